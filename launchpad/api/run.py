"""`launchpad.run`: does for a function, in the caller's process, what the command does for a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, overload

from launchpad.api.job import FunctionJob, Group, check, prepare
from launchpad.api.options import JobOptions, is_count, run_options
from launchpad.api.packing import name_of, pack
from launchpad.api.results import ResultCollector, Results
from launchpad.api.screen import Screen
from launchpad.errors import UsageError
from launchpad.job.limits import RestartLimit, Restarts
from launchpad.job.spec import Bind, Target
from launchpad.runner.doors import NOT_FOR_RUN

if TYPE_CHECKING:
    from launchpad.api.roles import Role


@overload
def run(
    fn: Mapping[str, Role],
    /,
    *,
    hosts: str | Sequence[str] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    wdir: str | None = None,
    ssh_config: str | None = None,
    **more: Unpack[JobOptions],
) -> dict[str, Any]: ...


@overload
def run(
    fn: Callable[..., Any],
    /,
    *args: Any,
    nproc: int | Literal["auto", "cpu", "gpu"] | None = None,
    hosts: str | Sequence[str] | None = None,
    backend: Group | None = "auto",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    wdir: str | None = None,
    sync: bool = False,
    ssh_config: str | None = None,
    max_restarts: int | tuple[int, float] = 0,
    restart: Restarts = "judged",
    progress: str | Sequence[str] = (),
    input_rank: int = 0,
    debug: int | tuple[int, int] | None = None,
    bind: Bind = "none",
    **more: Unpack[JobOptions],
) -> Results: ...


def run(
    fn: Callable[..., Any] | Mapping[str, Role],
    /,
    *args: Any,
    nproc: int | Literal["auto", "cpu", "gpu"] | None = None,
    hosts: str | Sequence[str] | None = None,
    backend: Group | None = "auto",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    wdir: str | None = None,
    sync: bool = False,
    ssh_config: str | None = None,
    max_restarts: int | tuple[int, float] = 0,
    restart: Restarts = "judged",
    progress: str | Sequence[str] = (),
    input_rank: int = 0,
    debug: int | tuple[int, int] | None = None,
    bind: Bind = "none",
    **more: Unpack[JobOptions],
) -> Results | dict[str, Any]:
    """Call `fn(*args)` on each of `nproc` ranks, and return their results in rank order.

        def mean(x):
            dist.all_reduce(x)
            return x / dist.get_world_size()

        results = launchpad.run(mean, torch.arange(3.0), nproc=4)

    Without `args`, a function that takes (rank, size) gets them. Each rank is a process of its own, with the process
    group initialized: `backend` is "gloo", "nccl" or "mpi"; "auto" means nccl if each rank has a GPU (and gloo for CPU
    tensors), else gloo; with None there is no group, and torch is not needed. What ranks print goes to the caller's
    sys.stdout, each line with its rank. No `if __name__ == "__main__"` is needed.

    `nproc`, `hosts` ("a:4,b:4", or a list), `timeout` (seconds), `env`, `wdir`, `sync`, `ssh_config`, `max_restarts` (a
    number, or (10, 3600.0) for 10 in any hour), `restart`, `progress` (a pattern, or several), `input_rank` (which
    reads the caller's standard input), `debug` (a rank, or (rank, port)) and `bind` are options of `launchpad run`, and
    so are `more`: `stall_timeout`, `spares`, `report` and others (`launchpad help functions`). The ranks run in the
    caller's interpreter; other hosts use the one at that path, else python3.

    Several functions, each on ranks of its own, are one job: `launchpad.run({"rollout": Role(serve, service=True),
    "train": Role(step, nproc=4)})` returns a dict with the results of each role that is no service (`launchpad.Role`).

    The function and its arguments are pickled with cloudpickle: what `__main__` defines by value, what modules define
    by reference. Large arrays and CPU tensors, both ways, are written once and mapped; tensors come back on the CPU.

    Raises the exception of the rank that failed first, after the other ranks are stopped; its `__cause__` has the
    traceback in the rank. Raises RankError for a rank that died, exited without returning, or raised an exception that
    can't be unpickled here; JobTimeout; UnpicklableError, which names the part; UsageError; NodeError for hosts that
    can't be reached or are lost; and KeyboardInterrupt on Ctrl-C, which stops the ranks. Ranks can't call it.
    """
    options = partial(run_options, "launchpad.run", more, JobOptions, NOT_FOR_RUN)
    if isinstance(fn, Mapping):
        from launchpad.api.roles import run_roles

        _refuse_beside_roles(args=args, nproc=nproc, max_restarts=max_restarts, restart=restart != "judged",
                             progress=progress, input_rank=input_rank, debug=debug is not None, bind=bind != "none",
                             backend=backend != "auto")  # fmt: skip
        return run_roles(fn, hosts, timeout, env, wdir, ssh_config, sync, options)
    check("launchpad.run", backend, timeout)
    _check_ranks(input_rank, debug)
    patterns = (progress,) if isinstance(progress, str) else tuple(progress)
    limit = _restart_limit(max_restarts, restart, patterns)
    request = prepare(
        *(Target("pickled", name_of(fn)), nproc, hosts, backend, env, wdir),
        sync=sync,
        ssh_config=ssh_config,
        bind=bind,
        more=options,
    )
    limits = request.spec.limits._replace(timeout=timeout, max_restarts=limit, restart=restart, progress=patterns)
    spec = request.spec._replace(
        limits=limits,
        input_rank=input_rank,
        debug=(debug, 0) if isinstance(debug, int) else debug,
    )
    call = pack(fn, args, "" if backend == "auto" else backend, spec.cwd)
    try:
        screen = Screen(sys.stdout, sys.stderr)
        job = FunctionJob(request._replace(spec=spec), call, screen, ResultCollector)
        try:
            job.run()
            return job.results()
        finally:
            job.end()
    finally:
        os.close(call)


def _check_ranks(input_rank: object, debug: object) -> None:
    if not isinstance(input_rank, int) or input_rank < 0:
        raise UsageError(f"input_rank={input_rank!r}: give a rank, from 0 on")
    pair = isinstance(debug, tuple) and len(debug) == 2 and all(map(is_count, debug))
    if not (debug is None or is_count(debug) or pair):
        raise UsageError(f"debug={debug!r}: give a rank, or (rank, port)")


def _refuse_beside_roles(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"launchpad.run: {name} can't be given beside roles; give it to a Role if it has that")


def _restart_limit(max_restarts: int | tuple[int, float], restart: Restarts, progress: Sequence[str]) -> RestartLimit:
    if restart not in get_args(Restarts):
        raise UsageError(f"restart={restart!r}: give 'judged' or 'always'")
    given: Any = max_restarts if isinstance(max_restarts, tuple | list) else (max_restarts, None)
    most, period = given if len(given) == 2 else (None, None)
    timed = isinstance(period, int | float) and period > 0
    if not isinstance(most, int) or most < 0 or not (period is None or timed):
        raise UsageError(f"max_restarts={max_restarts!r}: give a number, or (number, seconds)")
    if not most and (restart == "always" or progress):
        raise UsageError("restart='always' and progress only work with restarts; add max_restarts=N, or leave them out")
    return RestartLimit(most, period)
