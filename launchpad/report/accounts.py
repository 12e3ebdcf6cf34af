"""What a rank says of its own end: an exception as the rank has kept it, or as it stands in its last words. Pure.

It is shown as Python shows it, with the program's own lines of code: frames of the standard library and of installed
packages are left out where there are others, as are those of launchers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from launchpad.stacks import NURSERY

# Of an exception, so many of the program's own frames are shown, the innermost ones, and lines of its message.
SHOWN_FRAMES = 4
SHOWN_MESSAGE = 6
SHOWN_WIDTH = 300

_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"

_NOT_OWN = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python\d|/lib-dynload/|^<(frozen|string>$|__array)|/launchpad/(nursery|agent|head)/"
)
_FRAME = re.compile(r'^ *(?:\| *)?File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in (?P<function>.+))?$')
_TITLE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_HEADER = "Traceback (most recent call last):"
# torch's excepthook sets its rank before each line.
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# What torch sets before, and after, the messages of its C++ code.
_C_PLACE = re.compile(r"\[[^\] ]+\.(?:cc|cpp|h|hpp|cu):\d+\] ?")
_ADVICE = re.compile(r"\.? ?This is typically caused by a remote worker.*|\n?Exception raised from .*", re.DOTALL)
# How DataLoader and torch.multiprocessing.spawn pass on what a process of theirs has raised.
_FORWARDED = re.compile(
    r"(Original Traceback \(most recent call last\):|-- Process \d+ terminated with the following error:)"
)


class Frame(NamedTuple):
    """A place in the code."""

    file: str
    line: int
    function: str
    source: str

    @property
    def own(self) -> bool:
        """Whether it is the program's, not a library's or the interpreter's."""
        return not _NOT_OWN.search(self.file)

    @property
    def lines(self) -> list[str]:
        """As in a traceback."""
        where = f'  File "{self.file}", line {self.line}' + (f", in {self.function}" if self.function else "")
        return [where, f"    {self.source}"] if self.source else [where]


class Account(NamedTuple):
    """An exception."""

    type: str  # with its module, but for built-in types and the program's
    message: str = ""
    frames: tuple[Frame, ...] = ()  # the innermost last
    before: Account | None = None  # its cause, or what was being handled
    is_cause: bool = False
    group: tuple[Account, ...] = ()
    notes: tuple[str, ...] = ()
    inside: str = ""  # whose exception was passed on: it is the cause, and this the process

    @property
    def kind(self) -> str:
        """The type's own name."""
        return self.type.rpartition(".")[2]

    @property
    def roots(self) -> list[Account]:
        """What it began with: the end of the chain, or of each chain of a group."""
        if self.before is not None:
            return self.before.roots
        return [root for one in self.group for root in one.roots] or [self]

    @property
    def place(self) -> Frame | None:
        """Where in the program's own code it happened: at the root, else where that was passed on; else anywhere."""
        chain: list[Account] = []
        link: Account | None = self
        while link is not None:
            chain.insert(0, link)
            link = link.before
        chain = [one for link in chain for one in (*link.group, link)]
        for link in chain:
            for frame in reversed(link.frames):
                if frame.own:
                    return frame
        return next((link.frames[-1] for link in chain if link.frames), None)

    @property
    def title(self) -> str:
        """`Type: message`, one line of it."""
        if self.inside and self.before is not None:
            return f"{self.before.title}, in {self.inside}"
        first = next((line.strip() for line in _plain(self.message).splitlines() if line.strip()), "")
        return _cut(": ".join(filter(None, (self.type, first))))

    @property
    def lines(self) -> list[str]:
        """As Python shows it, without what is not the program's."""
        found: list[str] = []
        if self.before is not None:
            found += [*self.before.lines, "", _CAUSE if self.is_cause else _CONTEXT, ""]
        shown = [frame for frame in self.frames if frame.own] or list(self.frames[-1:])
        if shown:
            found.append(_HEADER)
            if len(shown) > SHOWN_FRAMES:
                found.append(f"  … ({len(shown) - SHOWN_FRAMES} frames above)")
            for frame in shown[-SHOWN_FRAMES:]:
                found += frame.lines
            inside = self.frames[-1]
            if inside is not shown[-1] and not inside.file.startswith("<"):
                found.append(f'  … and on into "{inside.file}", line {inside.line}, in {inside.function}')
        text = [line for line in _plain(self.message).rstrip().splitlines() if line.strip()] or [""]
        more = [f"… ({len(text) - SHOWN_MESSAGE} lines more)"] if len(text) > SHOWN_MESSAGE else []
        text = [_cut(line) for line in text[:SHOWN_MESSAGE]] + more
        found.append(": ".join(filter(None, (self.type, text[0]))))
        found += [*text[1:], *self.notes[:SHOWN_MESSAGE]]
        for number, one in enumerate(self.group[:SHOWN_FRAMES], 1):
            found += [f"  {number}) {line}" if not at else f"     {line}" for at, line in enumerate(one.lines)]
        return found


