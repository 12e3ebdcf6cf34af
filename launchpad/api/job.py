"""A job whose ranks call functions: the head runs in a thread of the caller's process."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from launchpad import linux
from launchpad.api.packing import deliver
from launchpad.api.results import ResultCollector, Results
from launchpad.api.screen import Screen
from launchpad.console.prefix import chosen_template
from launchpad.errors import JobTimeout, NodeError, UsageError
from launchpad.head.arrivals import Reopen
from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner
from launchpad.job.hosts import Host, Nproc, slots_of
from launchpad.job.outcome import Cause
from launchpad.job.plan import Plan, Stdin
from launchpad.job.spec import Bind, JobSpec, Target
from launchpad.named import NamedTuple
from launchpad.protocol.events import StopRequested
from launchpad.runner.conductor import Conductor
from launchpad.runner.imports import TORCH, why_not_forked
from launchpad.runner.job import membership_of
from launchpad.runner.kept import asked_of_hosts, look_for_image
from launchpad.runner.links import LocalAgent, open_links
from launchpad.runner.nodes import bring_up, members_of
from launchpad.runner.options import HostOptions, RunOptions
from launchpad.runner.outlets import outlets_of
from launchpad.runner.outlets.outlet import Ended
from launchpad.runner.spec import (
    collect_environ,
    faults_of,
    health_of,
    limits_of,
    make_world_spec,
    streams_of,
    supplies_for,
    with_gpus,
)
from launchpad.transport import Link

Group = Literal["auto", "gloo", "nccl", "mpi"]


def check(name: str, backend: str | None, timeout: float | None) -> None:
    """Raise UsageError if the function `name` can't be called here, or not with these."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            f"{name} was called in a rank (TORCHELASTIC_RUN_ID is set), so each rank would start ranks: call it "
            "in a process that no launcher has started; if a module calls it on import, move it into a function"
        )
    check_backend(backend)
    check_timeout(timeout)


def check_backend(backend: str | None) -> None:
    """Raises UsageError."""
    if backend is not None and backend not in get_args(Group):
        raise UsageError(f"backend={backend!r}: give 'auto', 'gloo', 'nccl', 'mpi', or None for no process group")


def check_timeout(timeout: float | None) -> None:
    """Raises UsageError."""
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise UsageError(f"timeout={timeout!r}: give a positive number of seconds, or None")


class JobRequest(NamedTuple):
    """What to run, and where."""

    spec: JobSpec
    hosts: Sequence[Host]
    options: RunOptions
    nproc: Nproc | None


def prepare(
    target: Target,
    nproc: Nproc | None,
    hosts: str | Sequence[str] | None,
    backend: Group | None,
    env: Mapping[str, str] | None,
    wdir: str | None,
    *,
    sync: bool,
    ssh_config: str | None,
    bind: Bind,
    more: Callable[[HostOptions], RunOptions] = lambda hosts: RunOptions(hosts=hosts),
) -> JobRequest:
    """The spec that these parameters of launchpad.run describe. Raises UsageError.

    `more` makes all options, of those for the hosts. Standard descriptors that are closed, as in some daemons, refer to
    /dev/null from here on.
    """
    linux.open_closed(0, 1, 2)
    nproc = _checked(nproc)
    _check_types(hosts, env, wdir, bind)
    listed = hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts)
    options = more(HostOptions(hosts=listed, sync=sync, ssh_config=ssh_config))
    nodes = _nodes(options.hosts, nproc)
    if options.nodes.nnodes != "1" and not nodes:
        raise UsageError(f"nnodes={options.nodes.nnodes!r} needs hosts; name them, or leave it out")
    make_world_spec(options, nodes)  # checks it
    nproc = with_gpus(options._replace(nproc=nproc), nodes).nproc
    if options.mpi is not None and backend != "mpi":
        raise UsageError(f"mpi={options.mpi!r} says which MPI makes the ranks' world; add backend='mpi'")
    far = not all(host.here for host in nodes)
    log_dir, _, tee = streams_of(options)
    spec = JobSpec(
        target=target,
        nproc=nproc or 1,
        python=sys.executable,
        cwd=os.path.abspath(wdir or os.getcwd()),
        environ={
            **collect_environ((), options.env_file, os.environ, far=far),
            **{os.fsdecode(os.fsencode(name)): str(value) for name, value in (env or {}).items()},  # a plain str
        },
        torch=False,
        preload=_preload(backend, {**os.environ, **(env or {})}, bind),
        line_prefix=chosen_template("", os.environ),
        bind=bind,
        backend="" if backend in (None, "auto") else backend,  # type: ignore[arg-type]
        mpi=options.mpi or "",
        log_dir=log_dir,
        tee=tee,
        limits=limits_of(options),
        sample=options.sample,
        faults=faults_of(options.inject),
        role=options.role,
        health=health_of(options),
        gpus=options.gpus,
        virtual_local_rank=options.virtual_local_rank,
        tf_config=options.tf_config,
        timeline=options.reports.report is not None,
    )
    return JobRequest(spec, nodes, options, nproc)


