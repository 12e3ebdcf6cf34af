"""How stacks are read, merged and told of."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from launchpad.agent.stacks.signalled import parse
from launchpad.control import client
from launchpad.diagnosis.held_sink import HeldSink
from launchpad.diagnosis.mismatch import mismatches
from launchpad.diagnosis.stack_summary import full, held, merged
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.protocol.events import NO_HANDLER, RanksHeld, Restarted, StackDump, StacksTaken
from launchpad.protocol.stacks import separate, together, where
from launchpad.rank import exceptions, stack_server
from launchpad.rank.groups import in_steps
from tests.support.needs import needs_torch
from tests.support.stacks import dumps

C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
TEXT = """Thread 0x00007f2d17e146c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/w/tr\\xe4n.py", line 3 in worker

Current thread 0x00007f2d3784ab80 [MainThread] (most recent call first):
  File "/w/train.py", line 41 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_faulthandlers_text_is_read() -> None:
    threads = parse(TEXT, lambda path, line: f"{path} {line}")
    assert [thread["name"] for thread in threads] == ["MainThread", "0x00007f2d17e146c0"]
    assert threads[0]["frames"] == [
        ("/w/train.py", 41, "<module>", "/w/train.py 41"),
        ("<frozen runpy>", 88, "_run_code", ""),
    ]
    assert threads[1]["frames"][1] == ("/w/trän.py", 3, "worker", "/w/trän.py 3")
    assert parse("", lambda *_: "") == []


def test_our_own_thread_is_no_thread_of_the_program() -> None:
    place = f'{stack_server.__file__}", line 170 in _answer'
    ours = f'Thread 0x00007f2d17e146c1 (most recent call first):\n  File "{place}\n\n'
    assert parse(ours + TEXT, lambda *_: "") == parse(TEXT, lambda *_: "")


WAITS = [[C10D, 3252, "all_reduce", ""], [C10D, 83, "wrapper", ""], ["/w/train.py", 41, "main", "dist.all_reduce(t)"]]
READS = [["/w/data.py", 12, "read_batch", "queue.get()"], ["/w/train.py", 40, "main", "read_batch()"]]


def test_ranks_at_one_place_are_told_of_together_and_the_odd_one_first() -> None:
    found = [dumps(rank, READS if rank == 3 else WAITS) for rank in range(8) if rank != 6]
    found.append(dumps(6, [], "no stacks: not a Python rank, or one without hooks"))
    text = merged(StacksTaken(0, "stall", 0, False, list(range(10)), found, [9]), "/w", {})
    assert text.splitlines() == [
        "the job is hanging; where the ranks are:",
        "  rank 3 is in read_batch at data.py:12: queue.get()",
        "  rank 6 is sleeping in ep_poll (no stacks: not a Python rank, or one without hooks)",
        "  ranks 0-2, 4-5, 7 wait in all_reduce at train.py:41",
        "  rank 9 has not been started yet",
        "  nothing is known about rank 8: launchpad's agent there does not answer",
        "  rank 3:",
        "    data.py:12 in read_batch: queue.get()",
        "    train.py:40 in main: read_batch()",
        "  rank 0 (and 5 more):",
        "    torch/distributed/distributed_c10d.py:3252 in all_reduce",
        "    torch/distributed/distributed_c10d.py:83 in wrapper",
        "    train.py:41 in main: dist.all_reduce(t)",
    ]


def test_who_has_failed_and_is_not_quite_gone_holds_up_nobody() -> None:
    found = [
        dumps(0, [], "no stacks: not a Python rank, or one without hooks")._replace(state="X"),
        dumps(1, [], NO_HANDLER)._replace(state="R"),
        dumps(2, READS),
    ]
    told = held(StacksTaken(0, "failure", 0, False, [0, 1, 2], found), "/w", {})
    assert (told.ranks, told.lines) == ([2], ["rank 2 is in read_batch at data.py:12: queue.get()"])


@pytest.mark.parametrize(
    ("why", "tells"), [("failure", True), ("stall", True), ("timeout", True), ("idle", True), ("asked", False)]
)
def test_who_holds_up_the_others_is_told_unless_somebody_only_asked(why: Any, tells: bool) -> None:
    plan = Plan("id", tuple(NodePlan(node, f"h{node}", "/w", {}, (RankPlan(node, 0, (), {}),), {}) for node in (0, 1)))
    told: list[RanksHeld] = []
    sink = HeldSink(plan, told.append)
    taken = StacksTaken(7, why, 0, False, [0, 1], [dumps(0, WAITS), dumps(1, READS)])
    assert sink.on(taken) is False
    found = [(one.time, one.why, one.ranks, one.lines[0]) for one in told]
    assert found == [(7, why, [1], "rank 1 on h1 is in read_batch at data.py:12: queue.get()")] * tells
    sink.on(Restarted(8, 1, 1, 1, 1, -1, nodes=[["h0", [0]], ["h2", [1]]]))
    sink.on(taken)
    assert [one.lines[0].partition(" is ")[0] for one in told] == ["rank 1 on h1", "rank 1 on h2"] * tells


