"""The mpi frontend under launchpad, MPICH's mpiexec and Open MPI's mpirun: training, timeouts, failures."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, PROGRAMS, Launchpad
from tests.support.needs import needs_mpi, needs_torch

pytestmark = [needs_torch, needs_mpi]

ROOT = Path(__file__).parents[3]
FRONTEND = "launchpad.collectives.mpi"
START = f"""
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from {FRONTEND} import install
install()
"""

# Ranks may outnumber cores here; MPICH's wheel installs mpiexec next to the interpreter.
HYDRA = [str(Path(sys.prefix, "bin", "mpiexec"))]
OPEN_MPI = ["mpirun.openmpi", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
OPEN_MPI += ["--mca", "mpi_yield_when_idle", "1"]  # other tests want to run too
ABI = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}


class Mpi:
    """Runs programs as MPI ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, ranks: int, *argv: object, timeout: float = DEADLINE) -> subprocess.CompletedProcess[str]:
        raise NotImplementedError

    def code(self, ranks: int, code: str, timeout: float = DEADLINE) -> subprocess.CompletedProcess[str]:
        program = self.folder / "program.py"
        program.write_text(START + textwrap.dedent(code))
        return self.run(ranks, program, timeout=timeout)


class Mpirun(Mpi):
    """By an mpirun."""

    def __init__(self, folder: Path, launcher: list[str], environ: dict[str, str]) -> None:
        super().__init__(folder)
        self.launcher = launcher
        drop = ("LAUNCHPAD_", "OMP_", "PMI_", "OMPI_", "WORLD_SIZE")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        self.environ = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ

    def run(self, ranks: int, *argv: object, timeout: float = DEADLINE) -> subprocess.CompletedProcess[str]:
        command = [*self.launcher, "-n", str(ranks), sys.executable, "-W", "ignore", *map(str, argv)]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )

    def why_not(self) -> str | None:
        """Why this launcher can't form a world; None if it can."""
        if shutil.which(self.launcher[0]) is None:
            return f"{self.launcher[0]} is not installed"
        try:
            done = self.run(2, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)", timeout=20)
        except subprocess.TimeoutExpired:
            return f"{self.launcher[0]} hangs"
        return None if done.stdout.count("2") == 2 else (done.stderr or done.stdout).strip()[-200:]


