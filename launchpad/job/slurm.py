"""A Slurm allocation: its nodes and ranks, and the srun line that starts launchpad on each node. Pure.

SLURM_JOB_ID           there is an allocation
SLURM_JOB_NODELIST     its nodes, in the order of SLURM_NODEID
SLURM_NTASKS           set if tasks were asked for; then SLURM_TASKS_PER_NODE has those of each node: 2(x3),1
SLURM_STEP_ID          set if srun started us: for salloc's shell (interactive), or as one of its tasks
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from launchpad.errors import UsageError
from launchpad.job.allocation import INSTEAD, expand_hostlist, is_one_of_several
from launchpad.job.hosts import MOST_SLOTS, Host, Nproc, hosts_of_slots
from launchpad.named import NamedTuple

# The id of the step in which salloc runs a shell on the first node (LaunchParameters=use_interactive_step).
_INTERACTIVE = "4294967290"

# One of these says that the job has asked for GPUs.
_GPUS = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_ON_NODE"),
    *("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"),
)

# srun reads these as options, about tasks other than ours. The ranks get them all the same, as in the batch script.
_OPTIONS_OF_TASKS = frozenset(
    f"SLURM_{name}"
    for name in (
        "CPUS_PER_TASK NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET NTASKS_PER_TRES GPUS "
        "GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK TRES_PER_TASK GPU_BIND MEM_BIND DISTRIBUTION HOSTFILE HINT "
        "THREADS_PER_CORE EXACT EXCLUSIVE WHOLE"
    ).split()
) | {"SRUN_CPUS_PER_TASK"}

_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,7})\))?")


class SlurmJob(NamedTuple):
    """The allocation that this process may use all of."""

    hosts: tuple[Host, ...]  # with the tasks of each as mentions; none if nothing says which nodes there are
    nproc: Nproc | None  # instead of the mentions
    here: str  # which of the nodes this process runs on; "": none of them


def find_job(environ: Mapping[str, str], nproc: Nproc | None, target: Sequence[str]) -> SlurmJob | None:
    """The allocation, if this process is free to use all of it. Raises UsageError if srun started it several times.

    `nproc` and `target` are those of the command line: with `nproc`, the allocation's tasks don't matter.
    """
    if "TORCHELASTIC_RUN_ID" in environ or not environ.get("SLURM_JOB_ID"):  # a rank's launchpads stay where it is
        return None
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
    interactive = step == _INTERACTIVE or (step != "" and "SLURM_PTY_PORT" in environ)
    if step and not interactive:
        tasks = _number(environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1:
            nodes = max(1, _number(environ.get("SLURM_STEP_NUM_NODES", "1")))
            raise UsageError(_started_by_srun(tasks, nproc or max(1, tasks // nodes), target))
        return None
    if is_one_of_several(environ):
        return None
    variable = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    names = expand_hostlist(environ.get(variable, ""), variable)
    if not names:
        if _number(environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))) > 1:
            raise UsageError(f"{variable} lists no nodes of this Slurm allocation; {INSTEAD}")
        return SlurmJob((), None, "")
    counts = [1] * len(names)
    if interactive:  # the other variables are about this step
        counts = [max(1, _number(environ.get("SLURM_NTASKS_PER_NODE", "1")))] * len(names)
    elif "SLURM_NTASKS" in environ and nproc is None:
        counts = _tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""), len(names))
    hosts = hosts_of_slots(zip(names, counts, [variable] * len(names), strict=True))
    has_gpus = any(environ.get(name, "0") not in ("", "0") for name in _GPUS)
    return SlurmJob(hosts, "gpu" if has_gpus and max(counts) == 1 else None, environ.get("SLURMD_NODENAME", ""))


def srun_line(nodes: Sequence[str], every: bool, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The srun command that starts a task on each of these nodes, but for the task's own words, and its environment.

    A node that is there several times gets so many. `every`: these are all nodes of the allocation, each once.
    """
    count = len(set(nodes))
    several = count < len(nodes)
    argv = [
        *("srun", f"--nodes={count}", f"--ntasks={len(nodes)}"),
        *(["--distribution=arbitrary", "--overcommit"] if several else ["--ntasks-per-node=1"]),
        "--overlap",  # with the batch script, and with other steps
        *("--no-kill", "--kill-on-bad-exit=0", "--wait=0"),  # who ends is for launchpad to judge
        *("--cpu-bind=none", "--mpi=none", "--export=ALL"),
        *_all_gpus(environ),
        *([] if every and not several else [f"--nodelist={','.join(nodes)}"]),
    ]
    moved = {name: value for name, value in environ.items() if name in _OPTIONS_OF_TASKS}
    if moved:
        argv += ["env", *(f"{name}={value}" for name, value in sorted(moved.items()))]
    return argv, {name: value for name, value in environ.items() if name not in moved}


def _all_gpus(environ: Mapping[str, str]) -> list[str]:
    """The option that gives the one task on a node all GPUs that the job has there, where that is not the default.

    With --gpus-per-task it would get those of one of the job's tasks, with --gpus an arbitrary share.
    """
    if per_task := environ.get("SLURM_GPUS_PER_TASK"):
        kind, colon, count = per_task.rpartition(":")
        tasks = _TASKS.fullmatch(environ.get("SLURM_TASKS_PER_NODE", "")) if "SLURM_NTASKS" in environ else None
        number = _number(count) * int(tasks[1]) if tasks else 0
    elif "SLURM_GPUS_PER_NODE" not in environ:
        kind, colon, count = environ.get("SLURM_GPUS", "").rpartition(":")
        number, rest = divmod(_number(count), max(1, _number(environ.get("SLURM_JOB_NUM_NODES", ""))))
        number = 0 if rest else number  # the nodes have different numbers, which srun can't be asked for
    else:
        return []
    return [f"--gpus-per-node={kind}{colon}{number}"] if number else []


def _started_by_srun(tasks: int, nproc: Nproc, target: Sequence[str]) -> str:
    line = shlex.join(["launchpad", "run", "--nproc", str(nproc), *target])
    return (
        f"srun has started {tasks} launchpads, and each would run the whole job; without srun, one uses all nodes of "
        f"the allocation: {line} (or start one on each node, with srun --ntasks-per-node=1 and --nnodes); if no srun "
        "has started this one, --hosts localhost is this machine alone"
    )


def _tasks_per_node(text: str, count: int) -> list[int]:
    """`2(x2),1` → 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None or not 0 < int(match[1]) <= MOST_SLOTS:
            raise UsageError(f"SLURM_TASKS_PER_NODE: {text[:60]!r} doesn't list tasks, as in 2(x3),1; give --nproc")
        found += [int(match[1])] * min(int(match[2] or 1), count + 1)
    if len(found) != count:
        raise UsageError(f"SLURM_TASKS_PER_NODE: {text[:60]!r} is not for {count} nodes; give --nproc")
    return found


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
