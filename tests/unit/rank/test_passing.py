"""Messages over a Unix socket, with and without a descriptor."""

from __future__ import annotations

import os
import socket

from launchpad.rank.passing import receive, send


def test_a_descriptor_arrives_with_its_message_and_is_not_inherited() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, writer = os.pipe()
    with near, far, open(reader, "rb"), open(writer, "wb"):
        send(near, b"c", reader)
        send(near, b"x")
        message, passed = receive(far)
        try:
            assert (message, os.path.sameopenfile(passed, reader), os.get_inheritable(passed)) == (b"c", True, False)
        finally:
            os.close(passed)
        assert receive(far) == (b"x", -1)


def test_whoever_has_gone_gets_nothing() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        far.close()
        send(near, b"x")
        assert receive(near) == (b"", -1)
