"""job/allocation_end: when batch allocations end. Values only."""

from __future__ import annotations

import time

import pytest

from launchpad.job.allocation_end import EndSource, find_end, parse_end

NOW = 1_700_000_000.0
BEGUN = time.ctime(NOW - 600)
PBS = f"""Job Id: 12.server
    Job_Name = train
    Resource_List.ncpus = 4
    Resource_List.walltime = 01:30:00
    resources_used.walltime = 00:10:00
    stime = {BEGUN}
    Variable_List = PBS_O_HOME=/home/me,
\tPBS_O_LANG=C
"""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"FLUX_JOB_ID": "f2", "SLURM_JOB_ID": "7"}, EndSource("Flux", command=("flux", "job", "timeleft"))),
        ({"FLUX_URI": "local:///x"}, EndSource("Flux", command=("flux", "job", "timeleft"))),
        ({"SLURM_JOB_ID": "7"}, EndSource("Slurm", "SLURM_JOB_END_TIME")),
        ({"PBS_JOBID": "12.server"}, EndSource("PBS", command=("qstat", "-f", "12.server"))),
        (
            {"LSB_JOBID": "5", "LSB_JOBINDEX": "0"},
            EndSource("LSF", command=("bjobs", "-noheader", "-o", "time_left", "5")),
        ),
        (
            {"LSB_JOBID": "5", "LSB_JOBINDEX": "3"},
            EndSource("LSF", command=("bjobs", "-noheader", "-o", "time_left", "5[3]")),
        ),
    ],
)
def test_who_is_asked(environ: dict[str, str], expected: EndSource | None) -> None:
    assert find_end(environ) == expected


@pytest.mark.parametrize(
    ("scheduler", "text", "left"),
    [
        ("Slurm", "1700000100\n", 100.0),
        ("Slurm", "", None),
        ("Slurm", "soon", None),
        ("Flux", "3599.5\n", 3599.5),
        ("Flux", "0\n", 0.0),
        ("Flux", "infinity\n", None),
        ("Flux", "nan\n", None),
        ("LSF", "0:56 L\n", 56 * 60.0),
        ("LSF", "120:00 L", 120 * 3600.0),
        ("LSF", "0:56 E", None),
        ("LSF", "-\n", None),
        ("PBS", PBS, 5400.0 - 600),
        ("PBS", PBS.replace("stime", "start_time"), 5400.0 - 600),
        ("PBS", PBS.replace("01:30:00", "5400"), 5400.0 - 600),
        ("PBS", f"{PBS}    Walltime.Remaining = 4711\n", 4711.0),
        ("PBS", PBS.replace("Resource_List.walltime", "x"), None),
        ("PBS", PBS.replace(BEGUN, "yesterday"), None),
        ("PBS", "qstat: Unknown Job Id", None),
    ],
)
def test_what_the_answer_means(scheduler: str, text: str, left: float | None) -> None:
    found = parse_end(EndSource(scheduler), text, NOW)
    assert found == (None if left is None else NOW + left)
