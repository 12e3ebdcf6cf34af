"""transport/held_link: what is sent again, over connections that the test plays."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from launchpad.errors import ConnectError, LaunchpadError, UsageError
from launchpad.protocol.commands import Credit, EventsTaken, Fence, LetGo, Ping
from launchpad.protocol.events import CommandsTaken, ContactLost, ContactRegained, Fenced, HoldEnded, LinkHeld
from launchpad.transport import held_link
from launchpad.transport.held_link import HeldLink, HolderGone, LinkState
from launchpad.transport.memory import MemoryLink

DEADLINE = 30.0
WAY = ("", 22, "python3", "", "", False)


class Host:
    """The far end: a link for each connection, or an error."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.links: queue.SimpleQueue[MemoryLink | LaunchpadError] = queue.SimpleQueue()

    def dial(self, asked: Any) -> MemoryLink:
        self.asked.append(asked)
        found = self.links.get(timeout=DEADLINE)
        if isinstance(found, LaunchpadError):
            raise found
        return found

    def connection(self) -> MemoryLink:
        link = MemoryLink("h", remote=True)
        self.links.put(link)
        return link


def unreachable() -> ConnectError:
    return ConnectError("timed out", "h", "no answer")


class Reader:
    """A held link, and its events."""

    def __init__(self, link: HeldLink) -> None:
        self.link = link
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for event in self.link.messages():
                self.events.put(event)
        except OSError as error:
            self.events.put(error)
        self.events.put(None)

    def next(self) -> Any:
        return self.events.get(timeout=DEADLINE)


class Head(Reader):
    """The one that has started the agent."""

    def __init__(self, host: Host, seconds: float = 60.0) -> None:
        super().__init__(HeldLink("h", WAY, host.dial, seconds, 0.0))


def heard(link: MemoryLink, count: int) -> list[int]:
    """The fences that the far end has got: so many."""
    found: list[int] = []
    while len(found) < count:
        command = link.heard.get(timeout=DEADLINE)
        if isinstance(command, Fence):
            found.append(command.number)
        else:
            assert isinstance(command, Ping | EventsTaken), command
    return found


def test_what_was_lost_with_a_connection_is_sent_again() -> None:
    host = Host()
    first = host.connection()
    head = Head(host)
    first.say(LinkHeld(0, "/there", 0))
    for number in range(3):
        head.link.send(Fence(number))
    assert heard(first, 3) == [0, 1, 2]
    first.say(CommandsTaken(0, 1))
    first.say(Fenced(5, 0))
    assert head.next() == Fenced(5, 0)
    host.links.put(unreachable())
    second = host.connection()
    first.hang_up()
    assert isinstance(head.next(), ContactLost)
    head.link.send(Fence(3))
    second.say(LinkHeld(0, "/there", 2))  # the second one had arrived
    assert isinstance(head.next(), ContactRegained)
    assert heard(second, 2) == [2, 3]
    assert [one for asked in host.asked for one in asked] == ["hold", "resume", "resume"]
    resumed = host.asked[-1]["resume"]
    assert (resumed["place"], resumed["taken"]) == ("/there", 1), "one event had come"
    assert resumed["secret"] == host.asked[0]["hold"]["secret"]
    second.say(HoldEnded(0, ""))
    assert head.next() is None


def test_a_host_that_is_away_for_too_long_is_lost() -> None:
    host = Host()
    first = host.connection()
    head = Head(host, seconds=0.1)
    first.say(LinkHeld(0, "/there", 0))
    for _ in range(20):
        host.links.put(unreachable())
    first.hang_up()
    assert isinstance(head.next(), ContactLost)
    assert str(head.next()) == "no contact for 0.1 s: timed out: no answer"


def test_a_host_that_was_started_again_is_lost_at_once() -> None:
    host = Host()
    first, second = host.connection(), host.connection()
    head = Head(host)
    first.say(LinkHeld(0, "/there", 0))
    first.hang_up()
    second.say(HoldEnded(0, "nothing of the job is left there"))
    assert isinstance(head.next(), ContactLost)
    assert str(head.next()) == "nothing of the job is left there"


def test_to_hang_up_the_far_end_must_hear_it() -> None:
    host = Host()
    first = host.connection()
    head = Head(host)
    first.say(LinkHeld(0, "/there", 0))
    head.link.send(Fence(0))
    assert heard(first, 1) == [0]
    head.link.close()
    assert isinstance(first.heard.get(timeout=DEADLINE), LetGo)
    assert head.next() is None


