"""runner/role_supplies: each folder and each environment goes once to each host."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from launchpad.head.bringup import BringUp
from launchpad.head.planner import Supplies
from launchpad.job.hosts import Host
from launchpad.job.role_places import Placed, RoleNode
from launchpad.job.spec import JobSpec, RoleSpec, Target
from launchpad.runner import connect, role_supplies
from launchpad.runner.connect import Supplied
from launchpad.runner.options import HostOptions
from launchpad.runner.role_supplies import RoleSupplies


def role(name: str, cwd: str, python: str) -> RoleSpec:
    return RoleSpec(name, JobSpec(Target("program", "true"), cwd=cwd, python=python))


A, B, C = role("a", "/work", "/py"), role("b", "/work", "/other"), role("c", "/data", "/py")

# Who is where. Another user, or another port, has files of its own; this machine is the last one.
NODES = [
    *((A, Host("n1")), (A, Host("n2")), (B, Host("n1")), (C, Host("n2"))),
    *((B, Host("n1", "alice")), (B, Host("n1", port=2222)), (C, Host("here"))),
]


def test_worlds_on_one_host_share_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[list[int], str, Any]] = []

    def supplies_for(options: HostOptions, spec: JobSpec, _: object) -> Supplies:
        return Supplies(spec.cwd if options.sync else None, spec.python if options.sync_env else None)  # type: ignore[arg-type]

    def give(_: object, nodes: list[int], folder: str, supplies: Supplies, *, quiet: bool) -> Supplied:
        assert not quiet
        given.append((nodes, folder, supplies.files or supplies.environment))
        folders = {node: f"{node}:{folder}" for node in nodes} if supplies.files else {}
        pythons = {node: f"{node}:{supplies.environment}" for node in nodes} if supplies.environment else {}
        return Supplied(folders, pythons)

    monkeypatch.setattr(role_supplies, "supplies_for", supplies_for)
    monkeypatch.setattr(connect, "give", give)
    nodes = [RoleNode(one, Placed(host, 1), one.spec.cwd) for one, host in NODES]
    links: Any = [SimpleNamespace(remote=host.name != "here") for _, host in NODES]
    supplies = RoleSupplies(HostOptions(sync=True, sync_env=True), [A, B, C], ExitStack())
    found = supplies.give(BringUp(), nodes, links, quiet=False)
    assert sorted(given, key=str) == sorted(
        [
            *(([0, 1, 4, 5], "/work", "/work"), ([3], "/data", "/data")),
            *(([0, 1], "", "/py"), ([2, 4, 5], "", "/other")),
        ],
        key=str,
    )
    assert [(one.cwd, one.python) for one in found] == [
        ("0:/work", "0:/py"),
        ("1:/work", "1:/py"),
        ("0:/work", "2:/other"),
        ("3:/data", "1:/py"),
        ("4:/work", "4:/other"),
        ("5:/work", "5:/other"),
        ("/data", ""),
    ]
