"""A record whose output is known, and how it is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from launchpad.protocol.events import JobPlanned, Restarted
from launchpad.record.event_lines import line_of
from tests.support.command import Launchpad
from tests.support.records import store_of

JOB = "0a1b2c3d"
AGO = 3600.0  # when the job began, in seconds before now

# (attempt, rank, stream, seconds after the job began, text); in the order in which it arrived
Piece = tuple[int, int, int, float, str]
PIECES: list[Piece] = [
    (0, 0, 1, 1.0, "up\nloss 0.5\n"),
    (0, 1, 1, 1.01, "up\nloss 0.7\n"),
    (0, 2, 1, 1.2, "up\n"),
    (0, 1, 2, 1.3, "a warn"),
    (0, 0, 1, 1.25, "step 1\n"),
    (0, 1, 2, 1.31, "ing\n"),
    (1, 0, 1, 3500.0, "again\n"),
    (1, 2, 2, 3500.0, "again\n"),
    (1, 1, 1, 3500.02, "again\n"),
]


def record(launchpad: Launchpad, pieces: Sequence[Piece] = PIECES) -> Path:
    """A job's record, as it would have been written. Its monotonic clock began 1000 s before the job."""
    folder = store_of(launchpad) / JOB
    folder.mkdir(parents=True)
    nodes = [["n", [0, 1, 2]]]
    folders = {str(rank): str(rank) for rank in range(3)}
    planned = JobPlanned(1000 * 10**9, time.time() - AGO, JOB, 1, "", [], "/", nodes, folders, 0.0, "")
    lines = [line_of(planned)]
    attempt = 0
    for number, rank, stream, at, text in pieces:
        if number > attempt:
            attempt = number
            lines.append(line_of(Restarted(0, number, 1, 1, 1, -1)))
        name = f"attempt_{attempt}/{rank}/{'stdout' if stream == 1 else 'stderr'}.log"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        offset = path.stat().st_size if path.exists() else 0
        with path.open("a") as file:
            file.write(text)
        said = {"time": int((1000 + at) * 1e9), "rank": rank, "stream": stream, "file": name}
        lines.append(json.dumps({"event": "Output", **said, "offset": offset, "length": len(text)}))
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def logs(launchpad: Launchpad, *words: object) -> list[str]:
    done = launchpad.run("logs", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
