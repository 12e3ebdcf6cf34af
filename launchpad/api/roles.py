"""`launchpad.run` with several functions, each in a world of its own, as one job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchpad.api.job import FunctionJob, Group, JobRequest, check, check_backend, check_timeout, prepare
from launchpad.api.packing import deliver, name_of, pack
from launchpad.api.results import ResultCollector, Results
from launchpad.api.screen import Screen
from launchpad.errors import UsageError
from launchpad.job.hosts import Host
from launchpad.job.limits import RestartLimit
from launchpad.job.plan import Plan
from launchpad.job.role_places import Placed, RoleNeeds, place_worlds
from launchpad.job.roles import ROLE_NAMES, RoleNames, check_ports, check_roles, is_role_name, parse_ready, replicas_of
from launchpad.job.spec import READY_SECONDS, Ready, RoleSpec, Target
from launchpad.runner.links import LocalAgent
from launchpad.runner.options import RunOptions
from launchpad.runner.role_nodes import begin_agents, bring_up_roles, nodes_of, open_role_links
from launchpad.runner.role_supplies import RoleSupplies
from launchpad.runner.roles import check_options

_WHERE = "launchpad.run"


class Role:
    """A function, and the ranks that call it: one of the worlds of `launchpad.run({"name": Role(…), …})`.

        results = launchpad.run({
            "rollout": Role(serve, backend=None, service=True, ports=["http"], ready="http:/"),
            "train": Role(step, 0.1, nproc=4, after="rollout"),
        })

    `fn` is called with `args` on each of `nproc` ranks of each of its `replicas`. The others are the settings of a role
    in a job file (`launchpad help roles`); `backend` is as in `launchpad.run`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        nproc: int = 1,
        replicas: int = 1,
        hosts: str | Sequence[str] | None = None,
        gpus: int | None = None,
        service: bool = False,
        ports: Sequence[str] = (),
        ready: str | None = None,
        ready_timeout: float = READY_SECONDS,
        after: str | Sequence[str] = (),
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        backend: Group | None = "auto",
    ) -> None:
        """Raises UsageError for values that make no sense."""
        for name, value, least in (("nproc", nproc, 1), ("replicas", replicas, 1), ("max_restarts", max_restarts, 0)):
            if not isinstance(value, int) or value < least:
                raise UsageError(f"Role: {name}={value!r}: give a number from {least} on")
        if gpus is not None and (not isinstance(gpus, int) or gpus < 0):
            raise UsageError(f"Role: gpus={gpus!r}: give how many each rank has, or None for all of its host")
        check_backend(backend)
        check_timeout(ready_timeout)
        self.fn, self.args = fn, args
        self.nproc, self.replicas, self.gpus, self.max_restarts = nproc, replicas, gpus, max_restarts
        self.hosts = hosts
        self.service = bool(service)
        self.ports = (ports,) if isinstance(ports, str) else tuple(ports)
        check_ports(self.ports, "Role: ports")
        self.after = (after,) if isinstance(after, str) else tuple(after)
        self.ready = Ready("started" if service else "ended", seconds=ready_timeout)
        if ready is not None:
            self.ready = parse_ready(ready, self.ports, ready_timeout, "Role: ready")
        self.env = env
        self.backend: Group | None = backend


