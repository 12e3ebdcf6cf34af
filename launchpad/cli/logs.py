"""`launchpad logs [JOB]`: print the recorded output of a job's ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from launchpad.cli.options import FOLD, since
from launchpad.console.console import wants_fold
from launchpad.console.fold import Fold, FoldingDevice
from launchpad.console.lines import Device, LineStream
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
from launchpad.errors import UsageError
from launchpad.job.spec import FoldChoice, named
from launchpad.protocol.events import STDOUT, JobPlanned, Output, RanksSpawned, Restarted
from launchpad.record import bundle, job_store, replay

# How often the record of a running job is polled, in seconds.
LOOK_SECONDS = 0.25


@click.command("logs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("-r", "--rank", "ranks", multiple=True, type=click.IntRange(min=0), help="Only this rank; repeatable.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="Only this role, or replica of one; repeatable.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the job ends.")
@click.option("--grep", metavar="REGEX", help="Only lines in which this regular expression is found.")
@click.option("--since", type=since, metavar="TIME", help="Only what was printed in the last 5m, 2h …")
@click.option("--attempt", type=click.IntRange(min=0), metavar="N", help="Only this attempt; 0 is the first.")
@click.option("--fold", **FOLD, help="As with launchpad run.")
@click.option(
    "--merge",
    type=click.Choice(["time"]),
    metavar="time",
    help="In the order in which it was written, by the hosts' clocks, instead of the order in which it arrived.",
)
def command(
    job: str | None,
    ranks: tuple[int, ...],
    roles: tuple[str, ...],
    follow: bool,
    grep: str | None,
    since: float | None,
    attempt: int | None,
    fold: FoldChoice | None,
    merge: str | None,
) -> int:
    """Print the output of JOB's ranks, each line prefixed with its rank.

    JOB is an id that `launchpad jobs` lists, a prefix of one, or a bundle; the default is the latest job. Without
    --log-dir, only the beginning and the end of each stream are kept. With --role, --rank counts in each role.
    """
    if merge and follow:
        raise UsageError(
            "--merge time sorts output that already exists, and --follow waits for more; leave one of them out"
        )
    with bundle.opened(job, os.environ) as folder:
        _print(
            folder,
            _of_roles(folder, roles, ranks) if roles else ranks,
            grep,
            since,
            attempt,
            fold,
            follow=follow,
            merge=merge is not None,
        )
    return 0


def _of_roles(folder: str, roles: Sequence[str], ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of these roles, in the job's numbering; of each only `ranks`, if there are any."""
    names = replay.role_names(folder)
    known = list(dict.fromkeys(name for name, _ in names.of.values()))
    found: list[int] = []
    for role in roles:
        if not any(named(name, role) for name in known):
            there = f"there are {', '.join(known)}" if known else "the job has no roles"
            raise UsageError(f"--role {role}: {there}")
        found += [rank for rank, (name, own) in names.of.items() if named(name, role) and (not ranks or own in ranks)]
    if not found:
        raise UsageError(f"--rank {ranks[0]}: {', '.join(roles)} has no such rank")
    return tuple(found)


def _print(
    folder: str,
    ranks: tuple[int, ...],
    grep: str | None,
    since: float | None,
    attempt: int | None,
    fold: FoldChoice | None,
    *,
    follow: bool,
    merge: bool,
) -> None:
    """Print what the options of the command ask for."""
    known, last = replay.extent(folder)
    for rank in ranks:
        if known and rank not in known:
            raise UsageError(f"--rank {rank}: the job has ranks 0 to {max(known)}")
    if attempt is not None and attempt > last:
        raise UsageError(f"--attempt {attempt}: the job has " + (f"attempts 0 to {last}" if last else "attempt 0 only"))
    if attempt is not None and not replay.keeps(folder, attempt, last):
        first = last - job_store.LAST_ATTEMPTS + 1
        raise UsageError(
            f"--attempt {attempt}: the record has the output of attempt 0 and of attempts {first} to {last}; "
            "launchpad run --log-dir keeps all"
        )
    shown = max(1, len(set(ranks) or known))
    chosen: FoldChoice = ("equal" if fold is None else fold) if wants_fold(fold, shown, STDOUT) else "never"
    printer = _Printer(shown, chosen, _matcher(grep), notes=attempt is None)
    begin = float("-inf") if since is None else time.time() - since
    reader = replay.OutputReader(folder, frozenset(ranks) or None, attempt=attempt, since=begin)
    try:
        if merge:
            printer.show(replay.by_time([*reader.more(), *reader.rest()]))
            printer.close()
            return
        while True:
            running = job_store.state_of(folder) != "over"  # before reading, so that all it wrote is read below
            printer.show(reader.more())
            if not (follow and running):
                break
            printer.show(reader.rest())
            time.sleep(LOOK_SECONDS)
            printer.tick(LOOK_SECONDS)
        printer.show(reader.rest())
        printer.close()
    finally:
        reader.close()


