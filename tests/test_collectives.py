"""launchpad.collectives: one contract for all frontends, the ways in which ranks meet, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

import launchpad as package

from .conftest import DEADLINE, PROGRAMS, Launchpad
from .sshd import free_port

DTYPES = (
    "float32 float64 float16 bfloat16 uint8 int8 int16 int32 int64 bool uint16 uint32 uint64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2"
).split()
SHAPES = ["0-d", "one", "empty", "no rows", "vector", "cube", "transposed", "strided", "mixed", "large"]
STRIDED, EMPTY = {"transposed", "strided", "mixed"}, {"empty", "no rows"}
MOVING = "broadcast scatter gather all_gather all_gather_into_tensor all_to_all all_to_all_single all_to_all_uneven"
REDUCING = "all_reduce reduce reduce_scatter reduce_scatter_tensor"
PEERS = "send_recv recv_any batch"
ONCE = "objects barriers coalesced future in_place premul_sum negative"
FLOATS, WHOLE = DTYPES[:4], DTYPES[4:9]
UNSIGNED, COMPLEX, FLOAT8 = DTYPES[10:13], DTYPES[14:16], DTYPES[16:]
OTHER_OPS = {  # tried on one shape
    "product": [*FLOATS, *WHOLE, *UNSIGNED, "bool"],
    **{key: [*FLOATS, *WHOLE, *UNSIGNED, *COMPLEX, "bool"] for key in ("avg", "min", "max")},
    **{key: ["float32", *WHOLE, *UNSIGNED, "bool"] for key in ("band", "bor", "bxor")},
}
SENSELESS = {**dict.fromkeys(("min", "max"), COMPLEX), **{key: ["float32"] for key in ("band", "bor", "bxor")}}
ALONE = "there is no other rank"


class Frontend(NamedTuple):
    """A backend, what starts its ranks, and what of the contract it does not do."""

    backend: str
    device: str = "cpu"
    mpirun: tuple[str, ...] = ()  # what starts the ranks; (): launchpad
    environ: dict[str, str] = {}  # noqa: RUF012 - never written to
    unmoved: Sequence[str] = ()  # the dtypes that its collectives refuse
    unreduced: Sequence[str] = ()  # the dtypes that reductions refuse
    unaveraged: Sequence[str] = ()  # and those whose average is refused
    refusals: Sequence[str] = ()  # with some of these words
    strided_peers: str = ""  # why isend and irecv are not tried on strided tensors; "" where they are
    empty_from_any: str = ""  # why nothing empty is received from any rank
    from_any: str = ""  # why nothing at all is
    premul_sum: bool = True

    def refuses(self, name: str, dtype: str) -> bool:
        operation, _, op = name.partition(" ")
        if operation in (*PEERS.split(), *ONCE.split()):
            return operation == "premul_sum" and not self.premul_sum
        reduces = operation in REDUCING.split()
        senseless = dtype in SENSELESS.get(op, ()) or (op == "avg" and dtype in self.unaveraged)
        return dtype in self.unmoved or (reduces and (dtype in self.unreduced or senseless))

    def __str__(self) -> str:
        return "-".join([self.backend, *(Path(word).name for word in self.mpirun[:1])])


def mpiruns() -> list[tuple[str, ...]]:
    """The mpiexec of MPICH that pip installs beside Python, and a system's Open MPI."""
    found: list[tuple[str, ...]] = []
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if hydra := shutil.which("mpiexec.hydra", path=places):
        found.append((hydra,))
    if open_mpi := shutil.which("mpirun.openmpi"):
        found.append((open_mpi, "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"))
    return found


FRONTENDS = [
    Frontend(
        "gloo",
        unmoved=[*FLOAT8, *UNSIGNED, "int16"],
        unaveraged=[*WHOLE, "bool"],
        refusals=["Invalid scalar type", "can't be cast", "with non-integral dtype", "complex tensors", "PREMUL_SUM"],
        strided_peers="gloo refuses strided tensors in isend and irecv",
        empty_from_any="gloo can't receive an empty tensor from just any rank",
        premul_sum=False,
    )
]
if find_spec("mpi4py"):
    MPI = Frontend(
        "mpi",
        unreduced=FLOAT8,
        unaveraged=[*UNSIGNED, "bool"],
        refusals=["can move", "is not defined for", "complex tensors"],
    )
    FRONTENDS.append(MPI)
    for words in mpiruns():
        # mpi4py takes MPICH where nothing else is said.
        abi = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"} if "openmpi" in words[0] else {}
        FRONTENDS.append(MPI._replace(mpirun=words, environ=abi))


