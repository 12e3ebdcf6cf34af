"""The program of a `launchpad bench` rank: python -m launchpad.bench REQUEST (a line of messages.py).

Results go to the launcher on the original stdout. Anything else that prints in this process, such as a library, writes
to stderr.
"""

from __future__ import annotations

import importlib
import os
import socket
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from launchpad.bench.messages import (
    BenchRequest,
    LinkTiming,
    Message,
    Point,
    Row,
    Setting,
    Unavailable,
    from_line,
    to_line,
)
from launchpad.bench.operations import ALGORITHMS, OPERATIONS, Operation, bandwidths, predicted
from launchpad.errors import FrontendError, LaunchpadError

TIMEOUT = timedelta(minutes=5)

# The share of the time budget that goes to the links, whatever the number of points.
LINKS_SHARE = 0.1

Send = Callable[[Message], None]


def main() -> int:
    """Carry out the request. Returns the exit code."""
    channel = os.dup(1)
    os.dup2(2, 1)

    def send(message: Message) -> None:
        data = (to_line(message) + "\n").encode()
        while data:
            data = data[os.write(channel, data) :]

    request: BenchRequest = from_line(sys.argv[1])
    try:
        from launchpad import collectives as dist

        dist.init_process_group(request.backend, timeout=TIMEOUT)
        if dist.get_world_size() == 1:
            raise FrontendError(f"{request.backend}: a single rank has no peer; start at least two: --nproc 2")
    except LaunchpadError as error:
        send(Unavailable(request.backend, str(error)))
        # On the first host all ranks fail in the same way, and have reported it. Another host must end the job.
        return 0 if os.environ.get("GROUP_RANK", "0") == "0" else 1
    try:
        _measure(request, send if dist.get_rank() == 0 else lambda _: None)
    finally:
        dist.destroy_process_group()
    return 0


def _measure(request: BenchRequest, send: Send) -> None:
    import torch

    from launchpad import collectives as dist
    from launchpad.bench import measure

    ranks = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if request.backend == "nccl" else torch.device("cpu")
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (int(os.environ.get("GROUP_RANK", "0")), *_facts()))
    hosts = sorted({node for node, *_ in everyone})
    ranks_on = [[other for other in range(ranks) if everyone[other][0] == node] for node in hosts]
    names = request.hosts or [everyone[members[0]][1] for members in ranks_on]
    points = sum(len(_sizes(request, OPERATIONS[name])) for name in request.operations)
    setting = Setting(
        backend=request.backend,
        ranks=ranks,
        hosts=tuple(names),
        ranks_on=tuple(len(members) for members in ranks_on),
        cores=tuple(everyone[members[0]][2] for members in ranks_on),
        dtype=request.dtype,
        torch=torch.__version__,
        library=_library(request.backend),
        points=points,
        missing={name: reason for *_, missing in reversed(everyone) for name, reason in missing.items()},
    )
    send(setting)
    links = measure.measure_links(measure.plan_links(ranks_on), request.seconds * LINKS_SHARE, device)
    host_of = {member: name for members, name in zip(ranks_on, names, strict=True) for member in members}
    for (first, second), (small, large) in sorted(links.items()):
        one, other = (host_of[end] if len(hosts) > 1 else f"rank {end}" for end in (first, second))
        send(LinkTiming(request.backend, one, other, small * 1e6, measure.LARGE / large / 1e9))
    between = [times for pair, times in links.items() if len(hosts) == 1 or host_of[pair[0]] != host_of[pair[1]]]
    # Across hosts a collective waits for the slowest link; on one host the links are alike and differ only by noise.
    typical = max if len(hosts) > 1 else statistics.median
    costs = (
        typical(small for small, _ in between),
        typical(max(0.0, large - small) / (measure.LARGE - measure.SMALL) for small, large in between),
        measure.max_over_ranks(measure.time_to_add(getattr(torch, request.dtype), device), device),
    )
    each = request.seconds * (1 - LINKS_SHARE) / points
    for name in request.operations:
        for size in _sizes(request, OPERATIONS[name]):
            send(Point(request.backend, name, size))
            send(_row(name, size, request, each, costs, device))


