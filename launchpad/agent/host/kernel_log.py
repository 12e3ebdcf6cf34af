"""What the kernel's log says of this node's hardware: errors of GPUs, memory, disks. Only root may see it on some."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ...protocol.printable import printable

_SIGNS = re.compile(
    r"NVRM: Xid |.*\bMachine check events logged|.*\bMemory failure:|.*\bI/O error, dev |.*\bUncorrected error\b"
)

_MOST = 160


def hardware_errors(since: float, path: str = "/dev/kmsg") -> list[str]:
    """The lines about it since then, in seconds of time.monotonic(); none if the log can't be read."""
    found: list[str] = []
    try:
        for record in records(path):
            found += [text for at, text in _dated(record) if at >= since and _SIGNS.match(text)]
    except OSError:
        pass
    return [printable(text)[:_MOST] for text in found]


def records(path: str = "/dev/kmsg") -> Iterator[str]:
    """The log's records that there are by now, oldest first. Raises OSError if it can't be read."""
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # a message was overwritten meanwhile
                continue
            except BlockingIOError:  # the end of it
                return
            if not record:
                return
            yield record.decode(errors="replace")
    finally:
        os.close(log)


def _dated(record: str) -> list[tuple[float, str]]:
    """Of records like `6,339,5140900,-;NVRM: Xid …`: seconds since the boot, and the message."""
    found = []
    for line in record.splitlines():
        head, semicolon, text = line.partition(";")
        fields = head.split(",")
        if semicolon and len(fields) > 2 and fields[2].isdecimal():
            found.append((int(fields[2]) / 1e6, text))
    return found
