"""Entry point of the forkserver.

It runs as `python -u …/forkserver/__main__.py PROGRAM [ARGS…]`, with a socket to the agent as descriptor 3.
PROGRAM [ARGS…] is the ranks' own command line. It is not used: it shows in a process listing whose forkserver this is,
and makes room for the ranks' command lines.
"""

import os
import sys

# The interpreter has put our folder where the program's own would be.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

# Load our code as a package with a name that no program uses (as rank/executed.py does).
_package = type(sys)("_launchpad")
_package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
sys.modules["_launchpad"] = _package

__import__("_launchpad.forkserver.forking", fromlist=["main"]).main()
