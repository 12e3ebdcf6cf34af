"""The entry of an executed Python rank.

    python -u …/nursery/executed.py (SCRIPT | -m MODULE | --call FUNCTION | --pickled NAME) ARGS

It makes the rank ready to be asked for its stacks, and keeps an account of what ends the program. And at an
interpreter's exit mpi4py finalizes MPI, which waits for all ranks: where this one ends with an exception, the others
would never come, and it has to leave without that.
"""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036  # older than what we run on: the program alone
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
_package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_root, _name = os.path.split(_package)  # launchpad, or what it is called where it was sent to
sys.path.insert(0, _root)

_program = __import__(f"{_name}.nursery.program", fromlist=["execute"])
_answering = __import__(f"{_name}.nursery.answering", fromlist=["prepare"])
_shown = __import__(f"{_name}.nursery.shown", fromlist=["drop_word"])

del sys.path[0]
sys.path_importer_cache.pop(_root, None)
for _one in [one for one in sys.modules if one.split(".")[0] == _name]:
    del sys.modules[_one]

# A variable, as it would be shown on the command line; it goes no further.
_how, _, _path = os.environ.pop("LAUNCHPAD_ANSWERS", "").partition(":")
_shown.drop_word(2)
_answering.prepare(_path, "eager" in _how)
_answering.watch()
_program.execute([sys.orig_argv[0], "-u", *sys.argv[1:]], whole="mpi" not in _how)
