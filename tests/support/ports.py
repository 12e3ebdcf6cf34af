"""Ports for the tests' servers."""

import functools
import itertools
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    """A port where nobody listens, at any address; not one of those that the kernel hands out."""
    while True:
        with socket.socket() as probe:
            port = next(_ports())
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


@functools.cache
def _ports() -> Iterator[int]:
    """Those of this worker of pytest-xdist, in turns: a port that a test was given comes again much later."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000 + worker, max(first_ephemeral, 20_000), workers)
    start = secrets.randbelow(len(ports))  # tests in another session have ports, too; hypothesis seeds `random`
    return itertools.cycle([*ports[start:], *ports[:start]])
