"""launchpad.collectives: one contract for all frontends, the ways in which ranks meet, and what is refused."""

from __future__ import annotations

import json
import os
import re
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
from tests.support.command import DEADLINE, PROGRAMS, Launchpad
from tests.support.ports import free_port

DTYPES = (
    "float32 float64 float16 bfloat16 uint8 int8 int16 int32 int64 bool uint16 uint32 uint64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2"
).split()
SHAPES = ["0-d", "one", "empty", "no rows", "vector", "cube", "transposed", "strided", "mixed", "large"]
STRIDED, EMPTY = {"transposed", "strided", "mixed"}, {"empty", "no rows"}
MOVING = "broadcast scatter gather gather_single all_gather all_gather_into_tensor "
MOVING += "all_to_all all_to_all_single all_to_all_uneven"
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

pytestmark = pytest.mark.usefixtures("from_image")


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
    strided_batch: str = ""  # why batch_isend_irecv is not tried on strided tensors; "" where it is
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
        library = self.environ.get("MPI4PY_MPIABI", "")
        return "-".join([self.backend, *([Path(self.mpirun[0]).name] if self.mpirun else [library] if library else [])])


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
        strided_batch="gloo refuses strided tensors in batch_isend_irecv",
        empty_from_any="gloo can't receive an empty tensor from any rank",
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
        if "openmpi" in words[0]:  # the other one's MPI is the one that mpi4py takes where nothing else is said
            abi = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}
            FRONTENDS.append(MPI._replace(mpirun=words, environ=abi))
            FRONTENDS.append(MPI._replace(environ=abi))


def cases(size: int) -> Iterator[tuple[str, str, str, bool, int]]:
    """The last rank's cases in a world of `size`: operation, dtype, shape, asynchronous, size of the group."""
    for group, is_async in product([size, size - 1][: 1 + (size > 1)], (False, True)):
        turn = is_async != (group < size)
        pairs = [
            (dtype, shape)
            for row, dtype in enumerate(DTYPES)
            for column, shape in enumerate(SHAPES)
            if size == 1 or (row % 2 == turn and (row + column) % {2: 3, 3: 7}.get(size, 10) == 0)
        ]
        for name, (dtype, shape) in product([*MOVING.split(), *PEERS.split(), *REDUCING.split()], pairs):
            yield name, dtype, shape, is_async, group
        for (op, dtypes), name in product(OTHER_OPS.items(), REDUCING.split()):
            for dtype in dtypes if size == 1 else dtypes[turn::2] if size == 2 else dtypes[size % 3 :: 3][turn::2]:
                yield f"{name} {op}", dtype, "vector", is_async, group
    for group, name in product([size, size - 1][: 1 + (size > 1)], ONCE.split()):
        yield name, "float32", "vector", False, group


def skip(frontend: Frontend, name: str, shape: str, group: int) -> str:
    """Why a case is not tried."""
    if name not in PEERS.split():
        return ""
    if group == 1:
        return ALONE
    if shape in STRIDED and name == "batch" and frontend.strided_batch:
        return frontend.strided_batch
    if name == "recv_any":
        return frontend.from_any or (frontend.empty_from_any if shape in EMPTY else "")
    return ""


def check_contract(frontend: Frontend, size: int, printed: str) -> None:
    """Hold what contract.py printed against what is to be tried, skipped and refused, case by case."""
    found = json.loads(next(line[line.index("{") :] for line in printed.splitlines() if '{"checked"' in line))
    checked: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for name, dtype, shape, _, group in cases(size):
        if why := skip(frontend, name, shape, group):
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
    assert [row for row in found["refused"] if not any(words in row[1] for words in frontend.refusals)] == []
    told: Counter[str] = Counter()
    for name, *_, count in found["refused"]:
        told[name] += count
    assert told == refused
    assert found["checked"] == checked
    assert found["skipped"] == skipped


