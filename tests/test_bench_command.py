"""`launchpad bench`: real runs with tiny sizes, and the arithmetic of fits, bandwidths and models."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad.bench import operations, plot, tables
from launchpad.bench.display import BenchSink
from launchpad.bench.fit import fit
from launchpad.bench.messages import BenchRequest, LinkTiming, Row, Setting, Unavailable, from_line, to_line
from launchpad.bench.operations import FACTORS, OPERATIONS, bandwidths, predicted
from launchpad.errors import UsageError
from launchpad.protocol.events import STDERR, STDOUT, Output
from tests.conftest import DEADLINE, MARK, Launchpad
from tests.sshd import Cluster, needs_sshd
from tests.test_architecture import loaded


def has(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in modules)


needs_torch = pytest.mark.skipif(not has("torch"), reason="torch is not installed")
needs_mpi = pytest.mark.skipif(not has("torch", "mpi4py"), reason="torch or mpi4py is not installed")
needs_matplotlib = pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")

HAS_ALGORITHMS = (Path(operations.__file__).parents[1] / "collectives" / "algorithms.py").exists()
THERE = [name for name, one in OPERATIONS.items() if HAS_ALGORITHMS or not one.is_algorithm]

ROW = Row("all_reduce", "gloo", 4, 1 << 20, 1 << 18, "float32", 20, 1000.0, 900.0, 2000.0, 1.0, 1.5, 0)


# Arithmetic.


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 3e-4, 0.05])
@pytest.mark.parametrize("beta", [0.0, 1e-11, 1e-9, 4e-7])
@pytest.mark.parametrize("sizes", [[4, 8], [4, 4096, 1 << 20], [0, 1, 10, 10**9], [1 << n for n in range(2, 30, 3)]])
def test_a_fit_finds_the_line_that_made_the_points(alpha: float, beta: float, sizes: list[int]) -> None:
    points = [(size, alpha + beta * size) for size in sizes]
    found = fit(points)
    if len([seconds for _, seconds in points if seconds > 0]) < 2:
        assert found is None
        return
    assert found is not None
    for size, seconds in points:
        assert found.at(size) == pytest.approx(seconds, rel=1e-6, abs=1e-12)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_a_fit_by_hand() -> None:
    """Weights 1/t²: of 2 s and 4 s at one size, the best constant is where 1/2 and 1/4 of it are nearest to 1 each."""
    found = fit([(1, 2.0), (1, 4.0), (10**6, 2.0), (10**6, 4.0)])
    assert found is not None
    assert found.latency == pytest.approx((1 / 2 + 1 / 4) / (1 / 4 + 1 / 16))
    assert found.per_byte == pytest.approx(0, abs=1e-12)
    assert found.error == pytest.approx(math.sqrt(((2.4 / 2 - 1) ** 2 + (2.4 / 4 - 1) ** 2) / 2))


@pytest.mark.parametrize(
    "points",
    [[(4, 9.0), (1024, 1.0)], [(4, 5e-3), (64, 4e-3), (4096, 1e-3)], [(4, 1e-9), (8, 1.0), (16, 5.0)]],
)
def test_neither_parameter_is_negative(points: list[tuple[float, float]]) -> None:
    found = fit(points)
    assert found is not None
    assert found.latency >= 0
    assert found.per_byte >= 0
    nearby = [fit_error(points, found.latency * a, found.per_byte * b) for a, b in [(0.99, 1), (1.01, 1), (1, 0.99)]]
    assert fit_error(points, found.latency, found.per_byte) <= min(nearby) + 1e-9


def fit_error(points: list[tuple[float, float]], latency: float, per_byte: float) -> float:
    return sum(((latency + per_byte * size - seconds) / seconds) ** 2 for size, seconds in points)


@pytest.mark.parametrize("points", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)], [(4, 0.0), (8, 1.0)]])
def test_one_size_makes_no_line(points: list[tuple[float, float]]) -> None:
    assert fit(points) is None


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("gather", 2, 0.5),
        ("scatter", 2, 0.5),
        ("broadcast", 7, 1.0),
        ("reduce", 7, 1.0),
        ("send_recv", 7, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(kind: operations.Kind, ranks: int, factor: float) -> None:
    assert bandwidths(kind, ranks, 3 * 10**9, 2.0) == (1.5, 1.5 * factor)


def test_every_operation_has_a_factor() -> None:
    assert {one.kind for one in OPERATIONS.values()} <= FACTORS.keys()


@pytest.mark.parametrize(
    ("name", "ranks", "seconds"),
    [
        ("ring_all_reduce", 4, 3 * (10 + 8 * 2 + 8 * 3)),
        ("chunked_ring_all_reduce", 4, 6 * 10 + 1.5 * 8 * 2 + 0.75 * 8 * 3),
        ("recursive_doubling_all_reduce", 8, 3 * (10 + 8 * 2 + 8 * 3)),
        ("recursive_doubling_all_reduce", 5, 4 * (10 + 8 * 2) + 3 * 8 * 3),
        ("tree_broadcast", 5, 3 * (10 + 8 * 2)),
        ("bruck_all_gather", 4, 2 * 10 + 0.75 * 8 * 2),
    ],
)
def test_the_models_are_the_textbooks(name: str, ranks: int, seconds: float) -> None:
    model = OPERATIONS[name].model
    assert model is not None
    assert predicted(model, ranks, 8, (10, 2, 3)) == seconds


# What travels, and what is shown.


def test_messages_come_back_as_they_were() -> None:
    messages = [
        BenchRequest("gloo", ("all_reduce",), (4, 8), "float32", 1.5, ("a", "b")),
        Setting("gloo", 4, ("a",), (4,), (2,), "float32", "2.13", "gloo", 7, {"nccl": "no GPU"}),
        ROW,
        LinkTiming("gloo", "a", "b", 12.5, 0.8),
        Unavailable("mpi", 'no "mpi4py"'),
    ]
    assert [from_line(to_line(message)) for message in messages] == messages
    for line in ("", "{}", "[1]", '{"is": "Row"}', '{"is": "Nothing"}', "all is well"):
        with pytest.raises(ValueError):
            from_line(line)


def test_the_sink_puts_pieces_of_lines_together() -> None:
    taken: list[object] = []
    strays: list[bytes] = []
    sink = BenchSink(taken.append, strays.append)
    data = (to_line(ROW) + "\nhello\n").encode() * 3
    for start in range(0, len(data), 7):
        assert not sink.on(Output(0, 0, STDOUT, data[start : start + 7]))
        sink.on(Output(0, 1, STDERR, b"a warning\n"))
    assert taken == [ROW] * 3
    assert strays == [b"hello"] * 3


def test_the_link_matrix() -> None:
    links = [
        LinkTiming("gloo", "a", "a", 10, 4),
        LinkTiming("gloo", "a", "b", 50, 1.25),
        LinkTiming("gloo", "b", "b", 11, 5),
    ]
    _, header, first, second = tables.link_matrix(links)
    assert header.split() == ["a", "b"]
    assert re.split("  +", first) == ["a", "10.0 µs, 4.00 GB/s", "50.0 µs"]
    assert re.split("  +", second) == ["b", "1.25 GB/s", "11.0 µs, 5.00 GB/s"]
    assert tables.link_matrix([]) == []


def test_a_row() -> None:
    assert tables.row(ROW).split() == "all_reduce 1 MiB 262144 20 1000 900.0 2000 1.00 1.50 yes".split()
    wrong = Row(**{**vars(ROW), "wrong": 17, "model_us": 12.34})
    assert tables.row(wrong).split()[-3:] == ["17", "WRONG", "12.3"]
    assert "can't be done: no such thing" in tables.row(Row(**{**vars(ROW), "error": "no such thing"}))


@pytest.mark.parametrize(
    ("size", "words"), [(4, "4 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (8 << 20, "8 MiB"), (1 << 30, "1 GiB")]
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert tables.size_in_words(size) == words


@needs_matplotlib
def test_a_plot_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--plot .*nothing: Format .* ending in .png"):
        plot.draw([ROW], str(tmp_path / "x.nothing"))
    with pytest.raises(UsageError, match="No such file or directory"):
        plot.draw([ROW], str(tmp_path / "missing" / "x.png"))


def test_the_command_itself_imports_no_torch() -> None:
    assert not loaded("import launchpad.cli.bench") & {"torch", "matplotlib", "numpy", "paramiko"}


# The ranks' part.


@needs_torch
@pytest.mark.parametrize("count", range(2, 10))
def test_every_pair_sends_once_and_nobody_twice_in_a_round(count: int) -> None:
    from launchpad.bench.measure import plan_links, rounds

    found = rounds(range(count))
    assert sorted(pair for one in found for pair in one) == list(itertools.combinations(range(count), 2))
    for one in found:
        assert len({member for pair in one for member in pair}) == 2 * len(one)
    assert len(found) == count - 1 + count % 2
    assert all(len(one) == 1 for one in plan_links([range(count)]))
    between = plan_links([[2 * node, 2 * node + 1] for node in range(count)])
    assert between[0] == [(2 * node, 2 * node + 1) for node in range(count)]
    assert sum(map(len, between)) == count + math.comb(count, 2)


# Runs.


def measure(launchpad: Launchpad, *args: object, **options: object) -> dict[str, list[dict[str, object]]]:
    """What --json prints of a run in which nothing was wrong."""
    done = launchpad.run("bench", "--json", *args, **{"timeout": 3 * DEADLINE, **options})
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
    return found


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