def test_a_link_that_is_away_comes_back_to_hang_up() -> None:
    host = Host()
    first = host.connection()
    head = Head(host)
    first.say(LinkHeld(0, "/there", 0))
    head.link.send(Fence(0))
    heard(first, 1)
    first.hang_up()
    assert isinstance(head.next(), ContactLost)
    links = [host.connection(), host.connection()]  # the reader may be dialling, too
    head.link.close()
    assert any(not link.heard.empty() and link.heard.get() == LetGo() for link in links)


@pytest.mark.parametrize("held", [False, True])
def test_only_a_connection_that_is_held_can_be_resumed(*, held: bool) -> None:
    host = Host()
    first = host.connection()
    head = Head(host)
    if held:
        first.say(LinkHeld(0, "/there", 0))
    first.hang_up()
    if held:
        assert isinstance(head.next(), ContactLost)
        host.connection().hang_up()  # the reader may be dialling, too
        host.connection().hang_up()
        head.link.close()
    assert head.next() is None


class Resumed(Reader):
    """A link that another process has left in this state."""

    def __init__(self, host: Host, state: LinkState) -> None:
        link = HeldLink("h", state.way, host.dial, 60.0, 0.0, state)
        link.take_over()
        super().__init__(link)


def acknowledged(link: MemoryLink) -> list[int]:
    """What the far end may forget, as far as it has heard by now."""
    found = []
    while not link.heard.empty():
        command = link.heard.get()
        if isinstance(command, EventsTaken):
            found.append(command.events)
    return found


def test_commands_wait_for_a_checkpoint_and_events_are_kept_until_then() -> None:
    host = Host()
    first = host.connection()
    head = Head(host)
    first.say(LinkHeld(0, "/there", 0))
    wanted = threading.Event()
    head.link.keep(wanted.set)
    head.link.send(Credit(0, 1, 5))
    assert first.heard.get(timeout=DEADLINE) == Credit(0, 1, 5), "it waits for none"
    assert not wanted.is_set()
    head.link.send(Fence(1))
    head.link.send(Credit(0, 1, 6))
    assert wanted.is_set()
    for number in range(100):
        first.say(Fenced(5, number))
        head.next()
    assert first.heard.empty()
    state = head.link.state(head.link.got)
    head.link.send(Fence(2))
    head.link.commit(state)
    assert [type(first.heard.get(timeout=DEADLINE)) for _ in range(3)] == [Fence, Credit, EventsTaken], "in their order"
    assert first.heard.empty(), "the second fence is in none"
    head.link.let_pass()
    assert heard(first, 1) == [2]


@pytest.mark.parametrize(
    ("taken", "again"),
    [(3, [3, 4]), (4, [4]), (5, []), (7, [])],  # the last: a ping or two came after the checkpoint
)
def test_another_process_sends_what_the_far_end_does_not_have(taken: int, again: list[int]) -> None:
    host = Host()
    state = LinkState(
        *("h", WAY, 60.0, 0.0, "/there", "secret"),
        got=10,
        known=3,
        commands=(Fence(3), Fence(4)),
        sure=2,
        queued=9,
        ended=False,
    )
    link = host.connection()
    link.say(LinkHeld(0, "/there", taken))
    head = Resumed(host, state)
    assert host.asked == [{"resume": {"place": "/there", "secret": "secret", "taken": 10, "done": 10}}]
    link.say(Fenced(5, 0))
    assert head.next() == Fenced(5, 0)
    assert heard(link, len(again)) == again
    head.link.send(Fence(5))
    following = head.link.state(head.link.got)
    assert (following.got, following.known) == (11, max(taken, 3))
    head.link.commit(following)
    assert heard(link, 1) == [5]


def test_a_process_that_is_killed_before_it_is_connected_has_changed_nothing() -> None:
    """What it would have sent was never sent; what the one before it had sent may have arrived."""
    state = LinkState(
        *("h", WAY, 60.0, 0.0, "/there", "secret"),
        got=10,
        known=3,
        commands=(Fence(3),),
        sure=1,
        queued=9,
        ended=False,
    )
    link = HeldLink("h", state.way, Host().dial, 60.0, 0.0, state)
    link.send(Fence(4))
    left = link.state(link.got)
    assert left == state._replace(commands=(Fence(3), Fence(4)), queued=2)
    host = Host()
    far = host.connection()
    far.say(LinkHeld(0, "/there", 6))  # the first fence, and two pings
    head = Resumed(host, left)
    far.say(Fenced(5, 0))
    head.next()
    assert heard(far, 1) == [4]


