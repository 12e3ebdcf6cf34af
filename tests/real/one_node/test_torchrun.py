"""torchrun's command line given to `launchpad run`; habits from mpirun; a world of several launchpads."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad.errors import UsageError
from launchpad.job.world import parse_endpoint, parse_nnodes
from tests.support.command import DEADLINE, Launchpad
from tests.support.targets import shown

pytestmark = pytest.mark.usefixtures("from_image")

# Every option of torchrun 2.15, as people give them; the value is what `--help` says it takes.
OPTIONS = {
    "--nnodes": "1:1",
    "--nproc-per-node": "1",
    "--rdzv-backend": "c10d",
    "--rdzv-endpoint": "localhost:0",
    "--rdzv-id": "job1",
    "--rdzv-conf": "timeout=10,join_timeout=20",
    "--standalone": None,
    "--max-restarts": "0",
    "--monitor-interval": "0.5",
    "--start-method": "forkserver",
    "--event-log-handler": "null",
    "--role": "trainer",
    "--log-dir": "logs",
    "--redirects": "0",
    "--tee": "0:3",
    "--log-line-prefix-template": "[${rank}] ",
    "--local-ranks-filter": "0",
    "--duplicate-stdout-filters": "a,b",
    "--duplicate-stderr-filters": "a,b",
    "--node-rank": "0",
    "--master-addr": "127.0.0.1",
    "--master-port": "0",
    "--local-addr": "127.0.0.1",
    "--logs-specs": "default",
    "--numa-binding": "node",
    "--signals-to-handle": "SIGTERM,SIGINT,SIGUSR1",
    "--shutdown-timeout": "3",
    "--run-path": None,
    "--virtual-local-rank": None,
}

# Of these, it is said that they have no effect.
MISSED = ("--event-log-handler", "--logs-specs")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_torchrun_in_both_spellings(launchpad: Launchpad, name: str) -> None:
    value, other = OPTIONS[name], name.replace("-", "_").replace("__", "--", 1)
    for words in ([name, value], [f"{other}={value}"]) if value else ([name], [other]):
        done = launchpad.run("run", *words, "show_env.py", "x")
        said = f"launchpad: {name} has no effect: " if name in MISSED else ""
        assert done.returncode == 0
        assert done.stderr.count("\n") == bool(said)
        assert done.stderr.startswith(said)
        assert shown(done.stdout)[0]["argv"][1:] == ["x"]


def test_as_many_ranks_as_torch_has_accelerators_of_a_kind(launchpad: Launchpad) -> None:
    """This torch has three."""
    (launchpad.folder / "torch.py").write_text("class xpu:\n    device_count = staticmethod(lambda: 3)\n")
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    assert launchpad.run("run", "--nproc-per-node", "xpu", "sh", "-c", "echo $WORLD_SIZE").stdout.count("3\n") == 3
    done = launchpad.run("run", "-n", "npu", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nproc npu: torch finds no npu on " in done.stderr


def test_what_has_no_effect_is_not_said_to_who_wants_quiet(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-q", *(f"{name}={OPTIONS[name]}" for name in MISSED), "show_env.py")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("mark", ["'", '"'])
def test_quotes_around_what_the_nodes_agree_on(launchpad: Launchpad, mark: str) -> None:
    conf = f"{mark}join_timeout=5,last_call_timeout=1,timeout=5{mark}"
    done = launchpad.run("run", "--nnodes", 1, "--rdzv-conf", conf, "show_env.py")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (("launch", "script.py"), ["--local-rank={}", "--lr", "3"]),
        (("launch", "-m", "script"), ["--local-rank={}", "--lr", "3"]),
        (("launch", "--use_env", "script.py"), ["--lr", "3"]),
        (("run", "--use-env", "script.py"), ["--lr", "3"]),
    ],
    ids=" ".join,
)
def test_commands_of_torch_distributed_launch(launchpad: Launchpad, words: tuple[str, ...], argv: list[str]) -> None:
    (launchpad.folder / "script.py").write_text("import sys; print(*sys.argv[1:])\n")
    command, *rest = words
    done = launchpad.run(command, "--nproc_per_node=2", *rest, "--lr", "3")
    wanted = [f"[{rank}] {' '.join(argv).format(rank)}" for rank in range(2)]
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, wanted, "")


def test_a_program_gets_no_local_rank_by_surprise(launchpad: Launchpad) -> None:
    done = launchpad.run("launch", "--no-python", "echo", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "add --use-env" in done.stderr
    assert launchpad.run("launch", "--no-python", "--use-env", "echo", "x").stdout == "[0] x\n"


def test_launch_takes_no_job_file(launchpad: Launchpad) -> None:
    """Its targets would get no --local-rank."""
    (launchpad.folder / "job.toml").write_text('target = "true"\n')
    done = launchpad.run("launch", "--config", "job.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--config: launchpad launch takes TARGET from the command line; use launchpad run" in done.stderr


def test_no_option_of_torchrun_is_missing() -> None:
    """Against the torchrun that is installed: a new option there is to be noticed here."""
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent)) or shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("torch is not installed")
    text = subprocess.run([torchrun, "--help"], capture_output=True, text=True, check=True, timeout=DEADLINE).stdout
    theirs = set(re.findall(r"^  (?:-\w [A-Z_]*, |-\w, )?(--[a-z-]+)", text, flags=re.M)) - {"--help"}
    assert len(theirs) > 25
    assert theirs <= {*OPTIONS, "--module", "--no-python", "--print-completion"}


@pytest.mark.parametrize(
    ("short", "meant"),
    [("--nproc-per", "3"), ("--nproc_p", "3"), ("--nproc-per-node", "3")],
)
def test_abbreviations(launchpad: Launchpad, short: str, meant: str) -> None:
    assert len(shown(launchpad.run("run", short, meant, "show_env.py").stdout)) == 3


def test_abbreviations_as_argparse_takes_them(launchpad: Launchpad) -> None:
    words = [
        "--stand",
        "--redirect=0",
        "--max-r",
        "0",
        "--rdzv_b",
        "c10d",
        "--local-ranks",
        "1",
        "--master-p=0",
        "--mod",
    ]
    (launchpad.folder / "thing.py").write_text("import os; print(os.environ['RANK'])")
    assert launchpad.run("run", "-n2", *words, "thing").stdout == "[1] 1\n"


def test_ambiguous_abbreviation_is_refused(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--log", "x", "show_env.py")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "launchpad: error: --log could be --log-dir or --log-line-prefix-template or --logs-specs"
    )


def test_defaults_from_pet_variables(launchpad: Launchpad) -> None:
    launchpad.environ |= {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "pet", "PET_STANDALONE": "1", "SHOW": "ROLE_NAME"}
    assert [got["env"] for got in shown(launchpad.run("run", "show_env.py").stdout).values()] == [
        {"ROLE_NAME": "pet"}
    ] * 2
    assert len(shown(launchpad.run("run", "-n", 1, "show_env.py").stdout)) == 1


def test_local_rank_macro(launchpad: Launchpad) -> None:
    got = shown(launchpad.run("run", "-n", 2, "show_env.py", "--id=${local_rank}", "$HOME").stdout)
    assert [got[rank]["argv"][1:] for rank in (0, 1)] == [["--id=0", "$HOME"], ["--id=1", "$HOME"]]


def test_role_and_run_id(launchpad: Launchpad) -> None:
    launchpad.environ["SHOW"] = "ROLE_NAME TORCHELASTIC_RUN_ID"
    done = launchpad.run("run", "--role", "eval", "--rdzv-id", "job7", "show_env.py")
    assert shown(done.stdout)[0]["env"] == {"ROLE_NAME": "eval", "TORCHELASTIC_RUN_ID": "job7"}


def test_virtual_local_rank(launchpad: Launchpad) -> None:
    launchpad.environ |= {"SHOW": "LOCAL_RANK RANK CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES": "5, 3"}
    got = shown(launchpad.run("run", "-n", 2, "--virtual-local-rank", "show_env.py").stdout)
    assert [list(got[rank]["env"].values()) for rank in (0, 1)] == [["0", "0", "5"], ["0", "1", "3"]]
    done = launchpad.run("run", "-n", 3, "--virtual-local-rank", "show_env.py")
    assert done.returncode == 2
    assert "local rank 2 has no GPU in CUDA_VISIBLE_DEVICES=5, 3" in done.stderr


def test_run_path_runs_a_script_of_any_name(launchpad: Launchpad) -> None:
    (launchpad.folder / "script").write_text("print(__name__)")
    assert launchpad.run("run", "--run-path", launchpad.folder / "script").stdout == "[0] __main__\n"


def test_lines_that_match_a_filter_are_duplicated(launchpad: Launchpad) -> None:
    (launchpad.folder / "t.py").write_text(
        "import os; r = os.environ['RANK']; print('loss', r); print('a,b', r); print('no')"
    )
    words = ("--log-dir", "logs", "--tee", "3", "--duplicate-stdout-filters", "loss,a,,b")
    assert launchpad.run("run", "-n", 2, *words, "t.py").returncode == 0
    (found,) = (launchpad.folder / "logs").glob("*/attempt_0/filtered_stdout.log")
    assert sorted(found.read_text().splitlines()) == ["[0] a,b 0", "[0] loss 0", "[1] a,b 1", "[1] loss 1"]


def test_with_a_filter_alone_all_output_is_recorded(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--duplicate-stdout-filters", "loss", "printf", "loss 1\nother\n")
    assert done.returncode == 0
    assert launchpad.run("logs").stdout.splitlines() == ["[0] loss 1", "[0] other"]
    (found,) = launchpad.scratch.glob("launchpad-logs-*/*/attempt_0/filtered_stdout.log")
    assert found.read_text() == "[0] loss 1\n"


def test_numbers_that_are_too_long_for_python() -> None:
    with pytest.raises(UsageError, match=r"^--nnodes 999"):
        parse_nnodes("9" * 5000)
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint h:999"):
        parse_endpoint(f"h:{'9' * 5000}", "--rdzv-endpoint")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "1:4"], "--nnodes 1:4: with a varying number of nodes, they meet by --rdzv-backend c10d"),
        (["--nnodes", "x"], "--nnodes x: give the number of nodes"),
        (
            ["--nnodes=2", "--rdzv-backend=etcd"],
            "--rdzv-backend etcd is not supported: no such server is needed",
        ),
        (["--nnodes=2", "--rdzv-endpoint=h", "--rdzv-conf=is_host=x"], "--rdzv-conf is_host=x: is_host must be true"),
        (
            ["--nnodes=2", "--node-rank=2", "--master-addr=h"],
            "--node-rank 2: with --nnodes 2 it must be from 0 to 1",
        ),
        (["--nnodes=2", "--node-rank=1"], "--nnodes 2: where do the nodes meet? Give --rdzv-endpoint"),
        (["--node-rank=1"], "--node-rank 1: with one node the only node rank is 0; give --nnodes"),
        (["--rdzv-endpoint=h:x"], "--rdzv-endpoint h:x: write HOST:PORT"),
        (["--rdzv-endpoint=2001:db8::5"], "--rdzv-endpoint 2001:db8::5: write HOST:PORT, or [::1]:PORT"),
        (["--rdzv-endpoint=:29400"], "--rdzv-endpoint :29400: write HOST:PORT"),
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h", "--rdzv-id="], "--rdzv-id is empty, and with it"),
        (["--rdzv-conf=join_timeout=nan"], "--rdzv-conf join_timeout=nan: join_timeout must be a number of seconds"),
        (["--rdzv-conf=timeout=-5"], "--rdzv-conf timeout=-5: timeout must be a number of seconds"),
        (["--rdzv-conf=x"], "--rdzv-conf x: 'x' is not NAME=VALUE"),
        (["--signals-to-handle=SIGFOO"], "--signals-to-handle: 'SIGFOO' is not a signal"),
        (
            ["--stop-signal", "FOO"],
            "--stop-signal: 'FOO' is not a signal; write a name like USR1",
        ),
        (["--stop-signal", "33"], "--stop-signal: '33' is not a signal"),
        (["--stop-signal", "sigkill"], "--stop-signal: sigkill can't be caught"),
        (["--stop-signal", "STOP"], "--stop-signal: STOP can't be caught"),
        (["--wdir", "nowhere"], "--wdir nowhere: No such file or directory; give a folder"),
        (
            ["-H", "a,b", "--node-rank=1", "--nnodes=2", "--master-addr=c"],
            "--node-rank is for launchpads started on each node; leave it out with --hosts, --enter",
        ),
        (["--hostfile", "f"], "--hostfile f: No such file or directory; give a file with one host per line"),
        (["-H", "a:2", "-n", "4"], "--hosts: a is given 2 ranks, but --nproc asks for 4"),
        (["-H", "a", "--hostfile", "f"], "--hosts and --hostfile both name the hosts"),
        (["--include", "a"], "--include needs hosts; name them with --hosts or --hostfile"),
        (["-H", ""], "--hosts is empty"),
        (["-H", "a", "--sync", "--dry-run"], "--dry-run changes nothing, but --sync writes to the hosts"),
        (["-H", "localhost,127.0.0.1"], "localhost and 127.0.0.1 are both this machine; name it once"),
        (
            ["--nnodes=2", "--node-rank=0", "--master-addr=192.0.2.1"],
            "the nodes of this job meet at 192.0.2.1:29500, and launchpad can't listen there (Cannot",
        ),
    ],
)
def test_what_can_not_be_honoured_is_refused(launchpad: Launchpad, words: list[str], message: str) -> None:
    done = launchpad.run("run", *words, "show_env.py")
    assert done.returncode == 2
    assert done.stderr.startswith(f"launchpad: error: {message}")
    assert done.stderr.count("\n") == 1


def test_mpirun_habits(launchpad: Launchpad) -> None:
    (launchpad.folder / "there").mkdir()
    (launchpad.folder / "there" / "s.py").write_text("import os; print(os.getcwd())")
    done = launchpad.run(
        "run", "-np", 1, "--oversubscribe", "--allow-run-as-root", "--tag-output", "--wdir", "there", "s.py"
    )
    assert (done.stdout, done.stderr) == (f"[0] {launchpad.folder}/there\n", "")


def test_master_port_that_is_taken(launchpad: Launchpad) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launchpad.run("run", "--master-port", port, "show_env.py")
    assert done.returncode == 2
    assert done.stderr.startswith(f"launchpad: error: --master-port {port}: pid {os.getpid()}, ")
    assert " listens there on " in done.stderr
