"""`launchpad.run`: what the command does for a program, for a function, in the caller's process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from launchpad.cli.hosts import is_here, make_world, open_links, read_hosts
from launchpad.cli.observers import Observers, waited
from launchpad.errors import JobTimeout, NodeError, UsageError
from launchpad.events import StopRequested
from launchpad.failures import JobOver
from launchpad.functions.delivery import deliver
from launchpad.functions.packing import name_of, pack
from launchpad.functions.results import Collector, Results
from launchpad.functions.screen import Screen
from launchpad.head.gathering import Gathering
from launchpad.head.preload import NOT_FORKED, TORCH
from launchpad.head.supervisor import Supervisor
from launchpad.head.sync import list_files
from launchpad.job.environ import travelling
from launchpad.job.hosts import Host
from launchpad.job.outcome import Cause
from launchpad.job.plan import Master, Place, Plan, make_plan
from launchpad.job.spec import JobSpec, Target
from launchpad.transport import Link
from launchpad.transport.local import LocalLink

Group = Literal["auto", "gloo", "nccl", "mpi"]

# As the command's --heartbeat-timeout.
_SILENCE_SECONDS = 10.0


def run(
    fn: Callable[..., Any],
    /,
    *args: Any,
    nproc: int | Literal["auto", "cpu", "gpu"] | None = None,
    hosts: str | Sequence[str] | None = None,
    backend: Group | None = "auto",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    wdir: str | None = None,
    sync: bool = False,
    ssh_config: str | None = None,
) -> Results:
    """Call `fn(*args)` on every one of `nproc` ranks, and return what they return, in the order of the ranks.

        def mean(x):
            dist.all_reduce(x)
            return x / dist.get_world_size()

        results = launchpad.run(mean, torch.arange(3.0), nproc=4)

    Without `args`, a function that takes (rank, size) gets them. It is called in a process of its own on each rank,
    where the process group is there: `backend` is "gloo", "nccl" or "mpi"; "auto" is nccl where each rank has a GPU
    (and gloo for CPU tensors), else gloo; with None there is no group, and no torch is needed. What ranks print appears
    in the caller's sys.stdout, each line with its rank. No `if __name__ == "__main__"` is needed.

    `nproc`, `hosts` ("a:4,b:4", or a list), `timeout` (seconds), `env`, `wdir`, `sync` and `ssh_config` are the options
    of `launchpad run`; the ranks run in the caller's interpreter, on other hosts in the one at that path, else python3.

    The function and its arguments go by cloudpickle: what `__main__` defines by value, what modules define by
    reference. Large arrays and CPU tensors, there and back, are written once and mapped; tensors come back on the CPU.

    Raises the exception of the first rank that failed, its traceback there as the `__cause__`, when the other ranks are
    ended; RankError for a rank that died, left without returning, or raised what can't be unpickled here; JobTimeout;
    UnpicklableError, which names the part; UsageError; NodeError for hosts that can't be reached, or are lost; and
    KeyboardInterrupt on Ctrl-C, which ends the ranks. Ranks can't call it.
    """
    _check(backend, timeout)
    cwd = os.path.abspath(wdir or os.getcwd())
    options = {
        "hosts": hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts),
        "nproc": nproc,
        "sync": sync,
        "ssh_config": ssh_config,
        **dict.fromkeys(("hostfile", "include", "exclude", "accept_new_host_keys")),
        "quiet": True,
    }
    named = read_hosts({**options, "include": "", "exclude": ""})
    far = not all(map(is_here, named))
    spec = JobSpec(
        target=Target("pickled", name_of(fn)),
        nproc=nproc or 1,
        python=sys.executable,
        cwd=cwd,
        environ={
            **(travelling(os.environ) if far else {}),
            **{name: str(value) for name, value in (env or {}).items()},
        },
        timeout=timeout,
        torch=False,
        preload=_preload(backend, {**os.environ, **(env or {})}),
        backend="" if backend in (None, "auto") else backend,  # type: ignore[arg-type]
    )
    call = pack(fn, args, "" if backend == "auto" else backend, cwd)
    try:
        job = _Job(spec, named, options, call)
        with _interrupts(job.interrupt):
            job.thread.start()
            job.screen.show()
            job.thread.join()
        try:
            return job.outcome()
        finally:
            job.close()
    finally:
        os.close(call)


def _check(backend: str | None, timeout: float | None) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "launchpad.run was called in a rank (TORCHELASTIC_RUN_ID is set), and each rank would start ranks: call it "
            "in a process that no launcher has started; if a module calls it while it is imported, move it out of there"
        )
    if backend is not None and backend not in get_args(Group):
        raise UsageError(f"backend={backend!r}: give 'auto', 'gloo', 'nccl', 'mpi', or None for no process group")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout={timeout!r}: give a number of seconds above 0, or None")


def _preload(backend: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What is imported once for all ranks of a node: torch, unless none of them is going to need it."""
    needed = backend is not None or "torch" in sys.modules
    return TORCH if needed and not any(environ.get(name) for name in NOT_FORKED) else ()