def test_a_host_without_a_holder_can_not_be_taken_over() -> None:
    host = Host()
    host.connection().say(HoldEnded(0, "nothing is left there"))
    state = LinkState(
        *("h", WAY, 60.0, 0.0, "/there", "s", 0, 0, (), 0, 0),
        ended=False,
    )
    with pytest.raises(HolderGone, match="nothing is left there"):
        Resumed(host, state)


FOLLOWED = LinkState(*("h", WAY, 60.0, 0.0, "/there", "s", 0, 0, (), 0, 0), ended=False)


def test_the_reader_waits_for_whoever_takes_over() -> None:
    host = Host()
    head = Reader(HeldLink("h", WAY, host.dial, 60.0, 0.0, FOLLOWED))
    taking = threading.Thread(target=head.link.take_over, daemon=True)
    taking.start()
    far = host.connection()
    far.say(LinkHeld(0, "/there", 0))
    far.say(Fenced(5, 0))
    assert head.next() == Fenced(5, 0), "it was never out of contact"
    assert len(host.asked) == 1


def test_a_host_that_can_not_be_taken_over_is_tried_again() -> None:
    """Also if ssh's configuration is wrong by now."""
    host = Host()
    head = Reader(HeldLink("h", WAY, host.dial, 60.0, 0.0, FOLLOWED))
    host.links.put(UsageError("no such file"))
    with pytest.raises(ConnectError, match="h: unreachable: no such file"):
        head.link.take_over()
    assert isinstance(head.next(), ContactLost)
    host.connection().say(LinkHeld(0, "/there", 0))
    assert isinstance(head.next(), ContactRegained)


@pytest.mark.parametrize("reached", [False, True])
def test_to_hang_up_on_a_host_that_is_being_dialled(*, reached: bool) -> None:
    host = Host()
    link = HeldLink("h", WAY, host.dial, 60.0, 0.0, FOLLOWED)
    link.keep(lambda: None)
    closing = threading.Thread(target=link.close, daemon=True)
    closing.start()
    if reached:
        first, second = host.connection(), host.connection()
        first.say(LinkHeld(0, "/there", 0))
        link.take_over()
        assert second.heard.get(timeout=DEADLINE) == LetGo()
    else:
        host.links.put(unreachable())
        with pytest.raises(ConnectError):
            link.take_over()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert len(host.asked) == 1 + reached


def test_to_hang_up_on_an_agent_that_had_ended_before_the_checkpoint() -> None:
    """Nobody takes it over, so nothing is to be waited for."""
    host = Host()
    host.links.put(unreachable())
    link = HeldLink("h", WAY, host.dial, 60.0, 0.0, FOLLOWED._replace(ended=True))
    assert list(link.messages()) == []
    link.keep(lambda: None)
    closing = threading.Thread(target=link.close, daemon=True)
    closing.start()
    closing.join(DEADLINE)
    assert not closing.is_alive()


@pytest.mark.parametrize("end", ["holder", "agent", ""])
def test_whether_a_host_outlives_a_login_is_tried(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_link, "SETTLE_SECONDS", 0.0)
    host = Host()
    host.connection().say(LinkHeld(0, "/there", 0))
    second = host.connection()
    second.say(HoldEnded(0, "nothing is left there") if end == "holder" else LinkHeld(0, "/there", 0, end == "agent"))
    link = HeldLink("h", WAY, host.dial, 60.0, 0.0)
    if end:
        with pytest.raises(ConnectError, match="session: all that a login leaves there is ended with it"):
            link.try_out()
        return
    link.try_out()
    link.send(Fence(0))
    second.say(Fenced(5, 0))
    assert next(iter(link.messages())) == Fenced(5, 0)
    assert heard(second, 1) == [0]


def test_a_link_that_was_taken_over_ends_nothing_before_it_is_led() -> None:
    """Whoever takes over may fail before that."""
    host = Host()
    state = LinkState(*("h", WAY, 60.0, 0.0, "/there", "s", 0, 0, (), 0, 0), ended=False)
    HeldLink("h", WAY, host.dial, 60.0, 0.0, state).close()
    assert not host.asked
    for leads in (False, True):
        far = host.connection()
        far.say(LinkHeld(0, "/there", 0))
        head = Resumed(host, state)
        far.say(Fenced(5, 0))
        head.next()
        if leads:
            head.link.keep(lambda: None)
        head.link.close()
        head.thread.join(DEADLINE)
        assert [far.heard.get() == LetGo() for _ in range(far.heard.qsize())] == ([False, True] if leads else [])
    assert len(host.asked) == 2
