"""`launchpad attach`: show a detached job in this terminal, and pass Ctrl-C on to it."""

from __future__ import annotations

import os
import queue
import signal
import time
from typing import TYPE_CHECKING, Any

import click

from launchpad.cli.options import FOLD, since
from launchpad.cli.wait import wait_for
from launchpad.console.console import LAST_WORDS_SECONDS, StandardStreams
from launchpad.console.prefix import Prefix, template_of
from launchpad.control.client import send_signal
from launchpad.errors import UsageError
from launchpad.head import own_signals
from launchpad.head.stdin_forwarder import StdinForwarder
from launchpad.job.outcome import OUTPUT_CLOSED
from launchpad.job.spec import FoldChoice
from launchpad.protocol.events import STDOUT, ConsoleClosed, Output, StdinRead, StopRequested, Written
from launchpad.record import held_hosts, job_store, replay
from launchpad.record.console_record import ConsoleEntry, ConsoleReader, segments
from launchpad.record.recorded_verdict import look_at

if TYPE_CHECKING:
    from launchpad.head.stdin_forwarder import StdinForwarder

# How often a running job's record is looked at, in seconds.
LOOK_SECONDS = 0.05

# How long a job that is over may take to write the rest of its record.
REST_SECONDS = 5.0

# The most of the record that may wait for a slow terminal.
MOST_WAITING = 1 << 20

_LEAVE = b"\x10\x11"  # Ctrl-P Ctrl-Q


