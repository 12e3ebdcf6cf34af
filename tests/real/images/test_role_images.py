"""Several worlds on one machine: what their ranks import is imported once, by an image of the job or a kept one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad import linux
from launchpad.agent.host import procfs
from launchpad.forkserver import keeper
from launchpad.image import Cold, job_image, pressure
from launchpad.image.keeper_link import ForkRequest
from tests.real.images.test_forked import OF_THE_PROCESS, PROGRAMS
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.kept import uses
from tests.support.needs import needs_torch
from tests.support.records import store_of

# Each process that imports it leaves a line.
IMPORTED = """\
import os
with open(os.path.join(os.path.dirname(__file__), "imported"), "a") as file:
    print(os.getpid(), file=file)
print("imports")
"""

TELLS = """\
import os, slow
print(os.environ["LAUNCHPAD_ROLE"], os.environ["RANK"], os.environ.get("LR"), flush=True)
"""


def write(launchpad: Launchpad, script: str, *worlds: str, job: str = 'preload = "slow"') -> None:
    """A job file with roles a, b, …; `worlds`: more about each."""
    roles = "".join(
        f'[jobs.j.roles.{name}]\ntarget = ["{script}", "an argument"]\n{more}\n'
        for name, more in zip("abcdefghij", worlds, strict=False)
    )
    (launchpad.folder / "job.toml").write_text(f"[jobs.j]\n{job}\n{roles}")
    (launchpad.folder / "tells.py").write_text(TELLS)


@pytest.fixture
def slow(launchpad: Launchpad, tmp_path: Path) -> Path:
    """An installed module."""
    module = tmp_path / "installed" / "slow.py"
    module.parent.mkdir()
    module.write_text(IMPORTED)
    launchpad.environ["PYTHONPATH"] = str(module.parent)
    return module


def run(launchpad: Launchpad, *words: str) -> subprocess.CompletedProcess[str]:
    return launchpad.run("run", "-v", "--config", "job.toml", "--job", "j", *words)


def imports(slow: Path) -> int:
    path = slow.with_name("imported")
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("count", [2, 6])
def test_worlds_import_once(launchpad: Launchpad, slow: Path, count: int) -> None:
    write(launchpad, "tells.py", *["nproc = 2"] * count)
    done = run(launchpad)
    assert (done.returncode, done.stderr) == (0, "")
    names = [f"[{name} {rank}]" for name in "abcdef"[:count] for rank in range(2)]
    shown = [f"{one} imports" for one in names] + [f"{one} {one[1]} {one[3]} None" for one in names]
    assert sorted(done.stdout.splitlines()) == sorted(shown)
    assert imports(slow) == 1
    assert launchpad.run("jobs").stderr == "", "nothing is kept"
    assert re.search(r"to start the ranks \(imports: \d", launchpad.run("why").stdout)
    (record,) = store_of(launchpad).glob("*/events.jsonl")
    events = [json.loads(line) for line in record.read_text().splitlines()]
    (begun,) = [event["time"] for event in events if event["event"] == "JobPlanned"]
    imported = [event for event in events if event["event"] == "ModulesImported"]
    assert len(imported) == count
    for event in imported:
        assert begun <= event["time"] - event["seconds"] * 1e9, "the import is part of the job"


def test_worlds_of_which_only_agents_know_the_size_import_each_for_itself(launchpad: Launchpad, slow: Path) -> None:
    write(launchpad, "tells.py", 'nproc = "auto"', "")
    assert run(launchpad).returncode == 0
    assert imports(slow) == 2


def test_variables_that_no_import_reads_may_differ(launchpad: Launchpad, slow: Path) -> None:
    write(launchpad, "tells.py", 'env = {LR = "0.1"}', 'env = {LR = "0.2"}')
    done = run(launchpad)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"[a 0] a 0 0.1", "[b 0] b 0 0.2"} < {*done.stdout.splitlines()}
    assert imports(slow) == 1


def test_a_world_without_variables_of_its_own_imports_with_those_that_have_some(
    launchpad: Launchpad, slow: Path
) -> None:
    write(launchpad, "tells.py", "", 'env = {LR = "0.2"}')
    assert run(launchpad).returncode == 0
    assert imports(slow) == 1


def test_worlds_with_other_variables_for_imports_have_an_image_of_their_own(launchpad: Launchpad, slow: Path) -> None:
    write(launchpad, "tells.py", "", "", 'env = {TZ = "UTC"}', 'env = {TZ = "UTC"}', 'env = {PYTHONHASHSEED = "1"}')
    done = run(launchpad)
    assert (done.returncode, done.stderr) == (0, "")
    assert imports(slow) == 3


def test_an_import_that_read_what_differs_is_made_again_without_a_word(launchpad: Launchpad, slow: Path) -> None:
    write(launchpad, "tells.py", 'env = {LR = "0.1"}', 'env = {LR = "0.2"}')
    slow.write_text(IMPORTED + "rate = os.environ.get('LR')\n")
    done = run(launchpad)
    assert (done.returncode, done.stderr) == (0, "")
    assert imports(slow) == 2


@pytest.mark.usefixtures("slow")
def test_a_module_that_comes_first_on_the_path_of_one_world(launchpad: Launchpad) -> None:
    (launchpad.folder / "other").mkdir()
    write(launchpad, "tells.py", "", 'wdir = "other"')
    for name in ("tells.py", "slow.py"):
        (launchpad.folder / "other" / name).write_text("print('the other one')\nimport slow\n")
    done = run(launchpad)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[a 0] a 0 None", "[a 0] imports", *["[b 0] the other one"] * 2]


def test_an_import_that_fails_is_shown_by_the_ranks(launchpad: Launchpad, slow: Path) -> None:
    write(launchpad, "tells.py", "", "")
    slow.write_text("import no_such_thing\n")
    done = run(launchpad)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such_thing'" in done.stderr + done.stdout


@pytest.mark.parametrize("name", OF_THE_PROCESS)
def test_a_rank_of_any_world_is_like_an_executed_one(launchpad: Launchpad, name: str) -> None:
    """The first world's agent is forked before its guard knows of others."""
    shown = []
    (launchpad.folder / f"p_{name}.py").write_text(PROGRAMS[name].replace("RANK=", "LOCAL_RANK="))
    for job in ('preload = "multiprocessing"', 'start-method = "exec"'):
        write(launchpad, f"p_{name}.py", *[""] * 3, job=job)
        done = run(launchpad)
        assert (done.returncode, done.stderr) == (0, "")
        shown.append(sorted(re.sub("0x[0-9a-f]+", "N", line) for line in done.stdout.splitlines()))
    assert shown[0] == shown[1]


