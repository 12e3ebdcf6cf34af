"""`launchpad bench`: real runs with tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad.bench import operations
from launchpad.bench.operations import FACTORS, OPERATIONS
from tests.support.command import DEADLINE, MARK, Launchpad
from tests.support.imports import loaded
from tests.support.needs import needs_mpi, needs_torch
from tests.support.sshd import Cluster, needs_sshd


def has(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in modules)


needs_matplotlib = pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")

HAS_ALGORITHMS = (Path(operations.__file__).parents[1] / "collectives" / "algorithms.py").exists()
THERE = [name for name, one in OPERATIONS.items() if HAS_ALGORITHMS or not one.is_algorithm]


# What travels, and what is shown.


def test_the_command_itself_imports_no_torch() -> None:
    assert not loaded("import launchpad.cli.bench") & {"torch", "matplotlib", "numpy", "paramiko"}


# Runs.


def measure(launchpad: Launchpad, *args: object, **options: object) -> dict[str, list[dict[str, object]]]:
    """What --json prints of a run in which nothing was wrong."""
    done = launchpad.run("bench", "--json", *args, **{"timeout": 3 * DEADLINE, **options})
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
    return found


@needs_torch
@needs_mpi
@needs_matplotlib
@pytest.mark.parametrize(("dtype", "backends"), [("float32", "gloo,mpi"), ("bfloat16", "mpi"), ("int64", "gloo")])
@pytest.mark.usefixtures("from_image")
def test_every_operation_is_right(launchpad: Launchpad, dtype: str, backends: str) -> None:
    """Three ranks: no power of two, and more than some machines have cores."""
    chosen = THERE if dtype == "float32" else ["all_reduce", "reduce_scatter"]
    found = measure(
        launchpad,
        *("-n", 3, "--backend", backends, "--op", ",".join(chosen), "--sizes", "4,4100,64K", "--dtype", dtype),
        *("--seconds", 0.02, "--plot", "out.png"),
    )
    assert list(found) == ["launchpad", "settings", "links", "rows", "fits", "unavailable"]
    assert [one["backend"] for one in found["settings"]] == backends.split(",")
    item = {"float32": 4, "bfloat16": 2, "int64": 8}[dtype]
    for setting in found["settings"]:
        assert (setting["ranks"], setting["ranks_on"], setting["dtype"]) == (3, [3], dtype)
        rows = [row for row in found["rows"] if row["backend"] == setting["backend"]]
        assert len(rows) == setting["points"]
        assert list(dict.fromkeys(row["operation"] for row in rows)) == chosen
    for row in found["rows"]:
        assert (row["error"], row["wrong"], row["ranks"]) == ("", 0, 3), row
        assert row["size"] == row["count"] * item
        assert 0 < row["min_us"] <= row["time_us"] <= row["max_us"]
        assert row["calls"] >= 3
        operation = OPERATIONS[row["operation"]]
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * FACTORS[operation.kind](3))
        assert (row["model_us"] is not None) == (operation.model is not None)
        if operation.shared:
            assert row["count"] % 3 == 0
    pairs = [("rank 0", "rank 1"), ("rank 0", "rank 2"), ("rank 1", "rank 2")]
    assert [(link["first"], link["second"]) for link in found["links"]] == pairs * len(found["settings"])
    assert all(link["latency_us"] > 0 and link["bandwidth"] > 0 for link in found["links"])
    assert {(one["operation"], one["backend"]) for one in found["fits"]} == {
        (name, backend) for name in chosen if name != "barrier" for backend in backends.split(",")
    }
    picture = (launchpad.folder / "out.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")


@needs_torch
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
@pytest.mark.usefixtures("from_image")
def test_a_backend_that_can_not_be_had_leaves_the_others(launchpad: Launchpad) -> None:
    done = launchpad.run(
        "bench", "-n", 2, "--backend", "nccl,gloo", "--op", "all_reduce,barrier", "--sizes", "4,8", "--seconds", 0.1
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("launchpad: nccl: ")
    assert "use backend='gloo'" in line
    shown = done.stdout.splitlines()
    assert shown[1].startswith("gloo: 2 ranks on ")
    assert [line.split()[0] for line in shown if "yes" in line] == ["all_reduce", "all_reduce", "barrier"]
    assert shown[-1].split()[:2] == ["all_reduce", "gloo"]


SPOILS = """
import os
if os.environ.get("SPOIL"):
    import torch.distributed as dist
    right = dist.all_reduce
    def all_reduce(tensor, op=dist.ReduceOp.SUM, *args, **options):
        right(tensor, op, *args, **options)
        if op == dist.ReduceOp.SUM and len(tensor) > 1 and dist.get_rank() == 1:
            tensor[-1] += 1
    dist.all_reduce = all_reduce
