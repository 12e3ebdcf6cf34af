"""The entry: `python -u …/nursery/__main__.py PROGRAM [ARGS…]`, with a socket to the agent as descriptor 3.

The words are the ranks' own command line behind the interpreter. It is not used: it is there so that a listing of
processes tells whose nursery this is, and so that the ranks' command lines fit in its place.
"""

import os
import sys

# Where the interpreter has put our folder, the ranks' program would have had its own.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
_package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_root, _name = os.path.split(_package)  # launchpad, or what it is called where it was sent to
sys.path.insert(0, _root)

_forking = __import__(f"{_name}.nursery.forking", fromlist=["main"])

del sys.path[0]
sys.path_importer_cache.pop(_root, None)
for _one in [one for one in sys.modules if one.split(".")[0] == _name]:
    del sys.modules[_one]  # the ranks' own import of launchpad, or of what they call so, finds theirs

_forking.main()
