"""A job's record, as it is found on the disk."""

from __future__ import annotations

from pathlib import Path

from tests.support.command import Launchpad

FAILS = (
    "import os, sys, time\nrank = os.environ['RANK']\nprint('out of', rank, flush=True)\n"
    "print('err of', rank, file=sys.stderr, flush=True)\nopen(f'up{rank}', 'w').close()\n"
    "while not all(os.path.exists(f'up{r}') for r in range(int(os.environ['WORLD_SIZE']))): time.sleep(0.01)\n"
    "if rank == '1': raise ValueError('no good')\ntime.sleep(600)\n"
)


def store_of(launchpad: Launchpad) -> Path:
    return Path(launchpad.environ["XDG_STATE_HOME"]) / "launchpad" / "jobs"
