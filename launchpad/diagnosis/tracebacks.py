"""Reads exceptions, as the rank recorded them or from its last output, and shows them. Pure.

They are shown as Python shows them, but only with the program's own frames: those of the standard library, of installed
packages and of launchers are left out, unless there are no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from launchpad.diagnosis import escapes
from launchpad.protocol.stacks import RANK_CODE

# How much of an exception is shown: the innermost of the program's own frames, and the first lines of its message.
SHOWN_FRAMES = 4
SHOWN_MESSAGE = 6
SHOWN_WIDTH = 300

_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"

_NOT_OWN = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python\d|/lib-dynload/|^<(frozen|string>$|__array)|/launchpad/(rank|forkserver|agent|head)/"
)
_FRAME = re.compile(r'^ *(?:\| *)?File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in (?P<function>.+))?$')
_TITLE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_HEADER = "Traceback (most recent call last):"
# torch's excepthook starts each line with the rank.
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# What torch adds before and after the messages of its C++ code.
_C_PLACE = re.compile(r"\[[^\] ]+\.(?:cc|cpp|h|hpp|cu):\d+\] ?")
_ADVICE = re.compile(r"\.? ?This is typically caused by a remote worker.*|\n?Exception raised from .*", re.DOTALL)
# How DataLoader and torch.multiprocessing.spawn forward an exception of a child process.
_FORWARDED = re.compile(
    r"(Original Traceback \(most recent call last\):|-- Process \d+ terminated with the following error:)"
)

# What ends a line. str.splitlines() takes U+2028, VT and others for that too, which a message may contain.
_LINE_END = re.compile(r"\r\n|\n|\r")

# What torch's launcher and its C++ code log.
_LOGGED = re.compile(r"\[?[WIE]\d{4} |\[[WIE]\d")
# Lines that are added to a traceback, or to a message: indented ones, the rest of torch's messages, warnings, and what
# launchers say when one of their processes has failed. Open MPI says it in blocks between lines of dashes.
_ADDED = (
    r"\s|Exception raised from |frame #|CUDA kernel errors |For debugging consider |Compile with |Exception ignored "
    r"|\S*:\d+: \w*Warning|warnings\.warn|[-=*]{5,}|=  |srun: |slurmstepd: |mpirun |mpiexec"
    rf"|YOUR APPLICATION TERMINATED|This typically refers to|Please see the FAQ|{_LOGGED.pattern}"
)
_BLOCK = r"(?m)^-{20,}\n(?:.*\n)*?-{20,}$"


class Frame(NamedTuple):
    """A place in the code."""

    file: str
    line: int
    function: str
    source: str

    @property
    def own(self) -> bool:
        """Whether it is in the program, not in a library or the interpreter."""
        return not _NOT_OWN.search(self.file)

    @property
    def lines(self) -> list[str]:
        """The frame as in a traceback."""
        where = f'  File "{self.file}", line {self.line}' + (f", in {self.function}" if self.function else "")
        return [where, f"    {self.source}"] if self.source else [where]


class Traceback(NamedTuple):
    """An exception."""

    type: str  # with its module, except for built-in types and the program's own
    message: str = ""
    frames: tuple[Frame, ...] = ()  # the innermost last
    before: Traceback | None = None  # its cause or context
    is_cause: bool = False  # whether `before` is the cause
    group: tuple[Traceback, ...] = ()
    notes: tuple[str, ...] = ()
    inside: str = ""  # the child process that `before` was forwarded from
    hidden: Traceback | None = None  # its context, if the program suppressed it (`raise … from None`)
    why: str = ""  # in plain words, if more is known than the message says
    kept: tuple[Traceback, ...] = ()  # those that the program had caught before, and still held
    killed_child: int = 0  # the last child process of the rank that was killed by SIGKILL
    seeker: str = ""  # which interpreter has looked for a module in vain
    # Of the exception that a command failed: the last that it wrote, and to which stream or file ("nowhere"); and the
    # stream of the rank to which its error messages went, if they were not kept apart.
    printed: str = ""
    printed_to: str = ""
    shared: str = ""
    shared_lines: tuple[str, ...] = ()  # the last of that stream before the exception

    @property
    def kind(self) -> str:
        """The type's name without its module."""
        return self.type.rpartition(".")[2]

    @property
    def roots(self) -> list[Traceback]:
        """The original exception: the end of the chain, or of each chain in a group."""
        if self.before is not None:
            return self.before.roots
        return [root for one in self.group for root in one.roots] or [self]

    @property
    def place(self) -> Frame | None:
        """Where it happened: in the program's own code as close to the root as possible, else in any code."""
        chain: list[Traceback] = []
        link: Traceback | None = self
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
        """`Type: message`, with the first line of the message."""
        if self.inside and self.before is not None:
            return f"{self.before.title}, in {self.inside}"
        first = next((line.strip() for line in lines_of(plain(self.message)) if line.strip()), "")
        return _cut(": ".join(filter(None, (self.type, first))))

    @property
    def lines(self) -> list[str]:
        """The exception as Python shows it, with the program's own frames only."""
        found: list[str] = []
        if self.before is not None:
            found += [*self.before.lines, "", _CAUSE if self.is_cause else _CONTEXT, ""]
        shown = [frame for frame in self.frames if frame.own] or list(self.frames[-1:])
        if shown:
            found.append(_HEADER)
            if len(shown) > SHOWN_FRAMES:
                found.append(f"  … ({len(shown) - SHOWN_FRAMES} outer frames)")
            for frame in shown[-SHOWN_FRAMES:]:
                found += frame.lines
            inside = self.frames[-1]
            if inside is not shown[-1] and not inside.file.startswith("<"):
                found.append(f'  … and from there into "{inside.file}", line {inside.line}, in {inside.function}')
        text = [line for line in lines_of(plain(self.message).rstrip()) if line.strip()] or [""]
        more = [f"… ({len(text) - SHOWN_MESSAGE} more lines)"] if len(text) > SHOWN_MESSAGE else []
        text = [_cut(line) for line in text[:SHOWN_MESSAGE]] + more
        found.append(": ".join(filter(None, (self.type, text[0]))))
        notes = [line for note in self.notes for line in lines_of(note)]
        found += [*text[1:], *notes[:SHOWN_MESSAGE]]
        found += filter(None, (self.seeker,))
        if self.before is None:
            found += self._last_words
        for number, one in enumerate(self.group[:SHOWN_FRAMES], 1):
            found += [f"  {number}) {line}" if not at else f"     {line}" for at, line in enumerate(one.lines)]
        return found

    @property
    def _last_words(self) -> list[str]:
        """What a command that failed has written."""
        found: list[str] = []
        if self.printed:
            found += [f"It wrote to {self.printed_to or 'stderr'}:", *_last_lines(self.printed)]
        elif self.printed_to == "nowhere":
            found += ["What it wrote to stderr was thrown away."]
        if self.shared_lines:
            found += [f"Before that, the rank's {self.shared}, to which it wrote too, ended with:", *self.shared_lines]
        return found

    def with_root(self, root: Traceback) -> Traceback:
        """The same exception with another one at the end of its chain of causes."""
        return root if self.before is None else self._replace(before=self.before.with_root(root))


