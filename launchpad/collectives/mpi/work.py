"""An operation in flight. Whoever waits on it drives its progress; a thread does so when torch waits on a future."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from mpi4py import MPI
from torch import Tensor
from torch.autograd import profiler
from torch.distributed import DistBackendError
from torch.distributed import Work as TorchWork
from torch.futures import Future

from launchpad.collectives.mpi import buffers, profiling

if TYPE_CHECKING:
    from launchpad.collectives.mpi.recorder import Ring

NO_TIMEOUT = timedelta(0)
"""Torch's value for the group's own timeout; in torch's options, negative values mean the same."""

TESTS = 8
"""Tests of a request between two calls of sched_yield."""

SPIN_SECONDS = 0.05
"""How long a wait spins before it also sleeps now and then."""

SPIN_POLLS = 30
"""Fruitless polls after which the progress thread sleeps instead of yielding."""

TIMED_OUT = "{what} on group {name}, rank {rank} of {size}: not all ranks took part within {seconds:g} s"

SHORT = "recv from rank {source}: the message has {got} bytes, the tensor {room}"


class Owner(Protocol):
    """What a work needs from its process group."""

    recorded: Ring
    timeout: float  # seconds

    @property
    def label(self) -> str: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def hold(self, work: Work) -> None: ...
    def drop(self, work: Work) -> None: ...
    def die(self, reason: str, keep: object = None) -> None: ...


class Work(TorchWork):
    """One operation: its MPI request, and what to do when it completes."""

    _done = False
    _error: Exception | None = None
    _future: Future[Any] | None = None
    _event: object = None

    def __init__(
        self,
        group: Owner,
        what: str,
        opts: Any,
        request: MPI.Request,
        outputs: Any,
        keep: object = None,
        arrived: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._group = group
        self._what = what
        self._opts = opts
        self._request = request
        self._outputs = outputs
        self._keep = keep
        """The memory that MPI reads or writes in the meantime; the request holds only its address."""
        self._arrived = arrived
        self._lock = threading.Lock()
        if getattr(profiler, "_is_profiler_enabled", False):
            self._event = profiling.begin(what, keep)
        group.hold(self)
        group.recorded.add(self, what, outputs)

    @property
    def limit(self) -> float:
        """The timeout in seconds, unless `wait` overrides it."""
        timeout = NO_TIMEOUT if self._opts is None else self._opts.timeout
        return timeout.total_seconds() if timeout > NO_TIMEOUT else self._group.timeout

    def poll(self, tests: int = 1) -> bool:
        """Drive its progress, unless another thread is doing so. Returns whether it is done."""
        if self._done:
            return True
        # MPI forbids two threads from testing the same request.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._done:
                return True
            try:
                for _ in range(tests):
                    if self._test():
                        break
                else:
                    return False
                if self._arrived is not None:
                    self._arrived()
            except MPI.Exception as error:
                self._error = DistBackendError(f"{self._what}: {error}")
            except Exception as error:
                self._error = error
            future = self._end()
        finally:
            self._lock.release()
        self._settle(future)
        return True

    def _test(self) -> bool:
        return self._request.Test()

    def _end(self) -> Future[Any] | None:
        """Call with the lock held. Settle the returned future without it: its callbacks may wait on other works."""
        self._done = True
        self._group.drop(self)
        self._arrived = self._keep = None
        if self._event is not None:
            profiling.end(self._event)
            self._event = None
        return self._future

    def _settle(self, future: Future[Any] | None) -> None:
        if future is None:
            return
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)

    def expire(self, seconds: float) -> None:
        """Abandon it. MPI may still write to its buffers, so the group, now dead, keeps them."""
        with self._lock:
            if self._done:
                return
            group = self._group
            text = TIMED_OUT.format(
                what=self._what, name=group.label, rank=group.rank(), size=group.size(), seconds=seconds
            )
            self._error = DistBackendError(text)
            group.die(text, (self._request, self._keep))
            future = self._end()
        self._settle(future)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        # Most operations end here: reading the clock and the options would take longer than they do.
        if not self._done and not self.poll(TESTS):
            self._wait(timeout.total_seconds() if timeout > NO_TIMEOUT else self.limit)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, limit: float) -> None:
        begin = time.monotonic()
        polls = 0
        while not self.poll(TESTS):
            os.sched_yield()
            waited = time.monotonic() - begin
            if waited > limit:
                self.expire(limit)
            polls += 1
            # Not after every poll: large messages move in pieces, one per test.
            if waited > SPIN_SECONDS and polls % 2 == 0:
                time.sleep(50e-6)

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = Future()
            done = self._done
        if done:
            self._settle(self._future)
        elif MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            self.wait()  # this MPI allows no other thread, so nothing else would drive it
        else:
            progress.watch(self, self.limit)
        return self._future

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()


class Receive(Work):
    """A receive. It records the sender, and checks that the message filled the tensor."""

    def __init__(self, group: Owner, what: str, request: MPI.Request, host: Tensor, tensor: Tensor) -> None:
        # First, as any thread may test the work once the group holds it.
        self._status = MPI.Status()
        super().__init__(group, what, None, request, [tensor], host, lambda: self._check(host, tensor))

    def _test(self) -> bool:
        return self._request.Test(self._status)

    def _check(self, host: Tensor, tensor: Tensor) -> None:
        if (got := self._status.Get_elements(MPI.BYTE)) != host.nbytes:
            raise ValueError(SHORT.format(source=self._status.source, got=got, room=host.nbytes))
        if (store := buffers.stored(tensor, host)) is not None:
            store()

    def source_rank(self) -> int:
        self.wait()
        return self._status.source


class Bundle(Work):
    """Several works as a single one."""

    def __init__(self, group: Owner, what: str, opts: Any, works: Sequence[Work], outputs: Any) -> None:
        self._works = works
        super().__init__(group, what, opts, MPI.REQUEST_NULL, outputs, works)

    def _test(self) -> bool:
        if not all([work.poll() for work in self._works]):  # noqa: C419 - poll all of them
            return False
        for work in self._works:
            work.wait()
        return True


class Progress:
    """The thread that drives works whose futures are waited on; started with the first such work."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: list[tuple[Work, float, float]] = []
        self._thread: threading.Thread | None = None
        self._stopping = False

    def watch(self, work: Work, limit: float) -> None:
        with self._changed:
            self._works.append((work, time.monotonic() + limit, limit))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpi progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """Stop the thread: MPI can't be finalised while a thread is inside it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        idle = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._works or self._stopping)
                if self._stopping:
                    return
                works = list(self._works)
            ended = {id(work) for work, deadline, limit in works if self._poll(work, deadline, limit)}
            if ended:
                idle = 0
                with self._changed:
                    self._works = [entry for entry in self._works if id(entry[0]) not in ended]
                continue
            # This core may be needed to compute the next gradients, so don't spin for long.
            idle += 1
            if idle < SPIN_POLLS:
                os.sched_yield()
            else:
                time.sleep(100e-6)

    @staticmethod
    def _poll(work: Work, deadline: float, limit: float) -> bool:
        if work.poll():
            return True
        if time.monotonic() > deadline:
            work.expire(limit)
            return True
        return False


progress = Progress()