"""


@needs_torch
def test_a_wrong_result_is_shown_and_makes_the_exit_code_1(launchpad: Launchpad) -> None:
    """An all_reduce that is wrong in one element, on one rank, and not for all sizes."""
    (launchpad.folder / "sitecustomize.py").write_text(SPOILS)
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    done = launchpad.run(
        *("bench", "-n", 2, "--backend", "gloo", "--op", "all_reduce,broadcast", "--sizes", "4,256"),
        *("--seconds", 0.1, "-x", "SPOIL=1"),
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == "launchpad: some results are wrong: see the column 'correct'\n"
    rows = [
        line for line in done.stdout.splitlines() if line.startswith(("all_reduce  ", "broadcast  ")) and " B " in line
    ]
    assert ["yes" in row for row in rows] == [True, False, True, True]
    assert rows[1].split()[-2:] == ["1", "WRONG"]


@needs_torch
def test_a_rank_that_fails_ends_its_job_and_is_told(launchpad: Launchpad) -> None:
    (launchpad.folder / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('SPOIL'):\n import torch.distributed as dist\n"
        " def barrier(*args, **options):\n  os._exit(7)\n dist.barrier = barrier\n"
    )
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    done = launchpad.run("bench", "-n", 2, "--backend", "gloo", "-x", "SPOIL=1")
    assert done.returncode == 7
    assert "failed first: exit code 7" in done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_a_reader_that_leaves_ends_it(launchpad: Launchpad) -> None:
    """As with | head: nothing goes on being measured, and nothing is left."""
    process = launchpad.start("bench", "-n", 2, "--backend", "gloo", "--seconds", 10)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    process.stdout.close()
    assert process.wait(DEADLINE) == 141


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_an_interrupt_starts_no_other_backend(launchpad: Launchpad) -> None:
    process = launchpad.start("bench", "-n", 2, "--seconds", 300)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    process.terminate()
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, err
    assert b"mpi: 2 ranks" not in out


@needs_torch
@needs_sshd
def test_two_hosts_where_no_launchpad_is_installed(launchpad: Launchpad, tmp_path: Path) -> None:
    """The link between them, by the names that the user gave; played by a Python that sees torch, and no launchpad."""
    site = Path(str(importlib.util.find_spec("torch").origin)).parents[1]
    paths = launchpad.folder / "paths"
    paths.mkdir()
    for name in os.listdir(site):
        if not re.match("_*(editable_*)*launchpad|.*[.]pth$", name):
            (paths / name).symlink_to(site / name)
    venv = launchpad.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=DEADLINE)
    (next(venv.glob("lib/python3*/site-packages")) / "torch.pth").write_text(f"{paths}\n")
    scratch = tmp_path / "ssh" / "tmp"
    scratch.mkdir(parents=True)
    environ = {MARK: launchpad.mark, "XDG_CACHE_HOME": str(tmp_path / "ssh" / "cache"), "TMPDIR": str(scratch)}
    with Cluster(tmp_path / "ssh", 2, environ=environ) as cluster:
        found = measure(
            launchpad,
            *("--ssh-config", cluster.ssh_config, "-H", "n1:2,n2:1", "--python", venv / "bin" / "python"),
            *("--backend", "gloo", "--op", "all_reduce,all_to_all", "--sizes", "4,4K", "--seconds", 0.1),
        )
    (setting,) = found["settings"]
    assert (setting["hosts"], setting["ranks_on"]) == (["n1", "n2"], [2, 1])
    assert [(link["first"], link["second"]) for link in found["links"]] == [("n1", "n1"), ("n1", "n2")]
    assert [(row["operation"], row["size"], row["wrong"]) for row in found["rows"]] == [
        *(("all_reduce", 4, 0), ("all_reduce", 4096, 0)),
        *(("all_to_all", 12, 0), ("all_to_all", 4092, 0)),
    ]
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--op all_reduce,fly", "--op: 'fly' is not an operation; choose from all_reduce, "),
        ("--op ,", "--op: no name given; choose from all_reduce, "),
        ("--backend tcp", "--backend: 'tcp' is not a backend; choose from gloo, nccl, mpi"),
        ("--sizes 4,many", "--sizes: 'many' is not a size; give bytes (4096), or 4K, 1M, 1G"),
        ("--sizes 1MK", "--sizes: '1MK' is not a size; give bytes (4096), or 4K, 1M, 1G"),
        ("--sizes 9999999999G", "--sizes: '9999999999G' is not a size; give bytes (4096), or 4K, 1M, 1G"),
        ("--sizes 0", "--sizes: '0' is not a size; give bytes (4096), or 4K, 1M, 1G"),
        ("--min -4", "--min: '-4' is not a size; give bytes (4096), or 4K, 1M, 1G"),
        ("--min 1M --max 1K", "--max 1024 is less than --min 1048576; give a larger --max"),
        ("--sizes 4 --max 1K", "--sizes lists all sizes; leave out --max, or --sizes"),
        ("--factor 1", "--factor: 1 is not in the range x>=2."),
        ("--dtype complex", "--dtype: 'complex' is not one of "),
        ("--seconds long", "--seconds: 'long' is not a time; give seconds (30), or 5m, 2h, 1d"),
        ("--plot nowhere/x.png", "--plot nowhere/x.png: there is no folder "),
        ("--nproc 0", "--nproc: 0 ranks can't be started; a job needs at least 1"),
        ("--exclude b", "--exclude needs hosts; name them with --hosts or --hostfile, or leave it out"),
        ("--hosts a --hostfile b", "--hosts and --hostfile both name the hosts; give only one of them"),
        ("--python /no/python", "--python /no/python: no such interpreter, or not executable; give its path"),
        ("train.py", "got unexpected extra argument (train.py); see launchpad bench --help"),
        ("--nproc 1 --backend gloo", "gloo: a single rank has no peer; start at least two: --nproc 2"),
    ],
)
def test_bad_input_is_one_sentence_and_2(launchpad: Launchpad, words: str, message: str) -> None:
    if "--nproc 1" in words and not has("torch"):
        pytest.skip("torch is not installed")
    if words.startswith("--plot") and not has("matplotlib"):
        pytest.skip("matplotlib is not installed")
    done = launchpad.run("bench", *words.split())
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.removeprefix("launchpad: ").removeprefix("error: ").startswith(message)