def test_nobody_is_held_up_where_nobody_waits() -> None:
    found = [
        dumps(0, [], "no stacks: not a Python rank, or one without hooks")._replace(state="R"),
        dumps(1, [], NO_HANDLER)._replace(state="R"),
    ]
    assert held(StacksTaken(0, "timeout", 0, False, [0, 1], found), "/w", {}).ranks == []
    found[1] = found[1]._replace(state="S")
    assert held(StacksTaken(0, "timeout", 0, False, [0, 1], found), "/w", {}).ranks == [0]


def test_who_waits_in_mpi_finalize_holds_up_the_others() -> None:
    found = [dumps(0, WAITS), dumps(1, [], NO_HANDLER, mpi=True)._replace(state="S", wchan="unix_stream_read_generic")]
    told = held(StacksTaken(0, "stall", 0, False, [0, 1], found), "/w", {})
    assert told.ranks == [1]
    assert told.lines[0] == (
        "rank 1 is at the end of the program, in MPI_Finalize (sleeping in unix_stream_read_generic)"
    )


def test_who_is_handling_an_exception_of_its_own_holds_up_the_others() -> None:
    own, lost = ({"type": kind, "message": "no", "frames": []} for kind in ("ValueError", "DistNetworkError"))
    found = [
        dumps(0, WAITS, raising=own),  # it waits nevertheless
        dumps(1, [["/w/train.py", 9, "retry", ""]], raising=lost),
        dumps(2, [["/w/train.py", 17, "upload", "put(report)"]], raising=own),
        dumps(3, READS),
    ]
    told = held(StacksTaken(0, "failure", 0, False, [0, 1, 2, 3], found), "/w", {})
    assert (told.ranks, told.raising) == ([2], own)
    assert told.lines[0] == "rank 2 is in upload at train.py:17: put(report), handling ValueError: no"
    assert told.lines[-1].startswith("rank 0 waits in all_reduce")
    told = held(StacksTaken(0, "failure", 0, False, [0, 3], [found[0], found[3]]), "/w", {})
    assert (told.ranks, told.raising) == ([3], None)


def test_what_a_rank_is_handling_is_reported() -> None:
    """Its chain too, with what it suppressed; and {} once it is handled."""
    try:
        try:
            raise KeyError("x")
        except KeyError:
            raise ValueError("no") from None
    except ValueError:
        found = exceptions.under_way(threading.get_ident())
        assert (found["type"], found["message"]) == ("ValueError", "no")
        assert found["frames"][-1][3] == 'raise ValueError("no") from None'
        assert found["hidden"]["type"] == "KeyError"
    assert exceptions.under_way(threading.get_ident()) == {}


@needs_torch
def test_what_a_program_has_caught_and_kept_is_reported() -> None:
    import torch.distributed  # noqa: F401

    kept: list[RuntimeError] = []
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        kept.append(error)
    try:
        try:
            raise RuntimeError("in its chain")
        except RuntimeError:
            raise ValueError("step 20 failed")  # noqa: B904
    except ValueError:
        found = exceptions.under_way(threading.get_ident())
    messages = [one["message"] for one in found["kept"]]
    assert "Connection closed by peer" in messages
    assert "in its chain" not in messages


def test_the_account_fits_a_screen() -> None:
    deep = [[f"/w/f{line}.py", line, "f", ""] for line in range(50)]
    found = [dumps(rank, [[f"/w/own{rank}.py", rank, "g", ""], *deep]) for rank in range(100)]
    text = merged(StacksTaken(0, "asked", 0, False, list(range(100)), found), "/w", {})
    assert len(text.splitlines()) < 50
    assert "ranks 8-99: in 92 other places" in text


@pytest.mark.parametrize(
    ("frames", "mpi", "operation", "line"),
    [
        (WAITS, False, "all_reduce", 41),
        ([["/w/t.py", 3, "f", "data = comm.recv(source=1)"]], True, "recv", 3),
        ([["/w/t.py", 3, "f", "data = socket.recv(10)"]], False, "", 3),
        (
            [[C10D, 1, "rendezvous", ""], [C10D, 2, "init_process_group", ""], ["/w/t.py", 5, "f", ""]],
            False,
            "rendezvous",
            5,
        ),
        ([["/venv/lib/python3.11/site-packages/a.py", 7, "f", ""]], False, "", 7),
        ([], False, "", 0),
    ],
)
def test_what_a_stack_waits_for(frames: list[list[Any]], mpi: bool, operation: str, line: int) -> None:
    found = where(frames, mpi)
    assert (found.waits_in, found.line) == (operation, line)


def entry(
    number: int, what: str = "all_reduce", size: int = 4, kind: str = "Float", done: bool = True
) -> dict[str, Any]:
    place = {"frames": [[C10D, 1, what], ["/w/train.py", 40 + number, "main"]], "done": done}
    return {"group": "0", "number": number, "what": what, "sizes": [[size]], "types": [kind], **place}