@pytest.mark.parametrize("how", ["head", "interrupt"])
def test_a_job_that_ends_while_it_imports_leaves_nothing(launchpad: Launchpad, slow: Path, how: str) -> None:
    """The fixture waits until nothing is left."""
    write(launchpad, "tells.py", "", "")
    slow.write_text(IMPORTED + "import signal\nsignal.pause()\n")
    job = launchpad.start("run", "--config", "job.toml", "--job", "j")
    wait_until(lambda: imports(slow), "the import")
    job.send_signal(signal.SIGKILL if how == "head" else signal.SIGINT)
    assert job.wait(DEADLINE) == (-9 if how == "head" else 130)


def test_an_image_does_not_outlive_its_keeper(launchpad: Launchpad, slow: Path) -> None:
    """The fixture waits until nothing is left."""
    write(launchpad, "tells.py", "", "")
    slow.write_text(IMPORTED + "import signal\nsignal.pause()\n")
    job = launchpad.start("run", "--config", "job.toml", "--job", "j")
    wait_until(lambda: imports(slow), "the import")
    image = int(slow.with_name("imported").read_text())
    os.kill(int(linux.stat(image)[1]), signal.SIGKILL)
    wait_until(lambda: procfs.state(image) in ("X", "Z"), "its end")
    job.terminate()
    assert job.wait(DEADLINE) == 143