def _nodes(named: HostOptions, nproc: Nproc | None) -> tuple[Host, ...]:
    if not named.given:
        return ()
    from launchpad.runner.connect import read_hosts

    return read_hosts(named, nproc)


def _check_types(hosts: object, env: object, wdir: object, bind: object) -> None:
    if bind not in get_args(Bind):
        raise UsageError(f"bind={bind!r}: give one of {', '.join(map(repr, get_args(Bind)))}")
    if hosts is not None and not (isinstance(hosts, str | Sequence) and all(isinstance(one, str) for one in hosts)):
        raise UsageError(f"hosts={hosts!r}: give 'a:4,b:4', or a list of such names")
    if env is not None and not (isinstance(env, Mapping) and all(isinstance(name, str) for name in env)):
        raise UsageError(f"env={env!r}: give a dict of names and values")
    for name, value in (env or {}).items():
        if value is None:
            raise UsageError(f"env: {name} is None; leave it out, or give its value")
    if wdir is not None and not isinstance(wdir, str | os.PathLike):
        raise UsageError(f"wdir={wdir!r}: give the path of a folder")


def _preload(backend: str | None, environ: Mapping[str, str], bind: Bind) -> tuple[str, ...]:
    """The modules to import once per node: torch, unless no rank will need it."""
    needed = backend is not None or "torch" in sys.modules
    return TORCH if needed and not why_not_forked(environ, bind) else ()


def _checked(nproc: Any) -> Nproc | None:
    """A number of ranks, or a word for it. Raises UsageError."""
    if nproc is None or (isinstance(nproc, str) and nproc in get_args(get_args(Nproc)[1])):
        return nproc  # type: ignore[return-value]
    try:
        count = 0 if isinstance(nproc, bool) else operator.index(nproc)
    except TypeError:
        count = 0
    if count <= 0:
        raise UsageError(f"nproc={nproc!r}: give a number of ranks, from 1 on, or 'auto', 'cpu' or 'gpu'")
    return count


