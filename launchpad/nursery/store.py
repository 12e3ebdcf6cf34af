"""torch's key-value store, in which ranks meet: served by a process of its own, on a socket that the agent holds.

A forked rank that asks for the store at the job's address gets a client of that one. The agent is asked to start it
then, and not before: where nobody asks, the port stays free for a script that wants to listen on it. Every other
address means what it means under plain torch: rank 0 listens there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from . import process


def install() -> None:
    """Have torch's env:// and tcp:// ask us first. A torch that does it another way than 2.x is left as it is."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None:
        return
    count = 0

    def create_store(hostname: str, port: int, rank: int, *rest: Any, **options: Any) -> Any:
        nonlocal count
        if not _serves(hostname, port) or not _ask():
            return create(hostname, port, rank, *rest, **options)
        with _hosts_from_files():
            # It is only to rank 0 that `rank` makes a difference: it would listen.
            store = create(hostname, port, 1, *rest, **options)
        count += 1  # a script that comes a second time, having destroyed its group, is not to find its old keys
        if count == 1 or not _is_ours(store):
            return store
        return sys.modules["torch.distributed"].PrefixStore(str(count), store)

    rendezvous._create_c10d_store = create_store  # type: ignore[union-attr]


_LOOPBACK = {"127.0.0.1", "localhost"}

# A key by which the ranks of other nodes, who can't ring, tell our store from one that rank 0 serves.
_OURS = "launchpad"

_address: tuple[str, int, str] | None = None


def hold(address: list[Any]) -> None:
    """In a rank: the store's host and port, and the Unix socket by which the agent is asked for it; or nothing.

    No socket, "": it is served on another node.
    """
    global _address
    _address = (address[0], address[1], address[2]) if address else None


def _serves(host: str, port: int) -> bool:
    if _address is None or int(port) != _address[1]:
        return False
    return host == _address[0] or {host, _address[0]} <= _LOOPBACK


def _ask() -> bool:
    """Ring; whether the store is there now."""
    assert _address is not None
    if not _address[2]:
        return True
    folder = os.open(os.path.dirname(_address[2]), os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bell:
            # By way of /proc, as a socket's path may have 107 bytes at most.
            bell.connect(f"/proc/self/fd/{folder}/{os.path.basename(_address[2])}")
            return bell.recv(1) == b"y"
    except OSError:
        return False
    finally:
        os.close(folder)


def _is_ours(store: Any) -> bool:
    assert _address is not None
    return bool(_address[2]) or store.check([_OURS])


@contextlib.contextmanager
def _hosts_from_files() -> Iterator[None]:
    """Without the DNS, which torch asks for the name of ::ffff:127.0.0.1, say, each time it connects, for its log.

    Where the DNS doesn't answer this is 5 s or more; and of 64 questions at once one is easily lost.
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
    """Replace this process's line `hosts:` of nsswitch.conf(5). Only the glibc since 2.34 can take it back."""
    name, _, version = (
        (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ") if sys.platform == "linux" else ("",) * 3
    )
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 34):
        return False
    return ctypes.CDLL(None).__nss_configure_lookup(b"hosts", where) == 0  # type: ignore[no-any-return]


def serve(listener: int, address: list[Any]) -> None:
    """Serve the store on a socket that listens already, until killed."""
    host, port, agent, shared = address
    process.die_with_parent(agent)
    _look_up_hosts(b"files")
    TCPStore = sys.modules["torch.distributed"].TCPStore
    kept = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener)
    if shared:
        kept.set(_OURS, "")
    threading.Event().wait()
    del kept