def _row(
    name: str, size: int, request: BenchRequest, seconds: float, costs: tuple[float, float, float], device: Any
) -> Row:
    """Check, then time, one operation at one size."""
    import torch

    from launchpad import collectives as dist
    from launchpad.bench.measure import max_over_ranks, sum_over_ranks, time_call
    from launchpad.bench.patterns import prepare

    operation, ranks, dtype = OPERATIONS[name], dist.get_world_size(), getattr(torch, request.dtype)
    count = size // dtype.itemsize

    def attempt(step: Callable[[], Any]) -> tuple[Any, str]:
        """The step's result, and an error if it failed on any rank; all ranks agree whether it did."""
        found, error = None, ""
        try:
            found = step()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, ImportError) as reason:
            error = " ".join(str(reason).split())[:300] or type(reason).__name__
        return found, (error or "it failed on another rank") if max_over_ranks(bool(error), device) else ""

    def check() -> int:
        prepared.fill()
        prepared.call()
        return int(prepared.wrong())

    # Two steps, so that the others don't wait for a rank that has no memory for its buffers.
    prepared, error = attempt(lambda: prepare(operation.kind, _function(operation), size, dtype, device))
    wrong = 0
    if not error:
        wrong, error = attempt(check)
    if error:
        return Row(name, request.backend, ranks, size, count, request.dtype, 0, 0, 0, 0, 0, 0, 0, None, error)
    wrong = sum_over_ranks(wrong, device)
    prepared.clear()
    timing = time_call(prepared.call, seconds, device)
    algbw, busbw = bandwidths(operation.kind, ranks, prepared.size, timing.median)
    return Row(
        operation=name,
        backend=request.backend,
        ranks=ranks,
        size=prepared.size,
        count=prepared.count,
        dtype=request.dtype,
        calls=timing.calls,
        time_us=timing.median * 1e6,
        min_us=timing.least * 1e6,
        max_us=timing.most * 1e6,
        algbw=algbw,
        busbw=busbw,
        wrong=wrong,
        model_us=predicted(operation.model, ranks, prepared.size, costs) * 1e6 if operation.model else None,
    )


def _function(operation: Operation) -> Any:
    from launchpad import collectives as dist

    if operation.is_algorithm:
        algorithms = importlib.import_module(f"launchpad.collectives.{ALGORITHMS}")
        return getattr(algorithms, operation.function.removeprefix(ALGORITHMS + "."))
    return getattr(dist, operation.function)


def _sizes(request: BenchRequest, operation: Operation) -> list[int]:
    """The request's sizes, rounded to whole elements for every rank, without duplicates; just 0 for a barrier."""
    import torch

    from launchpad import collectives as dist

    if operation.kind == "barrier":
        return [0]
    unit = getattr(torch, request.dtype).itemsize * (dist.get_world_size() if operation.shared else 1)
    return list(dict.fromkeys(max(unit, size // unit * unit) for size in request.sizes))


def _facts() -> tuple[str, int, dict[str, str]]:
    """This host's name, the number of cores that this rank may use, and the backends that are unavailable, with why."""
    from launchpad.collectives.frontends import look, why_not

    machine = look(os.environ)
    missing = {name: reason for name in ("gloo", "nccl", "mpi") if (reason := why_not(name, machine))}
    return socket.gethostname(), len(os.sched_getaffinity(0)), missing


def _library(backend: str) -> str:
    """The library that moves the data, with its version if it reports one."""
    if backend == "mpi":
        from mpi4py import MPI

        return " ".join(MPI.Get_library_version().partition("\n")[0].split(",")[0].replace("Version:", "").split())
    if backend == "nccl":
        import torch

        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return "NCCL " + ".".join(map(str, version))
    return backend


if __name__ == "__main__":
    sys.exit(main())
