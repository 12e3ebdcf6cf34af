"""What a node may offer: each field is of its type, or there is no offer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.offer import NodeOffer
from launchpad.job.spec import JobSpec, Target
from launchpad.job.succession import Peer, Roster

LIMITS = Limits(max_restarts=RestartLimit(3, 3600.0), progress=("a/*",), timeout=5.0)
SPEC = JobSpec(Target("script", "a.py", ("-x",)), nproc="gpu", environ={"A": "1"}, debug=(1, 0), limits=LIMITS)
OFFER = NodeOffer("b", "python3", "2", node_rank=1, slots=4, spec=SPEC)
ROSTERS = (Roster(1, 0, "a", (Peer("a", "h1"), Peer("b", "h2")), 1, 3, 2),)


def wire(offer: NodeOffer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(offer.as_json()))
    return found


@pytest.mark.parametrize(
    "offer",
    [
        OFFER,
        NodeOffer("b", "python3"),
        NodeOffer("b", "python3", failed="no script"),
        NodeOffer("b", "python3", key="b", beside="c", rosters=ROSTERS),
    ],
)
def test_an_offer_comes_back_as_it_was(offer: NodeOffer) -> None:
    assert NodeOffer.from_json(wire(offer)) == offer


# Each is wrong for all fields but those named.
VALUES: list[tuple[Any, tuple[str, ...]]] = [
    ([], ("preload", "progress", "rosters")),
    ({}, ("environ",)),
    ([[]], ()),
    ({"a": 1}, ()),
    (float("nan"), ()),
    (float("inf"), ()),
    (1 << 70, ("timeout", "stall_timeout", "grace")),
    ("\x1b]0;x\x07", ("python", "nnodes", "failed", "key", "cwd", "role")),
    ([1, "a", None], ()),
]


@pytest.mark.parametrize(("value", "but"), VALUES, ids=[repr(value) for value, _ in VALUES])
def test_a_wrong_value_in_any_field_is_no_offer(value: Any, but: tuple[str, ...]) -> None:
    for name in wire(OFFER):
        if name not in but:
            with pytest.raises((TypeError, ValueError, KeyError)):
                NodeOffer.from_json({**wire(OFFER), name: value})
    for name in wire(OFFER)["spec"]:
        if name not in but:
            with pytest.raises((TypeError, ValueError, KeyError)):
                NodeOffer.from_json({**wire(OFFER), "spec": {**wire(OFFER)["spec"], name: value}})


@pytest.mark.parametrize("name", [*wire(OFFER)])
def test_a_field_that_lacks_is_no_offer(name: str) -> None:
    found = wire(OFFER)
    del found[name]
    with pytest.raises(KeyError):
        NodeOffer.from_json(found)


@pytest.mark.parametrize("count", [0, -1, 1 << 20])
def test_a_number_of_ranks_that_no_node_has_is_no_offer(count: int) -> None:
    for found in ({**wire(OFFER), "slots": count}, {**wire(OFFER), "spec": {**wire(OFFER)["spec"], "nproc": count}}):
        with pytest.raises(ValueError, match="is not a number of ranks"):
            NodeOffer.from_json(found)


@pytest.mark.parametrize(
    "roster", [Roster(1, 0, "a", (), 1), Roster(1, 0, "a", (Peer("a", "a"),), 1, restarts=1 << 40)]
)
def test_a_roster_that_no_head_has_made_is_no_offer(roster: Roster) -> None:
    with pytest.raises(ValueError, match="rosters: one is of nobody, or of a job that has used up too many restarts"):
        NodeOffer.from_json(wire(OFFER._replace(rosters=(roster,))))


@pytest.mark.parametrize("name", ["a\x1b]0;title\x07", "a\n::error::forged", "a\x9b2J"])
def test_a_name_that_is_not_printable_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"^name: "):
        NodeOffer.from_json(NodeOffer(name, "python").as_json())


def test_the_reason_of_a_failed_node_is_one_line() -> None:
    offer = NodeOffer.from_json(NodeOffer("a", "python", failed="no\nlaunchpad: all well\x1b[2J").as_json())
    assert offer.failed == "no\\nlaunchpad: all well\\x1b[2J"