@contextlib.contextmanager
def interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Make Ctrl-C call `stop` instead of raising wherever the main thread happens to be."""
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


class FunctionJob:
    """The head in a thread of its own, so that the caller's threads can write the ranks' output and receive Ctrl-C."""

    def __init__(
        self,
        request: JobRequest,
        call: int,
        screen: Screen,
        collect: Callable[[Plan, Sequence[bool]], ResultCollector],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """`call`: the descriptor of what the ranks get first. `collect` gets the plan, and which nodes are remote.

        `over` is called when the outcome is known.
        """
        self._over = over
        self._spec, self._hosts, self._options, self._nproc = request
        self._call = call
        self._collect = collect
        self._bringup = BringUp()
        self.post = self._bringup.post  # puts an event into the loop's inbox
        self.screen = screen
        screen.post = self.post
        self.thread = threading.Thread(target=self._run, name="launchpad", daemon=True)
        self._closing = contextlib.ExitStack()  # the links
        self._abandon: Callable[[], None] | None = None  # while connecting to hosts
        self._interrupted = False
        self._error: BaseException | None = None
        self._collector: ResultCollector | None = None
        self._reopen: Reopen | None = None
        self._cause: Cause | None = None
        self._report: list[str] = []  # the verdict's lines, of which the first says why the job ended
        self._around: list[str] = []  # those of them that say more than the exception of the rank that failed
        self._blamed = -1  # the rank that failed first, which may not be the one that was reported first

    def run(self) -> None:
        """Run the ranks to their end, and show what they print. Ctrl-C stops them."""
        with interrupts(self.interrupt):
            self.thread.start()
            self.screen.show()
            self.thread.join()

    def interrupt(self) -> None:
        """Stop the ranks on Ctrl-C; kill them on the second."""
        self._interrupted = True
        self._bringup.post(StopRequested(time.monotonic_ns(), signal.SIGINT))
        if self._abandon is not None:
            self._abandon()

    def end(self) -> None:
        """Release everything. Kills the ranks first, if the caller's signal handler or sys.stdout has raised."""
        if self.thread.is_alive():
            self.interrupt()
            self.interrupt()
            self.thread.join()
        self.close()

    def results(self) -> Results:
        """Return the results, or raise the exception that says why there are none."""
        self.raise_failure()
        assert self._collector is not None
        return self._collector.results()

    def raise_failure(self) -> None:
        """Raise the exception that says why there are no results, if so."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error
        assert self._collector is not None
        cause = self._cause
        if cause is None:
            return
        report = "\n".join(self._report)
        match cause.kind:
            case "failure":
                error = self._collector.failure(self._blamed if self._blamed >= 0 else cause.rank, report)
                if self._around and str(error) != report:
                    error.add_note("\n".join(f"launchpad: {line}" for line in self._around))
                raise error
            case "timeout":
                first = f"the job was stopped: it ran longer than timeout={self._spec.limits.timeout:g} s"
                raise JobTimeout("\n".join([first, *self._report[1:]]))
            case "console" if self.screen.failure is not None:
                raise self.screen.failure
            case "lost":
                raise NodeError(report)
        raise UsageError(report)

    def close(self) -> None:
        """Release what was collected."""
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
            self._over()

    def _supervise(self) -> None:
        spec, bringup = self._spec, self._bringup
        supplies = supplies_for(self._options.hosts, spec, self._closing)
        links = self._links()
        members = members_of(self._hosts, links, spec, self._nproc)
        membership = membership_of(self._options, self._hosts)
        planner = bring_up(bringup, spec, members, links, supplies, self._options.hosts, membership, quiet=True)
        remote = [link.remote for link in links]
        self._collector = self._collect(planner.plan, remote)
        planner.plan = self._with_files(planner.plan, remote)
        planner.amend = lambda plan: self._with_files(plan, remote)
        planner.supply = lambda requester: deliver(requester, [0], self._call)
        deliver(bringup, [node for node, link in enumerate(links) if link.remote], self._call)
        self.screen.open(planner.plan, spec)
        self._conduct(planner)

    def _conduct(self, planner: Planner) -> None:
        """Run the planned job. Like a job of the command, it is recorded, and can be asked for its ranks' stacks."""
        assert self._collector is not None
        reports = self._options.reports
        outlets = outlets_of(reports, self.screen, self._bringup.post, {})
        conductor = Conductor(self._bringup, planner, self.screen.say, outlets=outlets)
        conductor.begin((), guests=(self.screen, self._collector))
        ended: Ended | None = None
        try:
            reopen = self._reopen if self._spec.target.kind == "pickled" else None
            conductor.run(stdin=Stdin(typed=os.isatty(0)), reopen=reopen)
            self._cause = conductor.cause
            ended = conductor.conclude()
            if ended.verdict is not None:
                diagnosis, verdict = conductor.diagnosis, ended.verdict
                self._around = diagnosis.around(verdict, ended.report)
                self._report = ended.report + diagnosis.last_output(verdict)
                if verdict.cause is not None and verdict.cause.rank >= 0:
                    self._blamed = verdict.cause.rank
        finally:
            conductor.over()
            conductor.close(ended)

    def _links(self) -> list[Link]:
        local = LocalAgent()
        self._closing.callback(local.close)
        python = self._spec.python
        look_for_image(local, self._spec, os.environ)
        try:
            links, self._reopen = open_links(
                self._hosts,
                local,
                self._closing,
                self._options.hosts,
                python,
                exact=False,
                quiet=True,
                asked=asked_of_hosts(self._spec, slots_of(self._hosts, self._nproc)),
                dialling=self._dialling,
            )
        finally:
            self._abandon = None
        return links

    def _dialling(self, abandon: Callable[[], None]) -> None:
        self._abandon = abandon
        if self._interrupted:
            abandon()

    def _call_for(self, node: int) -> int:  # noqa: ARG002
        """The descriptor of what the ranks of this node get first."""
        return self._call

    def _with_files(self, plan: Plan, remote: Sequence[bool]) -> Plan:
        """The plan, with the paths of our memfds in the environment of this machine's ranks."""
        assert self._collector is not None
        self._collector.follow(plan)
        nodes = list(plan.nodes)
        for place, node in enumerate(nodes):
            if remote[node.index]:
                continue
            ranks = []
            for rank in node.ranks:
                call = linux.path_of(self._call_for(node.index))
                own = {"LAUNCHPAD_CALL": call, **self._collector.environ(rank.rank)}
                ranks.append(rank._replace(environ={**rank.environ, **own}))
            nodes[place] = node._replace(ranks=tuple(ranks))
        return plan._replace(nodes=tuple(nodes))
