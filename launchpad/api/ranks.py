"""`launchpad.ranks`: starts ranks once, and calls functions on them until they are closed."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from launchpad.api.job import Group, JobRequest, check, check_timeout, interrupts, prepare
from launchpad.api.options import SharedOptions, run_options
from launchpad.api.packing import CallPacker, name_of, pack_session
from launchpad.api.results import Results
from launchpad.api.session import PendingCall, RankSession, gone, running
from launchpad.errors import UsageError
from launchpad.job.spec import Bind, Target
from launchpad.runner.doors import NOT_FOR_RANKS


def ranks(
    nproc: int | Literal["auto", "cpu", "gpu"] | None = None,
    *,
    hosts: str | Sequence[str] | None = None,
    backend: Group | None = "auto",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    wdir: str | None = None,
    sync: bool = False,
    ssh_config: str | None = None,
    bind: Bind = "none",
    **more: Unpack[SharedOptions],
) -> Ranks:
    """Start `nproc` ranks that stay, for one call after the other.

        with launchpad.ranks(4) as ranks:
            ranks.run(load, "data.pt")
            losses = ranks.run(step, 0.1)

    The parameters mean what they mean to launchpad.run, `more` too, as far as they make sense here; `timeout` (seconds)
    is for each call that gives none. Returns when all ranks have their process group. Without the `with`, they stay
    until `close`, or until the interpreter exits. Raises what launchpad.run raises.
    """
    check("launchpad.ranks", backend, timeout)
    target = Target("session", "launchpad.ranks")
    request = prepare(
        *(target, nproc, hosts, backend, env, wdir),
        sync=sync,
        ssh_config=ssh_config,
        bind=bind,
        more=partial(run_options, "launchpad.ranks", more, SharedOptions, NOT_FOR_RANKS),
    )
    return Ranks(request, backend, timeout)


class Ranks:
    """Ranks that stay. Calls run one after the other, in the order in which they were made, from any thread."""

    def __init__(self, request: JobRequest, backend: Group | None, timeout: float | None) -> None:
        """Start the ranks; use the function `ranks`."""
        self._request = request
        self._backend = backend
        self._timeout = timeout
        self._closed = False
        self._pid = os.getpid()
        self._begin()

    def _begin(self) -> None:
        cwd = self._request.spec.cwd
        self._packer = CallPacker(cwd)
        self._session = session = RankSession(
            self._request, pack_session("" if self._backend == "auto" else self._backend, cwd)
        )
        self._last = weakref.ref(session.start.future)  # the session holds it until it is done
        self._dropped = weakref.finalize(self, session.close)
        self._dropped.atexit = False
        try:
            self._wait(session.start)
        except BaseException:
            self._end()
            raise

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None) -> Results:
        """Call `fn(*args)` on each rank, and return their results in rank order, as launchpad.run does.

        What functions leave in globals is there for the next call. Raises the exception of the rank that raised first,
        after the others have finished the call; RankError if a rank exits; JobTimeout after `timeout` seconds, with the
        stacks of the ranks on stderr; KeyboardInterrupt on Ctrl-C, which ends the call in each rank. If ranks can't end
        it, because they wait for one that has failed, all ranks are ended, and a note of the exception says so.
        """
        call = self._queued(fn, args, timeout)
        return self._wait(call)

    def submit(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None) -> Future[Results]:
        """Like `run`, but return at once, with a future of the results. It can be cancelled until the call begins."""
        return self._queued(fn, args, timeout).future

    def restart(self) -> None:
        """End the ranks, if they still run, and start new ones in the same places. What they held is lost."""
        self._check_process()
        self._end()
        self._closed = False
        self._begin()

    def close(self) -> None:
        """End the ranks and the call that is running; calls that have not begun are cancelled."""
        self._closed = True
        if self._pid == os.getpid():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all calls, unless there is an exception; then end the ranks."""
        try:
            if kind is None and self._pid == os.getpid() and (last := self._last()) is not None:
                concurrent.futures.wait([last])
        finally:
            self.close()

    @property
    def gone(self) -> bool:
        """Whether the ranks have ended by themselves: calls are refused."""
        return self._session.over and not self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else "gone" if self.gone else "ready"
        return f"<launchpad.ranks: {self._session.size} ranks, {state}>"

    def _queued(self, fn: Callable[..., Any], args: Sequence[Any], timeout: float | None) -> PendingCall:
        self._check_process()
        check_timeout(timeout)
        if self._closed:
            raise UsageError("these ranks are closed: ranks.restart() starts new ones")
        if self._session.over:
            raise gone(self._session.error)
        call = PendingCall(self._packer.pack(fn, args), name_of(fn), self._timeout if timeout is None else timeout)
        self._last = weakref.ref(call.future)
        call.owner = self
        call.future.add_done_callback(lambda _: setattr(call, "owner", None))
        self._session.submit(call)
        return call

    def _wait(self, call: PendingCall) -> Results:
        session, interrupted = self._session, False

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            session.interrupt(call)

        with interrupts(interrupt):
            session.screen.show_until(call.future)
        if interrupted:
            raise call.future.exception() if call.ending is not None else KeyboardInterrupt()  # type: ignore[misc]
        return call.future.result()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("these ranks belong to the process that has started them; start ranks in this one")

    def _end(self) -> None:
        self._dropped.detach()
        self._session.close()
        self._session.join()


def _end_all() -> None:
    """End the ranks that nobody has closed."""
    pid = os.getpid()
    sessions = [session for session in running if session.pid == pid]
    for session in sessions:
        session.close()
    for session in sessions:
        session.join()


atexit.register(_end_all)
