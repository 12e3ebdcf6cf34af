"""launchpad/linux.py: descriptors, addresses and where we are."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from launchpad import linux

DEADLINE = 30.0


def test_what_can_be_read_now() -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        assert linux.read_now(reader, 10) is None
        os.write(writer, b"1234")
        assert (linux.read_now(reader, 3), linux.read_now(reader, 3)) == (b"123", b"4")
    finally:
        os.close(writer)
    assert linux.read_now(reader, 3) == b""
    os.close(reader)


def test_a_terminal_and_a_socket_that_are_broken_off_are_at_their_end() -> None:
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    os.close(theirs)
    assert linux.read_now(ours, 10) == b""
    os.close(ours)
    one, other = socket.socketpair()
    with one:
        one.setblocking(False)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        one.send(b"unread")
        other.close()
        assert linux.read_now(one.fileno(), 10) == b""


def test_all_is_written_to_a_reader_that_takes_little() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    data = os.urandom(1 << 20)
    thread = threading.Thread(target=linux.write_all, args=(writer, memoryview(data)))
    thread.start()
    got = b""
    while len(got) < len(data):
        got += os.read(reader, 1000)
    thread.join(DEADLINE)
    os.close(reader)
    os.close(writer)
    assert got == data


def test_a_pipe_is_widened_or_left_as_it_is() -> None:
    reader, writer = os.pipe()
    linux.widen_pipe(writer)
    assert fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) in (linux.PIPE_BYTES, 65536, 4096)
    os.close(reader)
    os.close(writer)
    linux.widen_pipe(writer)  # closed: nothing it could do is worth an error


def test_a_unix_socket_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    before = os.listdir("/proc/self/fd")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        with pytest.raises(OSError, match="too long"):
            listener.bind(str(folder / "it"))
        linux.by_short_path(str(folder / "it"), listener.bind)
        listener.listen()
        linux.by_short_path(str(folder / "it"), caller.connect)
    assert (folder / "it").is_socket()
    with pytest.raises(FileNotFoundError):
        linux.by_short_path(str(tmp_path / "gone" / "it"), print)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("address", "family", "loopback"),
    [
        ("10.0.0.1", socket.AF_INET, False),
        ("127.0.0.2", socket.AF_INET, True),
        ("::1", socket.AF_INET6, True),
        ("fe80::1%eth0", socket.AF_INET6, False),
    ],
)
def test_addresses(address: str, family: int, loopback: bool) -> None:
    assert (linux.address_family(address), linux.is_loopback(address)) == (family, loopback)


def test_where_we_are() -> None:
    assert linux.shows_our_pids()
    assert linux.namespace("pid").startswith("pid:[")
    assert len(linux.boot_id()) == 36


def test_a_file_that_a_user_names_is_read_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert linux.whole_text(str(tmp_path / "text"), "utf-8-sig") == "a\nb\n"
    with pytest.raises(OSError, match="longer than 4 MiB"):
        linux.whole("/dev/zero")


def test_what_can_be_read_to_an_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    kinds = [
        linux.never_ends(str(path)) for path in (tmp_path / "pipe", "/dev/zero", os.devnull, tmp_path, "gone", "\0")
    ]
    assert kinds == ["a pipe", "a device", "", "", "", ""]
