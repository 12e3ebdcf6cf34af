"""The search for the next head."""

from __future__ import annotations

from launchpad.job.offer import NodeOffer
from launchpad.job.succession import Peer, Roster
from launchpad.job.world import Meeting
from launchpad.runner.own_door import HeadPlace
from launchpad.runner.search import HeadSearch
from tests.support.sshd import free_port


def test_a_head_of_the_same_term_is_asked_too() -> None:
    """The roster that we hold may be of one that was lost before it counted, and another one leads in its stead."""
    port = free_port()
    peers = (Peer("a", "a", "127.0.0.1", free_port()), Peer("b", "b", "127.0.0.1", free_port()))
    offer = NodeOffer("b", "python3", "2", key="b", rosters=(Roster(2, 0, "a", peers, 1),))
    search = HeadSearch(Meeting("127.0.0.1", free_port(), 2), b"s", offer, None, lambda: None)
    search.follow(HeadPlace("127.0.0.1", port, 1))
    assert f"127.0.0.1:{port}" not in search._doors
    search.follow(HeadPlace("127.0.0.1", port, 2))
    assert f"127.0.0.1:{port}" in search._doors
    search.close()
