"""job/role_places: which hosts' slots each world gets."""

from __future__ import annotations

from typing import Any

import pytest

from launchpad.errors import UsageError
from launchpad.job.hosts import parse_hosts
from launchpad.job.role_places import RoleNeeds, even_slots, place_worlds


def role(name: str, nproc: Any = None, replicas: int = 1, hosts: str = "") -> RoleNeeds:
    return RoleNeeds(name, nproc, replicas, parse_hosts(hosts) if hosts else ())


def placed(*roles: RoleNeeds, hosts: str = "") -> list[str]:
    worlds = place_worlds(roles, parse_hosts(hosts) if hosts else (), "f: roles")
    return [" ".join(f"{share.host.name if share.host else '-'}:{share.ranks}" for share in world) for world in worlds]


def test_without_hosts_all_is_here() -> None:
    assert placed(role("a", 2), role("b"), role("c", "auto", replicas=2)) == ["-:2", "-:1", "-:auto", "-:auto"]


def test_the_jobs_hosts_are_filled_in_order() -> None:
    assert placed(role("a", 1), role("b", 3, replicas=2), role("c"), hosts="x:4,y:4") == ["x:1", "x:3", "y:3", "y:1"]
    assert placed(role("a", 3), role("b", 3), hosts="x:2,y:2,z:2") == ["x:2 y:1", "y:1 z:2"]


@pytest.mark.parametrize(
    ("given", "ranks", "slots"),
    [
        ([None, None, None], 7, [3, 2, 2]),
        ([None, None], 1, [1, 0]),
        ([None, 5, None], 8, [2, 5, 1]),
        ([None, 5], 3, [0, 5]),
        ([2, 3], 9, [2, 3]),
        ([None], 4, [4]),
    ],
)
def test_nodes_that_say_nothing_share_the_rest(given: list[int | None], ranks: int, slots: list[int]) -> None:
    assert even_slots(given, ranks) == slots


def test_a_role_has_its_own_hosts() -> None:
    assert placed(role("a", hosts="x:2,y:2"), role("b", 2), hosts="x:2") == ["x:2 y:2", "x:2"]
    assert placed(role("a", replicas=2, hosts="x,y"), role("b", 3)) == ["x:1", "y:1", "-:3"]


@pytest.mark.parametrize(
    ("roles", "hosts", "said"),
    [
        (
            [role("a", 2), role("b", 3)],
            "x:4",
            "f: roles.b: it needs 3 ranks, and the job's hosts have 4, of which 2 are",
        ),
        ([role("a", 2, 2)], "x:3", "f: roles.a: it needs 2 times 2 ranks, and the job's hosts have 3; write HOST:N"),
        ([role("a", 3, hosts="x:2")], "", "f: roles.a: it needs 3 ranks, and its hosts have 2; write HOST:N"),
        ([role("a", replicas=3, hosts="x:2,y:2")], "", "f: roles.a: 3 replicas can't share the 4 ranks of its hosts"),
        ([role("a", "gpu")], "x:2", "f: roles.a, nproc: gpu has to be a number on hosts"),
    ],
)
def test_hosts_that_are_not_enough(roles: list[RoleNeeds], hosts: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        placed(*roles, hosts=hosts)
