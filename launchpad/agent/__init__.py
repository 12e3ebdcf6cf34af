"""What runs on a node. Standard library only: just this and what it imports is sent to nodes."""

import os

# The package's folder: installed here, or sent to this node.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
