"""Two users who lease two of eight free GPUs at the same moment, again and again: `gpu_leases.py --tries 1000`.

As root, they are two users indeed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import uuid

from launchpad.agent.host import gpu_leases
from launchpad.agent.host.nvidia_smi import GpuDevice
from launchpad.protocol.commands import LeaseGpus

_NOBODY = 65534


def clashes(tries: int, users: int = 2, count: int = 2) -> list[str]:
    """What went wrong in so many tries."""
    found = [GpuDevice(index, f"GPU-{uuid.uuid4()}", "H100", "", 0, 1, False, ()) for index in range(8)]
    place = gpu_leases.folder()
    wrong: list[str] = []
    try:
        for number in range(tries):
            uuids = _one_try(place, found, users, count)
            if len(set(uuids)) != users * count:
                wrong.append(f"try {number}: {uuids}")
    finally:
        for device in found:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(gpu_leases._path(place, device.uuid))
    return wrong


def _one_try(place: str, found: list[GpuDevice], users: int, count: int) -> list[str]:
    """The UUIDs that all users together have got, each of them in a process of its own."""
    answers, answer = os.pipe()
    starts, start = os.pipe()
    held, hold = os.pipe()
    children = []
    for user in range(users):
        child = os.fork()
        if child == 0:
            os.close(start)
            os.close(hold)
            if os.getuid() == 0 and user:
                os.setuid(_NOBODY)
            os.read(starts, 1)  # until all are here
            uuids, _, problem = gpu_leases.lease(place, found, LeaseGpus([], count, True, "bench"))
            os.write(answer, f"{','.join(uuids) or problem}\n".encode())
            os.read(held, 1)  # until all have answered
            os._exit(0)
        children.append(child)
    os.close(starts)
    os.close(held)
    os.close(start)
    said = b""
    while said.count(b"\n") < users:
        said += os.read(answers, 65536)
    os.close(hold)
    for child in children:
        os.waitpid(child, 0)
    os.close(answers)
    os.close(answer)
    return [uuid for line in said.decode().split() for uuid in line.split(",")]


def main() -> None:
    """Try, and say what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=1000)
    tries = parser.parse_args().tries
    begun = time.monotonic()
    wrong = clashes(tries)
    print("\n".join(wrong))
    print(f"{len(wrong)} of {tries} tries went wrong, in {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
