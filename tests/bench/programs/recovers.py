"""Reduces without end, notes each attempt's first result, and does what it finds asked for: recovers.py FOLDER."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
rank = os.environ["RANK"]


def note(what: str) -> None:
    """All hosts are on one machine, so their clocks are one."""
    with open(folder / "marks", "a") as marks:
        marks.write(f"{what} {rank} {time.monotonic()} {os.uname().nodename}\n")


dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
note(f"reduced-{int(total)}")
while not (folder / "over").exists():
    for asked, victim in (("kill", os.getpid()), ("agent", os.getppid())):
        path = folder / f"{asked}-{rank}"
        if path.exists():
            path.unlink()
            note(asked)
            os.kill(victim, signal.SIGKILL)
    dist.all_reduce(total)
    time.sleep(0.005)