def _last_lines(text: str, is_known: Callable[[str], bool] = lambda _: False) -> list[str]:
    """As many as are shown, without those that a progress bar has overwritten, and without known ones."""
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    return [_cut(line) for line in lines if line.strip() and not is_known(line.strip())][-SHOWN_MESSAGE:]


def before_report(text: str, error: Traceback) -> str:
    """What a stream had before the report of an exception, without its causes; all of it if there is no such report."""
    at = text.rfind(error.title[: SHOWN_WIDTH - 2])
    start = text.rfind(_HEADER, 0, at) if at >= 0 else -1
    return text[: text.rfind("\n", 0, start) + 1] if start >= 0 else text


def last_lines_before(text: str, error: Traceback, is_known: Callable[[str], bool]) -> list[str]:
    """The last lines of a stream before the report of an exception, without known lines."""
    return _last_lines(before_report(text, error), is_known)


def lines_of(text: str) -> list[str]:
    """The lines of what a program has written, or of an exception's message."""
    found = _LINE_END.split(text)
    return found if found[-1] else found[:-1]


def plain(message: str) -> str:
    """A message of torch's C++ code without its location and without the advice to look elsewhere."""
    return _ADVICE.sub("", _C_PLACE.sub("", message))


def _cut(line: str) -> str:
    return line if len(line) <= SHOWN_WIDTH else line[: SHOWN_WIDTH - 2] + " …"


def unmarked(text: str, rank: int) -> str:
    """A rank's output without the prefixes that torch adds to its own lines; those of ranks that it ran itself stay."""
    return re.sub(rf"^\[rank{rank}\]: ?", "", text, flags=re.MULTILINE)


def without_prefixes(text: str) -> str:
    """Output without the prefixes that torch adds to the lines of a traceback."""
    return _PREFIX.sub("", text)


def from_event(recorded: dict[str, Any]) -> Traceback | None:
    """The traceback in an ExceptionRaised; None if it is malformed."""
    try:
        return _unwrap(_from_event(recorded))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _from_event(recorded: dict[str, Any]) -> Traceback:
    if str(recorded["type"]).endswith("RemoteTraceback"):  # how a pool forwards that of a worker
        forwarded = from_text(escapes.removed(str(recorded["message"])).strip('\n"'))
        if forwarded is not None:
            return forwarded
    before = recorded.get("cause") or recorded.get("context")
    return Traceback(
        str(recorded["type"]),
        escapes.removed(str(recorded["message"])),
        tuple(Frame(str(f), int(n), str(i), str(s)) for f, n, i, s in recorded["frames"]),
        _from_event(before) if before else None,
        bool(recorded.get("cause")),
        tuple(_from_event(one) for one in recorded.get("group", ())),
        tuple(str(note) for note in recorded.get("notes", ())),
        hidden=_from_event(recorded["hidden"]) if recorded.get("hidden") else None,
        why=str(recorded.get("why", "")),
        kept=tuple(_from_event(one) for one in recorded.get("kept", ())),
        seeker=str(recorded.get("seeker", "")),
        killed_child=int(recorded.get("killed_child", 0)),
        printed=escapes.removed(str(recorded.get("printed", ""))),
        printed_to=str(recorded.get("printed_to", "")),
        shared=str(recorded.get("shared", "")),
    )


