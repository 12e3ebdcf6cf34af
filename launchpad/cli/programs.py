"""Several programs on one command line, as mpirun's users write them: `-n 1 a.py : -n 4 -x LR=0.1 b.py`.

A word that is only ":" separates them. mpirun knows no escape for it: whoever has such an argument puts it into a
shell's command, `sh -c 'prog a : b'`, which is one word, or into a file; here, a job file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from launchpad.errors import UsageError
from launchpad.runner.options import ProgramOptions

SEPARATOR = ":"

# The options by the names of their fields: those that each program has.
_OWN = frozenset(ProgramOptions._fields)


def split(words: Sequence[str]) -> list[list[str]]:
    """The words between the separators."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == SEPARATOR:
            found.append([])
        else:
            found[-1].append(word)
    return found


def read_programs(command: click.Command, target: Sequence[str]) -> tuple[tuple[str, ...], tuple[ProgramOptions, ...]]:
    """The first program and its arguments, and those that come after a separator. Raises UsageError."""
    first, *others = split(target)
    if not first or not all(others):
        raise UsageError("a ':' separates two programs, and one is missing next to it; write -n 1 a.py : -n 4 b.py")
    return tuple(first), tuple(_read(command, words) for words in others)


def _read(command: click.Command, words: list[str]) -> ProgramOptions:
    """The options and the target of a program after the first."""
    with command.make_context("run", list(words)) as ctx:
        given = {
            param.name: param
            for param in command.params
            if param.expose_value and ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        }
        for name, param in given.items():
            if name not in _OWN:
                raise UsageError(
                    f"{_longest(param)} is the whole job's, so it stands before the first program: not after a ':'"
                )
        if not ctx.params["target"]:
            raise UsageError(f"nothing to run after ':' {' '.join(words)}; write : [OPTIONS] script.py [ARGS…]")
        return _absolute(ProgramOptions(**{str(name): ctx.params[str(name)] for name in given}))


def _longest(param: click.Parameter) -> str:
    return max(param.opts, key=len)


def _absolute(part: ProgramOptions) -> ProgramOptions:
    """With absolute paths, as the first program's --wdir changes the folder."""
    changed: dict[str, Any] = {
        name: os.path.abspath(path) for name in ("wdir", "hostfile") if (path := getattr(part, name)) is not None
    }
    return part._replace(**changed, env_file=tuple(map(os.path.abspath, part.env_file)))
