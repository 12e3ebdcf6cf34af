"""Images on hosts: `launchpad warm -H`, and runs over SSH that use what is kept there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.kept import kept_at
from tests.support.needs import needs_mpi, needs_torch
from tests.support.sshd import needs_sshd

pytestmark = needs_sshd

# Each rank says whether torch was there before it began, whether it was forked from an interpreter that had imported
# all it would (only that freezes objects), and whose child its guard is.
WHERE = """
import gc, os, sys
def parent(pid): return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
print('torch' in sys.modules, gc.get_freeze_count() > 0, parent(parent(os.getppid())))
"""


class WarmHosts(Hosts):
    """The same, with what `launchpad warm` is asked there."""

    def __init__(self, launchpad: Launchpad, folder: Path) -> None:
        super().__init__(launchpad, folder)
        self._launchpad = launchpad

    def warm(self, *args: object) -> subprocess.CompletedProcess[str]:
        words = [] if "-H" in args else ["-H", "n1,n2"]
        options = ("--ssh-config", self.ssh_config, *self.way, *words)
        return self._launchpad.run("warm", *options, *args, timeout=3 * DEADLINE)

    def status(self) -> dict[str, Any]:
        folder = f"launchpad-warm-{os.getuid()}"
        return {f"n{number}": kept_at(self.scratch[host] / folder) for number, host in enumerate(self.hosts[:2], 1)}

    def uses(self) -> list[int]:
        return [sum(image["uses"] for image in found["images"]) for found in self.status().values()]

    def wait_until_ready(self, count: int) -> None:
        """Wait until each host has so many images."""
        wanted = [["ready"] * count] * 2
        wait_until(
            lambda: [[image["state"] for image in found["images"]] for found in self.status().values()] == wanted,
            "the images",
            show=self.status,
        )


@pytest.fixture
def with_torch(request: pytest.FixtureRequest, launchpad: Launchpad, tmp_path: Path) -> Iterator[WarmHosts]:
    """Three hosts. What was kept there is ended."""
    (launchpad.folder / "w.py").write_text(WHERE)
    launchpad.environ["OMP_NUM_THREADS"] = "1"
    with WarmHosts(launchpad, tmp_path / "ssh") as cluster:
        if hasattr(request, "param"):
            cluster.way = ("--ssh", request.param)
        yield cluster
        cluster.way = ()
        cluster.warm("--stop", "-H", "n1,n2,n3")
        wait_until(lambda: not launchpad.survivors(), "all images to be gone", show=launchpad.survivors)


@pytest.fixture
def hosts(with_torch: WarmHosts, launchpad: Launchpad, tmp_path: Path) -> WarmHosts:
    """The same, where no interpreter finds torch, which takes a second to import."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(
        "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(name)\nsys.meta_path.insert(0, No())\n"
    )
    launchpad.environ["PYTHONPATH"] = str(tmp_path / "path")
    return with_torch


both_ways = pytest.mark.parametrize("with_torch", ["paramiko", "openssh"], indirect=True)

FORKED = ["False", "True"]  # what a rank of WHERE says first if it comes from an image


