"""Hangs, or only seems to, as its argument says. Says `ready` once, before that."""

from __future__ import annotations

import os
import sys
import threading
import time

RANK = int(os.environ["RANK"])


def lock() -> None:
    """The second acquire never returns."""
    mutex = threading.Lock()
    mutex.acquire()
    take(mutex)


def take(mutex: threading.Lock) -> None:
    mutex.acquire()


def sleeping() -> None:
    threading.Event().wait(timeout=1e6) if RANK else time.sleep(1e6)


def loop() -> None:
    """Rank 1 computes for ever, the other waits."""
    os.nice(19)  # others may need the processor
    while RANK:
        pass
    sleeping()


def slow() -> None:
    """Rank 1 computes for a while and says nothing; then all go on."""
    end = time.monotonic() + float(sys.argv[2])
    while RANK and time.monotonic() < end:
        pass
    folder = sys.argv[3]
    if RANK:
        open(f"{folder}/done", "w").close()
    while not os.path.exists(f"{folder}/done"):
        time.sleep(0.05)


def child() -> None:
    """Both wait for a child that computes for a while."""
    import subprocess

    code = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code, sys.argv[2]], check=True)


def fed() -> None:
    """A child of each sends to it, or to another child, for a while, over a socket whose bytes nobody counts."""
    import socket

    kind = socket.SOCK_DGRAM if RANK else socket.SOCK_STREAM
    source, drain = socket.socketpair(type=kind)
    if os.fork() == 0:
        drain.close()
        for _ in range(int(20 * float(sys.argv[2]))):
            source.send(b"x" * 2500)
            time.sleep(0.05)
        source.send(b"x")
        os._exit(0)
    source.close()
    if RANK and os.fork():
        os.wait()
        os.wait()
        return
    while len(drain.recv(4096)) > 1:
        pass


if __name__ == "__main__":
    print("ready", flush=True)
    globals()[sys.argv[1]]()
