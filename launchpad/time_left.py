"""`launchpad.stop_by`: how long a rank has until its job, or its node, is stopped."""

import os
import time

# Names the file that the node's agent keeps (agent/ranks/time_limit.py): a time in seconds since 1970, or no file.
VARIABLE = "LAUNCHPAD_STOP_BY"


def stop_by() -> float | None:
    """Seconds until the ranks of this job, or of this node, are stopped; None if no such time is known.

    It is the first of: `--timeout`, `--stop-before`, and the end of the batch allocation. Once the ranks have been
    asked to stop, it is the time until they are killed. It never falls below 0. It may change while the job runs, so
    ask again before each decision; that reads a small file, in about 15 µs. Outside of a job it is None.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return max(0.0, float(file.read(64)) - time.time())
    except (OSError, ValueError):  # no time is known
        return None