@contextlib.contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Have Ctrl-C call `stop`, instead of raising wherever the main thread happens to be."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (
        signal.SIG_IGN,
        None,
    ):
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Job:
    """The head, in a thread of its own, so that the caller's can write what the ranks print, and hears Ctrl-C."""

    def __init__(self, spec: JobSpec, hosts: Sequence[Host], options: dict[str, Any], call: int) -> None:
        self._spec = spec
        self._hosts = hosts
        self._options = options
        self._call = call
        self._gathering = Gathering()
        self.screen = Screen(sys.stdout, sys.stderr, self._gathering.post)
        self.thread = threading.Thread(target=self._run, name="launchpad", daemon=True)
        self._closing = contextlib.ExitStack()  # of links, the last first
        self._abandon: Callable[[], None] | None = None  # while hosts are being reached
        self._interrupted = False
        self._error: BaseException | None = None
        self._collector: Collector | None = None
        self._cause: Cause | None = None
        self._report = ""
        self._blamed = -1  # the rank that failed first, which need not be the one that was heard of first

    def interrupt(self) -> None:
        """Ctrl-C: end the ranks; a second one kills them."""
        self._interrupted = True
        self._gathering.post(StopRequested(time.monotonic_ns(), signal.SIGINT))
        if self._abandon is not None:
            self._abandon()

    def outcome(self) -> Results:
        """The results, or the exception that tells why there are none."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error
        assert self._collector is not None
        cause = self._cause
        if cause is None:
            return self._collector.results()
        match cause.kind:
            case "failure":
                raise self._collector.failure(self._blamed if self._blamed >= 0 else cause.rank, self._report)
            case "timeout":
                raise JobTimeout(self._report.replace("--timeout ", "timeout="))
            case "console" if self.screen.failure is not None:
                raise self.screen.failure
            case "lost":
                raise NodeError(self._report)
        raise UsageError(self._report)

    def close(self) -> None:
        """Forget what was collected and is not in use."""
        if self._collector is not None:
            self._collector.close()

    def _run(self) -> None:
        try:
            with self._closing:
                self._supervise()
        except SystemExit:  # asked to stop before the ranks were started
            self._interrupted = True
        except BaseException as error:
            self._error = error
        finally:
            self.screen.close()

    def _supervise(self) -> None:
        spec, gathering = self._spec, self._gathering
        files = list_files(spec.cwd) if self._options["sync"] else ()
        links = self._links()
        facts = gathering.connect(
            links,
            count_gpus=bool({"auto", "gpu"} & {spec.nproc, *(host.slots for host in self._hosts)}),
            silence=_SILENCE_SECONDS,
        )
        places: Sequence[Place] = ()
        master: Master | None = None
        if self._hosts:
            places, master = make_world(gathering, spec, self._hosts, links, files, self._options)
        plan = make_plan(spec, facts, os.urandom(4).hex(), places=places, master=master)
        self._collector = Collector(plan)
        plan = self._with_files(plan, [link.remote for link in links])
        deliver(gathering, [node for node, link in enumerate(links) if link.remote], self._call)
        self.screen.open(plan)
        self._conduct(plan)

    def _conduct(self, plan: Plan) -> None:
        """Run the planned job; as the command's, it is recorded, and can be asked where its ranks are."""
        spec, post = self._spec, self._gathering.post
        assert self._collector is not None
        observers = Observers(os.urandom(4).hex(), spec, plan, post, self.screen.say)
        sinks = observers.begin([self._collector, self.screen])
        code = 1
        try:
            code, self._cause = Supervisor(self._gathering).run(
                plan, sinks, grace=None, timeout=spec.timeout, waited=waited
            )
            if self._cause is not None:
                verdict, lines = observers.conclude()
                self._report = "\n".join(lines)
                if verdict.cause is not None and verdict.cause.rank >= 0:
                    self._blamed = verdict.cause.rank
        finally:
            observers.end()
            observers.journal.on(JobOver(time.monotonic_ns(), code))
            observers.journal.close()

    def _links(self) -> list[Link]:
        if not self._hosts:
            return [self._local()]
        try:
            links, _ = open_links(self._hosts, self._local, self._at_end, self._options, self._spec.python, exact=False)
        finally:
            self._abandon = None
        for link in links:
            if link.remote:
                self._closing.callback(link.close)
        return links

    def _local(self) -> Link:
        try:
            link = LocalLink()
        except (OSError, RuntimeError) as error:
            raise NodeError(f"this node's agent can't be started: {error}") from None
        self._closing.callback(link.close)
        return link

    def _at_end(self, abandon: Callable[[], None]) -> None:
        self._closing.callback(abandon)
        self._abandon = abandon
        if self._interrupted:
            abandon()

    def _with_files(self, plan: Plan, remote: Sequence[bool]) -> Plan:
        """The plan, where ranks of this machine are told of our files in memory."""
        assert self._collector is not None
        call = f"/proc/{os.getpid()}/fd/{self._call}"
        nodes = list(plan.nodes)
        for place, node in enumerate(nodes):
            if remote[place]:
                continue
            ranks = []
            for rank in node.ranks:
                own = {"LAUNCHPAD_CALL": call, "LAUNCHPAD_RESULT": self._collector.path(rank.rank)}
                ranks.append(dataclasses.replace(rank, environ={**rank.environ, **own}))
            nodes[place] = dataclasses.replace(node, ranks=tuple(ranks))
        return dataclasses.replace(plan, nodes=tuple(nodes))