def cases(size: int) -> Iterator[tuple[str, str, str, bool, int]]:
    """The last rank's cases in a world of `size`: operation, dtype, shape, asynchronous, size of the group."""
    pairs = [
        (dtype, shape)
        for row, dtype in enumerate(DTYPES)
        for column, shape in enumerate(SHAPES)
        if size < 3 or (row + column) % (2 * size - 2) == 0
    ]
    for group, is_async in product([size, size - 1][: 1 + (size > 1)], (False, True)):
        for name, (dtype, shape) in product([*MOVING.split(), *PEERS.split(), *REDUCING.split()], pairs):
            yield name, dtype, shape, is_async, group
        for (op, dtypes), name in product(OTHER_OPS.items(), REDUCING.split()):
            for dtype in dtypes if size < 3 else dtypes[size % 3 :: 3]:
                yield f"{name} {op}", dtype, "vector", is_async, group
    for group, name in product([size, size - 1][: 1 + (size > 1)], ONCE.split()):
        yield name, "float32", "vector", False, group


def skip(frontend: Frontend, name: str, shape: str, is_async: bool, group: int) -> str:
    """Why a case is not tried."""
    if name not in PEERS.split():
        return ""
    if group == 1:
        return ALONE
    if shape in STRIDED and (is_async or name == "batch") and frontend.strided_peers:
        return frontend.strided_peers
    if name == "recv_any":
        return frontend.from_any or (frontend.empty_from_any if shape in EMPTY else "")
    return ""


def check_contract(frontend: Frontend, size: int, printed: str) -> None:
    """Hold what contract.py printed against what is to be tried, skipped and refused, case by case."""
    found = json.loads(next(line[line.index("{") :] for line in printed.splitlines() if '{"checked"' in line))
    checked: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for name, dtype, shape, is_async, group in cases(size):
        if why := skip(frontend, name, shape, is_async, group):
            skipped[f"{name}: {why}"] += 1
        elif frontend.refuses(name, dtype):
            refused[name] += 1
        else:
            checked[name] += 1
    for why, count in skipped.items():
        print(f"{frontend.backend}, {size} ranks: {count} cases of {why}")
    for name, why, dtypes, _, count in found["refused"]:
        print(f"{frontend.backend}, {size} ranks: {count} cases of {name} refused for {' '.join(dtypes)}: {why}")
    assert found["wrong"] == []
    assert all(any(words in why for words in frontend.refusals) for _, why, *_ in found["refused"])
    told: Counter[str] = Counter()
    for name, *_, count in found["refused"]:
        told[name] += count
    assert told == refused
    assert found["checked"] == checked
    assert found["skipped"] == skipped


def worlds() -> Iterator[tuple[Frontend, int]]:
    """Frontends and the sizes of their worlds. All ranks are a group, and all but one: those have 1 to 5 ranks."""
    for frontend in FRONTENDS:
        if not frontend.mpirun:
            sizes = [1, 2, 3, 5]
        elif frontend.environ:  # another MPI: all pairs of a dtype and a shape, and an odd number of ranks
            sizes = [2, 3]
        else:  # MPICH again, which has had its worlds
            sizes = [3]
        yield from ((frontend, size) for size in sizes)