class Forked(Mpi):
    """By launchpad, from an image that has imported torch."""

    def __init__(self, launchpad: Launchpad, *options: str) -> None:
        super().__init__(launchpad.folder)
        self.launchpad = launchpad
        self.options = ("--backend", "mpi", *options)

    def run(self, ranks: int, *argv: object, timeout: float = DEADLINE) -> subprocess.CompletedProcess[str]:
        done = self.launchpad.run("run", "--nproc", ranks, *self.options, *argv, timeout=timeout)
        out, err = (re.sub(r"^\[\d+\] ", "", text, flags=re.M) for text in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def remove_stale_segments() -> None:
    """Remove what MPICH under Hydra leaves in /dev/shm after an abort: our segments that no process has mapped.

    A segment created just now may belong to another test that is starting.
    """
    old = time.time() - 1
    left = list(Path("/dev/shm").glob("mpich_shm_*"))
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += maps.read_text(errors="replace")
    for path in left:
        with suppress(FileNotFoundError):
            found = path.stat()
            if path.name not in mapped and found.st_uid == os.getuid() and found.st_ctime < old:
                path.unlink()


@functools.cache
def why_not(name: str) -> str | None:
    """Why MPICH or Open MPI can't form a world; None if it can."""
    return (Mpirun(Path(), OPEN_MPI, ABI) if name == "openmpi" else Mpirun(Path(), HYDRA, {})).why_not()


@pytest.fixture
def mpi(request: pytest.FixtureRequest, launchpad: Launchpad) -> Iterator[Mpi]:
    name = request.param
    if reason := why_not("openmpi" if name == "openmpi" else "mpich"):
        pytest.skip(f"{name} can't form a world: {reason}")
    if name == "mpiexec":
        yield Mpirun(launchpad.folder, HYDRA, {})
    else:
        request.getfixturevalue("from_image")
        yield Forked(launchpad, *(("--mpi", "openmpi") if name == "openmpi" else ()))
    if name == "mpiexec":
        remove_stale_segments()


# Open MPI only if it is installed, and for what depends on MPI; mpiexec for what depends on who starts the ranks.
OPEN = ["openmpi"] if shutil.which(OPEN_MPI[0]) else []
either = pytest.mark.parametrize("mpi", ["launchpad", *OPEN], indirect=True)
once = pytest.mark.parametrize("mpi", ["launchpad"], indirect=True)


@pytest.mark.parametrize(("mpi", "ranks"), [("launchpad", 4), *((name, 2) for name in OPEN)], indirect=["mpi"])
def test_training_gives_the_same_weights_as_one_process(mpi: Mpi, ranks: int) -> None:
    done = mpi.run(ranks, PROGRAMS / "collectives_training.py", FRONTEND, timeout=2 * DEADLINE)
    assert done.returncode == 0, done.stderr
    agreeing = {line.removesuffix(" agrees") for line in done.stdout.splitlines()}
    assert {"DDP", "DDP with a hook", "DDP in bfloat16", "FSDP 1", "FSDP 2", "DTensor reduced"} <= agreeing
    assert ("HSDP" in agreeing) == (ranks == 4)


@once
def test_the_profiler_shows_operations_with_their_sizes(mpi: Mpi) -> None:
    done = mpi.code(
        2,
        """
        dist.init_process_group("mpi")
        rank = dist.get_rank()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3, 2))
            dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4), async_op=True).wait()
            dist.barrier()
            dist.send(torch.ones(5), 1) if rank == 0 else dist.recv(torch.ones(5), 0)
        shown = [event for event in profile.events() if event.name.startswith("mpi:")]
        assert all(event.is_async for event in shown)
        told = [f"{event.name.removeprefix('mpi:')}{event.input_shapes}".replace(" ", "") for event in shown]
        print(f"rank {rank}:", *told)
        """,
    )
    assert done.returncode == 0, done.stderr
    both = "all_reduce[[3,2]] all_gather[[4]] barrier[]"
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank 0: {both} send[[5]]", f"rank 1: {both} recv[[5]]"]


@either
def test_a_late_rank_is_an_error_and_kills_the_group(mpi: Mpi) -> None:
    done = mpi.code(
        2,
        """
        dist.init_process_group("mpi", timeout=timedelta(seconds=0.5))
        if dist.get_rank() == 1:
            time.sleep(60)
        for call in (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.barrier()):
            try:
                call()
            except dist.DistBackendError as error:
                print(error, flush=True)
        """,
    )
    first, second = done.stdout.splitlines()
    assert first == "all_reduce on group 'default_pg', rank 0 of 2: not all ranks took part within 0.5 s"
    assert second == f"group 'default_pg' is dead: {first}"
    assert done.returncode != 0
    assert "aborting the other ranks" in done.stderr


@once
def test_timeouts_of_a_wait_a_future_and_a_group(mpi: Mpi) -> None:
    done = mpi.code(
        2,
        """
        dist.init_process_group("mpi")
        if dist.get_rank() == 0:
            pair = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
            other = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
            tests = {
                "wait": lambda: dist.irecv(torch.ones(2), 1).wait(timedelta(seconds=0.2)),
                "future": lambda: dist.all_reduce(torch.ones(2), group=pair, async_op=True).get_future().wait(),
                "group": lambda: dist.barrier(group=other),
            }
            for name, test in tests.items():
                try:
                    test()
                except RuntimeError as error:
                    assert "within 0.2 s" in str(error), error
                    print(name, flush=True)
        else:
            dist.new_group([0, 1]), dist.new_group([0, 1])
            time.sleep(60)
        """,
    )
    assert done.stdout.split() == ["wait", "future", "group"], done.stderr


@either
def test_a_groups_timeout_leaves_the_others_alive(mpi: Mpi, tmp_path: Path) -> None:
    """The ranks report in files: rank 0, having abandoned a barrier, aborts the world at exit, pipes included."""
    done = mpi.code(
        2,
        f"""
        dist.init_process_group("mpi")
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
        if dist.get_rank() == 0:
            try:
                dist.barrier(group=pair)
            except dist.DistBackendError:
                pass
        total = torch.ones(1)
        dist.all_reduce(total)
        with open(f"{tmp_path}/{{dist.get_rank()}}", "w") as file:
            file.write(f"total {{int(total)}}")
        dist.barrier()
        """,
    )
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["total 2", "total 2"], done.stderr


@pytest.mark.parametrize("mpi", ["launchpad", "mpiexec", *OPEN], indirect=True)
def test_a_failing_rank_aborts_the_others(mpi: Mpi) -> None:
    done = mpi.code(
        2,
        """
        dist.init_process_group("mpi")
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.all_reduce(torch.ones(1))
        """,
    )
    assert done.returncode == 1
    assert "KeyError: 'lost'" in done.stderr
    assert "rank 1 failed with KeyError" in done.stderr


@once
def test_monitored_barrier_names_the_missing_ranks(mpi: Mpi) -> None:
    done = mpi.code(
        3,
        """
        dist.init_process_group("mpi")
        group = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=30))
        if dist.get_rank() > 0:
            time.sleep(60)
        try:
            group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
        except dist.DistBackendError as error:
            print(error, flush=True)
        """,
    )
    error = "monitored_barrier on rank 0 of group 'default_pg': rank 1, 2 did not arrive within 0.3 s\n"
    assert done.stdout == error, done.stderr


@once
def test_gloo_and_mpi_in_one_program(mpi: Mpi, tmp_path: Path) -> None:
    done = mpi.code(
        2,
        f"""
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=world.rank, world_size=world.size)
        group = dist.new_group(backend="mpi")
        for one in (group, None):
            total = torch.ones(1)
            dist.all_reduce(total, group=one)
            assert total == 2
        assert (dist.get_backend(group), dist.get_backend()) == ("mpi", "gloo")
        dist.destroy_process_group()
        dist.init_process_group("mpi")
        try:
            dist.new_group(backend="gloo")
        except ValueError as error:
            assert "an mpi world has no store" in str(error)
            print("ok")
        """,
    )
    assert done.stdout.count("ok") == 2, done.stderr


REFUSALS = {
    "dist.all_gather_into_tensor(torch.ones(5), torch.ones(2))": (
        "all_gather_into_tensor: float32[5] must have 2 times the elements of float32[2], and the same dtype"
    ),
    "dist.group.WORLD.allgather([[torch.ones(2)]], [torch.ones(2)])": "all_gather: the list has 1 tensors for 2 ranks",
    "dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(2))": (
        "all_gather: tensor {rank} of the list, float32[3], must match this rank's own, float32[2]"
    ),
    "dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2])": (
        "all_to_all_single: the splits [1, 2] must be 2 numbers >= 0 that add up to 4,"
        " the first dimension of float32[4]"
    ),
    "dist.all_to_all_single(torch.ones(3), torch.ones(3))": (
        "all_to_all_single: the first dimension of float32[3] can't be split evenly among 2 ranks; pass the split sizes"
    ),
    "dist.group.WORLD.send([torch.ones(1)], 7, 0)": "send: there is no rank 7 in group 'default_pg', which has 2 ranks",
    "dist.broadcast(torch.ones(3).to_sparse(), 0)": "mpi: tensors must be dense, not torch.sparse_coo",
    "dist.all_reduce(torch.ones(3).to(torch.float8_e5m2))": (
        "mpi can move torch.float8_e5m2 but not reduce it: neither MPI nor torch has arithmetic for it"
    ),
    "dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)": "ReduceOp.BAND is not defined for torch.float32",
}


@either
def test_bad_calls_are_refused_with_a_reason_and_the_group_survives(mpi: Mpi) -> None:
    done = mpi.code(
        2,
        f"""
        dist.init_process_group("mpi")
        for call in {list(REFUSALS)!r}:
            try:
                eval(call)
            except ValueError as error:
                if dist.get_rank() == 0:
                    print(error, flush=True)
            else:
                raise SystemExit(f"rank {{dist.get_rank()}}: not refused: {{call}}")
        if dist.get_rank() == 1:
            dist.send(torch.ones(2), 0)
            dist.send(torch.ones(2), 0)
        else:
            for room in (3, 1):
                try:
                    dist.recv(torch.ones(room), 1)
                except (ValueError, dist.DistBackendError) as error:
                    print(error, flush=True)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[: len(REFUSALS)] == [text.format(rank=0) for text in REFUSALS.values()]
    short, long = lines[len(REFUSALS) :][:2]  # MPI's own message may have more lines
    assert short == "recv from rank 1: the message has 8 bytes, the tensor 12"
    assert long.startswith("recv from rank 1: ")
    assert "truncated" in long


@either
def test_operations_keep_their_order_and_tensors_and_groups_can_be_created_without_limit(mpi: Mpi) -> None:
    done = mpi.code(
        3,
        """
        import gc
        dist.init_process_group("mpi")
        rank = dist.get_rank()
        tensors = [torch.full((1000,), float(k + rank)) for k in range(50)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for k in range(50):  # fire and forget
            dist.isend(torch.full((20_000,), float(k)), (rank + 1) % 3, tag=k)
        gc.collect()
        got = [torch.empty(20_000) for _ in range(50)]
        receipts = [dist.irecv(got[k], (rank - 1) % 3, tag=k) for k in reversed(range(50))]
        for work in reversed([*works, *receipts]):
            work.wait()
        assert all(torch.all(got[k] == k) for k in range(50))
        assert all(torch.all(tensors[k] == 3 * k + 3) for k in range(50))
        for turn in range(1000):
            dist.isend(torch.ones(2), (rank + 1) % 3, tag=99)
            dist.recv(torch.ones(2), (rank - 1) % 3, tag=99)
        assert len(dist.group.WORLD._pending) < 400, "completed sends are never released"
        for turn in range(300):
            group = dist.new_group([0, 2] if turn % 2 else [0, 1, 2])
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                assert total == dist.get_world_size(group)
                dist.destroy_process_group(group)
        dist.destroy_process_group()
        dist.init_process_group("mpi")
        dist.barrier()
        print("ok")
        """,
        timeout=2 * DEADLINE,
    )
    assert done.stdout.count("ok") == 3, done.stderr
