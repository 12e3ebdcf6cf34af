"""The console: writes the ranks' lines to stdout and stderr, and the launcher's own messages to stderr."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from launchpad import caller
from launchpad.console.lines import Device, LineStream
from launchpad.console.message import message_line, wants_colour
from launchpad.console.prefix import (
    Prefix,
    PrefixTemplate,
    columns,
    encoded,
    of_several,
    prefixes,
    template_of,
    torch_mark,
)
from launchpad.job.plan import Plan
from launchpad.job.spec import FoldChoice, JobSpec
from launchpad.output.mark import SinkMark
from launchpad.output.writer import Target, Writer
from launchpad.protocol.events import (
    STDERR,
    STDOUT,
    ConsoleClosed,
    Output,
    RanksSpawned,
    Restarted,
    StopRequested,
    WorldRestarted,
)

if TYPE_CHECKING:
    from launchpad.console.fold import FoldingDevice

# Easy to distinguish, also for most people who can't distinguish red from green.
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)

_BOLD = 1  # for several ranks

# From so many ranks on, equal lines are folded on a terminal.
FOLD_FROM = 4

# How long a hurried exit waits for stderr to accept the report.
LAST_WORDS_SECONDS = 0.5


class ConsoleOutput(Protocol):
    """Where the console's lines go: standard output and error, or a record for `launchpad attach`."""

    def show(self, output: Output, prefix: Prefix) -> bool:
        """Show output of a rank. Returns True if a writer holds its bytes."""

    def say(self, line: str, *, bad: bool = False) -> None:
        """Show a line of the launcher's own."""

    def print(self, text: str) -> None:
        """Show a text as it is, beside the ranks' output."""

    @property
    def deadline(self) -> float | None:
        """When to call `tick`, in seconds of time.monotonic(), or of the clock that was given."""

    def tick(self, now: float) -> None:
        """Show the lines that are due."""

    def flush(self, ranks: Collection[int] | None = None) -> None:
        """Show what is held, and end the lines that these ranks left unfinished; None: all ranks."""

    def mark(self, mark: SinkMark) -> None:
        """Say how far it is written, if it is kept."""

    def leave(self, lines: Sequence[str]) -> None:
        """Say these while output waits for a reader that may never read it, and don't wait for that."""

    def close(self) -> None:
        """Wait until everything is written."""


class Console:
    """A sink: chooses what is shown of the ranks' output, and what stands before it."""

    def __init__(self, spec: JobSpec, plan: Plan, shown: ConsoleOutput, *, shows: bool = True) -> None:
        """`shows`: whether to show the ranks' output, or only messages about the job."""
        self._spec = spec
        self._shown = shown
        self._shows = shows
        self._template = template_of(spec.line_prefix, spec.role)
        self._prefixes: dict[tuple[int, int], Prefix] = {}  # by rank and stream, if that is shown
        self._programs, self._roles = plan.programs, plan.roles
        self._begin(plan.by_node, [node.index for node in plan.nodes if node.shown_there])
        # The width of the widest prefix, in columns. Without a template they are equal.
        different = set(self._prefixes.values()) if self._template else ()
        self.margin = max((columns(one.text) for one in different), default=columns(self._prefix(0, 0, 0).text))

    def _begin(self, nodes: Sequence[Sequence[Any]], shown_there: Collection[int]) -> None:
        """Show the ranks of these nodes, each [name, [rank, …]], except those that are shown elsewhere."""
        self._prefix = prefixes(nodes, self._template, shown_there, self._programs, self._roles)
        for node, (_, ranks) in enumerate(nodes):
            for local_rank, rank in enumerate(() if node in shown_there else ranks):
                self._open(node, rank, local_rank)

    def _open(self, node: int, rank: int, local_rank: int) -> None:
        if not self._shows:
            return
        prefix = self._prefix(node, rank, local_rank)
        for stream in (STDOUT, STDERR):
            if not self._spec.hides(local_rank, stream):
                self._prefixes[rank, stream] = prefix

    def on(self, event: Any) -> bool:
        """Show an event. Returns True if its bytes went to a writer."""
        if type(event) is RanksSpawned:
            for rank in event.ranks:
                self._open(event.node, rank, rank)
        if type(event) is WorldRestarted:
            self._shown.flush(event.ranks)  # a killed rank may have left a line unfinished
        if type(event) is Restarted:
            self.flush()
            if event.nodes:
                self._prefixes.clear()
                self._begin(event.nodes, event.shown_there)
        if type(event) is SinkMark:
            self._shown.mark(event)
        if type(event) is not Output:
            return False
        prefix = self._prefixes.get((event.rank, event.stream))
        return prefix is not None and self._shown.show(event, prefix)

    def print(self, text: str) -> None:
        """Show a text as it is, for a machine that reads the log; on stderr, as stdout is for the ranks' output."""
        self._shown.print(text)

    def say(self, text: str, *, bad: bool = False) -> None:
        """Show a message of the launcher's own, with a prefix on each line."""
        for line in text.split("\n"):
            self._shown.say(line, bad=bad)

    @property
    def deadline(self) -> float | None:
        """When the next line is due."""
        return self._shown.deadline

    def tick(self, now: float) -> None:
        """Show the lines that are due."""
        self._shown.tick(now)

    def flush(self) -> None:
        """Show what is held, and end the lines that the ranks left unfinished."""
        self._shown.flush()

    def say_and_leave(self, text: str) -> None:
        """Show a last message while output waits for a reader that may never read it."""
        self._shown.leave(text.split("\n"))

    def close(self) -> None:
        """Wait until everything is written."""
        self.flush()
        self._shown.close()


