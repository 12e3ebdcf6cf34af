"""Serves torch's key-value store for the rendezvous, in a process of its own, on a socket that the agent holds.

A forked rank that opens the store at the job's address becomes a client of this one. The agent starts it only on the
first request, so the port stays free for scripts that want to listen on it themselves. A rank that was the forkserver
before is given the socket, and serves the store itself. All other addresses work as under plain torch: rank 0 listens
there. This address works that way too in children of a rank that has not created a group itself: if they created two
groups one after the other, the second would find the keys of the first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from . import own_process, passing


def install() -> None:
    """Hook into torch's env:// and tcp://. A torch that works differently from 2.x is left alone."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None:
        return
    count = 0

    def create_store(hostname: str, port: int, rank: int, *rest: Any, **options: Any) -> Any:
        nonlocal count
        in_child = os.getpid() != _holder
        if not _serves(hostname, port) or (in_child and count == 0) or not _ask():
            return create(hostname, port, rank, *rest, **options)
        assert _address is not None
        if not _address[2]:
            _await_listener(_address[0], _address[1])
        with _hosts_from_files():
            # `rank` matters only for rank 0, which would listen.
            store = create(hostname, port, 1, *rest, **options)
        count += 1  # after destroying its group, a script must not find its old keys
        if count == 1 or not _is_ours(store):
            return store
        return sys.modules["torch.distributed"].PrefixStore(str(count), store)

    rendezvous._create_c10d_store = create_store  # type: ignore[union-attr]


# How long a rank looks for another node's store before it leaves that to torch.
LISTENER_SECONDS = 5.0

_LOOPBACK = {"127.0.0.1", "localhost"}

# By this key, ranks on other nodes, which have no bell, distinguish our store from one served by rank 0.
_OURS = "launchpad"

_address: tuple[str, int, str] | None = None
_holder = 0  # the rank's pid
_served: Any = None  # the store, if this rank serves it
_serving = threading.Lock()


def hold(address: list[Any]) -> None:
    """In a rank: keep the store's host, port and bell, the Unix socket over which the agent takes requests for it.

    The bell is "" if another node serves the store. `address` is empty if there is no store.
    """
    global _address, _holder
    _address = (address[0], address[1], address[2]) if address else None
    _holder = os.getpid()


def _serves(host: str, port: int) -> bool:
    if _address is None or int(port) != _address[1]:
        return False
    return host == _address[0] or {host, _address[0]} <= _LOOPBACK


def _ask() -> bool:
    """Ring the bell, and serve the store if asked to. Returns whether it is running."""
    global _served
    assert _address is not None
    if not _address[2]:
        return True
    folder = os.open(os.path.dirname(_address[2]), os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bell:
            # Via /proc, because a socket's path is limited to 107 bytes.
            bell.connect(f"/proc/self/fd/{folder}/{os.path.basename(_address[2])}")
            said, listener = passing.receive(bell)
    except OSError:
        return False
    finally:
        os.close(folder)
    if said != b"s":
        return said == b"y"
    if listener < 0:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with _serving:
        if _served is None:
            _served = serve_here(listener, *_address[:2])
        else:
            os.close(listener)
    return True


def _await_listener(host: str, port: int) -> None:
    """Wait a moment until the other node's store listens: torch pauses 0.5 s and more between its tries."""
    deadline = time.monotonic() + LISTENER_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), LISTENER_SECONDS).close()
        except OSError:
            time.sleep(0.005)
        else:
            return


def _is_ours(store: Any) -> bool:
    assert _address is not None
    return bool(_address[2]) or store.check([_OURS])


@contextlib.contextmanager
def _hosts_from_files() -> Iterator[None]:
    """Turn off DNS lookups: when torch connects, it looks up the address's name (of ::ffff:127.0.0.1, say) for its log.

    A query without an answer takes 5 s or more, and of 64 at once, one often gets lost.
    """
    before = b"files dns"
    with contextlib.suppress(OSError), open("/etc/nsswitch.conf", "rb") as lines:
        before = next((line[6:].partition(b"#")[0].strip() for line in lines if line.startswith(b"hosts:")), before)
    if not _look_up_hosts(b"files"):
        yield
        return
    try:
        yield
    finally:
        _look_up_hosts(before)


def _look_up_hosts(where: bytes) -> bool:
    """Override the line `hosts:` of nsswitch.conf(5) in this process. Only glibc 2.34 and later can undo that."""
    name, _, version = (
        (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ") if sys.platform == "linux" else ("",) * 3
    )
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 34):
        return False
    return ctypes.CDLL(None).__nss_configure_lookup(b"hosts", where) == 0  # type: ignore[no-any-return]


def serve_here(listener: int, host: str, port: int) -> Any:
    """Serve the store on a listening socket, which it takes over, from a thread of this process, until dropped."""
    with _hosts_from_files():
        TCPStore = sys.modules["torch.distributed"].TCPStore
        return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener)


def serve(listener: int, address: list[Any]) -> None:
    """Serve the store on a listening socket until killed."""
    host, port, agent, shared = address
    own_process.die_with_parent(agent)
    kept = serve_here(listener, host, port)
    if shared:
        kept.set(_OURS, "")
    threading.Event().wait()
    del kept
