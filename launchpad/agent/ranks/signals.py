"""Decides which of a rank's processes get a signal, and when a rank that was asked to stop counts as exited.

KILL, STOP and CONT go to the whole process group. Any other signal is a request and goes to the main process alone, as
with `kill PID`: a program may need its children (DataLoader workers) to save its state. Two kinds of programs don't act
on a request while one of their children runs, so that child gets it as well:

- a shell waits for its foreground command before it runs its trap. Background commands are left to the shell;
- a wrapper (uv run, time) relies on the terminal to send INT to everyone. It forwards other signals, or dies of them.

A main process that exits after INT, TERM, HUP or the job's --stop-signal may leave processes behind. They are then sent
the signal, by the same rules, and the rank counts as exited only when they are gone too, unless they ignore the signal,
or KILL comes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping

from ...protocol.events import RankExited
from ..host import processes, procfs
from ..host.processes import CLEANER, OTHER, SHELL, Process
from .rank import Rank

_WHOLE_GROUP = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def receivers(main: int | None, group: Mapping[int, Process], signum: int) -> set[int]:
    """The processes of a rank's group that get a request now. `main`: the main process, None if it is gone."""
    todo = [pid for pid, one in group.items() if one.parent not in group] if main is None else [main]
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        one = group.get(pid)
        if pid in found or (one and one.kind == CLEANER):
            continue
        found.add(pid)
        if one and _extends_to_children(one.kind, signum):
            todo += [child for child, its in group.items() if its.parent == pid and not _in_background(its, one)]
    return found


def _extends_to_children(kind: str, signum: int) -> bool:
    """Whether the children of such a process get the request too."""
    return kind == SHELL or (kind == OTHER and signum == signal.SIGINT)


def _in_background(child: Process, parent: Process) -> bool:
    """POSIX: a shell without job control starts its background commands with INT ignored."""
    return parent.kind == SHELL and child.ignores(signal.SIGINT) and not parent.ignores(signal.SIGINT)


class _StopRequest:
    """The last signal that asked a rank to stop."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.delivered_to: set[int] = set()  # the processes that got it and did not ignore it


class Signals:
    """Sends signals, and holds back a rank's exit until the processes that it left behind are gone too."""

    def __init__(self, ranks: Mapping[int, Rank], report: Callable[[RankExited], None]) -> None:
        """`ranks`: the running ones, by pid. `report` is called once with each rank's exit."""
        self._ranks = ranks
        self._report = report
        self._requests: dict[int, _StopRequest] = {}  # by the rank's pid
        self._held: dict[int, RankExited] = {}  # exits held back, by the pid of the rank's main process
        self._exiting: dict[int, bool] = {}  # by the rank's pid: whether it was, when it was first to be ended

    def send(self, signum: int, *, stops: bool = False, ranks: Collection[int] | None = None) -> None:
        """Send a signal to all ranks. `stops`: it asks them to stop, as INT, TERM and HUP do in any case.

        `ranks`: only these get the request; None: all.
        """
        if not 0 < signum < signal.NSIG:
            raise ValueError(f"there is no signal {signum}")
        if signum in _WHOLE_GROUP:
            if signum == signal.SIGKILL:
                self._note_exiting(self._ranks)
            for rank in self._ranks.values():
                rank.signal(signum)
            for group in self._groups(self._held).values():
                for pid in group:
                    _kill(pid, signum)
            if signum == signal.SIGKILL:
                self._requests.clear()
                self.release()
            return
        alive = [pid for pid, rank in self._ranks.items() if ranks is None or rank.rank in ranks]
        held = [pid for pid, exited in self._held.items() if ranks is None or exited.rank in ranks]
        if stops or signum in _STOPS:
            self._note_exiting(alive)
            kept = {} if ranks is None else self._requests
            self._requests = {**kept, **{pid: _StopRequest(signum) for pid in (*alive, *held)}}
        extending = [pid for pid in alive if _extends_to_children(processes.kind_of(pid), signum)]
        groups = self._groups([*extending, *held])
        for pid in (*alive, *held):
            group = groups.get(pid, {})
            self._request(pid, receivers(None if pid in held else pid, group, signum), group, signum)

    def send_to(self, number: int, signum: int) -> None:
        """Send a signal to the main process of one rank, if it runs."""
        for rank in self._ranks.values():
            if rank.rank == number:
                _kill(rank.pid, signum)

    def exited(self, pid: int, exited: RankExited) -> None:
        """A rank's main process is gone. Call `recheck` after a round of these."""
        exited = exited._replace(exiting=self._exiting.pop(pid, False))
        if pid in self._requests and processes.has_group(pid):
            self._held[pid] = exited
        else:
            self._release(pid, exited)

    def recheck(self) -> None:
        """A process has ended. For ranks whose main process is gone: signal new orphans, and report finished ranks."""
        groups = self._groups(self._held)
        for pid, exited in list(self._held.items()):
            request, group = self._requests[pid], groups.get(pid, {})
            self._request(pid, receivers(None, group, request.signum) - request.delivered_to, group, request.signum)
            if not request.delivered_to & group.keys():
                self._release(pid, exited)

    def release(self) -> None:
        """Stop waiting for processes that ranks left behind."""
        for pid, exited in list(self._held.items()):
            self._release(pid, exited)

    def _note_exiting(self, pids: Collection[int]) -> None:
        for pid in pids:
            if pid not in self._exiting:
                self._exiting[pid] = procfs.is_dying(pid)

    def _request(self, rank: int, pids: Collection[int], group: Mapping[int, Process], signum: int) -> None:
        request = self._requests.get(rank)
        for pid in pids:
            # Looked up again: reading the group takes a while, in which a new process may have begun to ignore it.
            counts = request and request.signum == signum and pid in group
            if request and counts and not procfs.has_signal(procfs.status(pid), "SigIgn", signum):
                request.delivered_to.add(pid)
            _kill(pid, signum)

    def _release(self, pid: int, exited: RankExited) -> None:
        self._requests.pop(pid, None)
        self._held.pop(pid, None)
        self._report(exited)

    @staticmethod
    def _groups(leaders: Collection[int]) -> Mapping[int, Mapping[int, Process]]:
        return processes.groups(leaders) if leaders else {}


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):  # it is gone, or another user's (sudo)
        pass
