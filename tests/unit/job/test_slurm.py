"""Slurm's variables: nodes, ranks, and what is kept from srun."""

from __future__ import annotations

import re

import pytest

from launchpad.errors import UsageError
from launchpad.job.hosts import Nproc
from launchpad.job.slurm import SlurmJob, find_job, srun_line

# What there is and who may use it, from the variables alone.

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[08-09],gpu1",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURMD_NODENAME": "n08",
}


@pytest.mark.parametrize(
    ("more", "counts", "nproc"),
    [
        ({}, [1, 1, 1], None),
        ({"SLURM_TASKS_PER_NODE": "32(x3)"}, [1, 1, 1], None),  # nobody has asked for tasks
        ({"SLURM_NTASKS": "9", "SLURM_TASKS_PER_NODE": "4(x2),1"}, [4, 4, 1], None),
        ({"SLURM_NTASKS": "3", "SLURM_GPUS_ON_NODE": "4"}, [1, 1, 1], "gpu"),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, [1, 1, 1], "gpu"),
        ({"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_GPUS": "0,1,2,3"}, [2, 2, 2], None),
        (
            # salloc's shell, which Slurm runs in a step of its own
            {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"},
            [1, 1, 1],
            None,
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "1", "SLURM_STEP_NUM_TASKS": "3"}, [1, 1, 1], None),
    ],
)
def test_nodes_and_ranks(more: dict[str, str], counts: list[int], nproc: Nproc | None) -> None:
    job = find_job(BATCH | more, None, ())
    assert job is not None
    assert [host.name for host in job.hosts] == ["n08", "n09", "gpu1"]
    assert [host.mentions for host in job.hosts] == counts
    assert (job.nproc, job.here) == (nproc, "n08")


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_JOB_ID": ""},
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # the one task of a step stays where it is
        {"TORCHELASTIC_RUN_ID": "none"},  # in a rank
        {"OMPI_COMM_WORLD_SIZE": "4"},  # under mpirun
    ],
)
def test_who_may_not_use_all_of_it(more: dict[str, str]) -> None:
    assert find_job(BATCH | more, None, ()) is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"SLURM_JOB_NODELIST": "", "SLURM_JOB_NUM_NODES": "3"},
            "SLURM_JOB_NODELIST lists no nodes of this Slurm allocation; name the hosts",
        ),
        ({"SLURM_JOB_NODELIST": "n[1-"}, "a bracket of 'n[1-' is not closed"),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x2)"}, "'1(x2)' is not for 3 nodes; give --nproc"),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "many"}, "'many' doesn't list tasks, as in 2(x3),1"),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x9999999)"}, "'1(x9999999)' is not for 3 nodes"),
    ],
)
def test_variables_that_make_no_sense(more: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        find_job(BATCH | more, None, ())


def test_tasks_do_not_matter_where_the_ranks_are_given() -> None:
    environ = {name: value for name, value in BATCH.items() if name != "SLURM_TASKS_PER_NODE"} | {"SLURM_NTASKS": "9"}
    job = find_job(environ, 2, ())
    assert job is not None
    assert [host.name for host in job.hosts] == ["n08", "n09", "gpu1"]


@pytest.mark.parametrize("more", [{}, {"SLURM_JOB_NUM_NODES": "1"}, {"SLURM_JOB_NODELIST": ""}])
def test_without_a_list_of_nodes_there_is_nothing_to_use(more: dict[str, str]) -> None:
    assert find_job({"SLURM_JOB_ID": "7"} | more, None, ()) == SlurmJob((), None, "")


def test_what_is_about_other_tasks_is_kept_from_srun_and_given_to_the_ranks() -> None:
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_PER_TASK": "1"}
    argv, left = srun_line(["a", "b"], True, environ)
    assert left == {"PATH": "/bin", "SLURM_JOB_ID": "7"}
    assert argv[-3:] == ["env", "SLURM_CPUS_PER_TASK=8", "SLURM_GPUS_PER_TASK=1"]
    assert srun_line(["a", "b"], False, left)[0][-1] == "--nodelist=a,b"
    layout = ["--nodes=2", "--ntasks=3", "--distribution=arbitrary", "--overcommit"]
    assert srun_line(["a", "b", "a"], True, left)[0][1:5] == layout
    assert srun_line(["a", "b", "a"], True, left)[0][-1] == "--nodelist=a,b,a"
    tasks = {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
    assert "--gpus-per-node=4" in srun_line(["a", "b"], True, environ | tasks)[0]
    assert "--gpus-per-node=4" in srun_line(["a"], False, {"SLURM_GPUS": "8", "SLURM_JOB_NUM_NODES": "2"})[0]
    assert "--gpus" not in str(srun_line(["a", "b"], True, {"SLURM_GPUS": "7", "SLURM_JOB_NUM_NODES": "2"})[0])
    assert "--gpus-per-node=a100:8" in srun_line(["a"], False, {"SLURM_GPUS_PER_TASK": "a100:2", **tasks})[0]