def _matcher(pattern: str | None) -> Callable[[bytes], Any] | None:
    """A function that finds the pattern in a line."""
    if pattern is None:
        return None
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise UsageError(f"--grep {pattern}: {error}; write a regular expression, with \\ before .*+?()[]|") from None
    return lambda line: search(line.decode(errors="surrogateescape"))


class _Printer:
    """Prints whole lines on stdout, each with its rank's prefix."""

    def __init__(self, ranks: int, fold: FoldChoice, matches: Callable[[bytes], Any] | None, *, notes: bool) -> None:
        """`matches`: whether to show a line, without its newline. `notes`: say where an attempt begins."""
        self._device = Device(1, None)
        if fold != "never":
            held = Fold(ranks, numbers=fold == "numbers")
            self._device = FoldingDevice(1, None, held, self._shared_prefix)
        self._matches = matches
        self._notes = notes
        self._now = 0.0  # how far we are in the job, by launchpad's clock
        self._rest: dict[LineStream, bytes] = {}  # the beginning of a line, not matched yet
        self._streams: dict[tuple[int, int], LineStream] = {}
        self._template: PrefixTemplate | None = None
        self._programs: Sequence[Sequence[Any]] = ()
        self._roles: Sequence[Sequence[Any]] = ()
        self._prefixes: dict[int, Prefix] = {}
        self._make_prefix: Callable[[int, int, int], Prefix]  # of a node, a rank and its local rank
        self._restarts: list[int] = []  # those after the last output

    def show(self, events: Iterable[Any]) -> None:
        """Print the output events; ignore others."""
        for event in events:
            match event:
                case JobPlanned(nodes=nodes, line_prefix=text, role=role, programs=programs, roles=roles):
                    self._template, self._programs, self._roles = template_of(text, role), programs, roles
                    self._begin(nodes)
                case Restarted(attempt=attempt):
                    self._end_lines()
                    if event.nodes:
                        self._begin(event.nodes)
                    self._restarts.append(attempt)
                case RanksSpawned(node=node, ranks=ranks):
                    self._prefixes.update((rank, self._make_prefix(node, rank, rank)) for rank in ranks)
                case Output(time=at, rank=rank, stream=stream, data=data):
                    self._note_restarts()
                    self._now = max(self._now, at / 1e9)
                    self._write(self._device.tick(self._now))
                    if (rank, stream) not in self._streams:
                        prefix = encoded(self._prefix(rank).text)
                        mark = torch_mark(rank, stream, self._template)
                        self._streams[rank, stream] = LineStream(STDOUT, prefix, len(prefix), rank, stream, mark)
                    self._feed(self._streams[rank, stream], data)
        self._note_restarts()
        sys.stdout.buffer.flush()

    def _note_restarts(self) -> None:
        """Say where an attempt begins; of very many the output isn't kept."""
        if self._restarts and self._notes:
            first, last = self._restarts[0], self._restarts[-1]
            text = f"restart {first}" if first == last else f"restarts {first} to {last}"
            self._write(self._device.note(f"launchpad: {text}".encode(), STDOUT))
        self._restarts.clear()

    def _feed(self, stream: LineStream, data: bytes) -> None:
        if self._matches is not None:
            *lines, self._rest[stream] = (self._rest.get(stream, b"") + data).split(b"\n")
            data = b"".join(line + b"\n" for line in lines if self._matches(line))
        if data:
            self._write(self._device.feed(stream, data, self._now))

    def _begin(self, nodes: Sequence[Sequence[Any]]) -> None:
        self._make_prefix = prefixes(nodes, self._template, programs=self._programs, roles=self._roles)
        self._prefixes = {
            rank: self._make_prefix(node, rank, local_rank)
            for node, (_, ranks) in enumerate(nodes)
            for local_rank, rank in enumerate(ranks)
        }
        self._streams.clear()

    def _prefix(self, rank: int) -> Prefix:
        return self._prefixes.get(rank) or Prefix(of_several((rank,)))  # the record may not say who that is

    def _shared_prefix(self, ranks: tuple[int, ...], _: int) -> tuple[bytes, int]:
        template = self._template
        text = template.of_several({rank: self._prefix(rank) for rank in ranks}) if template else of_several(ranks)
        return encoded(text), columns(text)

    def tick(self, seconds: float) -> None:
        """So much time has passed: print what has waited long enough."""
        self._now += seconds
        self._write(self._device.tick(self._now))
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Finish all unfinished lines."""
        self._end_lines()
        sys.stdout.buffer.flush()

    def _end_lines(self) -> None:
        for stream, line in self._rest.items():
            if line and self._matches is not None and self._matches(line):
                self._write(self._device.feed(stream, line, self._now))
        self._rest.clear()
        self._write(self._device.close(list(self._streams.values())))

    def _write(self, pieces: list[tuple[int, bytes]]) -> None:
        for _, data in pieces:
            sys.stdout.buffer.write(data)
