"""The entry: `python -u …/nursery/__main__.py PROGRAM [ARGS…]`, with a socket to the agent as descriptor 3.

The words are the ranks' own command line behind the interpreter. It is not used: it is there so that a listing of
processes tells whose nursery this is, and so that the ranks' command lines fit in its place.
"""

import os
import sys

# Where the interpreter has put our folder, the ranks' program would have had its own.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

# This folder as a package by a name that no program has (executed.py does likewise).
_package = type(sys)("_launchpad_rank")
_package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules["_launchpad_rank"] = _package

__import__("_launchpad_rank.forking", fromlist=["main"]).main()
