"""What each rank of a running job does and uses, from two looks at it; ranks that are alike as one. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.diagnosis.history import History, RankHistory
from launchpad.job.outcome import signal_name
from launchpad.protocol.events import Sampled, SamplesTaken

# States of a rank.
STARTING, RUNNING, WAITING, PROMPT, STOPPED, ENDED, LOST = (
    *("starting", "running", "waiting", "at a prompt", "stopped"),
    *("ended", "lost"),
)

# Of processes below a rank, by their letters in proc(5).
_PROCESSES = {"S": "asleep", "D": "in the kernel", "T": STOPPED, "t": STOPPED, "Z": ENDED, "X": ENDED}

# Ranks in the same state are alike if their figures differ from the median by no more than a quarter, or than this.
_ALIKE = 0.25
_ALIKE_CPU = 0.2
_ALIKE_BYTES = 64 << 20
_ALIKE_GPU = 20.0

# What is in a RankLook of what isn't known: when, the process's state and its figures; operation, number, seconds.
_NO_FIGURES = (0, "", -1.0, -1, -1, -1, -1)
_NO_WAIT = ("", -1, -1.0)

# How much of the end of a rank's output is searched for its last line.
LINE_BYTES = 400

# Escape sequences of terminals: colours, and those that move the cursor.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")


class GpuLook(NamedTuple):
    """A GPU that a rank uses; figures are -1 if unknown."""

    uuid: str
    use: int  # the share of the time, in percent, in which it was busy, for anybody
    memory: int  # bytes that the rank uses, or if that is unknown all that is in use
    total: int


class RankLook(NamedTuple):
    """A rank at one moment; figures are -1 if unknown."""

    rank: int
    host: str
    pid: int
    state: str
    code: int = 0  # of one that has ended: its exit code, or -n for signal n
    operation: str = ""  # that it waits in
    number: int = -1  # of the collective
    seconds: float = -1.0  # for how long it has waited
    taken: int = 0  # when the figures were taken, in ns of the head's clock
    cpu: float = -1.0  # seconds
    memory: int = -1
    threads: int = -1
    read: int = -1
    written: int = -1
    gpus: Sequence[Sequence[Any]] = ()  # GpuLooks
    lines: int = 0  # counted since somebody looked first
    last_line: str = ""
    role: str = ""  # its world, if there are several
    own: int = -1  # its number there


class ChildLook(NamedTuple):
    """A process below a rank at one moment."""

    rank: int
    pid: int
    command: str
    state: str  # a letter as in proc(5)
    cpu: float  # seconds
    memory: int
    threads: int


class JobLook(NamedTuple):
    """A job at one moment."""

    job: str
    words: list[str]
    time: int  # ns of the head's clock
    started: int  # when its ranks were started, likewise; 0: not yet
    state: str  # "starting", "running" or "stopping"
    attempt: int  # 0 for the first
    restarts: int
    most_restarts: int
    hosts: list[list[str]]  # [name, what there is to say about it] each
    joining: list[str]  # machines that will take part
    ranks: Sequence[Sequence[Any]]  # RankLooks
    slow: str = ""  # for which ranks the others wait
    children: Sequence[Sequence[Any]] = ()  # ChildLooks


class RankRow(NamedTuple):
    """A rank, or several that are alike, as it is shown. Figures are those of each, and -1 if unknown."""

    ranks: list[int]
    hosts: list[str]
    state: str
    code: int
    operation: str
    number: int
    seconds: float
    cpu: float  # 1.0: a whole core
    memory: float
    threads: float
    read: float  # bytes per second
    written: float
    gpu: float  # percent
    gpu_memory: float
    lines: float  # per second
    last_line: str
    role: str = ""
    own: Sequence[int] = ()  # the numbers of the ranks there


class ChildRow(NamedTuple):
    """A process below a rank, as it is shown."""

    pid: int
    command: str
    state: str
    cpu: float  # 1.0: a whole core; -1: unknown
    memory: int
    threads: int


class HostRow(NamedTuple):
    """A host as it is shown: the sums over its ranks."""

    name: str
    note: str
    ranks: int
    cpu: float
    memory: float
    read: float
    written: float
    gpu_memory: float


# In the head.


def look_at(
    history: History,
    taken: SamplesTaken,
    lines: Mapping[int, int],
    at_prompt: int,
    lost: Mapping[int, str],
) -> JobLook:
    """What is known about the job now.

    `at_prompt`: the rank that waits for what is typed, or -1. `lost`: why nodes are gone.
    """
    figures, waits, gpus = _by_rank(taken.samples)
    ranks = []
    for number, one in sorted(history.ranks.items()):
        state, code = _state_of(one, at_prompt, one.node in lost)
        at, letter, *known = figures[number] if number in figures and state != ENDED else _NO_FIGURES
        if letter in ("T", "t") and state == RUNNING:
            state = STOPPED
        wait = waits.get(number, _NO_WAIT) if state == RUNNING else _NO_WAIT
        ranks.append(
            RankLook._make(
                [
                    *(number, history.node_name(one.node), one.pid, state if wait is _NO_WAIT else WAITING, code),
                    *(*wait, at, *known, gpus.get(number, ())),
                    *(lines.get(number, 0), last_line(one.tail.last(LINE_BYTES))),
                    *(history.role(number), history.own_rank(number)),
                ]
            )
        )
    used = {look.host for look in ranks}
    hosts = []
    for node, (name, own) in enumerate(history.planned.nodes):
        hosts.append([str(name), lost.get(node, "" if own or name in used else "a spare")])
    return JobLook(
        job=history.planned.job,
        words=history.planned.words,
        time=taken.time,
        started=history.started,
        state="stopping" if history.stop else "running" if history.started else "starting",
        attempt=history.attempt,
        restarts=0,
        most_restarts=0,
        hosts=hosts,
        joining=taken.joining,
        ranks=ranks,
        slow=history.slow(recent=True),
        children=[row for sample in taken.samples for row in sample.children],
    )


def _state_of(one: RankHistory, at_prompt: int, lost: bool) -> tuple[str, int]:
    if one.exited is not None:
        return ENDED, one.exited.code
    if one.not_started is not None:
        return ENDED, 1
    if lost:
        return LOST, 0
    if not one.started:
        return STARTING, 0
    return (PROMPT if one.rank == at_prompt else RUNNING), 0


def _by_rank(samples: Iterable[Sampled]) -> tuple[dict[int, Any], dict[int, Any], dict[int, list[GpuLook]]]:
    """The figures of each rank with their time, what it waits in, and its GPUs."""
    figures: dict[int, Any] = {}
    waits: dict[int, Any] = {}
    gpus: dict[int, list[GpuLook]] = {}
    for sample in samples:
        figures |= {rank: (sample.time, *known) for rank, *known in sample.ranks}
        waits |= {rank: wait for rank, *wait in sample.waits}
        for uuid, use, memory, total, users in sample.gpus:
            for number, own in users.items():
                gpus.setdefault(int(number), []).append(GpuLook(uuid, use, own if own >= 0 else memory, total))
    return figures, waits, gpus


def plain_lines(output: bytes) -> list[str]:
    """A rank's output as lines of text without escape sequences; of a progress bar its last state."""
    text = _ESCAPES.sub("", output.decode(errors="replace")).expandtabs()
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return ["".join(letter if letter.isprintable() else " " for letter in line).rstrip() for line in lines]