def ranks(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """What each rank said, in the order of the ranks; nothing else was."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [line.partition("] ")[2].split() for line in sorted(done.stdout.splitlines())]


def starts(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """What each rank of WHERE said, without the parent of its guard."""
    return [words[:2] for words in ranks(done)]


@both_ways
def test_runs_use_the_image_of_each_host(launchpad: Launchpad, hosts: WarmHosts) -> None:
    done = hosts.warm()
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(";")[0] for line in done.stdout.splitlines()] == [
        "n1: plain Python (ready)",
        "n2: plain Python (ready)",
    ]
    told = json.loads(hosts.warm("--status", "--json").stdout)
    images = [str(found["images"][0]["pid"]) for found in hosts.status().values()]
    assert [str(told[name]["images"][0]["pid"]) for name in ("n1", "n2")] == images
    for _ in range(2):
        assert ranks(hosts.run(launchpad, "-v", "-H", "n1,n2", "w.py")) == [["False", "True", pid] for pid in images]
    assert hosts.uses() == [2, 2]
    assert hosts.warm("--stop").stdout == "n1: ended\nn2: ended\n"
    wait_until(lambda: not launchpad.survivors(), "all to be gone", show=launchpad.survivors)
    assert hosts.warm("--stop").stdout == hosts.warm("--status").stdout == "n1: nothing is kept\nn2: nothing is kept\n"
    assert json.loads(hosts.warm("--status", "--json").stdout) == hosts.status() == {"n1": None, "n2": None}


@both_ways
def test_several_worlds_use_the_image_of_their_host(launchpad: Launchpad, hosts: WarmHosts) -> None:
    """Their ranks share its cores, so each has fewer threads than its world alone would have."""
    del launchpad.environ["OMP_NUM_THREADS"]
    cores = len(os.sched_getaffinity(0))
    assert hosts.warm("-H", "n1").returncode == 0
    role = f'target = "w.py"\nhosts = "n1:{-(-cores // 2)}"\n'
    (launchpad.folder / "job.toml").write_text(f"[jobs.j.roles.a]\n{role}[jobs.j.roles.b]\n{role}")
    image = str(hosts.status()["n1"]["images"][0]["pid"])
    done = hosts.run(launchpad, "-v", "--config", "job.toml", "--job", "j")
    assert ranks(done) == [["False", "True", image]] * (-(-cores // 2) * 2)
    assert sum(one["uses"] for one in hosts.status()["n1"]["images"]) == 2


@needs_torch
def test_with_torch(launchpad: Launchpad, with_torch: WarmHosts) -> None:
    (launchpad.folder / "t.py").write_text(WHERE + "import torch\n")
    assert with_torch.warm().returncode == 0
    found = with_torch.status()
    images = {name: next(str(one["pid"]) for one in found[name]["images"] if one["preload"]) for name in found}
    assert ranks(with_torch.run(launchpad, "-v", "-H", "n1:2,n2:1", "t.py")) == [
        ["True", "True", images[host]] for host in ("n1", "n1", "n2")
    ]
    with_torch.wait_until_ready(2)
    assert starts(with_torch.run(launchpad, "-v", "-H", "n1,n2", "w.py")) == [FORKED] * 2


@needs_mpi
def test_with_mpi(launchpad: Launchpad, hosts: WarmHosts) -> None:
    """The interface that MPI is given on each host is no reason to start cold."""
    (launchpad.folder / "m.py").write_text(
        "import gc, os\nforked = gc.get_freeze_count() > 0\nfrom mpi4py import MPI\n"
        "told = os.environ['UCX_NET_DEVICES'] and os.environ['FI_TCP_IFACE']\n"
        "print(forked, MPI.COMM_WORLD.allreduce(1), bool(told))\n"
    )
    assert hosts.warm("--preload", "mpi4py.MPI").returncode == 0
    words = ("-v", "--backend", "mpi", "--preload", "mpi4py.MPI", "-H", "n1:2,n2:1", "m.py")
    assert ranks(hosts.run(launchpad, *words)) == [["True", "3", "True"]] * 3


@needs_torch
def test_doctor_uses_the_image_of_each_host_and_has_no_other_one_made(
    launchpad: Launchpad, with_torch: WarmHosts
) -> None:
    assert with_torch.warm().returncode == 0
    for threads, kept in (("1", True), ("7", False)):
        launchpad.environ["OMP_NUM_THREADS"] = threads
        done = launchpad.run("doctor", "--ssh-config", with_torch.ssh_config, "-H", "n1,n2", "--json")
        result = json.loads(done.stdout)
        assert [one["facts"]["import"]["kept"] for one in result["hosts"]] == [kept] * 2, done.stderr
        assert "gloo" in result["all_reduce"]["seconds"]
        assert with_torch.uses() == [1, 1]
    assert [len(found["images"]) for found in with_torch.status().values()] == [2, 2]


@needs_torch
def test_where_no_launchpad_is_installed(launchpad: Launchpad, with_torch: WarmHosts) -> None:
    """Ranks find the one that was sent, so their PYTHONPATH is another one than that of the session."""
    site = Path(str(importlib.util.find_spec("torch").origin)).parents[1]  # type: ignore[union-attr]
    paths = launchpad.folder / "paths"
    paths.mkdir()
    for name in os.listdir(site):
        if not re.match("_*(editable_*)*launchpad|.*[.]pth$", name):
            (paths / name).symlink_to(site / name)
    venv = launchpad.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=DEADLINE)
    (next(venv.glob("lib/python3*/site-packages")) / "torch.pth").write_text(f"{paths}\n")
    (launchpad.folder / "t.py").write_text(WHERE + "import torch, launchpad\n")
    python = ("--python", venv / "bin" / "python")
    assert with_torch.warm(*python).returncode == 0
    for program, torch in (("t.py", "True"), ("w.py", "False")):
        with_torch.wait_until_ready(2)
        done = with_torch.run(launchpad, "-v", "-H", "n1,n2", *python, program)
        assert starts(done) == [[torch, "True"]] * 2


def test_in_a_copy_of_the_folder(launchpad: Launchpad, hosts: WarmHosts) -> None:
    hosts.warm()
    words = ("-v", "-H", "n1,n2", "--sync", "w.py")
    assert starts(hosts.run(launchpad, *words)) == [FORKED] * 2
    (launchpad.folder / "ctypes.py").write_text("mine = True\n")
    (launchpad.folder / "w.py").write_text("import ctypes; print(ctypes.mine)\n")
    done = hosts.run(launchpad, *words)
    assert sorted(done.stdout.splitlines()) == ["[n1 0] True", "[n2 1] True"]
    said = sorted(done.stderr.splitlines())
    for line, name in zip(said, ("n1", "n2"), strict=True):
        assert re.fullmatch(
            f"launchpad: no kept image was used on {name}: .*/copy-.*/ctypes.py comes first on the path", line
        )
    assert all("ctypes.py comes first" in found["last_cold"] for found in hosts.status().values())


def test_another_image_for_other_variables(launchpad: Launchpad, hosts: WarmHosts) -> None:
    hosts.warm()
    words = ("-v", "-H", "n1,n2", "--env", "PYTHONHASHSEED=7", "w.py")
    done = hosts.run(launchpad, *words)
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == [
        f"launchpad: no kept image was used on {name}: PYTHONHASHSEED differs, which imports read"
        for name in ("n1", "n2")
    ]
    assert "False False" in done.stdout
    hosts.wait_until_ready(2)
    assert starts(hosts.run(launchpad, *words)) == [FORKED] * 2
    assert starts(hosts.run(launchpad, "-v", "-H", "n1,n2", "w.py")) == [FORKED] * 2
    assert all(len(found["images"]) == 2 for found in hosts.status().values())


@pytest.mark.parametrize("how", [["--start-method", "exec", "w.py"], ["--no-hooks", "w.py"], ["sh", "-c", "echo here"]])
def test_ranks_that_are_executed_stay_that(launchpad: Launchpad, hosts: WarmHosts, how: list[str]) -> None:
    hosts.warm()
    images = [str(found["images"][0]["pid"]) for found in hosts.status().values()]
    shown = ranks(hosts.run(launchpad, "-v", "-H", "n1,n2", *how))
    assert shown == ([["here"]] * 2 if "sh" in how else [["False", "False", pid] for pid in images])
    assert hosts.uses() == [1, 1]


def test_a_job_outlives_its_images(launchpad: Launchpad, hosts: WarmHosts) -> None:
    hosts.warm()
    (launchpad.folder / "s.py").write_text(
        "import os, sys, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('on')\n"
    )
    process = hosts.begin(launchpad, "-H", "n1,n2", "s.py")
    assert process.stdout is not None
    assert [process.stdout.readline().split()[-1] for _ in range(2)] == [b"up", b"up"]
    assert [found["images"][0]["jobs"] for found in hosts.status().values()] == [1, 1]
    for found in hosts.status().values():
        os.kill(found["images"][0]["pid"], signal.SIGKILL)
    wait_until(lambda: hosts.status() == {"n1": None, "n2": None}, "the images to be missed")
    (launchpad.folder / "go").touch()
    output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output.count(b"on\n"), errors) == (0, 2, b"")
    assert starts(hosts.run(launchpad, "-v", "-H", "n1,n2", "w.py")) == [["False", "False"]] * 2


@pytest.mark.parametrize(
    ("with_torch", "how"), [("paramiko", "stopped"), ("openssh", "killed")], indirect=["with_torch"]
)
def test_nothing_of_a_job_is_left_but_the_images(launchpad: Launchpad, hosts: WarmHosts, how: str) -> None:
    hosts.warm()
    before = len(launchpad.survivors())
    (launchpad.folder / "s.py").write_text(
        "import signal, subprocess\nsubprocess.Popen(['setsid', 'sleep', '100'])\n"
        "print('up', flush=True)\nsignal.pause()\n"
    )
    process = hosts.begin(launchpad, "-H", "n1:2,n2", "s.py")
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline().endswith(b"up\n")
    process.send_signal(signal.SIGTERM if how == "stopped" else signal.SIGKILL)
    assert process.wait(DEADLINE) == (143 if how == "stopped" else -signal.SIGKILL)
    wait_until(lambda: len(launchpad.survivors()) == before, "the job to be gone", show=launchpad.survivors)
    wait_until(
        lambda: [found["images"][0]["jobs"] for found in hosts.status().values()] == [0, 0], "the images to notice it"
    )


def test_launchpad_run_uses_them(launchpad: Launchpad, hosts: WarmHosts) -> None:
    hosts.warm()
    where = f"hosts=['n1:1', 'n2:1'], ssh_config={str(hosts.ssh_config)!r}, backend=None"
    code = f"import launchpad; print(list(launchpad.run(lambda rank, size: rank + 10, {where})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=launchpad.environ,
        cwd=launchpad.folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout == "[10, 11]\n"
    assert hosts.uses() == [1, 1]


def test_this_machine_among_the_hosts(launchpad: Launchpad, hosts: WarmHosts, tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    launchpad.environ["XDG_RUNTIME_DIR"] = str(tmp_path / "runtime")
    both = ("-H", "localhost,n1")
    assert hosts.warm(*both).stdout.count("plain Python (ready)") == 2
    assert starts(hosts.run(launchpad, "-v", *both, "w.py")) == [FORKED] * 2
    assert launchpad.run("warm", "--status").stdout.startswith("plain Python: ready")
    assert hosts.warm("--stop", *both).stdout == "localhost: ended\nn1: ended\n"
    wait_until(lambda: not launchpad.survivors(), "all to be gone", show=launchpad.survivors)
    assert not list((tmp_path / "runtime").iterdir())


def test_a_host_that_can_not_be_used_is_named(hosts: WarmHosts) -> None:
    hosts.hosts[1].stop()
    for words in ((), ("--status",), ("--stop",)):
        done = hosts.warm(*words, "-H", "n1,n2,n3")
        assert done.returncode == 3
        assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["n1", "n3"]
        first, second = done.stderr.splitlines()
        assert first == "launchpad: error: 1 of 3 hosts can't be used:"
        assert second.split()[:2] == ["n2", "refused:"]


def test_a_host_that_can_not_keep_an_image_is_named(hosts: WarmHosts) -> None:
    folder = hosts.hosts[0].folder / "tmp" / f"launchpad-warm-{os.getuid()}"
    folder.mkdir(mode=0o755)
    done = hosts.warm()
    folder.rmdir()
    assert done.returncode == 3
    assert done.stdout.startswith("n2: plain Python (ready)")
    assert "n1  the keeper of images can't be started" in done.stderr
    assert "only you can enter" in done.stderr
    done = hosts.warm("--preload", "there_is_none", "-H", "n2")
    assert (done.returncode, done.stdout) == (3, "")
    assert "importing there_is_none here failed (ModuleNotFoundError)" in done.stderr


@pytest.mark.parametrize(
    "words", [["--include", "n1"], ["-H", "n1", "--hostfile", "h"], ["-H", ""], ["-H", "n1", "--preload", "a b"]]
)
def test_bad_usage_is_said(launchpad: Launchpad, words: list[str]) -> None:
    done = launchpad.run("warm", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
