"""diagnosis/role_blame: a rank that lost another world is a victim of what happened to that."""

from __future__ import annotations

from typing import Any

import pytest

from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import Verdict, verdict_on
from launchpad.protocol.events import (
    FaultInjected,
    JobPlanned,
    Output,
    PhaseChanged,
    PortsTold,
    RankExited,
    RanksSpawned,
    RankStarted,
    RoleReady,
    WorldRestarted,
    WorldStopping,
)

SECOND = 1_000_000_000
WORLDS = [("serve", [0]), ("train", [1, 2])]


def at(seconds: float) -> int:
    return 1000 * SECOND + int(seconds * SECOND)


def job(*events: Any) -> Verdict:
    """The verdict on a service at 127.0.0.1:4000, and two clients of which rank 1 of the job fails at 10 s."""
    return verdict_on(
        History(
            [
                JobPlanned(at(0), 0.0, "j", 1, "", [], "", WORLDS, {}, 0.0, "", roles=WORLDS),
                PortsTold(at(0), "serve", ["127.0.0.1:4000"]),
                *(RankStarted(at(0), rank, 20 + rank) for rank in range(3)),
                *events,
                RankExited(at(10), 1, 1, 0, False),
                PhaseChanged(at(10), "stopping", "failure", 15, 5.0, [0, 2]),
            ]
        )
    )


def said(text: str) -> Output:
    frame = '  File "/work/train.py", line 3, in <module>\n    step()'
    return Output(at(9.9), 1, 2, f"Traceback (most recent call last):\n{frame}\n{text}\n".encode())


def restart(seconds: float, ready: float | None) -> list[Any]:
    """The service dies, is started again 0.1 s later, and is then ready."""
    return [
        RankExited(at(seconds), 0, -9, 0, False),
        WorldStopping(at(seconds), "serve", 15, 5.0, []),
        WorldRestarted(at(seconds + 0.1), "serve", [0], 1, 3),
        RankStarted(at(seconds + 0.1), 0, 30),
        *([] if ready is None else [RoleReady(at(ready), "serve", 1.0)]),
    ]


REFUSED = said("ConnectionRefusedError: [Errno 111] Connection refused")
RESET = said("ConnectionResetError: [Errno 104] Connection reset by peer")
THERE = said("httpx.ConnectError: http://127.0.0.1:4000/generate: Connection refused")
ELSEWHERE = said("redis.ConnectionError: Error 111 connecting to localhost:6379. Connection refused.")
UNAVAILABLE = said("grpc.RpcError: StatusCode.UNAVAILABLE: ipv4:127.0.0.1:4000: Failed to connect to remote host")
TIMED_OUT = said("TimeoutError: timed out")
OWN = said("ValueError: no such layer")


@pytest.mark.parametrize(
    ("down", "error", "blamed"),
    [
        (restart(9.5, None), REFUSED, 0),
        (restart(9.5, None), THERE, 0),
        (restart(9.5, None), UNAVAILABLE, 0),
        (restart(9.5, None), TIMED_OUT, 0),
        (restart(9.5, None), ELSEWHERE, 1),
        (restart(9.5, None), OWN, 1),
        (restart(5, 9.5), REFUSED, 0),
        (restart(1, 2), REFUSED, 1),  # it was there again
        (restart(1, 2), RESET, 0),  # a connection of before, used late
        ([RankExited(at(9.5), 0, -9, 0, False)], REFUSED, 0),
        ([RankExited(at(9.5), 0, -9, 0, False)], TIMED_OUT, 0),
        ([], REFUSED, 1),
        ([], OWN, 1),
    ],
)
def test_who_is_to_blame(down: list[Any], error: Output, blamed: int) -> None:
    verdict = job(*down, error)
    assert verdict.cause is not None
    assert verdict.cause.rank == blamed
    assert verdict.exit_code == (137 if blamed == 0 else 1)
    assert [one.rank for one in verdict.victims] == ([1] if blamed == 0 else [])
    assert verdict.cause.again == (blamed == 0 and len(down) > 1)


def test_a_world_without_ports_is_nobodys_service() -> None:
    """What is lost is no part of the job, and that another world has failed has nothing to do with it."""
    worlds = [("a", [0]), ("b", [1])]
    verdict = verdict_on(
        History(
            [
                JobPlanned(at(0), 0.0, "j", 1, "", [], "", worlds, {}, 0.0, "", roles=worlds),
                *(RankStarted(at(0), rank, 20 + rank) for rank in range(2)),
                ELSEWHERE,
                RankExited(at(10), 1, 1, 0, False),
                RankExited(at(10.5), 0, 3, 0, False),
            ]
        )
    )
    assert verdict.cause is not None
    assert (verdict.cause.rank, verdict.victims) == (1, ())


def test_what_a_world_had_spawned_has_no_part_in_its_next_start() -> None:
    worlds = [("a", [0])]
    events = [
        JobPlanned(at(0), 0.0, "j", 1, "", [], "", worlds, {}, 0.0, "", roles=worlds),
        RankStarted(at(0), 0, 20),
        RanksSpawned(at(0), 0, 0, [1], ["s.py"]),
        FaultInjected(at(1), 9, 1, 0),
        RankExited(at(1), 1, 7, 0, False),
        WorldStopping(at(1), "a", 15, 5.0, [0]),
        RankExited(at(1.1), 0, -15, 0, False),
    ]
    history = History(events)
    assert (history.world("a").ranks.keys(), history.stopped) == ({0, 1}, {0})
    history.on(WorldRestarted(at(2), "a", [0], 1, 2))
    assert (history.ranks.keys(), history.stops, history.injected) == ({0}, {}, [])
    history.on(RankExited(at(3), 0, 9, 0, False))
    verdict = verdict_on(history.world("a"))
    assert verdict.cause is not None
    assert (verdict.cause.rank, verdict.exit_code) == (0, 9)