def last_line(tail: bytes) -> str:
    """The last line that is not blank."""
    if not tail:
        return ""
    return next(filter(None, reversed(plain_lines(tail))), "").strip()


# Where it is shown.


def rank_looks(look: JobLook) -> dict[int, RankLook]:
    """The ranks, by their numbers."""
    return {row[0]: RankLook(*row) for row in look.ranks}


def rows(before: JobLook | None, after: JobLook) -> list[RankRow]:
    """A row for each rank, in order. Without an earlier look, nothing is known per second."""
    earlier = rank_looks(before) if before is not None and before.attempt == after.attempt else {}
    seconds = (after.time - before.time) / 1e9 if before is not None else 0.0
    return [_row(earlier.get(rank), look, seconds) for rank, look in rank_looks(after).items()]


def _row(before: RankLook | None, after: RankLook, seconds: float) -> RankRow:
    def per_second(old: float, new: float) -> float:
        if before is None or old < 0 or new < 0 or after.taken <= before.taken:
            return -1.0
        return max(0.0, (new - old) * 1e9 / (after.taken - before.taken))

    then = before or after
    gpus = [GpuLook(*gpu) for gpu in after.gpus]
    return RankRow(
        ranks=[after.rank],
        hosts=[after.host],
        state=after.state,
        code=after.code,
        operation=after.operation,
        number=after.number,
        seconds=after.seconds,
        cpu=per_second(then.cpu, after.cpu),
        memory=after.memory,
        threads=after.threads,
        read=per_second(then.read, after.read),
        written=per_second(then.written, after.written),
        gpu=_mean([gpu.use for gpu in gpus]),
        gpu_memory=_sum([gpu.memory for gpu in gpus]),
        lines=-1.0 if before is None or seconds <= 0 or not after.taken else (after.lines - before.lines) / seconds,
        last_line=after.last_line,
        role=after.role,
        own=[after.own],
    )


