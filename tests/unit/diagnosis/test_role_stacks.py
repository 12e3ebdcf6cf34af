"""diagnosis/role_stacks: where the ranks of several worlds are, each world for itself."""

from __future__ import annotations

from launchpad.diagnosis.role_stacks import full_by_role, held_by_role, merged_by_role
from launchpad.protocol.events import StackDump, StacksTaken

ROLES = [("serve", [0]), ("train", [1, 2])]


def dump(rank: int, line: int, text: str) -> StackDump:
    frames = [("/work/t.py", line, "<module>", text)]
    threads: list = [{"name": "MainThread", "frames": frames}]
    return StackDump(0, rank, 1, 10 + rank, "", threads, "S", "", 0.0, False, 0, 0, {}, "")


TAKEN = StacksTaken(
    *(0, "asked", 0, False), ranks=[0, 1, 2], dumps=[dump(0, 3, "accept()"), dump(1, 7, "step()"), dump(2, 7, "step()")]
)


def test_ranks_have_their_worlds_numbers() -> None:
    assert merged_by_role(TAKEN, "/work", ROLES).splitlines()[:5] == [
        "where the ranks are:",
        "  serve:",
        "    rank 0 is in <module> at t.py:3: accept()",
        "    rank 0:",
        "      t.py:3 in <module>: accept()",
    ]
    assert "  train:\n    ranks 0-1 are in <module> at t.py:7: step()" in merged_by_role(TAKEN, "/work", ROLES)
    assert "train:\nranks 0-1, pids 11, 12" in full_by_role(TAKEN, "/work", ROLES)


def test_a_service_that_waits_for_requests_holds_up_nobody() -> None:
    waiting = TAKEN._replace(why="failure", dumps=[dump(0, 3, "accept()"), dump(1, 5, "slow()"), dump(2, 7, "step()")])
    found = held_by_role(waiting, "/work", ROLES)
    assert found.ranks == [1], "in the job's numbering"
    assert found.lines[0] == "serve: rank 0 is in <module> at t.py:3: accept()"


def test_spawned_ranks_stand_below_the_roles() -> None:
    taken = TAKEN._replace(ranks=[*TAKEN.ranks, 3], dumps=[*TAKEN.dumps, dump(3, 9, "solve()")])
    assert merged_by_role(taken, "/work", ROLES).count("  spawned:\n    rank 3 is in <module> at t.py:9: solve()") == 1
    assert "spawned:" not in merged_by_role(TAKEN, "/work", ROLES)
