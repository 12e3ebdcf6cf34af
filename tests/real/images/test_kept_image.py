"""The kept image: when it is used and when not, and that nothing of it is left. What runs from it: test_forked.py."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad import linux
from launchpad.image import channel, facts, place
from launchpad.image.keeper_link import ForkRequest, KeeperLink, connect_at
from launchpad.runner import suggestion
from launchpad.runner.links import LocalAgent
from tests.support.command import DEADLINE, MARK, Launchpad, descriptors, kept_images, wait_until
from tests.support.kept import kept, uses
from tests.support.needs import needs_torch
from tests.support.terminal import Terminal


def test_an_image_moves_to_huge_pages() -> None:
    with mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        region.write(b"x" * len(region))
        try:
            region.madvise(25)  # MADV_COLLAPSE
        except OSError as error:
            pytest.skip(f"the kernel gives no huge pages on request ({error.strerror})")
    if "[never]" in linux.text_of("/sys/kernel/mm/transparent_hugepage/enabled"):
        pytest.skip("huge pages are turned off")
    program = (
        "from launchpad.image import huge_pages\nkept = bytearray(b'x') * (16 << 20)\nhuge_pages.use()\n"
        "print(open('/proc/self/smaps_rollup').read())\nassert kept.count(b'x') == 16 << 20\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=True
    )
    found = re.search(r"AnonHugePages: +(\d+) kB", done.stdout)
    assert found
    assert int(found[1]) >= 8 << 10


def test_own_facts_are_no_different() -> None:
    own = facts.facts_of(os.getpid(), os.getpid())
    assert facts.difference(own, own) == "" or own["NoNewPrivs"] != "0"
    assert "namespace" in facts.difference(own, {**own, "ns/net": "net:[1]"})
    assert "capabilities" in facts.difference(own, {**own, "CapEff": "1"})
    assert "no_new_privs" in facts.difference(own, {**own, "NoNewPrivs": "1"})
    assert facts.limits(own["limits"])["Max open files"] == resource.getrlimit(resource.RLIMIT_NOFILE)
    low = facts.facts_of(os.getpid(), os.getpid(), files=(100, resource.RLIM_INFINITY))
    assert facts.limits(low["limits"])["Max open files"] == (100, resource.RLIM_INFINITY)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "leaves"])
def test_a_keeper_that_ends_after_it_was_asked(
    launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The agent is started cold when it is waited for; if it never is, nothing is left."""
    for name in (MARK, "TMPDIR"):
        monkeypatch.setenv(name, launchpad.environ[name])
    before = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = KeeperLink(ours)
    channel.send(theirs, {"cores": 1})
    link.want(ForkRequest(sys.executable, (), {}, {}, forks=False))
    with contextlib.closing(LocalAgent(keeper=link)) as local:
        local.begin()
        asked = channel.receive(theirs)
        assert asked is not None
        channel.close(asked[1])
        theirs.close()
        if waits:
            local.link()
            assert local.why_cold == "it has ended"
            wait_until(launchpad.survivors, "an agent that was started cold")
    assert descriptors() == before


# The real thing.

WHERE = "import os, sys\nprint('parent', os.getppid(), 'torch' in sys.modules)\n"


@pytest.fixture
def warm(launchpad: Launchpad, keeper: Launchpad) -> Launchpad:
    """The command, with images that others use too."""
    launchpad.use_images(keeper)
    (launchpad.folder / "w.py").write_text(WHERE)
    (launchpad.folder / "t.py").write_text(WHERE + "import torch\nprint(torch.ones(1))\n")
    return launchpad


def status(launchpad: Launchpad) -> dict[str, Any]:
    found = kept(launchpad)
    assert found
    return found


def ready_images(launchpad: Launchpad) -> list[dict[str, Any]]:
    return [image for image in status(launchpad)["images"] if image["state"] == "ready"]


def all_ready(launchpad: Launchpad) -> bool:
    return all(image["state"] == "ready" for image in status(launchpad)["images"])


def keeps_what_optimizers_import(launchpad: Launchpad) -> bool:
    """Whether there is such an image for ranks of one thread."""
    of_one = [image for image in ready_images(launchpad) if image["threads"] == "1"]
    return any("torch._dynamo" in image["preload"] for image in of_one)  # type: ignore[operator]


