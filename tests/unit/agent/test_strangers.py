"""Who is hung up on when many have connected of whom nobody knows who they are."""

from __future__ import annotations

from launchpad import linux
from launchpad.agent.net.strangers import MOST, MOST_OF_ADDRESS, SECONDS, Strangers


def test_the_oldest_of_an_address_goes_first() -> None:
    strangers: Strangers[str] = Strangers()
    assert strangers.add("other", "10.0.0.2", 0.0) is None
    assert [strangers.add(f"{number}", "10.0.0.1", 1.0) for number in range(MOST_OF_ADDRESS)] == [
        None
    ] * MOST_OF_ADDRESS
    assert strangers.add("more", "10.0.0.1", 2.0) == "0"
    assert strangers.add("again", "10.0.0.1", 2.0) == "1"


def test_the_oldest_of_all_goes_if_there_are_too_many() -> None:
    strangers: Strangers[int] = Strangers()
    assert not any(strangers.add(number, f"10.0.{number % 250}.1", 0.0) for number in range(1, MOST + 1))
    assert strangers.add(0, "10.1.0.1", 1.0) == 1
    strangers.forget(2)
    assert strangers.add(1000, "10.1.0.1", 1.0) is None


def test_each_has_a_time_in_all() -> None:
    strangers: Strangers[str] = Strangers()
    assert strangers.deadline is None
    assert strangers.late(100.0) == []
    for at, name in enumerate("abc"):
        strangers.add(name, "::1", float(at))
    strangers.forget("a")
    strangers.forget("a")
    assert strangers.deadline == 1 + SECONDS
    assert strangers.late(1 + SECONDS) == ["b"]
    assert strangers.deadline == 2 + SECONDS
    assert strangers.oldest() == "c"
    assert strangers.oldest() is None


def test_64_bits_of_ipv6_are_one_address() -> None:
    assert linux.network_of("10.0.0.1") == linux.network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert linux.network_of("fe80::1%eth0") == linux.network_of("fe80::2") != linux.network_of("fe80:0:0:1::1")
