"""The entry: `python -u …/nursery/__main__.py PROGRAM [ARGS…]`, with a socket to the agent as descriptor 3.

The words are the ranks' own command line behind the interpreter. It is not used: it is there so that a listing of
processes tells whose nursery this is, and so that the ranks' command lines fit in its place.
"""

import os
import sys

# Where the interpreter has put our folder, the ranks' program would have had its own.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, _root)

from launchpad.nursery import forking  # noqa: E402

del sys.path[0]
sys.path_importer_cache.pop(_root, None)
for _name in [name for name in sys.modules if name.split(".")[0] == "launchpad"]:
    del sys.modules[_name]  # the ranks' own import of launchpad, or of what they call so, finds theirs

forking.main()
