"""agent/stacks/served: which socket is at the other end of a connection."""

from __future__ import annotations

import pytest

from launchpad.agent.stacks.served import Socket, other_end

LISTENER = Socket("00000000:1F90", "00000000:0000", "0A", "socket:[10]")
CLIENT = Socket("0100007F:C001", "0100007F:1F90", "01", "socket:[11]")
ACCEPTED = Socket("0100007F:1F90", "0100007F:C001", "01", "socket:[12]")
IN_QUEUE = ACCEPTED._replace(link="socket:[0]")
AWAY = Socket("0100007F:C002", "0500000A:1F90", "01", "socket:[13]")


@pytest.mark.parametrize(
    ("sockets", "link", "found"),
    [
        ([LISTENER, CLIENT, ACCEPTED], CLIENT.link, ACCEPTED.link),
        ([LISTENER, CLIENT, ACCEPTED], ACCEPTED.link, CLIENT.link),
        ([LISTENER, CLIENT, IN_QUEUE], CLIENT.link, LISTENER.link),  # not accepted yet
        ([CLIENT, IN_QUEUE], CLIENT.link, ""),
        ([LISTENER, AWAY], AWAY.link, ""),  # on another machine, whatever listens on that port here
        ([LISTENER, CLIENT], LISTENER.link, ""),
        ([LISTENER], "pipe:[11]", ""),
    ],
)
def test_the_other_end(sockets: list[Socket], link: str, found: str) -> None:
    assert other_end(sockets, link) == found