def test_a_job_does_not_wait_for_ever(launchpad: Launchpad, slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow.write_text(IMPORTED + "import signal\nsignal.pause()\n")
    monkeypatch.setattr(job_image, "PATIENCE_SECONDS", 0.0)
    image = job_image.JobImage(launchpad.environ)
    try:
        image.want(ForkRequest(sys.executable, ("slow",), {}, {}, forks=True))
        with pytest.raises(Cold, match="doesn't answer"):
            image.ask_to_fork(0, 1, 2, None, [], launchpad.environ)
    finally:
        image.close()


@pytest.mark.usefixtures("slow")
def test_a_keeper_reaps_what_its_image_has_forked(launchpad: Launchpad) -> None:
    """The first process of a container may not reap."""
    write(launchpad, "tells.py", "", "")
    code = (
        "import os, subprocess, sys\nfrom launchpad.agent.host import processes\n"
        "processes.become_subreaper()\nsubprocess.run(sys.argv[1:], check=True)\n"
        "try:\n    print(os.wait())\nexcept ChildProcessError:\n    print('nothing is left')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *launchpad.argv("run", "--quiet", "--config", "job.toml", "--job", "j")],
        cwd=launchpad.folder, env=launchpad.environ, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["nothing is left"])


def test_short_memory_does_not_end_the_image_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, each world would take that memory."""
    monkeypatch.setattr(pressure, "found", lambda: "memory is short")
    one = keeper.Keeper()
    one._look()
    assert one._over == ""


def test_imports_see_no_inherited_descriptors(launchpad: Launchpad, slow: Path) -> None:
    shown = []
    slow.write_text("import os\nprint(len(os.listdir('/proc/self/fd')))\n")
    reader, writer = os.pipe()
    with open(reader), open(writer, "w"):
        for variables in ("", 'env = {TZ = "UTC"}'):  # an image, two imports
            write(launchpad, "tells.py", "", variables)
            done = launchpad.run("run", "--config", "job.toml", "--job", "j", pass_fds=(reader, writer))
            shown.append({number for line in done.stdout.splitlines() if (number := line.split()[-1]).isdigit()})
    assert shown[0] == shown[1] != set()


def test_worlds_import_once_with_no_new_privs(launchpad: Launchpad, slow: Path) -> None:
    """A kept image is not used then."""
    write(launchpad, "tells.py", "", "")
    done = subprocess.run(
        ["setpriv", "--no-new-privs", *launchpad.argv("run", "--config", "job.toml", "--job", "j")],
        cwd=launchpad.folder, env=launchpad.environ, capture_output=True, timeout=DEADLINE, check=True,
    )  # fmt: skip
    assert done.stderr == b""
    assert imports(slow) == 1


@pytest.mark.parametrize("which", ["agent", "guard"])
@pytest.mark.usefixtures("slow")
def test_the_death_of_an_agent_or_of_the_guard_of_all(launchpad: Launchpad, which: str) -> None:
    """The fixture waits until nothing is left."""
    write(launchpad, "waits.py", "", "", "")
    (launchpad.folder / "waits.py").write_text(
        "import os, signal, subprocess\nsubprocess.Popen(['setsid', 'sleep', '100'])\n"
        "os.write(1, f'child of {os.getppid()}\\n'.encode())\nsignal.pause()\n"
    )
    job = launchpad.start("run", "--config", "job.toml", "--job", "j")
    assert job.stdout is not None
    lines = [job.stdout.readline().decode() for _ in range(6)]
    agents = [int(line.split()[-1]) for line in lines if "child of" in line]
    assert len({*agents}) == 3
    guards = {int(linux.stat(agent)[1]) for agent in agents}
    (guard,) = guards
    os.kill({"agent": agents[1], "guard": guard}[which], signal.SIGKILL)
    if which == "guard":  # the job can do without it
        job.terminate()
    assert job.wait(DEADLINE) == {"agent": 4, "guard": 143}[which]


@needs_torch
def test_worlds_are_forked_from_a_kept_image(from_image: Launchpad) -> None:
    """However many ranks share the machine: the number of their threads is that of the plan."""
    del from_image.environ["OMP_NUM_THREADS"]
    cores = len(os.sched_getaffinity(0))
    (from_image.folder / "t.py").write_text("import os, torch\nprint(os.environ['OMP_NUM_THREADS'], flush=True)\n")
    write(from_image, "t.py", *[f"nproc = {-(-cores // 2)}"] * 2, job="")
    before = uses(from_image)
    done = run(from_image)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {"1"}
    assert uses(from_image) == before + 1


@needs_torch
def test_worlds_that_a_kept_image_does_not_fit_share_one_of_the_job(from_image: Launchpad) -> None:
    """All but the first, which finds that out. Forks of one process have its addresses."""
    (from_image.folder / "t.py").write_text("import torch\nprint(id(torch), flush=True)\n")
    write(from_image, "t.py", *[""] * 4, job='env = {TORCH_GLOO_LAZY_INIT = "1"}')
    done = run(from_image)
    assert done.returncode == 0
    assert "TORCH_GLOO_LAZY_INIT differs, which imports read" in done.stderr
    assert len({line.split()[-1] for line in done.stdout.splitlines()}) == 2


@needs_torch
def test_functions_in_several_worlds_import_torch_once(launchpad: Launchpad) -> None:
    """All ranks show the same address of a library that is mapped once, as only forks of one process do."""
    code = (
        "import launchpad\n"
        "def where(rank, size):\n    import torch\n    return id(torch)\n"
        "role = launchpad.Role(where, nproc=2, backend='gloo')\n"
        "found = launchpad.run({'a': role, 'b': role})\n"
        "print(len({*found['a'], *found['b']}))\n"
    )
    (launchpad.folder / "f.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "f.py"],
        cwd=launchpad.folder, env=launchpad.environ, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_an_interrupt_of_functions_is_heeded_while_an_image_imports(launchpad: Launchpad, slow: Path) -> None:
    slow.with_name("torch.py").write_text(IMPORTED + "import signal\nsignal.pause()\n")
    code = (
        "import launchpad\n"
        "role = launchpad.Role(print, backend='gloo')\n"
        "try:\n    launchpad.run({'a': role, 'b': role})\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    )
    (launchpad.folder / "f.py").write_text(code)
    job = subprocess.Popen(
        [sys.executable, "f.py"], cwd=launchpad.folder, env=launchpad.environ, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: imports(slow), "the import")
        job.send_signal(signal.SIGINT)
        assert job.communicate(timeout=DEADLINE)[0] == "interrupted\n"
    finally:
        job.kill()
        job.communicate()