@needs_torch
def test_what_optimizers_import_is_kept_once_a_program_makes_them(launchpad: Launchpad, tmp_path: Path) -> None:
    (launchpad.folder / "t.py").write_text("import torch\n")
    (launchpad.folder / "o.py").write_text(
        "import sys, torch\nprint('torch._dynamo' in sys.modules)\ntorch.optim.SGD([torch.ones(1)])\n"
    )
    (tmp_path / "keeper").mkdir()
    with kept_images(tmp_path / "keeper") as keeper:
        launchpad.use_images(keeper)
        done = launchpad.run("run", "-v", "o.py")
        assert (done.stdout, done.stderr) == ("[0] False\n", "")
        wait_until(lambda: keeps_what_optimizers_import(launchpad), "the image")
        done = launchpad.run("run", "-v", "-n", 2, "o.py")
        assert (sorted(done.stdout.splitlines()), done.stderr) == (["[0] True", "[1] True"], "")
        assert launchpad.run("run", "-v", "-n", 2, "t.py").stderr == ""


@needs_torch
@pytest.mark.parametrize("program", ["t.py", "w.py"])
def test_a_run_uses_an_image(warm: Launchpad, program: str) -> None:
    before = uses(warm)
    done = warm.run("run", "-v", "-n", 2, program)
    assert done.returncode == 0
    assert done.stderr == ""
    assert uses(warm) == before + 1
    assert ("True" in done.stdout) == (program == "t.py")


def test_an_interpreter_may_be_called_by_any_of_its_names(warm: Launchpad) -> None:
    """`launchpad` runs .venv/bin/python3, and people type .venv/bin/python."""
    (warm.folder / "names.py").write_text(
        "import os, sys\nfrom multiprocessing import spawn\nprint(sys.executable, os.fsdecode(spawn.get_executable()))"
    )
    before = uses(warm)
    names = [path for name in ("python", "python3") if (path := Path(sys.executable).with_name(name)).exists()]
    for name in names:
        done = warm.run("run", "-v", "-n", 1, "--python", name, "names.py")
        assert (done.stdout, done.stderr) == (f"[0] {name} {name}\n", "")
    assert uses(warm) == before + len(names)


def test_interpreters_are_told_apart(tmp_path: Path) -> None:
    for name, target in (
        ("python3.12", "/bin/sh"),
        ("python3", "python3.12"),
        ("python", "python3"),
        ("other", "/bin/sh"),
    ):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "far").symlink_to("/bin/cat")
    own = str(tmp_path / "own")
    Path(own).touch()
    assert place.interpreter(own) == own
    assert place.interpreter(str(tmp_path / "python")) == str(tmp_path / "python")  # there is no sh here
    (tmp_path / Path("/bin/sh").resolve().name).symlink_to("/bin/sh")
    assert len({place.interpreter(str(tmp_path / name)) for name in ("python", "python3", "python3.12", "other")}) == 1
    assert place.interpreter(str(tmp_path / "far")) == str(tmp_path / "far")


@needs_torch
def test_doctor_uses_an_image(warm: Launchpad) -> None:
    before = uses(warm)
    (found,) = json.loads(warm.run("doctor", "--json").stdout)["hosts"]
    assert found["facts"]["import"]["kept"]
    assert "torch, torch.distributed, torch._dynamo" in found["facts"]["kept"]["images"]
    assert uses(warm) == before + 1


