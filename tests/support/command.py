"""`launchpad` as a user runs it, what waits for facts, and what looks for remains."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.processes import with_variable

PROGRAMS = Path(__file__).parents[1] / "programs"

# Long enough for a busy machine: a test that exceeds it has found a hang.
DEADLINE = 60.0

MARK = "LAUNCHPAD_TEST"


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

    def use_no_images(self) -> None:
        """Start cold: with a kept head, its parent is still about to end when the command has."""
        self.environ["XDG_RUNTIME_DIR"] = str(self.scratch)

    @property
    def sockets(self) -> list[Path]:
        """Where the running jobs take questions. One that doesn't yet has a hidden file there."""
        return list(self.state.glob("launchpad/running/[!.]*@*"))

    def argv(self, *args: object) -> list[str]:
        """The command line of `launchpad ARGS`; programs in tests/programs need no path."""
        words = [str(arg) for arg in args]
        return [sys.executable, "-m", "launchpad", *(_program(word) for word in words)]

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


@contextlib.contextmanager
def kept_images(base: Path, *options: str) -> Iterator[Launchpad]:
    """What `launchpad warm` keeps, until the end of the block."""
    for name in ("work", "scratch", "runtime"):
        (base / name).mkdir(mode=0o700)
    command = Launchpad(base / "work", base / "scratch")
    # Torch reads at its import how many threads it may have: one image is for any number of ranks.
    command.environ |= {"XDG_RUNTIME_DIR": str(base / "runtime"), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    done = command.run("warm", "--for", "8h", *options, timeout=3 * DEADLINE)
    assert done.returncode == 0, done.stderr
    yield command
    assert command.run("warm", "--stop").stdout == "ended\n"
    command.close()
    assert not list((base / "runtime").iterdir())
