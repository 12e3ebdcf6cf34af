"""What is said of a node that doesn't answer the bootstrap, or whose shell took a part of it."""

from __future__ import annotations

import os

import pytest

from launchpad.errors import ConnectError
from launchpad.transport.ssh.bootstrap import MARK
from launchpad.transport.ssh.bundle import CUT, ENTERED, Startup, bootstrap, bridge, digest, held_at
from launchpad.transport.ssh.handover import GREETING_BYTES, HungUp, TooSlow, hand_over, not_started, too_slow

STARTUP = Startup("/v/bin/python", asked='{"image": {"preload": [], "environ": {"A": "1"}}}')
SENT = bootstrap() + f"{digest()} {STARTUP.asked}\n".encode()


class Host:
    """Says these pieces, and then nothing until the time is up, or ends if the last one is empty."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.sent = b""

    def hand_over(self, startup: Startup = STARTUP) -> bytes:
        self.frames = hand_over(self.send, self.receive, startup)
        return self.sent

    def send(self, data: bytes) -> None:
        self.sent += data

    def receive(self) -> bytes:
        if not self.pieces:
            raise TimeoutError
        return self.pieces.pop(0)


def test_a_greeting_may_come_first() -> None:
    assert Host(b"Welcome\n" + MARK[:4], MARK[4:] + b"ha", b"ve\n").hand_over().startswith(bootstrap())


def test_frames_may_come_with_the_answer() -> None:
    """Of an agent that is held there, any number."""
    frames = b"frames " * GREETING_BYTES
    host = Host(b"Welcome\n" + MARK + b"have\n" + frames, b"more")
    assert host.hand_over(Startup("python", held=held_at("/place", "secret", 5))).startswith(bridge())
    assert host.frames == frames
    assert host.pieces == [b"more"]


@pytest.mark.parametrize(("last", "kind"), [((), TooSlow), ((b"",), HungUp)])
def test_what_came_instead_of_an_answer_is_kept(last: tuple[bytes, ...], kind: type[HungUp] | type[TooSlow]) -> None:
    with pytest.raises(kind) as caught:
        Host(b"Conti", b"nue? ", *last).hand_over()
    assert caught.value.output == b"Continue? "


def as_read(sent: bytes) -> bytes:
    """The first line, as a shell's `read` without -r leaves it."""
    return sent.partition(b"\n")[0].replace(b"\\", b"")


@pytest.mark.parametrize(
    ("output", "stderr", "said"),
    [
        (b"", b"", ""),
        (b"Continue?\nContinue?\n", b"bye\n", "Continue?; bye"),
        (b"you said " + as_read(SENT) + b"\n", b"", "you said"),
        (SENT.replace(b"\n", b"\r\n") + b"bye\n", b"", "bye"),
        (SENT[:200], b"", ""),
        (SENT[3000:9000].replace(b"\\n", b"\n"), b"bye\n", "bye"),
        (b"Traceback:\n  " + STARTUP.words[-1].encode()[60:] + b"\nSyntaxError\n", b"", "Traceback:; SyntaxError"),
    ],
)
def test_the_host_is_quoted_without_what_we_sent(output: bytes, stderr: bytes, said: str) -> None:
    error = not_started("n1", 1, output, stderr, STARTUP)
    assert error.text == f"its shell exited with code 1 before the agent started{f' ({said})' if said else ''}"


@pytest.mark.parametrize(
    ("enter", "output", "kind", "text"),
    [
        (
            (),
            b"Continue?",
            "protocol",
            "a start-up file of its shell (~/.bashrc?) read what was meant for the agent (Continue?); let it read only "
            "in interactive shells",
        ),
        (
            ("docker", "exec", "a"),
            ENTERED,
            "enter",
            "docker exec a doesn't pass standard input on; docker and podman need -i",
        ),
    ],
)
def test_a_python_that_did_not_get_all(enter: tuple[str, ...], output: bytes, kind: str, text: str) -> None:
    error = not_started("n1", CUT, output, b"", STARTUP._replace(enter=enter))
    assert (error.kind, error.text) == (kind, text)


def test_the_exit_code_is_none_that_shells_have() -> None:
    assert os.EX_DATAERR == CUT < 126


@pytest.mark.parametrize(
    ("output", "stderr", "text"),
    [
        (b"", b"", "; is the host overloaded, does a start-up file of its shell ask for something, or does its sshd"),
        (b"Welcome\nContinue? ", b"", " (it said: Welcome; Continue?); does a start-up file of its shell ask for"),
        (b"".join(b"line %d\n" % line for line in range(999)), b"", " (it said: line 983; line 984; "),
        (b"welcome\n" * 99, b"sorry\n" * 99, " (it said: welcome; sorry); does a start-up file"),
        (SENT[-300:], b"", "; is the host overloaded, does"),
    ],
)
def test_a_node_that_is_too_slow(output: bytes, stderr: bytes, text: str) -> None:
    error = too_slow("n1", 30.0, output, stderr, STARTUP)
    assert isinstance(error, ConnectError)
    assert error.text.startswith(f"the agent did not start within 30 s{text}")
    assert error.text.endswith("run another command (ForceCommand)?")