def test_a_program_in_another_language_and_its_exit_code(warm: Launchpad) -> None:
    before = uses(warm)
    done = warm.run("run", "-v", "-n", 2, "sh", "-c", "echo $RANK; exit $((RANK * 3))")
    assert done.returncode == 3
    assert "kept image" not in done.stderr
    assert uses(warm) == before + 1


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (["setpriv", "--no-new-privs"], "no_new_privs is set"),
        (["setpriv", "--bounding-set", "-sys_time"], "it has other capabilities"),
        (["unshare", "--uts"], "it is in another uts namespace"),
        (["unshare", "--ipc"], "it is in another ipc namespace"),
        (["unshare", "--user", "--map-root-user"], "it "),
        (["setarch", "--addr-no-randomize"], "it has another personality"),
        (["sh", "-c", 'ulimit -s 1024; exec "$@"', "-"], "the stack limit differs"),
        (["env", "PYTHONPATH=relative"], "PYTHONPATH has a relative folder"),
        (["env", "PYTHONHASHSEED=7"], "PYTHONHASHSEED differs"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_cold_where_the_process_would_differ(warm: Launchpad, prefix: list[str], reason: str) -> None:
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"not permitted here: {tried.stderr.decode()}")
    done = subprocess.run(
        [*prefix, *warm.argv("run", "-v", "w.py")],
        env=warm.environ,
        cwd=warm.folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0
    assert "no kept image was used: " in done.stderr
    assert reason in done.stderr
    warm.run("run", "true")  # otherwise the kept head that is made is for that environment


def test_cold_where_a_module_comes_first_on_the_path(warm: Launchpad) -> None:
    (warm.folder / "ctypes.py").write_text("mine = True\n")
    (warm.folder / "j.py").write_text("import ctypes; print(ctypes.mine)\n")
    done = warm.run("run", "-v", "j.py")
    assert done.stdout == "[0] True\n"
    assert "ctypes.py comes first on the path" in done.stderr


HANDED = [
    "umask 027; ulimit -n 77; ulimit -c 0; ulimit -v 9000000; cd /; exec",
    "trap '' TERM USR1; exec",
    "nice -n 7",
    f"taskset -c {min(os.sched_getaffinity(0))}",
    "echo 500 > /proc/self/oom_score_adj; exec",
]


@pytest.mark.parametrize("restarts", [(), ("--max-restarts", 1)], ids=["becomes", "forked"])
@pytest.mark.parametrize("shell", HANDED, ids=lambda text: text.split()[0])
def test_what_is_handed_over(warm: Launchpad, shell: str, restarts: tuple[object, ...]) -> None:
    """Each program prints what it finds: the same from the image as from a cold start.

    With restarts, the rank is forked from the image's forkserver; without, it is that process.
    """
    script = warm.folder / "facts.py"
    script.write_text(
        "import os, resource, signal\n"
        "print(os.getcwd(), os.umask(0), os.nice(0), os.sched_getaffinity(0))\n"
        "print(open('/proc/self/oom_score_adj').read(), dict(os.environ).keys())\n"
        "print([resource.getrlimit(n) for n in range(16)])\n"
        "print([s for s in range(1, 32) if signal.getsignal(s) == signal.SIG_IGN])\n"
        "print(open('/proc/self/status').read().split('SigBlk')[1].split('Cpus')[0])\n"
        "print(sorted(os.listdir('/proc/self/fd')), os.getsid(0) == os.getpgid(0) == os.getpid())\n"
    )
    shown = []
    for images in (True, False):
        if not images:
            warm.environ["XDG_RUNTIME_DIR"] = str(warm.scratch)
        done = subprocess.run(
            ["sh", "-c", f'{shell} "$@"', "-", *warm.argv("run", "-v", *restarts, script)],
            env=warm.environ,
            cwd=warm.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        )
        assert "kept image" not in done.stderr
        shown.append(done.stdout)
    assert shown[0] == shown[1]


def test_rank_0_reads_standard_input(warm: Launchpad) -> None:
    before = uses(warm)
    (warm.folder / "r.py").write_text("import sys\nprint(sys.stdin.read())\n")
    assert warm.run("run", "-n", 1, "r.py", input="from outside").stdout.startswith("[0] from outside")
    assert uses(warm) == before + 1


def test_a_job_from_an_image_is_stopped_like_any_other(warm: Launchpad) -> None:
    (warm.folder / "s.py").write_text(
        "import signal, subprocess\nsubprocess.Popen(['setsid', 'sleep', '100'])\n"
        "print('up', flush=True)\nsignal.pause()\n"
    )
    process = warm.start("run", "-n", 2, "s.py")
    assert process.stdout is not None
    for _ in range(2):
        assert b"up" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 143


def test_the_end_of_the_head_ends_the_job(warm: Launchpad) -> None:
    """The fixture waits until nothing is left."""
    (warm.folder / "s.py").write_text("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    process = warm.start("run", "-n", 2, "s.py")
    assert process.stdout is not None
    assert b"up" in process.stdout.readline()
    process.kill()
    process.wait(DEADLINE)


@pytest.mark.parametrize("which", ["agent", "guard"])
def test_nothing_survives_the_death_of(warm: Launchpad, which: str) -> None:
    """The fixture waits until nothing is left."""
    (warm.folder / "s.py").write_text(
        "import os, signal, subprocess\nsubprocess.Popen(['setsid', 'sleep', '100'])\n"
        "print('child of', os.getppid(), flush=True)\nsignal.pause()\n"
    )
    process = warm.start("run", "s.py")
    assert process.stdout is not None
    agent = int(process.stdout.readline().split()[-1])
    guard = int(linux.stat(agent)[1])
    os.kill({"agent": agent, "guard": guard}[which], signal.SIGKILL)
    if which == "guard":  # the job can do without it
        process.terminate()
    assert process.wait(DEADLINE) == {"agent": 4, "guard": 143}[which]


def test_launchpad_run_uses_an_image(warm: Launchpad) -> None:
    before = uses(warm)
    code = "import launchpad; print(list(launchpad.run(lambda rank, size: rank + 10, nproc=2, backend=None)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=warm.environ,
        cwd=warm.folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout == "[10, 11]\n"
    assert uses(warm) == before + 1


def test_ranks_that_stay_come_from_an_image_each_time_they_are_started(warm: Launchpad) -> None:
    before = uses(warm)
    code = (
        "import launchpad, os\n"
        "with launchpad.ranks(2, backend=None) as ranks:\n"
        "    first = ranks.run(os.getpid)\n"
        "    ranks.restart()\n"
        "    print(set(first) & set(ranks.run(os.getpid)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=warm.environ,
        cwd=warm.folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout == "set()\n"
    assert uses(warm) == before + 2


# Keepers of their own: without torch, which takes a second.


@pytest.fixture
def own(launchpad: Launchpad, tmp_path: Path) -> Iterator[Launchpad]:
    """The command, in an environment whose interpreter finds no torch; what was kept is ended."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    (tmp_path / "path").mkdir()
    launchpad.environ["XDG_RUNTIME_DIR"] = str(tmp_path / "runtime")
    # A finder that knows nothing of torch.
    (tmp_path / "path" / "sitecustomize.py").write_text(
        "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(name)\nsys.meta_path.insert(0, No())\n"
    )
    launchpad.environ |= {"PYTHONPATH": str(tmp_path / "path"), "OMP_NUM_THREADS": "1"}
    (launchpad.folder / "w.py").write_text(WHERE)
    yield launchpad
    launchpad.run("warm", "--stop")
    wait_until(lambda: not launchpad.survivors(), "all images to be gone", show=launchpad.survivors)
    assert not list((tmp_path / "runtime").iterdir())


def pid_of(launchpad: Launchpad) -> int:
    pid = status(launchpad)["pid"]
    assert isinstance(pid, int)
    return pid


OTHER = 65534  # a user's number


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_is_not_served(own: Launchpad, scratch: Path) -> None:
    """Even if the folders and the socket were open to everybody, by mistake."""
    runtime = scratch / "runtime"
    runtime.mkdir(mode=0o700)
    own.environ["XDG_RUNTIME_DIR"] = str(runtime)
    own.run("warm")
    (path,) = (runtime / "launchpad").iterdir()
    code = f"""
import os, socket
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.settimeout({DEADLINE})
os.chdir({str(path.parent)!r})  # whom its parents let in is the machine's choice
os.seteuid({OTHER})  # whom the kernel names to the keeper
link.connect({path.name!r})
try:
    print(link.recv(1))
except ConnectionResetError:
    print(b"")
"""
    for entered in (path, path.parent):
        entered.chmod(0o777)
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    finally:
        path.parent.chmod(0o700)
    assert (done.stdout, done.stderr) == ("b''\n", "")
    assert own.run("warm", "--stop").stdout == "ended\n"
    wait_until(lambda: not list(runtime.iterdir()), "the keeper to remove its folder")
    runtime.rmdir()


def test_an_image_is_suggested_once_a_day(own: Launchpad, tmp_path: Path) -> None:
    (tmp_path / "path" / "slow.py").write_text(f"import time; time.sleep({suggestion.SECONDS})\n")
    for said in (True, False):
        terminal = Terminal(own.argv("run", "--preload", "slow", "w.py"), own, {"NO_COLOR": "1"})
        assert bool(re.search(r"importing slow took \d+\.\d s; after launchpad warm", terminal.rest())) == said
        assert terminal.end() == 0
    (stamp,) = own.state.glob("**/warm-suggested")
    day_before = stamp.stat().st_mtime - 86400
    os.utime(stamp, (day_before, day_before))
    terminal = Terminal(own.argv("run", "--preload", "slow", "w.py"), own, {})
    assert "after launchpad warm" in terminal.rest()
    assert terminal.end() == 0
    os.utime(stamp, (day_before, day_before))
    assert "launchpad warm" not in own.run("run", "--preload", "slow", "w.py").stderr  # no terminal


def test_nothing_is_kept_unasked(own: Launchpad) -> None:
    assert own.run("run", "-v", "w.py").stderr == ""
    assert own.run("warm", "--status").stdout.startswith("nothing is kept")
    assert own.run("warm", "--stop").stdout == "nothing is kept\n"


def test_idle_time_ends_it(own: Launchpad, tmp_path: Path) -> None:
    """It begins when all is imported."""
    (tmp_path / "path" / "slow.py").write_text("import time; time.sleep(1.5)\n")
    done = own.run("warm", "--for", "1", "--preload", "slow")
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: not own.survivors(), "the keeper to end")


def test_it_is_shown_among_the_jobs(own: Launchpad) -> None:
    own.run("warm")
    assert f"(pid {pid_of(own)})" in own.run("jobs").stderr


@pytest.mark.parametrize("which", ["keeper", "image"])
def test_killed_images_are_not_missed(own: Launchpad, which: str) -> None:
    own.run("warm")
    found = status(own)
    victim = found["pid"] if which == "keeper" else found["images"][0]["pid"]  # type: ignore[index]
    os.kill(victim, signal.SIGKILL)  # type: ignore[arg-type]
    wait_until(lambda: not any(line.startswith(f"{victim} ") for line in own.survivors()), "it to be gone")
    assert own.run("run", "w.py").returncode == 0
    if which == "keeper":  # its socket is still there
        assert own.run("warm").returncode == 0
        assert own.run("run", "-v", "w.py").stderr == ""


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "leaves"])
def test_an_agent_is_asked_for_before_it_is_waited_for(
    warm: Launchpad, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    for name in [name for name in os.environ if name.startswith("PYTHON")]:  # the images were made without
        monkeypatch.delenv(name)
    for name in (MARK, "TMPDIR", "XDG_RUNTIME_DIR", "OMP_NUM_THREADS", "LC_ALL"):
        monkeypatch.setenv(name, warm.environ[name])
    before = descriptors()
    (listens,) = Path(warm.environ["XDG_RUNTIME_DIR"], "launchpad").iterdir()
    link = connect_at(str(listens))
    assert link is not None
    link.want(ForkRequest(sys.executable, (), {}, {}, forks=False))
    with contextlib.closing(LocalAgent(keeper=link)) as local:
        local.begin()
        if waits:
            local.link()
            assert not local.why_cold
            wait_until(warm.survivors, "the guard to have the environment that it was forked for")
    assert not warm.survivors()
    assert descriptors() == before


def test_a_job_outlives_its_image(own: Launchpad) -> None:
    own.run("warm")
    (own.folder / "s.py").write_text("print('up', flush=True)\nprint(input(), flush=True)\n")
    process = own.start("run", "s.py", stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert b"up" in process.stdout.readline()
    assert status(own)["images"][0]["jobs"] == 1  # type: ignore[index]
    assert own.run("warm", "--stop").stdout == "ended\n"
    process.stdin.write(b"on\n")
    process.stdin.flush()
    assert b"on" in process.stdout.readline()
    assert process.wait(DEADLINE) == 0


def test_it_ends_when_its_socket_is_removed(own: Launchpad, tmp_path: Path) -> None:
    own.run("warm")
    for path in (tmp_path / "runtime" / "launchpad").iterdir():
        path.unlink()
    (tmp_path / "runtime" / "launchpad").rmdir()
    assert own.run("run", "-v", "w.py").stderr == ""
    wait_until(lambda: not own.survivors(), "the keeper to end")


def test_another_image_after_a_file_has_changed(own: Launchpad, tmp_path: Path) -> None:
    module = tmp_path / "path" / "preloaded.py"
    module.write_text("value = 1\n")
    assert own.run("warm", "--preload", "preloaded").returncode == 0
    (own.folder / "p.py").write_text("import preloaded; print(preloaded.value)\n")
    words = ("run", "-v", "--preload", "preloaded", "p.py")
    assert own.run(*words).stderr == ""
    module.write_text("value = 22\n")  # longer, as Python sees it at once only then
    done = own.run(*words)
    assert done.stdout == "[0] 22\n"
    assert f"{module} has changed" in done.stderr
    wait_until(lambda: [one["state"] for one in status(own)["images"]].count("ready") == 2, "another image")  # type: ignore[attr-defined]
    done = own.run(*words)
    assert (done.stdout, done.stderr) == ("[0] 22\n", "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
            "started a thread",
        ),
        ("1 / 0\n", "ZeroDivisionError"),
        ("import os\nos._exit(3)\n", "it ended"),
    ],
)
def test_what_can_t_be_kept_is_said(own: Launchpad, tmp_path: Path, source: str, reason: str) -> None:
    (tmp_path / "path" / "bad_module.py").write_text(source)
    done = own.run("warm", "--preload", "bad_module")
    assert done.returncode == 2
    assert done.stderr.startswith("launchpad: error: nothing is kept: ")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "bad_module" in done.stderr or "os._exit" in source
    wait_until(lambda: not own.survivors(), "the keeper to end")


def test_what_is_kept_can_be_changed(own: Launchpad, tmp_path: Path) -> None:
    (tmp_path / "path" / "preloaded.py").touch()
    own.run("warm")
    done = own.run("warm", "--preload", "preloaded")
    assert (done.returncode, done.stderr) == (0, "")
    assert ["preloaded"] in [image["preload"] for image in status(own)["images"]]  # type: ignore[attr-defined]
    assert own.run("run", "-v", "--preload", "preloaded", "w.py").stderr == ""


@needs_torch
def test_a_program_that_preloads_but_has_no_torch(own: Launchpad, tmp_path: Path) -> None:
    (tmp_path / "path" / "sitecustomize.py").unlink()
    (tmp_path / "path" / "preloaded.py").touch()
    assert own.run("warm", "--preload", "preloaded").returncode == 0
    assert "it has imported torch" in own.run("run", "-v", "--preload", "preloaded", "w.py").stderr
    wait_until(lambda: ["preloaded"] in [one["preload"] for one in ready_images(own)], "the image")
    assert own.run("run", "-v", "--preload", "preloaded", "w.py").stderr == ""


def test_what_imports_print_comes_in_each_rank(own: Launchpad, tmp_path: Path) -> None:
    (tmp_path / "path" / "loud.py").write_text("import sys\nprint('hear me')\nprint('and me', file=sys.stderr)\n")
    assert own.run("warm", "--preload", "loud").returncode == 0
    done = own.run("run", "-v", "-n", 2, "--preload", "loud", "w.py")
    assert done.stdout.count("hear me") == 2
    assert done.stderr.count("and me") == 2
    assert "kept image" not in done.stderr


def test_at_most_three_images_of_a_kind(own: Launchpad) -> None:
    own.run("warm")

    def count() -> int:
        return len(status(own)["images"])  # type: ignore[arg-type]

    for seed in range(1, 5):
        own.environ["PYTHONHASHSEED"] = str(seed)
        assert "PYTHONHASHSEED differs" in own.run("run", "-v", "w.py").stderr
        wait_until(lambda: all_ready(own), "the image")
        assert own.run("run", "-v", "w.py").stderr == ""
        assert count() == min(seed + 1, 3)


@pytest.mark.parametrize(
    "words", [("--status", "--stop"), ("--json",), ("--python", "/none"), ("--preload", "a b"), ("--for", "soon")]
)
def test_bad_usage_is_said(own: Launchpad, words: tuple[str, ...]) -> None:
    done = own.run("warm", *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_others_can_enter_is_not_used(own: Launchpad, tmp_path: Path) -> None:
    folder = tmp_path / "runtime" / "launchpad"
    folder.mkdir(mode=0o755)
    done = own.run("warm")
    assert done.returncode == 3
    assert "only you can enter" in done.stderr
    folder.rmdir()
