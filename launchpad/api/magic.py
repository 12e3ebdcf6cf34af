"""The IPython magic `%%ranks`: runs a notebook cell on ranks that stay (`%load_ext launchpad`)."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from launchpad.api.ranks import Ranks, ranks
from launchpad.errors import UsageError

_USAGE = (
    "%%ranks [N] [--backend gloo|nccl|mpi|none] [--hosts a:4,b:4] [--timeout SECONDS]; %ranks --restart; %ranks --close"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; usage: {_USAGE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("nproc", nargs="?", type=int)
    parser.add_argument("--backend")
    parser.add_argument("--hosts")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--close", action="store_true")
    return parser


class RanksMagic:
    """The magic of one shell. Its ranks are the variable `ranks` there, for calls besides the cells."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._ranks: Ranks | None = None
        self._started_with: tuple[Any, ...] = ()

    def __call__(self, line: str, cell: str | None = None) -> None:
        """Start the ranks that the line asks for, unless they run, and run the cell on each of them."""
        try:
            wanted = _parser().parse_args(shlex.split(line))
        except ValueError as error:  # a quotation without its end
            raise UsageError(f"{error}; usage: {_USAGE}") from None
        if wanted.close:
            self.close()
            return
        if wanted.restart and self._ranks is not None:
            self._ranks.restart()
        self._start(wanted)
        if cell is not None and cell.strip() and self._ranks is not None:
            name = self._shell.compile.cache(cell, self._shell.execution_count)
            try:
                self._ranks.run(_runner(), cell, name, timeout=wanted.timeout)
            except NameError as error:
                found = re.match(r"name '(\w+)' is not defined", str(error))  # `name` is lost where it is pickled
                if found and found[1] in self._shell.user_ns:
                    error.add_note(
                        f"The notebook has {found[1]}, but the ranks have a namespace of their own: define it in a "
                        "%%ranks cell, or pass it to a function with ranks.run"
                    )
                raise

    def _start(self, wanted: argparse.Namespace) -> None:
        backend: Any = None if wanted.backend == "none" else wanted.backend or "auto"
        asked = (wanted.nproc, wanted.backend, wanted.hosts)
        pairs = zip(asked, self._started_with, strict=False)
        if self._ranks is not None and all(one is None or one == before for one, before in pairs):
            if self._ranks.gone and (wanted.nproc is not None or wanted.hosts is not None):
                print("launchpad: the ranks have ended; starting new ones, without what those held", file=sys.stderr)
                self._ranks.restart()
            return
        if wanted.nproc is None and wanted.hosts is None:
            raise UsageError(f"say how many ranks to start; usage: {_USAGE}")
        self.close()
        self._ranks = ranks(wanted.nproc, hosts=wanted.hosts, backend=backend)
        self._started_with = asked
        self._shell.user_ns["ranks"] = self._ranks

    def close(self) -> None:
        """End the ranks, if there are any."""
        if self._ranks is not None:
            if self._shell.user_ns.get("ranks") is self._ranks:
                del self._shell.user_ns["ranks"]
            before, self._ranks = self._ranks, None
            before.close()


def _runner() -> Callable[[str, str], None]:
    """What runs a cell in a rank. A function inside a function is sent by value: other hosts lack this module."""

    def run_cell(source: str, name: str) -> None:
        import ast
        import io
        import linecache
        import sys

        linecache.cache[name] = (len(source), None, io.StringIO(source).readlines(), name)
        space = vars(sys.modules["__main__"])
        tree = ast.parse(source, name)
        final = tree.body[-1] if tree.body else None
        last = ast.Expression(final.value) if isinstance(final, ast.Expr) else None
        del tree.body[len(tree.body) - (last is not None) :]
        exec(compile(tree, name, "exec", dont_inherit=True), space)  # noqa: S102
        if last is not None:
            value = eval(compile(last, name, "eval", dont_inherit=True), space)  # noqa: S307
            if value is not None:
                print(repr(value))

    return run_cell


def load_ipython_extension(shell: Any) -> None:
    """Add the magic to this shell; IPython calls it for `%load_ext launchpad`."""
    shell.register_magic_function(RanksMagic(shell), "line_cell", "ranks")
