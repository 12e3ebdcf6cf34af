"""The search for the next head."""

from __future__ import annotations

import threading

from launchpad.job.offer import NodeOffer
from launchpad.job.succession import Peer, Roster
from launchpad.job.world import Meeting
from launchpad.protocol.commands import JobEnded
from launchpad.runner.own_door import HeadPlace
from launchpad.runner.search import HeadSearch
from tests.support.command import DEADLINE, wait_until
from tests.support.joined import OFFER, Door
from tests.support.ports import free_port


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


def test_a_node_that_lost_the_head_just_before_the_end_hears_how_the_job_ended() -> None:
    """It was silent for too long, but had all that the ranks there did: the head waits for it to ask."""
    door = Door()
    offer = OFFER._replace(key="b")
    connection = door.join(offer)
    [(link, _)] = door.joining.wait()
    peers = (Peer("h", "h", "", door.port), Peer("b", "b"))
    door.joining.rosters = (Roster(1, 0, "h", peers, 1),)
    connection.close()
    wait_until(link.gone.is_set, "the head to see that it is gone")
    door.joining.close()
    door.joining.tell(["well done"], 0)
    leaves = threading.Thread(target=door.joining.leave, daemon=True)
    leaves.start()
    heard = threading.Event()
    offer = offer._replace(rosters=door.joining.rosters)
    search = HeadSearch(Meeting(*door.address, 2), b"s", offer, None, heard.set)
    assert heard.wait(DEADLINE)
    assert search.look(0.0) == JobEnded(0, ["well done"])
    search.close()
    leaves.join(DEADLINE)
    assert not leaves.is_alive()


def test_the_end_of_an_earlier_term_is_none() -> None:
    roster = Roster(2, 0, "a", (Peer("a", "a", "127.0.0.1", free_port()), Peer("b", "b")), 1)
    offer = NodeOffer("b", "python3", "2", key="b", rosters=(roster,))
    search = HeadSearch(Meeting("127.0.0.1", free_port(), 2), b"s", offer, None, lambda: None)
    search._answers = {"a": {"ended": [0, []], "term": 1}}
    assert search._ended() is None
    search._answers = {"a": {"ended": [0, []], "term": 2}}
    assert search._ended() == JobEnded(0, [])
    search.close()