class _RoleRequests:
    """The roles of one call, turned into a request."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        hosts: str | Sequence[str] | None,
        env: Mapping[str, str] | None,
        wdir: str | None,
        ssh_config: str | None,
        sync: bool,
        timeout: float | None,
        more: Callable[[Any], RunOptions],
    ) -> None:
        """The parameters are those of `launchpad.run`. Raises UsageError."""
        _check_names(roles)
        uses_mpi = any(role.backend == "mpi" for role in roles.values())
        requests = {
            name: prepare(
                *(Target("pickled", name_of(role.fn)), None, role.hosts or hosts, role.backend),
                *({**(env or {}), **(role.env or {})}, wdir),
                sync=sync, ssh_config=ssh_config, bind="none",
                more=more if role.backend == "mpi" or not uses_mpi else lambda hosts: more(hosts)._replace(mpi=None),
            )
            for name, role in roles.items()
        }  # fmt: skip
        self.shares = _placed(roles, requests, hosts)
        self.backends = {name: "" if role.backend == "auto" else role.backend for name, role in roles.items()}
        specs = []
        for name, role in roles.items():
            spec = requests[name].spec
            limits = spec.limits._replace(max_restarts=RestartLimit(role.max_restarts))
            spec = spec._replace(nproc=role.nproc, limits=limits, python=sys.executable)
            specs.append(
                RoleSpec(name, spec, role.service, role.ports, role.ready, role.after, 0, role.replicas, role.gpus)
            )
        check_roles(specs, _WHERE)
        first = next(iter(requests.values()))
        check_options(first.options, _WHERE)
        limits = first.spec.limits._replace(timeout=timeout)
        spec = first.spec._replace(roles=tuple(replicas_of(specs)), preload=(), limits=limits)
        self.request = JobRequest(spec, (), first.options, None)


def _check_names(roles: Mapping[str, Role]) -> None:
    if not roles:
        raise UsageError(f"{_WHERE} needs at least one role")
    for name, role in roles.items():
        if not isinstance(name, str) or not is_role_name(name):
            raise UsageError(f"{_WHERE}: {name!r}: {ROLE_NAMES}")
        if not isinstance(role, Role):
            raise UsageError(f"{_WHERE}: {name}: give launchpad.Role(function, …), not {role!r:.80}")


def _placed(
    roles: Mapping[str, Role], requests: Mapping[str, JobRequest], hosts: str | Sequence[str] | None
) -> list[list[Placed]]:
    shared: Sequence[Host] = ()
    if hosts is not None:
        shared = next((requests[name].hosts for name, role in roles.items() if not role.hosts), ())
    needs = [
        RoleNeeds(name, role.nproc, role.replicas, tuple(requests[name].hosts) if role.hosts else ())
        for name, role in roles.items()
    ]
    return place_worlds(needs, shared, _WHERE)


class RoleCollector(ResultCollector):
    """Collects what the ranks of several worlds return."""

    def follow(self, plan: Plan) -> None:
        """From now on the ranks are those of this plan."""
        self._names = RoleNames(plan.roles)
        super().follow(plan)

    def by_role(self, roles: Sequence[RoleSpec]) -> dict[str, Any]:
        """The values of those that are no services. Raises RankError if a rank did not return."""
        places = dict(zip((rank.rank for rank in self._plan.ranks), self.places, strict=True))
        found: dict[str, Any] = {}
        for role, (_, ranks) in zip(roles, self._plan.roles, strict=True):
            if role.service:
                continue
            own = Results([self._returned(rank) for rank in ranks], [places[rank] for rank in ranks])
            if role.replicas == 1:
                found[role.role] = own
            else:
                found.setdefault(role.role, []).append(own)
        return found

    def _name(self, rank: int) -> str:
        return self._names.one(rank)


class RoleJob(FunctionJob):
    """A job of several worlds."""

    def __init__(self, job: _RoleRequests, calls: Mapping[str, int], screen: Screen) -> None:
        """`calls`: of each role, the descriptor of what its ranks get first."""
        super().__init__(job.request, -1, screen, RoleCollector)
        self._shares = job.shares
        self._calls = calls
        self._call_of: list[int] = []  # by node

    def by_role(self) -> dict[str, Any]:
        """The results of each role that is no service, or raise the exception that says why there are none."""
        self.raise_failure()
        assert isinstance(self._collector, RoleCollector)
        return self._collector.by_role(self._spec.roles)

    def _supervise(self) -> None:
        nodes, worlds = nodes_of(self._spec.roles, self._shares)
        self._call_of = [self._calls[one.role.role] for one in nodes]
        supplies = RoleSupplies(self._options.hosts, self._spec.roles, self._closing)
        local = LocalAgent()
        self._closing.callback(local.close)
        begun = begin_agents(local, nodes, self._options.hosts, self._closing, leaves=False)
        if begun is not None:
            self._dialling(begun.abandon)
        try:
            links, _ = open_role_links(nodes, self._options, local, begun, self._closing)
        finally:
            self._abandon = None
        self._bringup.since = begun.importing_since if begun else None
        planner = bring_up_roles(self._bringup, self._spec, nodes, worlds, links, supplies, self._options, _WHERE)
        remote = [link.remote for link in links]
        self._collector = self._collect(planner.plan, remote)
        planner.plan = self._with_files(planner.plan, remote)
        for node in (node for node, far in enumerate(remote) if far):
            deliver(self._bringup, [node], self._call_of[node])
        self.screen.open(planner.plan, self._spec)
        self._conduct(planner)

    def _call_for(self, node: int) -> int:
        return self._call_of[node]


def run_roles(
    roles: Mapping[str, Role],
    hosts: str | Sequence[str] | None,
    timeout: float | None,
    env: Mapping[str, str] | None,
    wdir: str | None,
    ssh_config: str | None,
    sync: bool,
    more: Callable[[Any], RunOptions],
) -> dict[str, Any]:
    """Run the job, and return the results of each role that is no service; of several replicas, a list."""
    check(_WHERE, None, timeout)
    made = _RoleRequests(roles, hosts, env, wdir, ssh_config, sync, timeout, more)
    calls: dict[str, int] = {}
    try:
        for name, role in roles.items():
            calls[name] = pack(role.fn, role.args, made.backends[name], made.request.spec.cwd)
        screen = Screen(sys.stdout, sys.stderr)
        job = RoleJob(made, calls, screen)
        try:
            job.run()
            return job.by_role()
        finally:
            job.end()
    finally:
        for call in calls.values():
            os.close(call)
