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

# This folder as a package by a name that no program has: a launchpad that the program imports is its own, and what we
# import late comes from here.
_package = type(sys)("_launchpad_rank")
_package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules["_launchpad_rank"] = _package

_program = __import__("_launchpad_rank.program", fromlist=["execute"])
_answering = __import__("_launchpad_rank.answering", fromlist=["prepare"])
_shown = __import__("_launchpad_rank.shown", fromlist=["drop_word"])

# A variable, as it would be shown on the command line; it goes no further.
_how, _, _path = os.environ.pop("LAUNCHPAD_ANSWERS", "").partition(":")
_shown.drop_word(2)
_answering.prepare(_path, "eager" in _how)
_answering.watch()
_program.execute([sys.orig_argv[0], "-u", *sys.argv[1:]], whole="mpi" not in _how)
