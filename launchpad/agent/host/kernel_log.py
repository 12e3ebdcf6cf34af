"""What the kernel's log says of this node's hardware: errors of GPUs, memory, disks. Only root may see it on some."""

from __future__ import annotations

import os
import re

from ...protocol.printable import printable

_SIGNS = re.compile(
    r"NVRM: Xid |.*\bMachine check events logged|.*\bMemory failure:|.*\bI/O error, dev |.*\bUncorrected error\b"
)

_MOST = 160


def hardware_errors(since: float, path: str = "/dev/kmsg") -> list[str]:
    """The lines about it since then, in seconds of time.monotonic(); none if the log can't be read."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    found = []
    try:
        while record := os.read(log, 8192):
            found += [text for at, text in _records(record) if at >= since and _SIGNS.match(text)]
    except BrokenPipeError:  # a message was overwritten while we read
        pass
    except OSError:  # EAGAIN: the end of it
        pass
    finally:
        os.close(log)
    return [printable(text)[:_MOST] for text in found]


def _records(data: bytes) -> list[tuple[float, str]]:
    """Records like `6,339,5140900,-;NVRM: Xid …`: seconds since the boot, and the message."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        head, semicolon, text = line.partition(";")
        fields = head.split(",")
        if semicolon and len(fields) > 2 and fields[2].isdecimal():
            found.append((int(fields[2]) / 1e6, text))
    return found
