"""Calls ranks that stay: hands them one call after the other, and collects what each has come to.

A thread of its own decides; the callers, the head's thread and the ranks' sockets report to it. Ranks of this machine
are called directly, over a socket each; those of other machines through their agents. The head supervises the ranks
meanwhile as it does in any job, so that a rank which dies ends them all, with a verdict.

When a call goes wrong:

    a rank raises         the others may finish the call, and all stay; unless they wait for it: then all are ended
    Ctrl-C, the timeout   the ranks get SIGINT; if all of them answer soon, they stay; else all are ended
    a rank exits          all are ended
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from launchpad import linux
from launchpad.api.job import FunctionJob, JobRequest
from launchpad.api.results import ResultCollector, Results
from launchpad.api.screen import SessionScreen
from launchpad.api.unpickling import unpickle
from launchpad.errors import JobTimeout, LaunchpadError, UsageError
from launchpad.head.session_calls import Orders, SendCall
from launchpad.head.stall import is_stuck
from launchpad.job.outcome import ranks_in_words
from launchpad.job.plan import Plan
from launchpad.protocol.commands import EndCall, EndSession, Fence, SignalRank
from launchpad.protocol.events import (
    RESULT,
    Fenced,
    Output,
    RankExited,
    RankFailed,
    StackDump,
    StacksRequested,
    StacksTaken,
    StopRequested,
)
from launchpad.protocol.stacks import main_frames, where
from launchpad.rank import pickling
from launchpad.rank.call_server import CALL, END, NAME_BYTES, admitted
from launchpad.rank.passing import receive, send

# How long ranks that were interrupted may take to answer.
INTERRUPT_SECONDS = 5.0

# After a rank has raised, how often to look where the others are, and how long they must be seen to wait.
LOOK_SECONDS = 1.0
WAITING_SECONDS = 3.0

# poll(2) takes no more milliseconds than a C int.
LONGEST_WAIT_SECONDS = 3600.0

# How long to wait for the ranks' stacks.
STACKS_SECONDS = 5.0

# At the end, how long the ranks may take to exit, and then to obey SIGTERM.
LEAVE_SECONDS = 10.0
TERM_SECONDS = 5.0

# Numbers of StacksRequested that no terminal uses: for the user, and to see whether ranks wait.
_SHOWN = 0
_LOOK = -1

_GONE = "ranks.restart() starts new ones"


# Those whose ranks have not ended.
running: set[RankSession] = set()


class PendingCall:
    """One call, and what it has come to in each rank."""

    def __init__(self, file: int, name: str, timeout: float | None) -> None:
        """`file`: the packed call, -1 for the start of the ranks."""
        self.file = file
        self.name = name
        self.timeout = timeout
        self.future: Future[Results] = Future()
        self.outcomes: dict[int, Any] = {}  # by rank, in the order in which they came
        self.wrote: set[int] = set()
        self.places: dict[int, dict[str, int]] = {}
        self.deadline: float | None = None  # its timeout, then that of the stacks which are shown
        self.ending: BaseException | None = None  # why it is ended early
        self.kill_at: float | None = None
        self.look_at: float | None = None
        self.seen: dict[int, tuple[float, StackDump]] = {}  # the ranks that seem to wait, since when
        self.stacks_asked = False
        self.given_up = False  # the rank that has raised exits
        self.fences = 0  # that are missing before the output is complete
        self.owner: Any = None  # keeps the ranks until it is done

    def failed(self) -> int:
        """The rank that was the first to raise, -1 if none has."""
        bad = ("raised", "refused", "unreadable", *(("interrupted",) if self.ending is None else ()))
        return next((rank for rank, outcome in self.outcomes.items() if outcome[0] in bad), -1)


class SessionCollector(ResultCollector):
    """A sink that passes on what the ranks of other machines answer, and who has exited."""

    def __init__(self, plan: Plan, remote: Sequence[bool], line: str, report: Callable[[Any], None]) -> None:
        """`line`: the name of our socket. `report` takes events, and ("outcome", rank, descriptor)."""
        super().__init__(plan, remote)
        self.last: dict[int, Any] = {}  # what the current call has come to
        self._line = line
        self._report = report
        self._partial: dict[int, tuple[int, bytearray]] = {}

    def environ(self, rank: int) -> dict[str, str]:
        """The variables by which a rank of this machine finds us."""
        return {**super().environ(rank), "LAUNCHPAD_CALL_LINE": self._line}

    def on(self, event: Any) -> bool:
        """Take an event of the job."""
        match event:
            case Output(rank=rank, stream=stream, data=data) if stream == RESULT:
                self._add(rank, data)
            case RankExited():
                self.codes[event.rank] = event.code
                self._report(event)
            case Fenced() | StacksTaken():
                self._report(event)
        return False

    def _add(self, rank: int, data: bytes) -> None:
        """The next bytes of an outcome; no bytes of another one are among them."""
        file, head = self._partial.pop(rank, (-1, bytearray()))
        if file < 0:
            file = os.memfd_create("launchpad-result")
        head += data[: 8 - len(head)]
        linux.write_all(file, data)
        if len(head) == 8 and os.fstat(file).st_size >= int.from_bytes(head, "little"):
            self._report(("outcome", rank, file))
        else:
            self._partial[rank] = file, head

    def failure(self, rank: int, report: str) -> Exception:
        """The exception to raise if this rank failed first."""
        if self.codes.get(rank) == 0 and self._ended(rank) is None:
            return self._exited(rank, 0)
        return super().failure(rank, report)

    def _ended(self, rank: int) -> Any:
        return self.last[rank] if rank in self.last else super()._ended(rank)

    def name(self, rank: int) -> str:
        """The rank, for messages."""
        return self._name(rank)

    def close(self) -> None:
        """Close what is open."""
        super().close()
        while self._partial:
            os.close(self._partial.popitem()[1][0])


class RankSession:
    """The ranks of one job, from their start to their end."""

    def __init__(self, request: JobRequest, packed: int) -> None:
        """Start the ranks. `packed`: what pack_session has made; it is closed with the session."""
        self.error: BaseException | None = None  # why the ranks are gone, once they are
        self.over = False
        self.pid = os.getpid()
        self.screen = SessionScreen()
        self.start = PendingCall(-1, "the start of the ranks", None)
        self._doomed = False  # the ranks are being ended after the last call
        self._packed = packed
        self._call: PendingCall | None = self.start
        self.start.future.set_running_or_notify_cancel()
        self._waiting: deque[PendingCall] = deque()
        self._inbox: deque[Any] = deque()
        self._bell = os.eventfd(0)
        self._fence = 0
        self._places: dict[int, dict[str, int]] = {}  # how far each rank was in its groups at the end of the last call
        self._closing = False
        self._killed = False
        self._leave_at: float | None = None
        self._lines: dict[int, socket.socket] = {}  # by rank
        self._rank_of: dict[int, int] = {}  # by descriptor
        self._node_of: dict[int, int] = {}  # by rank
        self._remote: list[int] = []  # nodes with ranks
        self._collector: SessionCollector | None = None
        name = f"launchpad-{os.urandom(NAME_BYTES).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen(socket.SOMAXCONN)
        self._poll = select.poll()
        for fd in (self._bell, self._listener.fileno()):
            self._poll.register(fd, select.POLLIN)

        def collect(plan: Plan, remote: Sequence[bool]) -> ResultCollector:
            self._remote = [node.index for node in plan.nodes if node.ranks and remote[node.index]]
            self._node_of = {rank.rank: node.index for node in plan.nodes for rank in node.ranks}
            self._collector = SessionCollector(plan, remote, name, self._report)
            return self._collector

        self._job = FunctionJob(request, packed, self.screen, collect, over=lambda: self._report("over"))
        self.thread = threading.Thread(target=self._run, name="launchpad-session", daemon=True)
        running.add(self)
        self._job.thread.start()
        self.thread.start()

    # For the callers' threads.

    @property
    def size(self) -> int:
        """How many ranks there are; 0 before they are planned."""
        return len(self._node_of)

    def submit(self, call: PendingCall) -> None:
        """Queue a call."""
        self._report(call)
        if self.over:
            self._refuse_rest()

    def interrupt(self, call: PendingCall) -> None:
        """End the call, as Ctrl-C does; the second time, end the ranks. May be called in a signal handler."""
        self._report(("interrupt", call))

    def close(self) -> None:
        """Let the ranks exit; end the call that is running, and cancel the others. Does not wait for it."""
        self._report("close")

    def join(self) -> None:
        """Wait until nothing is left of the ranks."""
        here = threading.current_thread()  # one of these, if a future's callback closes the ranks
        with self.screen.released():
            for thread in (self.thread, self._job.thread, self.screen.thread):
                if thread is not here:
                    thread.join()

    def _report(self, event: Any) -> None:
        self._inbox.append(event)
        try:
            os.eventfd_write(self._bell, 1)
        except (OSError, ValueError):  # all is over
            pass

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a bug of ours: nobody may wait for it
            self.error = error
            self._job.interrupt()
            self._job.interrupt()
            self._job.thread.join()
            self._end()
        finally:
            running.discard(self)
            self._release()

    def _serve(self) -> None:
        while not self.over:
            due = self._due()
            wait = None if due is None else min(max(0.0, due - time.monotonic()), LONGEST_WAIT_SECONDS) * 1000
            for fd, _ in self._poll.poll(wait):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                    while self._inbox:
                        self._on(self._inbox.popleft())
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._rank_of:
                    self._hear(self._rank_of[fd])
            if not self.over:
                self._tick(time.monotonic())

    def _on(self, event: Any) -> None:
        call = self._call
        match event:
            case PendingCall():
                self._waiting.append(event)
                self._next()
            case ("interrupt", PendingCall() as which):
                self._interrupted(which)
            case ("outcome", int() as rank, int() as file):
                self._outcome(rank, file)
            case Fenced(number=number) if call is not None and number == self._fence:
                call.fences -= 1
                if not call.fences:
                    self._finish(call)
            case StacksTaken(why="asked", asker=asker, dumps=dumps) if call is not None:
                if asker == _LOOK:
                    self._looked(call, dumps)
                elif asker == _SHOWN and call.deadline is not None:
                    self._timed_out(call)
            case RankExited(rank=rank, code=code) if not self._closing and not code and not self._killed:
                reason = "exited with code 0 while the others stay for more calls"
                self._job.post(RankFailed(time.monotonic_ns(), rank, 1, reason))
            case "close":
                self._close()
            case "over":
                self._end()

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        line.settimeout(INTERRUPT_SECONDS)
        try:
            rank = admitted(line)
        except OSError:
            rank = -1
        if self._node_of.get(rank) is None or rank in self._lines:
            line.close()
            return
        line.settimeout(None)
        self._lines[rank] = line
        self._rank_of[line.fileno()] = rank
        self._poll.register(line.fileno(), select.POLLIN)

    def _hear(self, rank: int) -> None:
        line = self._lines[rank]
        try:
            _, file = receive(line)
        except OSError:
            file = -1
        if file >= 0:
            self._outcome(rank, file)
            return
        self._poll.unregister(line.fileno())  # the rank has gone, which the head reports
        del self._rank_of[line.fileno()], self._lines[rank]
        line.close()

    def _next(self) -> None:
        """Begin the next call, if none is running."""
        while self._call is None and self._waiting and not (self._closing or self._doomed):
            call = self._waiting.popleft()
            if not call.future.set_running_or_notify_cancel():
                os.close(call.file)
                continue
            self._call = call
            if self._collector is not None:
                self._collector.last = {}
            for line in self._lines.values():
                send(line, CALL, call.file)
            if self._remote:
                self._job.post(SendCall(os.dup(call.file), self._remote))
            os.close(call.file)
            if call.timeout is not None:
                call.deadline = time.monotonic() + call.timeout

    def _outcome(self, rank: int, file: int) -> None:
        assert self._collector is not None
        try:
            value = pickling.load(pickling.map_file(file, shared=True), unpickle)[0]
        except Exception as error:
            value = ("unreadable", self._collector.unreadable(rank, error)), True, {}
        finally:
            os.close(file)
        if isinstance(value[0], str):  # it could not even begin, and exits
            self._collector.last[rank] = value
            return
        call = self._call
        if call is None:
            return
        outcome, wrote, places = value
        call.outcomes[rank] = outcome
        if wrote:
            call.wrote.add(rank)
        call.places[rank] = places
        call.seen.pop(rank, None)
        if len(call.outcomes) == len(self._node_of):
            self._all_answered(call)
        elif call.look_at is None and call.failed() >= 0:
            self._collector.last = call.outcomes
            call.look_at = time.monotonic() + LOOK_SECONDS

    def _all_answered(self, call: PendingCall) -> None:
        """Wait for the rest of the output, and until no rank can be hit by a signal that is on its way."""
        call.deadline = call.kill_at = call.look_at = None
        if call.given_up:  # the end of all ranks follows
            return
        ranks = self._node_of if call.ending is not None else call.wrote
        nodes = {self._node_of[rank] for rank in ranks}
        if not nodes:
            self._finish(call)
            return
        self._fence += 1
        call.fences = len(nodes)
        self.screen.expect(call.fences)
        self._job.post(Orders([(node, Fence(self._fence)) for node in nodes]))

    def _finish(self, call: PendingCall) -> None:
        """The call is complete: the thread that writes the output says so after what is queued."""
        error: BaseException | None = call.ending
        assert self._collector is not None
        if error is None and (rank := call.failed()) >= 0:
            outcome = call.outcomes[rank]
            error = outcome[1] if outcome[0] == "unreadable" else self._collector.failure_of(rank, outcome, "")
        if error is not None:
            self._collector.last = call.outcomes
            self._doomed = self._check_places(call, error)
            self._call = None
            self.screen.after(lambda: call.future.set_exception(error))
        else:
            values = [call.outcomes[rank][1] for rank in sorted(self._node_of)]
            results = Results(values, self._collector.places)
            self._places = call.places
            self._call = None
            self.screen.after(lambda: call.future.set_result(results))
        self._next()

    def _check_places(self, call: PendingCall, error: BaseException) -> bool:
        """End the ranks if in this call some of them have begun operations in a process group that others have not.

        Returns whether they are ended.

        In calls that all ranks have returned from, gloo may have counted more on some: it counts sends and receives.
        """
        assert self._collector is not None
        before, self._places = self._places, call.places
        for group in {name for places in call.places.values() for name in places}:
            begun = {
                rank: places[group] - before.get(rank, {}).get(group, 0)
                for rank, places in call.places.items()
                if group in places
            }
            most, least = max(begun, key=begun.__getitem__), min(begun, key=begun.__getitem__)
            if begun[most] != begun[least]:
                names = self._collector.name(most), self._collector.name(least)
                why = f"{names[0]} has begun {begun[most]} collectives in this call and {names[1]} {begun[least]}"
                error.add_note(f"launchpad: {why}, so the ranks can't go on together and were ended; {_GONE}")
                if (rank := call.failed()) >= 0:
                    self._give_up(call, rank)
                else:
                    self._kill()
                return True
        return False

    # What goes wrong.

    def _interrupted(self, call: PendingCall) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            os.close(call.file)
            call.future.set_exception(KeyboardInterrupt())
        elif call is self._call:
            if call is self.start:
                self._job.interrupt()
            elif call.ending is None:
                self._stop(call, KeyboardInterrupt())
            else:
                self._kill()

    def _stop(self, call: PendingCall, why: BaseException) -> None:
        """Have the ranks end the call."""
        call.ending = why
        call.deadline = call.look_at = None
        if call.fences:  # it has just ended by itself
            return
        call.kill_at = time.monotonic() + INTERRUPT_SECONDS
        late = [rank for rank in self._node_of if rank not in call.outcomes]
        self._job.post(Orders([(self._node_of[rank], SignalRank(rank, signal.SIGINT)) for rank in late]))

    def _timed_out(self, call: PendingCall) -> None:
        late = [rank for rank in self._node_of if rank not in call.outcomes]
        text = f"the call of {call.name} was ended: it ran longer than timeout={call.timeout:g} s"
        if len(late) < len(self._node_of):
            text += f"; {ranks_in_words(late)} had not returned"
        self._stop(call, JobTimeout(text))

    def _looked(self, call: PendingCall, dumps: Sequence[StackDump]) -> None:
        """A rank has raised: if all that have not answered wait, they wait for it in vain."""
        if call.look_at is None:
            return
        now = time.monotonic()
        seen = {}
        for dump in dumps:
            if dump.rank in call.outcomes:
                continue
            at, before = call.seen.get(dump.rank, (now, dump))
            if dump is before or (is_stuck(before, dump, now - at) and _waits(dump)):
                seen[dump.rank] = at, before
            else:
                seen[dump.rank] = now, dump
        call.seen = seen
        late = [rank for rank in self._node_of if rank not in call.outcomes]
        if all(rank in seen and now - seen[rank][0] >= WAITING_SECONDS for rank in late):
            call.look_at = None
            self._give_up(call, call.failed())

    def _give_up(self, call: PendingCall, rank: int) -> None:
        """Have the rank that has raised exit, which ends the job with the verdict on it."""
        call.given_up = True
        if rank in self._lines:
            send(self._lines[rank], END)
        else:
            self._job.post(Orders([(self._node_of[rank], EndCall(rank))]))

    def _kill(self) -> None:
        """End the ranks."""
        if not self._killed:
            self._killed = True
            self._job.post(StopRequested(time.monotonic_ns(), signal.SIGTERM))
            self._leave_at = time.monotonic() + TERM_SECONDS
        else:
            self._job.post(StopRequested(time.monotonic_ns(), signal.SIGINT))
            self._leave_at = None

    def _due(self) -> float | None:
        call = self._call
        times = [self._leave_at, *((call.deadline, call.kill_at, call.look_at) if call else ())]
        return min((one for one in times if one is not None), default=None)

    def _tick(self, now: float) -> None:
        if self._leave_at is not None and self._leave_at <= now:
            self._kill()
        call = self._call
        if call is None:
            return
        if call.look_at is not None and call.look_at <= now:
            call.look_at = now + LOOK_SECONDS
            self._job.post(StacksRequested(time.monotonic_ns(), _LOOK, False, False))
        if call.kill_at is not None and call.kill_at <= now:
            call.kill_at = None
            assert call.ending is not None
            late = ranks_in_words([rank for rank in self._node_of if rank not in call.outcomes])
            why = f"{late} did not end the call within {INTERRUPT_SECONDS:g} s, so the ranks were ended"
            call.ending.add_note(f"launchpad: {why}; {_GONE}")
            self._kill()
        if call.deadline is not None and call.deadline <= now:
            if call.timeout is not None and not call.stacks_asked:
                call.stacks_asked = True
                call.deadline = now + STACKS_SECONDS
                self._job.post(StacksRequested(time.monotonic_ns(), _SHOWN, False, False))
            else:
                self._timed_out(call)

    # The end.

    def _close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._cancel()
        if self._call is self.start:
            self._job.interrupt()
        elif self._call is not None and not self._call.fences:
            self._kill()
        else:
            for line in self._lines.values():
                try:
                    line.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
            self._job.post(Orders([(node, EndSession()) for node in self._remote]))
            self._leave_at = time.monotonic() + LEAVE_SECONDS

    def _cancel(self) -> None:
        while self._waiting:
            call = self._waiting.popleft()
            os.close(call.file)
            call.future.cancel()

    def _end(self) -> None:
        """The ranks are gone."""
        self.over = True
        call, self._call = self._call, None
        try:
            self._job.results()
        except BaseException as error:
            self.error = self.error or error
        if call is not None and call.ending is not None:
            self.error = call.ending
        if call is not None:
            why = self.error or UsageError("the ranks were ended while they ran this call")
            if call.ending is None and call is not self.start:
                why.add_note(f"launchpad: the ranks are gone; {_GONE}")
            call.future.set_exception(why)
        self._closing = True
        self._inbox.extend(self._waiting)
        self._waiting.clear()
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Fail the calls that came too late."""
        while self._inbox:
            try:
                call = self._inbox.popleft()
            except IndexError:  # another thread does the same
                return
            if isinstance(call, PendingCall):
                os.close(call.file)
                if call.future.set_running_or_notify_cancel():
                    call.future.set_exception(gone(self.error))

    def _release(self) -> None:
        self._job.close()
        self._listener.close()
        for line in self._lines.values():
            line.close()
        os.close(self._packed)
        bell, self._bell = self._bell, -1
        os.close(bell)


def gone(why: BaseException | None) -> UsageError:
    """The error for a call of ranks that are gone."""
    text = str(why).partition("\n")[0] if why is not None else ""
    if why is not None and not isinstance(why, LaunchpadError):
        text = f"{type(why).__name__}: {text}" if text else type(why).__name__
    return UsageError(f"the ranks are gone{f' ({text})' if text else ''}: {_GONE}")


def _waits(dump: StackDump) -> bool:
    place = where(main_frames(dump), bool(dump.collectives.get("mpi")))
    return bool(place.waits_in or dump.collectives.get("waiting"))