@pytest.mark.parametrize(("frontend", "size"), list(worlds()), ids=str)
def test_every_operation_is_what_arithmetic_says(frontend: Frontend, size: int, launchpad: Launchpad) -> None:
    launchpad.environ |= frontend.environ
    words = [str(PROGRAMS / "contract.py"), frontend.backend, frontend.device]
    if frontend.mpirun:
        done = alone(launchpad, *frontend.mpirun, "-n", size, sys.executable, *words, timeout=5 * DEADLINE)
    else:
        done = launchpad.run("run", "--nproc", size, "--backend", frontend.backend, *words, timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    check_contract(frontend, size, done.stdout)


def run(launchpad: Launchpad, size: int, *words: object, options: Sequence[str] = ()) -> list[str]:
    """The lines that `together.py WORDS` prints in `size` ranks, without the ranks' marks, sorted."""
    done = launchpad.run("run", "--nproc", size, *options, "together.py", *words)
    assert done.returncode == 0, done.stderr
    return sorted(line.partition("] ")[2] for line in done.stdout.splitlines())


def test_groups_come_one_after_the_other(launchpad: Launchpad) -> None:
    assert run(launchpad, 3, "again") == sorted(
        f"turn {turn} rank {rank} of 3 gloo sum 6" for turn in range(3) for rank in range(3)
    )


@pytest.mark.parametrize("given", ["", "given"], ids=["rank from the launcher", "rank given"])
@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_ranks_meet_where_the_url_says(scheme: str, given: str, launchpad: Launchpad, tmp_path: Path) -> None:
    url = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meet", "env": "env://"}[scheme]
    assert run(launchpad, 2, "method", url, *given.split()) == ["rank 0 sum 3", "rank 1 sum 3"]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_command_line_names_the_backend(backend: str, launchpad: Launchpad) -> None:
    assert run(launchpad, 2, "unnamed", options=("--backend", backend)) == [f"unnamed {backend} 3"] * 2


def test_objects(launchpad: Launchpad) -> None:
    assert run(launchpad, 3, "objects") == ["objects 0", "objects 1", "objects 2"]


def test_ddp_trains_as_one_process_would(launchpad: Launchpad, tmp_path: Path) -> None:
    launchpad.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # optimizers make that folder, in TMPDIR
    assert run(launchpad, 2, "ddp") == ["ddp 0", "ddp 1"]


def test_work_on_strided_tensors_is_waited_for_as_any_other(launchpad: Launchpad) -> None:
    assert run(launchpad, 2, "futures") == ["futures 0", "futures 1"]


ERRORS = {
    "no group": "ValueError: Default process group has not been initialized",
    "nccl": "FrontendError: nccl: ",
    "twice": "ValueError: trying to initialize the default process group twice!",
    "rank": "ValueError: send: there is no rank 2 in the world, whose ranks are 0 to 1",
    "self": "ValueError: Invalid destination rank",
    "shape": "RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (3), got (2))",
    "dtype": "ValueError: Invalid usage of tensors with different dtypes",
    "list": "RuntimeError: ProcessGroupGloo::scatter: Incorrect input list size 1",
    "no tensor": "TypeError: Invalid function argument. Expected parameter `tensor`",
    "name": "AttributeError: neither launchpad.collectives nor torch.distributed has 'no_such_thing'",
    "still": "3",
}


def test_errors_are_told_and_the_group_goes_on(launchpad: Launchpad) -> None:
    lines = run(launchpad, 2, "errors")
    assert len(lines) == 2 * len(ERRORS)
    for line in lines:
        what, _, text = line.partition(": ")
        assert text.startswith(ERRORS[what]), line


def environ(launchpad: Launchpad) -> dict[str, str]:
    """The tests' environment, without a launcher's variables."""
    return launchpad.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])}


def alone(launchpad: Launchpad, *argv: object, timeout: float = DEADLINE) -> subprocess.CompletedProcess[str]:
    """Run a command without launchpad's."""
    words = [str(word) for word in argv]
    return subprocess.run(words, env=environ(launchpad), capture_output=True, text=True, timeout=timeout)


def test_a_world_of_one_needs_no_launcher(launchpad: Launchpad) -> None:
    done = alone(launchpad, sys.executable, PROGRAMS / "together.py", "again")
    assert done.stdout.splitlines() == [f"turn {turn} rank 0 of 1 gloo sum 1" for turn in range(3)], done.stderr