class StandardStreams:
    """Our standard output and error. The writer threads send events to the loop through `post`."""

    def __init__(
        self,
        ranks: int,
        environ: Mapping[str, str],
        post: Callable[[Any], None],
        fold: FoldChoice | None = None,
        clock: Callable[[], float] = time.monotonic,
        template: PrefixTemplate | None = None,
    ) -> None:
        """`fold`: None for what `wants_fold` says. `clock`: when what is shown was written. `template`: of prefixes."""
        self._post = post
        self._clock = clock
        shared = _same_device(STDOUT, STDERR)
        self._devices: dict[int, Device] = {}
        self._writers: dict[int, Writer] = {}
        self._streams: dict[tuple[int, int, Prefix], LineStream] = {}  # by rank, stream and prefix
        self._template = template
        self._prefixes: dict[int, Prefix] = {}  # the latest of each rank
        self._colour = {fd: wants_colour(fd, environ) for fd in (STDOUT, STDERR)}
        self._folding: dict[int, FoldingDevice] = {}
        for fd in (STDOUT, STDERR):
            if fd == STDERR and shared:
                self._devices[fd] = self._devices[STDOUT]
                self._writers[fd] = self._writers[STDOUT]
                if STDOUT in self._folding:
                    self._folding[fd] = self._folding[STDOUT]
            else:
                streams = ranks * (2 if shared else 1)
                if wants_fold(fold, ranks, fd):
                    from launchpad.console.fold import Fold, FoldingDevice

                    held = Fold(ranks, numbers=fold == "numbers")
                    self._folding[fd] = FoldingDevice(streams, _columns(fd), held, self._shared_prefix)
                self._devices[fd] = self._folding.get(fd) or Device(streams, _columns(fd))
                self._writers[fd] = Writer(post, self._failed)

    def show(self, output: Output, prefix: Prefix) -> bool:
        """Show output of a rank. Returns True if a writer holds its bytes."""
        rank, fd = output.rank, output.stream
        self._prefixes[rank] = prefix
        stream = self._streams.get((rank, fd, prefix))
        if stream is None:
            text = self._coloured(prefix.text, fd, _COLOURS[rank % len(_COLOURS)])
            stream = self._streams[rank, fd, prefix] = LineStream(
                fd, text, columns(prefix.text), rank, mark=torch_mark(rank, fd, self._template)
            )
        pieces = self._devices[fd].feed(stream, output.data, self._clock())
        if fd in self._folding:
            holds = bool(pieces) or b"\n" in output.data
            if holds:
                self._folding[fd].keep(output)
            self._put(fd, pieces)
            return holds
        if pieces:
            self._writers[fd].put(pieces, output)
        return bool(pieces)

    def _put(self, fd: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        """Write these, which may be the last that was held of some output."""
        if pieces:
            self._writers[fd].put(pieces)
        if fd in self._folding:
            for output in self._folding[fd].done():
                self._writers[fd].put((), output)

    def _shared_prefix(self, ranks: tuple[int, ...], fd: int) -> tuple[bytes, int]:
        """The prefix of ranks that wrote the same, and its width in columns."""
        template = self._template
        text = template.of_several({rank: self._prefixes[rank] for rank in ranks}) if template else of_several(ranks)
        return self._coloured(text, fd, _BOLD), columns(text)

    def _coloured(self, prefix: str, fd: int, attribute: int) -> bytes:
        if not self._colour[fd]:
            return encoded(prefix)
        if "\x1b" in prefix:  # a template's own colours
            return encoded(f"\x1b[0m{prefix}")
        # The reset in front undoes the attributes that an earlier line may have left on.
        text = prefix.rstrip(" ")
        return encoded(f"\x1b[0;{attribute}m{text}\x1b[0m{prefix[len(text) :]}")

    def print(self, text: str) -> None:
        """Show a text as it is, on stderr."""
        self._put(STDERR, self._devices[STDERR].note(encoded(text), STDERR))

    def say(self, line: str, *, bad: bool = False) -> None:
        """Show a line of the launcher's own."""
        self.print(message_line(line, self._colour[STDERR], bad))

    @property
    def deadline(self) -> float | None:
        """When the next line is due."""
        return min((d.deadline for d in self._devices.values() if d.deadline is not None), default=None)

    def tick(self, now: float) -> None:
        """Show the lines that are due."""
        for fd, device in self._devices.items():
            self._put(fd, device.tick(now))

    def flush(self, ranks: Collection[int] | None = None) -> None:
        """Show what is held, and end the lines that these ranks left unfinished; None: all ranks."""
        ended = [stream for stream in self._streams.values() if ranks is None or stream.rank in ranks]
        for fd, device in self._devices.items():
            self._put(fd, device.close([stream for stream in ended if self._devices[stream.fd] is device]))

    def mark(self, mark: SinkMark) -> None:
        """Nothing of it is kept."""

    def leave(self, lines: Sequence[str]) -> None:
        """Say these while output waits for a reader that may never read it, and don't wait for that."""
        if self._writers[STDERR] is not self._writers[STDOUT]:
            for line in lines:
                self.say(line, bad=True)
            self._writers[STDERR].close(LAST_WORDS_SECONDS)

    def close(self, seconds: float | None = None) -> None:
        """Wait until everything is written, at most so many seconds for each stream."""
        for writer in {id(w): w for w in self._writers.values()}.values():
            writer.close(seconds)

    def _failed(self, fd: Target, error: OSError) -> None:
        if fd != STDOUT and self._writers[STDOUT] is not self._writers[STDERR]:
            return
        if error.errno == errno.EIO and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            # The terminal is gone, and SIGHUP is about to arrive: end the same way, whichever we see first.
            self._post(StopRequested(time.monotonic_ns(), signal.SIGHUP))
        else:
            self._post(ConsoleClosed(time.monotonic_ns(), error.strerror or str(error)))


def wants_fold(choice: FoldChoice | None, ranks: int, fd: int) -> bool:
    """Whether to fold equal lines: as chosen, else of several ranks on a terminal."""
    return choice != "never" if choice is not None else ranks >= FOLD_FROM and os.isatty(fd)


def terminal_size(environ: Mapping[str, str], prefix_columns: int) -> Sequence[int]:
    """[rows, columns] that our terminal leaves for a rank's text; [] unless stdin and stdout are both a terminal."""
    if not (os.isatty(0) and os.isatty(STDOUT)) or environ.get("TERM") == "dumb":
        return []
    size = os.get_terminal_size(STDOUT)
    return [size.lines, max(20, size.columns - prefix_columns)] if size.columns else []


def terminal_modes() -> list[Any] | None:
    """Our terminal's settings (echo, line mode …) for `restore_terminal`; None if we are not in its foreground."""
    if not os.isatty(0):
        return None
    import termios

    try:
        return termios.tcgetattr(0) if caller.in_foreground(0) else None
    except (OSError, termios.error):
        return None


def restore_terminal(modes: list[Any] | None) -> None:
    """Undo the settings of a rank that was killed at a prompt (readline, a debugger)."""
    if modes is not None and terminal_modes() is not None:
        import termios

        termios.tcsetattr(0, termios.TCSANOW, modes)


def _columns(fd: int) -> int | None:
    """The width of a terminal that can redraw a line; None for anything else."""
    if not os.isatty(fd) or os.environ.get("TERM") == "dumb":
        return None
    return os.get_terminal_size(fd).columns or 80


def _same_device(first: int, second: int) -> bool:
    one, two = os.fstat(first), os.fstat(second)
    return (one.st_dev, one.st_ino, one.st_rdev) == (two.st_dev, two.st_ino, two.st_rdev)
