"""Shared fixtures: `launchpad` as a user runs it, with a check after each test that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from launchpad.image import WITH_OPTIMIZERS
from launchpad.job.hosts import ALLOCATION_VARIABLES
from tests.processes import with_variable

PROGRAMS = Path(__file__).parent / "programs"
MEASURED = Path(__file__).parent / "measured.py"

# Long enough for a busy machine: a test that exceeds it has found a hang.
DEADLINE = 60.0

MARK = "LAUNCHPAD_TEST"

# Found without importing it: that would take seconds.
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

# nohup, and a shell's & without job control, ignore these signals, and the commands that we start would inherit that.
for _signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signum) == signal.SIG_IGN:
        signal.signal(_signum, signal.SIG_DFL)


# A batch allocation that the tests run in is not theirs to use.
for _name in ALLOCATION_VARIABLES & os.environ.keys():
    del os.environ[_name]


class Launchpad:
    """Runs the command line in the test's own working folder, temporary folder and environment."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self.scratch = scratch
        self.mark = uuid.uuid4().hex
        drop = ("LAUNCHPAD_", "XDG_STATE_", "TORCHELASTIC_", "OMP_", "SLURM_", "PMI_", "PYTHON")
        drop += ("GITHUB_", "GITLAB_", "TEAMCITY_", "BUILDKITE")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        self.state = folder.parent / "state"
        self.environ |= {MARK: self.mark, "TMPDIR": str(scratch), "XDG_STATE_HOME": str(self.state)}
        self.environ["XDG_RUNTIME_DIR"] = str(scratch)  # whoever runs the tests may have images
        self._started: list[subprocess.Popen[bytes]] = []
        self._keeper: Launchpad | None = None

    def use_images(self, keeper: Launchpad) -> None:
        """Find the images of this one's `launchpad warm`. Those that are made for our runs stay with it."""
        self._keeper = keeper
        self.environ |= {name: keeper.environ[name] for name in ("XDG_RUNTIME_DIR", "OMP_NUM_THREADS", "LC_ALL")}

    def argv(self, *args: object) -> list[str]:
        """The command line of `launchpad ARGS`; programs in tests/programs need no path."""
        words = [str(arg) for arg in args]
        how = [str(MEASURED)] if "COVERAGE_PROCESS_CONFIG" in os.environ else ["-m", "launchpad"]
        return [sys.executable, *how, *(_program(word) for word in words)]

    def run(self, *args: object, timeout: float = DEADLINE, **options: object) -> subprocess.CompletedProcess[str]:
        """Run to the end. Output is decoded as UTF-8 with surrogateescape."""
        options = {"env": self.environ, "cwd": self.folder, "stdin": subprocess.DEVNULL, **options}
        if "input" in options:
            del options["stdin"]
        return subprocess.run(
            self.argv(*args),
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout,
            **options,
        )

    def start(self, *args: object, **options: object) -> subprocess.Popen[bytes]:
        """Start in the background; the end of the test kills it if it still runs."""
        options = {
            "env": self.environ,
            "cwd": self.folder,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        process: subprocess.Popen[bytes] = subprocess.Popen(self.argv(*args), **options)
        self._started.append(process)
        return process

    def survivors(self) -> list[str]:
        """All live processes that descend from this test's commands: they inherit its mark."""
        found = []
        for pid in with_variable(MARK, self.mark):
            entry = Path("/proc", str(pid))
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, IndexError):
                continue
            if state not in "ZX" and not (self._keeper and words.rstrip().endswith(" kept-image")):
                found.append(f"{pid} {words}")
        return found

    def close(self) -> None:
        """Kill and reap what was started, then fail if any process or temporary file is left."""
        for process in self._started:
            with process:
                if process.poll() is None:
                    process.kill()
        wait_until(lambda: not self.survivors(), "all processes to be gone", show=self.survivors)
        left = [entry.name for entry in self.scratch.iterdir() if not entry.name.startswith("launchpad-logs-")]
        assert not left, f"temporary files are left: {left}"


def _program(word: str) -> str:
    return str(PROGRAMS / word) if (PROGRAMS / word).is_file() else word


def descriptors() -> dict[str, str]:
    """What each open descriptor of this process leads to, without the one that lists them."""
    leads_to = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            leads_to[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return leads_to


def wait_until(fact: Callable[[], object], what: str, show: Callable[[], object] = lambda: "") -> None:
    """Poll until `fact()` is true; fail after DEADLINE, naming what was waited for."""
    deadline = time.monotonic() + DEADLINE
    while not fact():
        assert time.monotonic() < deadline, f"waited {DEADLINE:g} s for {what}: {show()}"
        time.sleep(0.01)


@pytest.fixture(scope="session", autouse=True)
def _torchs_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Torch makes a folder for what it compiles as soon as there is an optimizer: one for all tests."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    # What g++ is made to do takes half a minute else.
    os.environ |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


@pytest.fixture(scope="session")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launchpad]:
    """`launchpad warm` was typed: its images are for those who have its XDG_RUNTIME_DIR."""
    with kept_images(tmp_path_factory.mktemp("keeper")) as command:
        yield command


@pytest.fixture(scope="session")
def keeper_with_optimizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launchpad]:
    """The same, and all images have imported what optimizers need."""
    with kept_images(tmp_path_factory.mktemp("keeper"), "--preload", WITH_OPTIMIZERS) as command:
        yield command


@contextlib.contextmanager
def kept_images(base: Path, *options: str) -> Iterator[Launchpad]:
    """What `launchpad warm` keeps, until the end of the block."""
    for name in ("work", "scratch", "runtime"):
        (base / name).mkdir(mode=0o700)
    command = Launchpad(base / "work", base / "scratch")
    # Torch reads at its import how many threads it may have: one image is for any number of ranks.
    command.environ |= {"XDG_RUNTIME_DIR": str(base / "runtime"), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    done = command.run("warm", *options, timeout=3 * DEADLINE)
    assert done.returncode == 0, done.stderr
    yield command
    assert command.run("warm", "--stop").stdout == "ended\n"
    command.close()
    assert not list((base / "runtime").iterdir())


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder with a short path, as a user's would be: Unix socket paths are limited to 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="lp-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def launchpad(tmp_path: Path, scratch: Path) -> Iterator[Launchpad]:
    """The command, run in an empty folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    command = Launchpad(folder, scratch)
    yield command
    command.close()


@pytest.fixture
def from_image(launchpad: Launchpad, keeper: Launchpad) -> Launchpad:
    """The command forks its ranks from a kept image: for tests whose subject is not the start, which is then short."""
    launchpad.use_images(keeper)
    return launchpad


@pytest.fixture
def from_image_with_optimizers(from_image: Launchpad, keeper_with_optimizers: Launchpad) -> None:
    """The same, for programs that make optimizers."""
    from_image.use_images(keeper_with_optimizers)