@pytest.mark.parametrize("mpirun", mpiruns(), ids=lambda words: Path(words[0]).name)
def test_ranks_of_mpirun_meet(mpirun: tuple[str, ...], launchpad: Launchpad) -> None:
    """Two jobs at the same time: each has a world of its own. In one the ranks are children of shells."""
    plain = [sys.executable, str(PROGRAMS / "together.py"), "again"]
    started = [
        subprocess.Popen(
            [*mpirun, "-n", "2", *words],
            env=environ(launchpad),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in (plain, ["sh", "-c", f"{shlex.join(plain)}; exit $?"])
    ]
    for job in started:
        out, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, err
        assert sorted(out.splitlines()) == sorted(
            f"turn {turn} rank {rank} of 2 gloo sum 3" for turn in range(3) for rank in range(2)
        )


def python(code: str, launchpad: Launchpad, **variables: str) -> str:
    """What a Python program prints last, on either stream."""
    words = [sys.executable, "-c", "from launchpad import collectives as dist\n" + code]
    done = subprocess.run(
        words,
        env=environ(launchpad) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def test_without_torch_it_says_so(launchpad: Launchpad) -> None:
    assert python(NO_TORCH + "print(dist.is_available(), dist.world_of({}).size)", launchpad) == "False 1"
    line = python(NO_TORCH + "dist.init_process_group()", launchpad)
    assert line.startswith("launchpad.errors.FrontendError: ")
    assert line.endswith("has no torch, on which all frontends rest: pip install torch")


def test_ranks_over_several_hosts_need_an_address(launchpad: Launchpad) -> None:
    two_hosts = {
        f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_SIZE", "1"))
    }
    code = "import sys; sys.modules['mpi4py'] = None\ndist.init_process_group('gloo')"
    line = python(code, launchpad, OMPI_COMM_WORLD_LOCAL_RANK="0", **two_hosts)
    assert "Open MPI started 2 ranks over several hosts and told no address to meet at: set MASTER_ADDR" in line
    assert "pip install mpi4py" in line


def test_ranks_that_the_program_names_need_an_address(launchpad: Launchpad) -> None:
    line = python("dist.init_process_group('gloo', rank=0, world_size=2)", launchpad)
    assert "nothing says where the 2 ranks meet (the caller told the rank): set MASTER_ADDR" in line


def test_rank_0_that_does_not_come_is_named(launchpad: Launchpad) -> None:
    ranks = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    code = "import datetime; dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=0.2))"
    assert "rank 0 did not write where to meet" in python(code, launchpad, **ranks)


def test_another_users_meeting_file_is_refused(launchpad: Launchpad, tmp_path: Path) -> None:
    code = (
        "import os\nfrom launchpad.collectives import meeting\n"
        f"meeting._write({str(tmp_path / 'meet')!r}, 7)\n"
        f"assert meeting._read({str(tmp_path / 'meet')!r}) == 7\n"
        f"os.getuid = lambda: -1\nmeeting._read({str(tmp_path / 'meet')!r})"
    )
    assert "is another user's" in python(code, launchpad)


def test_two_ranks_on_one_gpu_are_refused(launchpad: Launchpad) -> None:
    code = (
        "from torch.distributed import HashStore\nfrom launchpad.collectives.start import claim\n"
        "store = HashStore()\nclaim(store, 'a GPU 0', 0)\nclaim(store, 'a GPU 0', 0)\nclaim(store, 'b GPU 0', 1)\n"
        "claim(store, 'a GPU 0', 2)"
    )
    assert "nccl: ranks 0 and 2 both take a GPU 0" in python(code, launchpad)


def test_the_gpu_is_bound_before_nccl_starts(launchpad: Launchpad) -> None:
    """With a torch.cuda that is not there: by the local rank, unless the program chose."""
    code = (
        "import torch, types\nfrom torch.distributed import HashStore\n"
        "from launchpad.collectives import start, frontends\n"
        "machine = frontends.look({})._replace(gpus=4)\n"
        "bound = []\n"
        "torch.cuda.set_device = lambda device: bound.append(str(device))\n"
        "torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=str(device))\n"
        "for current, asked in ((0, None), (3, None), (0, 1), (0, torch.device('cuda', 0))):\n"
        "    torch.cuda.current_device = lambda: current\n"
        "    world = dist.World(2, 4, 2, 4, 'x', None)\n"
        "    assert str(start._bind(world, machine, HashStore(), asked)) == bound[-1]\n"
        "print(*bound)"
    )
    assert python(code, launchpad) == "cuda:2 cuda:3 cuda:1 cuda:0"


def test_nccl_refuses_to_receive_from_just_any_rank(launchpad: Launchpad) -> None:
    code = (
        "import torch\nfrom launchpad.collectives import peers\n"
        "peers.dist.get_rank = lambda group: 0\n"
        "peers.dist.get_backend = lambda group: 'cpu:gloo,cuda:nccl'\n"
        "peers._refuse_nccl(torch.device('cpu'), None)\n"
        "peers._refuse_nccl(torch.device('cuda'), None)"
    )
    assert "FrontendError: nccl: it can't receive from just any rank; name the sender" in python(code, launchpad)


def test_the_names_are_torchs(launchpad: Launchpad) -> None:
    code = (
        "import inspect, torch.distributed as td\n"
        "own = {'FrontendError', 'World', 'WorldError', 'world_of', 'init_process', 'dist_backend'}\n"
        "own |= {'init_master_worker'} | {name for name in dist.__all__ if name.endswith('_multigpu')}\n"
        "assert all(hasattr(dist, name) for name in dist.__all__) and set(dist.__all__) <= set(dir(dist))\n"
        "for name in dist.__all__:\n"
        "    if name in own: continue\n"
        "    ours, theirs = getattr(dist, name), getattr(td, name)\n"
        "    if ours is not theirs and callable(theirs):\n"
        "        a, b = inspect.signature(ours).parameters, inspect.signature(theirs).parameters\n"
        "        b = {k: v for k, v in b.items() if not k.startswith('_')}\n"
        "        assert list(a) == list(b), name\n"
        "        assert [v.default for v in a.values()] == [v.default for v in b.values()], name\n"
        "print('same')"
    )
    assert python(code, launchpad) == "same"


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="there is no GPU here")
def test_nccl_under_contract(launchpad: Launchpad) -> None:
    size = len(list(Path("/dev").glob("nvidia[0-9]*")))
    done = launchpad.run("run", "--nproc", size, "contract.py", "nccl", "cuda", timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1].partition("] ")[2])["wrong"] == []
    done = launchpad.run("run", "--nproc", size + 1, "contract.py", "nccl", "cuda")
    assert "GPU" in done.stderr
    assert "start" in done.stderr