def progress(*ranks: list[dict[str, Any]]) -> list[str]:
    groups = {"0": ["default_pg", [[0, len(ranks) - 1, 1]]]}
    found = mismatches([dumps(rank, [], entries=told, groups=groups) for rank, told in enumerate(ranks)], "/w")
    return [one.sentence for one in found]


def test_ranks_that_agree_are_not_told_of() -> None:
    assert progress([entry(1), entry(2, done=False)], [entry(1), entry(2, done=False)]) == []
    assert progress([], []) == []
    assert mismatches([dumps(0, WAITS)], "/w") == []


def test_who_never_entered_is_named() -> None:
    there = [entry(1), entry(2, done=False)]
    assert progress(there, [entry(1)], there) == [
        "group default_pg: rank 1 has not entered collective 2, all_reduce of 4 float32 at train.py:42, "
        "which ranks 0, 2 have"
    ]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (entry(2, "broadcast", done=False), "broadcast of 4 float32"),
        (entry(2, size=8, done=False), "all_reduce of 8 float32"),
        (entry(2, kind="Double", done=False), "all_reduce of 4 float64"),
    ],
)
def test_who_entered_another_operation_is_named(odd: dict[str, Any], words: str) -> None:
    there = [entry(1), entry(2, done=False)]
    assert progress(there, [entry(1), odd], there) == [
        f"group default_pg: collective 2 is not the same on all ranks: rank 1 has entered {words} at train.py:42; "
        "ranks 0, 2 have entered all_reduce of 4 float32 at train.py:42"
    ]


# With real ranks.


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_job_that_does_not_answer_is_said_to(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launchpad is suspended, or ends before it takes the connection."""
    near, far = socket.socketpair()
    monkeypatch.setattr(client, "_call", lambda _: near)
    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.1)
    with far:
        if hangs_up:
            far.close()
            assert client.ask("", "sample") == ""
        else:
            with pytest.raises(client.NoAnswer, match="may be suspended"):
                client.ask("", "sample")


def test_ranks_with_equal_stacks_are_in_one_entry_of_the_file() -> None:
    found = [dumps(rank, READS if rank == 3 else WAITS) for rank in range(12)]
    entries = full(StacksTaken(0, "stall", 0, False, list(range(12)), separated(found), []), "/w", {}).split("\n\n")
    assert [entry.splitlines()[0] for entry in entries] == [
        "ranks 0-2, 4-11, pids 100, 101, 102, 104, 105, 106, 107, 108, …: ",
        "rank 3, pid 103: ",
    ]
    assert "    train.py:41 in main: dist.all_reduce(t)" in entries[0].splitlines()


def separated(found: list[StackDump]) -> list[StackDump]:
    """As the head has them, which got them from two nodes."""
    known: dict[str, Any] = {}
    there = [one for node in (found[::2], found[1::2]) for one in separate(together(node), known)]
    return sorted(there, key=lambda one: one.rank)


def test_equal_stacks_travel_once_and_are_one_object_in_the_head() -> None:
    found = [dumps(rank, READS if rank == 3 else WAITS, counts={"0": 7}) for rank in range(8)]
    assert len(together(found).threads) == 2
    there = separated(found)
    assert sorted(one.rank for one in there) == list(range(8))
    assert [one._replace(threads=[]) for one in there if one.rank == 3] == [found[3]._replace(threads=[])]
    assert len({id(one.threads) for one in there}) == 2
    assert len({id(one.collectives) for one in there}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"threads": ['[{"name": 1, "frames": []}]']},
        {"threads": ["[{"]},
        {"threads": []},
        {"collectives": ['{"counts": []}']},
        {"threads": ["[" * 100_000]},
    ],
)
def test_stacks_that_are_none_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError, ValueError, RecursionError)):
        separate(together([dumps(0, WAITS)])._replace(**change), {})


def test_of_ranks_with_many_gaps_only_some_are_named() -> None:
    found = [dumps(rank, READS if rank % 2 else WAITS) for rank in range(40)]
    text = merged(StacksTaken(0, "asked", 0, False, list(range(40)), found, []), "/w", {})
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, … (20 ranks) wait in all_reduce" in text


def test_members_of_a_group_are_told_in_steps() -> None:
    assert in_steps([*range(8), 16, 24, 32, 33]) == [[0, 7, 1], [16, 32, 8], [33, 33, 1]]
    assert in_steps([0, 8, 16]) == [[0, 16, 8]]
    assert in_steps([]) == []
    groups = {"0": ["tp", [[0, 6, 2]]]}
    there = {rank: [entry(1)] if rank == 4 else [entry(1), entry(2, done=False)] for rank in range(7)}
    found = mismatches([dumps(rank, [], entries=told, groups=groups) for rank, told in there.items()], "/w")
    assert [one.ranks for one in found] == [[4]]
