"""Asks the scheduler when the batch allocation ends that launchpad runs in."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping

from launchpad.errors import UsageError
from launchpad.time_left import stop_by

# Schedulers answer in 100 ms. For what only ranks may want to know, the start doesn't wait for a slow one.
ASK_SECONDS = 5.0

# With one of these, the process may be in an allocation.
_NONE = "this machine is in no allocation of Slurm, PBS, LSF or Flux"
_MARKS = ("SLURM_JOB_ID", "SLURM_JOB_END_TIME", "FLUX_JOB_ID", "FLUX_URI", "PBS_JOBID", "LSB_JOBID")


def allocation_end(environ: Mapping[str, str]) -> float | None:
    """When the allocation ends, or the job of which we are a rank, in seconds since 1970; None if nobody says so."""
    left = stop_by()
    outer = None if left is None else time.time() + left
    ends = (outer, _asked(tuple(environ.get(name, "") for name in _MARKS))[0])
    return min((end for end in ends if end is not None), default=None)


def stop_time(before: float, environ: Mapping[str, str]) -> float:
    """When the job is to be asked to stop, in seconds since 1970: so long before the allocation ends.

    Raises UsageError if nobody says when that is.
    """
    end, why = _asked(tuple(environ.get(name, "") for name in _MARKS))
    if end is None:
        raise UsageError(f"--stop-before needs to know when the allocation ends, and {why}; use --timeout")
    return end - before


@functools.cache
def _asked(marks: tuple[str, ...]) -> tuple[float | None, str]:
    """When the allocation ends, or why that isn't known. `marks` only tells one allocation from another."""
    if not any(marks):
        return None, _NONE
    from launchpad.job.allocation_end import find_end, parse_end

    source = find_end(os.environ)
    if source is None:
        return None, _NONE
    if source.variable:
        text = os.environ.get(source.variable, "")
        why = f"{source.variable}, which Slurm 23.02 and newer set, doesn't say so; set it to seconds since 1970"
    else:
        from launchpad.runner.allocation import run_command

        try:
            text = run_command(source.command, ASK_SECONDS, "")
        except UsageError as error:
            return None, str(error)
        why = f"{' '.join(source.command)} doesn't say so"
    return parse_end(source, text, time.time()), why
