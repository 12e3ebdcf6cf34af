"""What runs on a node. Standard library only: a node receives just this, protocol/, forkserver/ and rank/."""

import os

# The package's folder: installed here, or sent to this node.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