def child_rows(before: JobLook | None, after: JobLook) -> dict[int, list[ChildRow]]:
    """The processes below each rank that has any. Their CPU seconds are known at about the time of the looks."""
    seconds = (after.time - before.time) / 1e9 if before is not None else 0.0
    earlier = {child.pid: child for child in _children(before)} if before is not None else {}
    found: dict[int, list[ChildRow]] = {}
    for child in _children(after):
        then = earlier.get(child.pid)
        share = max(0.0, child.cpu - then.cpu) / seconds if then is not None and seconds > 0 else -1.0
        state = _PROCESSES.get(child.state, RUNNING)
        row = ChildRow(child.pid, child.command, state, share, child.memory, child.threads)
        found.setdefault(child.rank, []).append(row)
    return found


def _children(look: JobLook) -> list[ChildLook]:
    return [ChildLook(*row) for row in look.children]


def host_rows(look: JobLook, rows: Iterable[RankRow]) -> list[HostRow]:
    """A row for each host."""
    by_host: dict[str, list[RankRow]] = {name: [] for name, _ in look.hosts}
    for row in rows:
        by_host.setdefault(row.hosts[0], []).append(row)
    notes: dict[str, str] = dict(look.hosts)
    return [
        HostRow(
            name,
            notes.get(name, ""),
            len(own),
            cpu=_sum([row.cpu for row in own]),
            memory=_sum([row.memory for row in own]),
            read=_sum([row.read for row in own]),
            written=_sum([row.written for row in own]),
            gpu_memory=_sum([row.gpu_memory for row in own]),
        )
        for name, own in by_host.items()
    ]


def folded(rows: Sequence[RankRow], room: int) -> list[RankRow]:
    """If the rows don't fit: those that are alike as one, with their means."""
    if len(rows) <= room:
        return list(rows)
    by_state: dict[tuple[Any, ...], list[RankRow]] = {}
    for row in rows:
        by_state.setdefault((row.role, row.state, row.code, row.operation, row.number), []).append(row)
    found: list[RankRow] = []
    for group in by_state.values():
        usual = [statistics.median(figures) for figures in zip(*map(_likeness, group), strict=True)]
        alike: list[RankRow] = []
        for row in group:
            (alike if _is_usual(_likeness(row), usual) else found).append(row)
        if alike:
            found.append(_merged(alike))
    return sorted(found, key=lambda row: row.ranks)


def _likeness(row: RankRow) -> tuple[float, ...]:
    return row.cpu, row.memory, row.gpu, row.gpu_memory


def _is_usual(figures: Sequence[float], usual: Sequence[float]) -> bool:
    slacks = (_ALIKE_CPU, _ALIKE_BYTES, _ALIKE_GPU, _ALIKE_BYTES)
    return all(
        abs(one - median) <= max(slack, _ALIKE * median)
        for one, median, slack in zip(figures, usual, slacks, strict=True)
    )


def _merged(alike: Sequence[RankRow]) -> RankRow:
    first = alike[0]
    return first._replace(
        ranks=sorted(rank for row in alike for rank in row.ranks),
        own=sorted(rank for row in alike for rank in row.own),
        hosts=sorted({host for row in alike for host in row.hosts}),
        seconds=max(row.seconds for row in alike),
        cpu=_mean([row.cpu for row in alike]),
        memory=_mean([row.memory for row in alike]),
        threads=_mean([row.threads for row in alike]),
        read=_mean([row.read for row in alike]),
        written=_mean([row.written for row in alike]),
        gpu=_mean([row.gpu for row in alike]),
        gpu_memory=_mean([row.gpu_memory for row in alike]),
        lines=_mean([row.lines for row in alike]),
    )