def worlds() -> Iterator[tuple[Frontend, int]]:
    """Frontends and the sizes of their worlds. All ranks are a group, and all but one: those have 1 to 5 ranks."""
    for frontend in FRONTENDS:
        # Waiting ranks of Open MPI hardly run beside other programs.
        sizes = [3] if frontend.mpirun else [2, 3] if frontend.environ else [1, 2, 3, 5]
        yield from ((frontend, size) for size in sizes)


@pytest.mark.parametrize(("frontend", "size"), list(worlds()), ids=str)
def test_every_operation_is_what_arithmetic_says(
    frontend: Frontend, size: int, launchpad: Launchpad, request: pytest.FixtureRequest
) -> None:
    launchpad.environ |= frontend.environ
    words = [str(PROGRAMS / "contract.py"), frontend.backend, frontend.device]
    if frontend.mpirun:
        done = alone(launchpad, *frontend.mpirun, "-n", size, sys.executable, *words, timeout=5 * DEADLINE)
    else:
        request.getfixturevalue("from_image")
        done = launchpad.run("run", "--nproc", size, "--backend", frontend.backend, *words, timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    check_contract(frontend, size, done.stdout)


def run(launchpad: Launchpad, size: int, *words: object, options: Sequence[str] = ()) -> list[str]:
    """The lines that `together.py WORDS` prints in `size` ranks, without the ranks' marks, sorted."""
    done = launchpad.run("run", "--nproc", size, *options, "together.py", *words)
    assert done.returncode == 0, done.stderr
    return sorted(line.partition("] ")[2] for line in done.stdout.splitlines())


@pytest.mark.parametrize("how", ["gloo", "mpi", "gloo-with-mpi"])
def test_what_torch_does_wrong_or_not_at_all(how: str, launchpad: Launchpad) -> None:
    if "mpi" in how and not find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed")
    done = launchpad.run("run", "-n", 2, *(["--backend", "mpi"] if "mpi" in how else []), "edges.py", how)
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr


def test_ranks_meet_where_the_url_says(launchpad: Launchpad, tmp_path: Path) -> None:
    """With the rank from the launcher, and given, by one scheme after the other."""
    urls = [f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/meet", "env://"]
    again = [f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/again", "env://"]
    places = [*((url, "") for url in urls), *((url, "given") for url in again)]
    words = [f"method={','.join(place).rstrip(',')}" for place in places]
    assert run(launchpad, 2, *words) == sorted(
        f"at {url} {given} rank {rank} sum 3" for url, given in places for rank in range(2)
    )


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_command_line_names_the_backend(backend: str, launchpad: Launchpad) -> None:
    assert run(launchpad, 2, "unnamed", options=("--backend", backend)) == [f"unnamed {backend} 3"] * 2


ERRORS = {
    "no group": "ValueError: Default process group has not been initialized",
    "nccl": "FrontendError: nccl: ",
    "twice": "ValueError: trying to initialize the default process group twice!",
    "rank": "ValueError: send: there is no rank 3 in the world, whose ranks are 0 to 2",
    "self": "ValueError: Invalid destination rank",
    "shape": "RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (3), got (2))",
    "dtype": "ValueError: Invalid usage of tensors with different dtypes",
    "list": "RuntimeError: ProcessGroupGloo::scatter: Incorrect input list size 1",
    "no tensor": "TypeError: Invalid function argument. Expected parameter `tensor`",
    "name": "AttributeError: neither launchpad.collectives nor torch.distributed has 'no_such_thing'",
    "still": "6",
}


def test_objects_training_futures_and_errors_in_groups_one_after_the_other(launchpad: Launchpad) -> None:
    lines = run(launchpad, 3, "again", "objects", "ddp", "futures", "errors")
    errors = [line for line in lines if ": " in line]
    assert len(errors) == 3 * len(ERRORS)
    for line in errors:
        what, _, text = line.partition(": ")
        assert text.startswith(ERRORS[what]), line
    told = {f"turn {turn} rank {rank} of 3 gloo sum 6" for turn in range(3) for rank in range(3)}
    told |= {f"{what} {rank}" for what in ("objects", "ddp", "futures") for rank in range(3)}
    assert {*lines} - {*errors} == told


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
    """Two jobs at the same time: each has a world of its own. In one the ranks are children of shells.

    Each has a temporary folder of its own: two mpiruns of Open MPI race for the folder of their sessions.
    """
    plain = [sys.executable, str(PROGRAMS / "together.py"), "again"]
    started = []
    for number, words in enumerate((plain, ["sh", "-c", f"{shlex.join(plain)}; exit $?"])):
        folder = launchpad.scratch / str(number)
        folder.mkdir()
        started.append(
            subprocess.Popen(
                [*mpirun, "-n", "2", *words],
                env={**environ(launchpad), "TMPDIR": str(folder)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for job in started:
        out, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, err
        assert sorted(out.splitlines()) == sorted(
            f"turn {turn} rank {rank} of 2 gloo sum 3" for turn in range(3) for rank in range(2)
        )
    for number in range(2):
        (launchpad.scratch / str(number)).rmdir()  # nothing is left in them


def python(code: str, launchpad: Launchpad, given: str = "") -> str:
    """What a Python program prints, on either stream."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ(launchpad),
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print(dist.is_available(), dist.world_of({}).size)", "False 1"),
        (
            "dist.init_process_group()",
            r"launchpad.errors.FrontendError: .* has no torch, which every frontend needs: pip install torch",
        ),
    ],
)
def test_without_torch_it_says_so(launchpad: Launchpad, code: str, says: str) -> None:
    said = python(
        f"import sys; sys.modules['torch'] = None\nfrom launchpad import collectives as dist\n{code}", launchpad
    )
    assert re.fullmatch(says, said.splitlines()[-1])


class Alone(NamedTuple):
    """A program without a launcher: what it prints last, on either stream, has `says` in it."""

    code: str
    says: str
    environ: dict[str, str] = {}  # noqa: RUF012 - never written to


MPI_ALONE = "import torch.distributed as dist\nfrom launchpad.collectives.mpi import install\ninstall()\n"
OF_TWO_HOSTS = {"RANK": "1", "SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_RANK": "0"}
PROGRAMS_ALONE = {
    "ranks over several hosts need an address": Alone(
        "import sys; sys.modules['mpi4py'] = None\ndist.init_process_group('gloo')",
        "Open MPI started 2 ranks on several hosts and set no rendezvous address: set MASTER_ADDR",
        {f"OMPI_COMM_WORLD_{name}": value for name, value in OF_TWO_HOSTS.items()},
    ),
    "and mpi4py could tell them one": Alone(
        "import sys; sys.modules['mpi4py'] = None\ndist.init_process_group('gloo')",
        "pip install mpi4py",
        {f"OMPI_COMM_WORLD_{name}": value for name, value in OF_TWO_HOSTS.items()},
    ),
    "ranks that the program names need an address": Alone(
        "dist.init_process_group('gloo', rank=0, world_size=2)",
        "the caller set no rendezvous address for the 2 ranks: set MASTER_ADDR",
    ),
    "rank 0 that does not come is named": Alone(
        "import datetime; dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=0.2))",
        "rank 0 did not write its port to",
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ),
    "another user's meeting file is refused": Alone(
        "import os\nfrom launchpad.collectives import bootstrap\n"
        "bootstrap._write('meet', 7)\nassert bootstrap._read('meet') == 7\n"
        "os.getuid = lambda: -1\nbootstrap._read('meet')",
        "WorldError: meet is not your own file",
    ),
    "two ranks on one GPU are refused": Alone(
        "from torch.distributed import HashStore\nfrom launchpad.collectives.start import claim\n"
        "store = HashStore()\nclaim(store, 'a GPU 0', 0)\nclaim(store, 'a GPU 0', 0)\nclaim(store, 'b GPU 0', 1)\n"
        "claim(store, 'a GPU 0', 2)",
        "nccl: ranks 0 and 2 both use a GPU 0",
    ),
    # With a torch.cuda that is not there: by the local rank, unless the program chose.
    "the GPU is bound before NCCL starts": Alone(
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
        "print(*bound)",
        "cuda:2 cuda:3 cuda:1 cuda:0",
    ),
    "NCCL refuses to receive from any rank": Alone(
        "import torch\nfrom launchpad.collectives import peers\n"
        "peers.dist.get_rank = lambda group: 0\n"
        "peers.dist.get_backend = lambda group: 'cpu:gloo,cuda:nccl'\n"
        "peers._refuse_nccl(torch.device('cpu'), None)\n"
        "peers._refuse_nccl(torch.device('cuda'), None)",
        "FrontendError: nccl: can't receive from any rank; name the sender",
    ),
    "the names are torch's": Alone(
        "import inspect, torch.distributed as td\n"
        "own = {'FrontendError', 'World', 'WorldError', 'world_of', 'init_process', 'dist_backend'}\n"
        "own |= {'init_master_worker'} | {name for name in dist.__all__ if name.endswith('_multigpu')}\n"
        "assert all(hasattr(dist, name) for name in dist.__all__) and set(dist.__all__) <= set(dir(dist))\n"
        "for name in dist.__all__:\n"
        "    if name in own: continue\n"
        "    ours, theirs = getattr(dist, name), getattr(td, name, None)\n"
        "    if ours is not theirs and callable(theirs):\n"
        "        a, b = dict(inspect.signature(ours).parameters), inspect.signature(theirs).parameters\n"
        "        b = {k: v for k, v in b.items() if not k.startswith('_')}\n"
        "        if 'options' in a and 'options' not in b:  # what a newer torch has besides\n"
        "            assert a.pop('options').kind is inspect.Parameter.VAR_KEYWORD, name\n"
        "            b = {k: b[k] for k in list(b)[: len(a)]}\n"
        "        assert list(a) == list(b), name\n"
        "        assert [v.default for v in a.values()] == [v.default for v in b.values()], name\n"
        "print('same')",
        "same",
    ),
}

if find_spec("mpi4py"):
    PROGRAMS_ALONE |= {
        "MPI is missing": Alone(
            f"{MPI_ALONE}dist.init_process_group('mpi')",
            "`pip install mpi4py mpich` installs both",
            {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        ),
        "the launcher is not one of MPI": Alone(
            f"{MPI_ALONE}dist.init_process_group('mpi')",
            "WORLD_SIZE is 3 but MPI sees only one rank",
            {"WORLD_SIZE": "3"},
        ),
        "mpi cannot be combined with another backend": Alone(
            f"{MPI_ALONE}dist.init_process_group('cpu:mpi,cuda:gloo', rank=0, world_size=1, store=dist.HashStore())",
            "use backend='mpi'",
        ),
    }

# Each in a fork of a process that has imported torch, as that takes a second or two.
FORKS = """
import json, os, sys, tempfile
import torch.distributed
from launchpad import collectives as dist
for name, (code, _, environ) in json.load(sys.stdin).items():
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os.chdir(folder)
            os.environ.update(environ)
            try:
                exec(code, {"dist": dist})
            except BaseException as error:
                print(f"{type(error).__name__}: {error}")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        said.seek(0)
        print(json.dumps([name, said.read().strip()]))
"""


def test_programs_without_a_launcher(launchpad: Launchpad) -> None:
    printed = python(FORKS, launchpad, json.dumps(PROGRAMS_ALONE))
    said = dict(json.loads(line) for line in printed.splitlines() if line.startswith('["'))
    assert list(said) == list(PROGRAMS_ALONE), printed
    for name, program in PROGRAMS_ALONE.items():
        assert program.says in said[name].splitlines()[-1], name


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="there is no GPU here")
def test_nccl_under_contract(launchpad: Launchpad) -> None:
    size = len(list(Path("/dev").glob("nvidia[0-9]*")))
    done = launchpad.run("run", "--nproc", size, "contract.py", "nccl", "cuda", timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1].partition("] ")[2])["wrong"] == []
    done = launchpad.run("run", "--nproc", size + 1, "contract.py", "nccl", "cuda")
    assert "GPU" in done.stderr
    assert "start" in done.stderr
