"""Entry point of an executed Python rank.

    python -u …/rank/executed.py (SCRIPT | -m MODULE | FUNCTION) ARGS

It installs the stack server and records what ends the program. When the interpreter exits, mpi4py finalizes MPI, which
waits for all ranks. A rank that fails would wait forever, so it exits without finalizing.
"""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036  # older than we support: run just the program
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

# Load our code as a package with a name that no program uses: the program may import another launchpad, and our late
# imports must come from here.
_package = type(sys)("_launchpad")
_package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
sys.modules["_launchpad"] = _package

_program = __import__("_launchpad.rank.program", fromlist=["execute"])
_stack_server = __import__("_launchpad.rank.stack_server", fromlist=["prepare"])
_command_line = __import__("_launchpad.rank.command_line", fromlist=["drop_word"])

# Passed as variables, because arguments would show in ps. The program doesn't see them.
_stacks, _watched, _in_mpi, _calls, _debug = (
    os.environ.pop(f"LAUNCHPAD_{name}", "") for name in ("STACKS", "WATCHED", "IN_MPI", "CALLS", "DEBUG")
)
_command_line.drop_word(2)
_stack_server.prepare(_stacks, bool(_watched))
__import__("_launchpad.rank.import_watch", fromlist=["watch"]).watch()
if _debug:
    __import__("_launchpad.rank.debugger", fromlist=["wait"]).wait(_stack_server.start)
_program.execute([sys.orig_argv[0], "-u", *sys.argv[1:]], _calls, whole=not _in_mpi)
