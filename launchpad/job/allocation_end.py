"""When the batch allocation ends: who says so, and what the answer means. Pure.

SLURM_JOB_ID       Slurm: SLURM_JOB_END_TIME, in seconds since 1970; since Slurm 23.02
FLUX_JOB_ID        Flux: `flux job timeleft` prints seconds
FLUX_URI           the same, in all that flux batch and flux alloc set
PBS_JOBID          PBS, Torque: `qstat -f ID` prints when the job started, and its walltime
LSB_JOBID          LSF: `bjobs -o time_left ID` prints hours and minutes
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

# The answer of bjobs: `0:56 L`. L: a limit; E and X: an estimate, at which nothing ends.
_TIME_LEFT = re.compile(r"([0-9]{1,6}):([0-9]{2}) L")

# Of `qstat -f`: `    Resource_List.walltime = 01:00:00`.
_ATTRIBUTE = re.compile(r"^\s*([\w.]{1,80}) = (.{1,200})$", re.MULTILINE)
_WALLTIME = re.compile(r"(?:(?:([0-9]{1,5}):)?([0-9]{1,5}):)?([0-9]{1,9})")
_DATE = "%a %b %d %H:%M:%S %Y"  # of PBS, in the machine's time zone


class EndSource(NamedTuple):
    """Who says when the allocation ends: a variable, or a command."""

    scheduler: str
    variable: str = ""
    command: tuple[str, ...] = ()


def find_end(environ: Mapping[str, str]) -> EndSource | None:
    """Who says when the allocation ends that this process is in; None if it is in none, or nobody says so."""
    if environ.get("FLUX_JOB_ID") or environ.get("FLUX_URI"):
        return EndSource("Flux", command=("flux", "job", "timeleft"))
    if environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOB_END_TIME"):
        return EndSource("Slurm", "SLURM_JOB_END_TIME")
    if job := environ.get("PBS_JOBID"):
        return EndSource("PBS", command=("qstat", "-f", job))
    if job := environ.get("LSB_JOBID"):
        index = environ.get("LSB_JOBINDEX", "0")
        name = f"{job}[{index}]" if index != "0" else job
        return EndSource("LSF", command=("bjobs", "-noheader", "-o", "time_left", name))
    return None


def parse_end(source: EndSource, text: str, now: float) -> float | None:
    """When the allocation ends, in seconds since 1970, as are `now` and the result; None if `text` doesn't say so."""
    text = text.strip()
    match source.scheduler:
        case "Slurm":
            return float(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None
        case "Flux":
            return _end_after(text, now)
        case "LSF":
            found = _TIME_LEFT.match(text)
            return now + 3600.0 * int(found[1]) + 60.0 * int(found[2]) if found else None
    return _end_of_pbs(dict(_ATTRIBUTE.findall(text)), now)


def _end_after(seconds: str, now: float) -> float | None:
    try:
        left = float(seconds)
    except ValueError:
        return None
    return now + left if math.isfinite(left) and left >= 0 else None


def _end_of_pbs(attributes: Mapping[str, str], now: float) -> float | None:
    if left := attributes.get("Walltime.Remaining"):  # Torque
        return _end_after(left, now)
    walltime = _WALLTIME.fullmatch(attributes.get("Resource_List.walltime", "").strip())
    started = attributes.get("stime") or attributes.get("start_time", "")
    if walltime is None or not started:
        return None
    try:
        begun = time.mktime(time.strptime(" ".join(started.split()), _DATE))
    except (ValueError, OverflowError):
        return None
    hours, minutes, seconds = (int(part or 0) for part in walltime.groups())
    return begun + 3600.0 * hours + 60.0 * minutes + seconds
