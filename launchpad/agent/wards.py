"""What guards do: they wait for the ends of their agents, and kill those that can't notice what they have to."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ..named import NamedTuple
from .host import processes
from .mpi import shm
from .poll import earliest
from .ranks import rundir, shared_memory

if TYPE_CHECKING:
    from .ranks.forkserver_client import KeptFork

# A stopped or stuck agent can't notice that its head is gone; the guard kills it after this many seconds. One that is
# stopped while its head is there has as long to be continued.
STUCK_AGENT = 5.0

# If the guard wakes up this late, it was stopped too: whoever continues it is about to continue the agent.
LATE_SECONDS = 1.0

# The guard waits so long for room in the link.
REPORT_SECONDS = 5.0

# How often the guard lets the head know that it still ends processes.
SIGN_OF_LIFE_SECONDS = 1.0


class Shared(NamedTuple):
    """What guard and agent have in common."""

    folder: str  # the job's
    heartbeats: int  # an eventfd that the agent writes to if its head would notice that it is silent


def share() -> tuple[Shared, int]:
    """What guard and agent are to have in common, and the descriptor that holds the folder's lock, or -1.

    Raises OSError.
    """
    heartbeats = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        folder, lock = rundir.create_locked()
    except OSError:
        os.close(heartbeats)
        raise
    return Shared(folder, heartbeats), lock


def run_agent(stdin_fd: int | None, shared: Shared, kept: "KeptFork | None" = None, why_cold: str = "") -> NoReturn:
    """Be the agent. `shared`: what `prepare` returned.

    `kept`: the forkserver that a kept image provides; `why_cold`: why there is none.
    """
    code = 1
    try:
        from .loop import Agent

        processes.continue_with_end_of_parent()
        code = Agent(0, 1, stdin_fd, *shared, kept, why_cold).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


class Ward:
    """An agent that is guarded. It is killed if it can't notice what it has to."""

    def __init__(self, agent: int, shared: Shared, link: tuple[int, int], lock: int = -1) -> None:
        """`link`: its ends, for reading and for writing; `lock`: what holds the lock of its folder, to be closed."""
        self.agent = agent
        self.shared = shared
        self.link = link
        self.kill_at: float | None = None
        self._lock = lock
        self._watched = False  # by a head that hears its heartbeats
        self._stopped = 0  # the signal that has stopped it
        self._hung_up = False

    def hung_up(self) -> None:
        """Its head is gone."""
        self._hung_up = True
        self.kill_at = time.monotonic() + STUCK_AGENT

    def look(self) -> None:
        """Note whether it has been stopped or continued; kill it if it is time."""
        while (change := processes.stopped_or_continued(self.agent)) is not None:
            if self._hung_up:
                continue
            self._stopped = change
            self.kill_at = time.monotonic() + STUCK_AGENT if change and not self._head_watches() else None
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self._kill(self.kill_at)

    def _head_watches(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._watched = os.eventfd_read(self.shared.heartbeats) > 0 or self._watched
        return self._watched

    def _kill(self, at: float) -> None:
        if not self._hung_up and time.monotonic() > at + LATE_SECONDS:
            self.kill_at = time.monotonic() + STUCK_AGENT
            return
        os.kill(self.agent, signal.SIGKILL)
        self.kill_at = None

    def reason(self, code: int) -> str:
        """Why it has ended with this exit code (-n for signal n)."""
        if code >= 0:
            return "the agent crashed"
        if self._stopped:
            name = signal.Signals(self._stopped).name
            return f"the agent was stopped by another process's {name}, and not continued within {STUCK_AGENT:g} s"
        return f"the agent was killed by signal {-code}"

    def close(self) -> None:
        """Let its descriptors go. The standard ones stay taken, as an agent that is forked later gets its own there."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in {*self.link, self.shared.heartbeats, self._lock}:
            if fd > 2:
                os.close(fd)
            elif fd >= 0:
                os.dup2(null, fd)
        os.close(null)


class Guard:
    """Waits for the ends of agents, its children, and then kills what they have left."""

    def __init__(self) -> None:
        self._begun = time.time()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._wards: dict[int, Ward] = {}  # by pid
        self._codes: dict[int, int] = {}  # of agents that have just ended: the exit code, -n for signal n
        self._reaped: set[int] = set()
        self._exit_code = 0
        wakeup = processes.wakeup_on_exit()
        self.hear(wakeup, lambda _: _empty(wakeup), select.POLLIN)

    def hear(self, fd: int, handle: Callable[[int], None], events: int = 0) -> None:
        """Call this with what occurs, whenever such an event does, or a hang-up."""
        self._handlers[fd] = handle
        self._poll.register(fd, events)

    def hear_no_more(self, fd: int) -> None:
        """Undo `hear`."""
        del self._handlers[fd]
        self._poll.unregister(fd)

    def watch(self, ward: Ward) -> None:
        """Look after this agent too."""
        self._wards[ward.agent] = ward

        def hung_up(_: int) -> None:
            self.hear_no_more(ward.link[0])
            ward.hung_up()

        self.hear(ward.link[0], hung_up)

    def run(self) -> NoReturn:
        """Serve until the agents are gone."""
        while True:
            self._reap()
            for agent, ward in self._wards.items():
                if agent not in self._codes:  # otherwise its pid may be another process's by now
                    ward.look()
            for agent in [one for one in self._wards if one in self._codes]:
                self._end(self._wards[agent], self._codes.pop(agent))
            if not self._wards:
                os._exit(self._exit_code)
            kill_at = earliest(ward.kill_at for ward in self._wards.values())
            for fd, events in self._poll.poll(None if kill_at is None else max(0.0, kill_at - time.monotonic()) * 1000):
                if fd in self._handlers:
                    self._handlers[fd](events)

    def _reap(self) -> None:
        codes = processes.reap()
        self._reaped.update(codes)
        self._codes |= {pid: code for pid, code in codes.items() if pid in self._wards}

    def _end(self, ward: Ward, code: int) -> None:
        """Remove what an agent has left. What others have forked isn't ours, as they are subreapers too."""
        ended = time.monotonic_ns()
        # Of an agent that broke down, the last frame may not be whole.
        seconds = SIGN_OF_LIFE_SECONDS if code == 0 else 0.0
        reap = processes.telling(self._reap, seconds, lambda: give_sign_of_life(ward.link[1]))
        processes.sweep(reap, spared=self._wards.keys())
        shared_memory.remove(self._reaped, self._begun)
        self._reaped.clear()
        shm.remove(ward.shared.folder)
        rundir.remove(ward.shared.folder)
        if code != 0:
            self._exit_code = 1
            report(ward.link[1], ward.reason(code), ended)
        if ward.link[0] in self._handlers:
            self.hear_no_more(ward.link[0])
        del self._wards[ward.agent]
        ward.close()


def _empty(pipe: int) -> None:
    os.read(pipe, 4096)


def give_sign_of_life(link: int) -> None:
    from ..protocol import wire  # needed only for a process that can't be killed
    from ..protocol.events import Pong

    with contextlib.suppress(OSError):  # the link is full, or the head is gone
        os.write(link, wire.encode(Pong(time.monotonic_ns(), 0)))


def report(link: int, reason: str, at: int) -> None:
    """Tell the head why this node is going down, if the link still works."""
    from ..protocol import wire  # needed only if something fails
    from ..protocol.events import AgentFailed

    os.set_blocking(link, False)
    room = select.poll()
    room.register(link, select.POLLOUT)
    room.poll(REPORT_SECONDS * 1000)  # it may be full and its reader stuck
    with contextlib.suppress(OSError):
        os.write(link, wire.encode(AgentFailed(at, reason)))