def _plain(message: str) -> str:
    """A message of torch's C++ code without the place in that, and without advice to look elsewhere."""
    return _ADVICE.sub("", _C_PLACE.sub("", message))


def _cut(line: str) -> str:
    return line if len(line) <= SHOWN_WIDTH else line[: SHOWN_WIDTH - 2] + " …"


def without_marks(text: str) -> str:
    """Some output without the marks that torch sets before the lines of a traceback."""
    return _PREFIX.sub("", text)


def from_event(said: dict[str, Any]) -> Account | None:
    """The account in an ExceptionRaised; None where it makes no sense."""
    try:
        return _unwrap(_from_event(said))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _from_event(said: dict[str, Any]) -> Account:
    before = said.get("cause") or said.get("context")
    return Account(
        str(said["type"]),
        str(said["message"]),
        tuple(Frame(str(f), int(n), str(i), str(s)) for f, n, i, s in said["frames"]),
        _from_event(before) if before else None,
        bool(said.get("cause")),
        tuple(_from_event(one) for one in said.get("group", ())),
        tuple(str(note) for note in said.get("notes", ())),
    )


def _unwrap(account: Account) -> Account:
    """Where another process's exception was passed on as text, that one is the cause."""
    found = _FORWARDED.search(account.message)
    if found is None or account.before is not None:
        return account
    inner = from_text(account.message[found.end() :], headless=True)
    if inner is None:
        return account
    head = account.message[: found.start()].strip() or found[0].strip("- :\n")
    process = re.search(r"DataLoader worker process \d+|[Pp]rocess \d+", head)
    inside = process[0] if process else "another process"
    return account._replace(
        message=head,
        before=inner,
        is_cause=True,
        inside=inside[0].lower() + inside[1:] if inside.startswith("P") else inside,
    )


def from_text(text: str, *, headless: bool = False) -> Account | None:
    """The last traceback in some output, with what led to it; None where there is none.

    `headless`: it begins without its first line.
    """
    lines = without_marks(text).splitlines()
    if headless:
        lines.insert(0, _HEADER)
    found: Account | None = None
    joint = ""
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        if line in (_CAUSE, _CONTEXT):
            joint = line
        elif line == _HEADER or line.endswith(_HEADER):
            one, end = _read(lines, at + 1)
            if one is not None:
                found = one._replace(before=found if joint else None, is_cause=joint == _CAUSE)
                joint = ""
                at = end
                continue
        at += 1
    return found


def _read(lines: Sequence[str], at: int) -> tuple[Account | None, int]:
    """One traceback, from behind its first line, and where it ends."""
    frames: list[Frame] = []
    while at < len(lines):
        line = lines[at]
        match = _FRAME.match(line)
        if match:
            source = lines[at + 1].strip() if at + 1 < len(lines) and lines[at + 1].startswith("    ") else ""
            frames.append(Frame(match["file"], int(match["line"]), match["function"] or "", source))
        elif line.strip() == _HEADER:
            pass
        elif line and not line[0].isspace() and line[0] != "|":
            title = _TITLE.match(line)
            if title is None or not frames:
                return None, at
            message = [title["text"] or ""]
            at += 1
            while at < len(lines) and lines[at] and lines[at].strip() not in (_CAUSE, _CONTEXT, _HEADER):
                message.append(lines[at])
                at += 1
            return Account(title["type"], "\n".join(message).strip(), tuple(frames)), at
        at += 1
    return None, at


def crash_frames(stack: str) -> list[Frame]:
    """The frames of the thread that faulthandler says has crashed, the innermost first."""
    found: list[Frame] = []
    inside = False
    lines = stack.splitlines()
    for at, line in enumerate(lines):
        if line.startswith("Current thread"):
            inside, found = True, []  # of several crashes the last
        elif inside and (match := _FRAME.match(line)):
            after = lines[at + 1] if at + 1 < len(lines) else ""
            source = after.strip() if after.startswith("    ") else ""
            if NURSERY not in match["file"]:
                found.append(Frame(match["file"], int(match["line"]), match["function"] or "", source))
        elif inside and not line.startswith("    "):
            inside = False
    return found