def _unwrap(traceback: Traceback) -> Traceback:
    """If the message holds a child process's exception as text, make that the cause."""
    found = _FORWARDED.search(traceback.message)
    if found is None or traceback.before is not None:
        return traceback
    inner = from_text(traceback.message[found.end() :], headless=True)
    if inner is None:
        return traceback
    head = traceback.message[: found.start()].strip() or found[0].strip("- :\n")
    process = re.search(r"DataLoader worker process \d+|[Pp]rocess \d+", head)
    inside = process[0] if process else "another process"
    return traceback._replace(
        message=head,
        before=inner._replace(why=traceback.why),
        is_cause=True,
        inside=inside[0].lower() + inside[1:] if inside.startswith("P") else inside,
    )


def from_text(text: str, *, headless: bool = False) -> Traceback | None:
    """The last traceback in the output, with its causes; None if there is none.

    `headless`: the first line of the traceback is missing.
    """
    lines = lines_of(without_prefixes(text))
    if headless:
        lines.insert(0, _HEADER)
    found = _all(lines)
    return found[-1][0] if found else None


def all_in(text: str) -> list[Traceback]:
    """The tracebacks in the output of several ranks, which may be mixed if torch's hook marks whose line is whose."""
    by_prefix: dict[str, list[str]] = {}
    for line in lines_of(text):
        prefix = _PREFIX.match(line)
        by_prefix.setdefault(prefix[0].strip() if prefix else "", []).append(line[prefix.end() :] if prefix else line)
    return [one for lines in by_prefix.values() for one, _, _ in _all(lines)]


def ending(text: str, code: int) -> Traceback | None:
    """The traceback that the output ends with, if this exit code fits it: what comes later the program had to say.

    The lines after its title may belong to its message. With 1, as from an uncaught exception, they are taken for that.
    """
    lines = lines_of(without_prefixes(text))
    found = _all(lines)
    if not found:
        return None
    traceback, title, end = found[-1]
    return None if _said(lines[end if code == 1 else title :]) else traceback


def after_handled(text: str, *, killed: bool = False) -> str:
    """The output without the last traceback and all before, if the program had more to say after it.

    `killed`: it went on in any case, until a signal ended it.
    """
    lines = lines_of(without_prefixes(text))
    found = _all(lines)
    if not found:
        return text
    _, title, _ = found[-1]
    return "\n".join(lines[title:]) if killed or _said(lines[title:]) else text


def _said(lines: Sequence[str]) -> bool:
    """Whether these lines are more than what interpreters, libraries and launchers add to a traceback."""
    text = re.sub(_BLOCK, "", "\n".join(lines))
    return any(line.strip() and not re.match(_ADDED, line) for line in lines_of(text))


def _all(lines: Sequence[str]) -> list[tuple[Traceback, int, int]]:
    """The tracebacks, with their causes; the line after the title of each, and the one after its message."""
    found: list[tuple[Traceback, int, int]] = []
    link = ""  # the line that joins it to the traceback before
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        if line in (_CAUSE, _CONTEXT):
            link = line
        elif line == _HEADER or line.endswith(_HEADER):
            one, title, end = _read(lines, at + 1)
            if one is not None:
                before = found.pop()[0] if link and found else None
                found.append((one._replace(before=before, is_cause=link == _CAUSE), title, end))
                link = ""
                at = end
                continue
        at += 1
    return found


def _read(lines: Sequence[str], at: int) -> tuple[Traceback | None, int, int]:
    """One traceback, read from the line after its first; the line after its title, and the one after its message."""
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
                return None, at, at
            message = [title["text"] or ""]
            at += 1
            after_title = at
            ends = ("", _CAUSE, _CONTEXT, _HEADER)
            while at < len(lines) and lines[at].strip() not in ends and not _LOGGED.match(lines[at]):
                message.append(lines[at])
                at += 1
            return Traceback(title["type"], "\n".join(message).strip(), tuple(frames)), after_title, at
        at += 1
    return None, at, at


def crash_frames(stack: str) -> list[Frame]:
    """The frames of the thread that crashed, from faulthandler's report, the innermost first."""
    found: list[Frame] = []
    inside = False
    lines = lines_of(stack)
    for at, line in enumerate(lines):
        if line.startswith("Current thread 0x"):  # not the C stack of the same thread, which Python 3.14 adds
            inside, found = True, []  # keep the last of several crashes
        elif inside and (match := _FRAME.match(line)):
            after = lines[at + 1] if at + 1 < len(lines) else ""
            source = after.strip() if after.startswith("    ") else ""
            if not any(part in match["file"] for part in RANK_CODE):
                found.append(Frame(match["file"], int(match["line"]), match["function"] or "", source))
        elif inside and not line.startswith("    "):
            inside = False
    return found