def _mean(figures: Sequence[float]) -> float:
    known = [figure for figure in figures if figure >= 0]
    return sum(known) / len(known) if known else -1.0


def _sum(figures: Sequence[float]) -> float:
    known = [figure for figure in figures if figure >= 0]
    return sum(known) if known else -1.0


def matching(rows: Iterable[RankRow], text: str) -> list[RankRow]:
    """The rows that a filter leaves: of the ranks 0-7,12, or with this text in host, state or last line."""
    wanted = _ranks_of(text)
    if wanted is not None:
        return [row for row in rows if any(row.ranks[0] in some for some in wanted)]
    text = text.lower()
    return [row for row in rows if text in f"{row.role} {row.hosts[0]} {state_in_words(row)} {row.last_line}".lower()]


def _ranks_of(text: str) -> list[range] | None:
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        found.append(range(int(first), int(last if dash else first) + 1))
    return found


# What the rows can be ordered by: the largest first, except by rank.
ORDERS: dict[str, Callable[[RankRow], Any]] = {
    "rank": lambda row: row.ranks,
    "CPU": lambda row: -row.cpu,
    "memory": lambda row: -row.memory,
    "GPU": lambda row: -row.gpu,
    "read": lambda row: -row.read,
    "written": lambda row: -row.written,
    "lines": lambda row: -row.lines,
    "wait": lambda row: -row.seconds,
}


def ordered(rows: Iterable[RankRow], by: str) -> list[RankRow]:
    """The rows in this order, and by rank where that makes no difference."""
    return sorted(sorted(rows, key=ORDERS["rank"]), key=ORDERS[by])


def state_in_words(row: RankRow) -> str:
    """What a rank does."""
    if row.state == WAITING:
        number = f" #{row.number}" if row.number >= 0 else ""
        seconds = f" for {seconds_in_words(row.seconds)}" if row.seconds >= 0 else ""
        return f"waiting in {row.operation}{number}{seconds}"
    if row.state == ENDED and row.code:
        return f"ended, {signal_name(-row.code) if row.code < 0 else f'exit code {row.code}'}"
    return row.state


def seconds_in_words(seconds: float) -> str:
    """About how long: 2 s, 5 min, 3 h, 2 days."""
    for most, size, unit in ((100, 1, "s"), (6000, 60, "min"), (172800, 3600, "h")):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def as_json(before: JobLook | None, after: JobLook) -> dict[str, Any]:
    """A look for programs. Unknown figures are null."""

    def known(value: float) -> float | None:
        return round(value, 3) if value >= 0 else None

    ranks = []
    children = child_rows(before, after)
    for look, row in zip(rank_looks(after).values(), rows(before, after), strict=True):
        waits = {"operation": look.operation, "number": known(look.number), "seconds": known(look.seconds)}
        ranks.append(
            {
                "rank": look.rank,
                **({"role": look.role, "role_rank": look.own} if look.role else {}),
                "host": look.host,
                "pid": look.pid,
                "state": look.state,
                "exit_code": look.code if look.state == ENDED else None,
                "waits": waits if look.state == WAITING else None,
                "cpu": known(row.cpu),
                "cpu_seconds": known(look.cpu),
                "memory": known(look.memory),
                "threads": known(look.threads),
                "read": known(look.read),
                "written": known(look.written),
                "read_per_second": known(row.read),
                "written_per_second": known(row.written),
                "gpus": [GpuLook(*gpu)._asdict() for gpu in look.gpus],
                "lines_per_second": known(row.lines),
                "last_line": look.last_line,
                "children": [{**child._asdict(), "cpu": known(child.cpu)} for child in children.get(look.rank, ())],
            }
        )
    return {
        "job": after.job,
        "state": after.state,
        "words": after.words,
        "seconds": known((after.time - after.started) / 1e9) if after.started else None,
        "attempt": after.attempt,
        "restarts": after.restarts,
        "most_restarts": after.most_restarts,
        "hosts": [{"name": name, "note": note} for name, note in after.hosts],
        "joining": after.joining,
        "slow": after.slow or None,
        "ranks": ranks,
    }