@click.command("attach", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option(
    "--since",
    type=since,
    metavar="TIME",
    help="Begin with what was shown in the last 5m, 2h … or from the start. Default: with the last screen; without a "
    "terminal, from the start.",
)
@click.option("--fold", **FOLD, help="As with launchpad run.")
def command(job: str | None, since: float | None, fold: FoldChoice | None) -> int:
    """Show what a job that was started with --detach prints, until it ends; the exit code is the job's.

    JOB is an id that `launchpad run --detach` printed or `launchpad jobs` lists, or a prefix of one; the default is
    the latest detached job. If its launchpad was killed, and it was started with --keep-running, launchpad takes it
    over, as with `launchpad resume`. Ctrl-C is passed on to the job; Ctrl-P Ctrl-Q leaves it running, and so does
    closing the terminal. Several terminals can attach.
    """
    folder = _find(job)
    running = replay.is_running(folder)
    headless = None if running else held_hosts.headless(folder)
    if headless is not None and not headless.ended:
        from launchpad.cli.resume import resume_detached

        if code := resume_detached(folder):
            return code
        running = True
    reader = ConsoleReader(folder)
    if since is not None:
        reader.start_since(time.time() - since)
    elif os.isatty(STDOUT):
        reader.start_at_last(max(1, os.get_terminal_size(STDOUT).lines - 2))
    return _Attached(folder, reader, fold).run(running)


def _find(job: str | None) -> str:
    """The folder of a detached job. Raises UsageError."""
    if job is not None:
        folder = replay.find_job(job, os.environ)
        if not segments(folder):
            name = os.path.basename(folder)
            if goes_on := held_hosts.headless(folder):
                raise UsageError(f"job {name} is {goes_on}")
            raise UsageError(f"job {name} was not started with --detach; `launchpad logs {name}` shows its output")
        return folder
    place = job_store.jobs_folder(os.environ)
    for name in job_store.jobs(os.environ):
        if segments(os.path.join(place, name)):
            return os.path.join(place, name)
    raise UsageError(f"no job that was started with --detach is recorded in {place}")


class _Attached:
    """The loop. Threads post keys, signals, and what has been written to the terminal."""

    def __init__(self, folder: str, reader: ConsoleReader, fold: FoldChoice | None) -> None:
        self._folder = folder
        self._job = os.path.basename(folder)
        self._reader = reader
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        planned = replay.first_event(folder)
        ranks = sum(len(ranks) for _, ranks in planned.nodes) if planned else 1
        self._now = 0.0  # how far we are in the record, or in the present: seconds since 1970
        template = template_of(planned.line_prefix, planned.role) if planned else None
        self._screen = StandardStreams(ranks, os.environ, self._inbox.put, fold, lambda: self._now, template)
        self._waiting = 0  # bytes that the terminal has not taken yet
        self._input: StdinForwarder | None = None
        self._key = b""  # the last one
        self._told = False  # how to leave
        self._code: int | None = None  # to leave the job with

    def run(self, running: bool) -> int:
        """Show the job to its end. Returns the exit code."""
        own_signals.catch(self._inbox.put)
        if running and os.isatty(0) and os.isatty(STDOUT):  # else they are for a pager
            self._input = StdinForwarder(self._inbox.put, keys=True, flow_control=False)
            self._input.go_on()  # at once: the user is about to be told which keys there are
        try:
            self._follow()
        finally:
            if self._input:
                self._input.close()
        self._screen.flush()
        self._screen.close(None if self._code is None else LAST_WORDS_SECONDS)
        return wait_for(self._folder) if self._code is None else self._code

    def _follow(self) -> None:
        """Show what is recorded until the job is over, or the user leaves it."""
        begin = time.time()
        give_up: float | None = None  # when to wait no longer for the end of the record of a job that is over
        entries = self._reader.more()
        while self._code is None:
            if self._waiting >= MOST_WAITING:
                self._take(LOOK_SECONDS)
                self._now += LOOK_SECONDS  # or what is held would wait for what is not read yet
                self._show_what_is_due()
                continue
            entry = next(entries, None)
            if entry is None or entry.at >= begin:
                self._tell_how_to_leave()
            self._now = max(self._now, entry.at if entry is not None else time.time())
            self._show_what_is_due()
            if entry is not None:
                if entry.kind == "over":
                    return
                self._show(entry)
                self._take(0.0)
                continue
            if give_up is not None and time.monotonic() >= give_up:
                return
            if give_up is None and not replay.is_running(self._folder):
                was_killed = look_at(self._folder)[0].over is None
                give_up = time.monotonic() + (0.0 if was_killed else REST_SECONDS)
            self._take(LOOK_SECONDS)
            entries = self._reader.more()

    def _tell_how_to_leave(self) -> None:
        if self._input and not self._told:
            self._screen.say(f"attached to job {self._job}: Ctrl-C stops it, Ctrl-P Ctrl-Q leaves it running")
        self._told = True

    def _show(self, entry: ConsoleEntry) -> None:
        match entry.kind:
            case "output":
                output = Output(0, entry.rank, entry.stream, entry.text.encode(errors="surrogateescape"))
                if self._screen.show(output, Prefix(entry.label, entry.local_rank, entry.host)):
                    self._waiting += len(output.data)
            case "say":
                self._screen.say(entry.text, bad=entry.bad)
            case "print":
                self._screen.print(entry.text)
            case "flush":
                self._screen.flush(entry.ranks)

    def _take(self, seconds: float) -> None:
        """Handle what the threads have posted, or do within so many seconds."""
        try:
            event = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            while True:
                self._handle(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _show_what_is_due(self) -> None:
        due = self._screen.deadline
        if due is not None and due <= self._now:
            self._screen.tick(self._now)

    def _handle(self, event: Any) -> None:
        match event:
            case Written(output=output):
                self._waiting -= len(output.data)
            case StdinRead(data=data) if self._input:
                self._input.taken(len(data))
                if _LEAVE in self._key + data:
                    self._screen.flush()
                    self._screen.say(f"job {self._job} goes on; launchpad attach {self._job} shows it again")
                    self._code = 0
                self._key = data[-1:]
            case ConsoleClosed():
                self._code = OUTPUT_CLOSED
            case StopRequested(signum=signal.SIGTSTP):
                if self._input:
                    self._input.rest()
                os.kill(os.getpid(), signal.SIGSTOP)
            case StopRequested(signum=signal.SIGCONT) if self._input:
                self._input.go_on()
            case StopRequested(signum=signal.SIGINT | signal.SIGQUIT):
                self._pass_on(event.signum)
            case StopRequested(signum=signal.SIGTERM | signal.SIGHUP):
                self._code = 128 + event.signum

    def _pass_on(self, signum: int) -> None:
        try:
            send_signal(self._job, signum)
        except UsageError as error:
            if replay.is_running(self._folder):
                self._screen.say(str(error), bad=True)
