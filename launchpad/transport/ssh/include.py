"""ssh_config files as one text that paramiko can parse: Include written out, a wrong line named by file and number.

paramiko ignores Include, and takes a Match criterion that it doesn't know as met. So each block is written as one Match
line that holds all that has to be true there: an included file's Host lines count only where the block around its
Include does.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator

from launchpad.errors import UsageError

# As OpenSSH's READCONF_MAX_DEPTH.
MAX_DEPTH = 16

_SETTING = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.+)")
_ALONE = {"all", "canonical", "final"}
_WITH_PATTERN = {"host", "originalhost", "user", "localuser", "exec"}
_NEVER = "originalhost !*"


def read(path: str, folder: str) -> str:
    """The file's settings with those it includes; a relative Include lies in `folder`. Raises UsageError."""
    return "".join(f"{line}\n" for line in _lines(path, folder, "", f"ssh's configuration {path}", 0))


def words(value: str) -> list[str]:
    """A value's words as OpenSSH splits them: with quotes, up to a comment."""
    try:
        found = shlex.split(value)
    except ValueError:  # an apostrophe in a comment
        found = value.split()
    comment = next((index for index, word in enumerate(found) if word.startswith("#")), len(found))
    return found[:comment]


def _lines(path: str, folder: str, outer: str, where: str, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise UsageError(f"{where}: Include goes deeper than {MAX_DEPTH} files; does a file include itself?")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}; name a file that can be read") from None
    here = outer
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        place = f"{path}:{number}"
        setting = _SETTING.match(line)
        if setting is None:
            raise UsageError(f"{place}: {line!r} is no ssh_config setting; write a keyword and a value")
        keyword, value = setting[1].lower(), setting[2]
        if keyword in ("host", "match"):
            here = f"{outer} {_criteria(keyword, value, place)}".strip()
            yield _header(here)
        elif keyword == "include":
            for name in _included(value, folder):
                yield from _lines(name, folder, here, f"{place}: Include {name}", depth + 1)
                yield _header(here)
        else:
            # paramiko takes one pair of quotes off; ours are to be read later, with all of the value in sight.
            quoted = len(value) > 1 and value[0] == value[-1] == '"'
            yield f'{keyword} "{value}"' if quoted else f"{keyword} {value}"


def _header(criteria: str) -> str:
    return f"Match {criteria or 'all'}"


def _criteria(keyword: str, value: str, place: str) -> str:
    """A Host or Match line as criteria of Match; nothing for one that always holds."""
    try:
        shlex.split(value)
    except ValueError as error:
        raise UsageError(f"{place}: {value!r}: {error}") from None
    tokens = words(value)
    if keyword == "host":
        return f"originalhost {shlex.quote(','.join(tokens))}"
    found = []
    while tokens:
        word = tokens.pop(0)
        name = word.lower().removeprefix("!")
        if name in _ALONE:
            if name != "all":
                found.append(word.lower())
            continue
        if not tokens:
            raise UsageError(f"{place}: Match {word} needs a value; write Match {word} PATTERN")
        pattern = tokens.pop(0)
        found.append(f"{word.lower()} {shlex.quote(pattern)}" if name in _WITH_PATTERN else _NEVER)
    return " ".join(found)


def _included(value: str, folder: str) -> list[str]:
    found = []
    for word in words(value):
        pattern = os.path.join(folder, os.path.expanduser(os.path.expandvars(word)))
        found += [name for name in sorted(glob.glob(pattern)) if os.path.isfile(name)]
    return found
