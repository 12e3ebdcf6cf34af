"""What is said of made cases in which a rank is slow, or none: python tests/bench/stragglers.py [--seconds S] [CASE …]

Each case (tests/programs/slowed.py) runs on 4 ranks. The rank that is to be named is known; in the healthy ones it is
nobody. Exits with 1 if a case came out wrong. With --overhead it measures instead what a rank spends on its answers, of
steps of 5 ms on as many ranks as there are cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.netns import Network
from tests.support.sshd import Cluster

PROGRAM = Path(__file__).parents[1] / "programs" / "slowed.py"
BESIDE = Path(sys.executable).parent

LIMIT_SECONDS = 60.0
DELAY = "20ms"


class Case(NamedTuple):
    name: str
    slow: tuple[int, ...] = ()  # the ranks to be named
    because: str = ""  # a pattern that the reason must contain
    options: tuple[str, ...] = ()


CASES = (
    Case("even"),
    Case("noisy"),
    Case("rotating"),
    Case("saving"),
    Case("even", options=("--backend", "mpi")),
    Case("double", (1,)),
    Case("double", (1,), options=("--backend", "mpi")),
    Case("double", (1,), options=("--start-method", "exec")),
    Case("computing", (2,), "computes more|wait for a core"),
    Case("loading", (3,)),
    Case("throttled", (1,), "quota"),
    Case("faulting", (2,), "page faults"),
    Case("crowded", (0,), "wait for a core"),
    Case("stopped", (2,)),
    Case("collecting", (3,)),
    Case("checkpointing", (0,)),
    Case("halves", (3,)),
    Case("ddp", (1,)),
    Case("even", options=("hosts",)),
    Case("second_host", (2, 3), options=("hosts",)),
    Case("double", (1,), options=("hosts",)),
    Case("even", options=("namespaces",)),
    Case("even", (2, 3), "a message from launchpad to them and back", options=("namespaces", "delay")),
)


@contextlib.contextmanager
def cgroup() -> Iterator[str]:
    """A cgroup with a tenth of a core; "" if none can be made."""
    for root, settings in (
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_quota_us": "10000", "cpu.cfs_period_us": "100000"}),
        ("/sys/fs/cgroup", {"cpu.max": "10000 100000"}),
    ):
        folder = Path(root, f"stragglers-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, value in settings.items():
                (folder / name).write_text(value)
        except OSError:
            folder.rmdir()
            continue
        try:
            yield str(folder)
        finally:
            folder.rmdir()
        return
    yield ""


def run(case: Case, seconds: float, folder: Path) -> dict[str, Any] | str:
    """What `launchpad why --json` says of it, or why it can't be run here."""
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    with contextlib.ExitStack() as stack:
        options: Sequence[str] = ("-n", "4", *case.options)
        if "hosts" in case.options:
            cluster = stack.enter_context(Cluster(folder / "ssh", 2))
            options = ("--ssh-config", str(cluster.ssh_config), "--hosts", "n1:2,n2:2")
        before: Sequence[str] = ()
        if "namespaces" in case.options:
            network = stack.enter_context(Network(folder / "net", 2))
            options = ("--ssh-config", str(network.ssh_config), "--hosts", "h1:2,h2:2")
            before = network.argv()
            if "delay" in case.options:
                try:
                    network.spoil("h2", "delay", DELAY)
                except AssertionError as error:
                    return f"no packets can be delayed here: {error}"
        if case.name == "throttled":
            environ["CGROUP"] = stack.enter_context(cgroup())
            if not environ["CGROUP"]:
                return "no cgroup can be made here"
        argv = [str(BESIDE / "launchpad"), "run", "--sample", "2", *options, str(PROGRAM), case.name, str(seconds)]
        done = subprocess.run(
            [*before, *argv], env=environ, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        if done.returncode:
            raise SystemExit(f"{case.name}: {done.stderr}")
    said = subprocess.run([argv[0], "why", "--json"], env=environ, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What is said of slow ranks.")
    parser.add_argument("--seconds", type=float, default=7.0, help="of each case")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--overhead", action="store_true")
    options = parser.parse_args()
    if options.overhead:
        for backend in ("gloo", "mpi"):
            argv = [str(BESIDE / "launchpad"), "run", "-n", str(os.cpu_count()), "--backend", backend]
            print(backend, flush=True)
            subprocess.run([*argv, str(PROGRAM), "quick", "35"], check=True)
        return
    wrong = 0
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        with tempfile.TemporaryDirectory() as name:
            said = run(case, options.seconds, Path(name))
        title = " ".join((case.name, *case.options))
        if isinstance(said, str):
            print(f"{title:28} skipped: {said}", flush=True)
            continue
        slow = said["slow"]
        right = tuple(slow["ranks"] if slow else ()) == case.slow
        right = right and bool(re.search(case.because, slow["because"] if slow else ""))
        wrong += not right
        print(f"{title:28} {'right' if right else 'WRONG':6} {said['text'][-1] if slow else 'nobody'}", flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
