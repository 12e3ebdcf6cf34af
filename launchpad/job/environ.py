"""Variables that the user hands to the ranks: `--env VAR[=VALUE]` and files of such lines."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launchpad.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_option(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """`VAR=VALUE`, or `VAR` to pass on the value that it has here. Raises UsageError."""
    name = text.partition("=")[0]
    return _parse(text, environ, f"--env {name}" if _NAME.fullmatch(name) else "--env")


def parse_file(text: str, path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """A file's variables: a line is VAR=VALUE, VAR, blank, or a comment (#); `export` before it and quotes around the
    value are dropped. Raises UsageError that names file and line.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip().removeprefix("export ").lstrip()
        if not line or line.startswith("#"):
            continue
        name, value = _parse(line, environ, f"{path}, line {number}")
        if "=" in line:  # what is passed on is passed as it is
            value = value.strip()
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
        found[name] = value
    return found


def _parse(text: str, environ: Mapping[str, str], where: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    name = name.rstrip()
    if not _NAME.fullmatch(name):
        # The value may be a secret that was pasted in the wrong place: it is not repeated.
        raise UsageError(f"{where}: the part before '=' is not a variable's name; write VAR=VALUE")
    if "\0" in value:
        raise UsageError(f"{where}: the value of {name} has a NUL byte in it, which no environment can hold")
    if given:
        return name, value
    if name not in environ:
        raise UsageError(f"{where}: {name} is not set here, so it can't be passed on; set it or write {name}=VALUE")
    return name, environ[name]
