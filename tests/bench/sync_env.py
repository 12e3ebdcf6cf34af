"""An environment's way to hosts: `launchpad run --sync-env` beside rsync: python tests/bench/sync_env.py [--python P]

Each host is a network namespace with its own sshd and a folder of its own for what is sent; all share this machine's
cores and disk. rsync is `rsync -a` of the same prefix over the same ssh, one process for each host, all at once. Times
are from the command line to its end; launchpad's are those of a whole job, of a rank on each host that prints nothing.
Every run begins with empty folders, except "again".
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.hosts import Hosts, why_not

DEADLINE = 1800.0


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose environment is sent")
    parser.add_argument("--hosts", default="1,8", help="how many, one after the other")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if reason := why_not() or ("" if shutil.which("rsync") else "rsync is not installed"):
        sys.exit(f"no hosts to measure on: {reason}")
    prefix = Path(options.python).parent.parent
    files = [path.stat().st_size for path in prefix.rglob("*") if path.is_file() and not path.is_symlink()]
    print(f"{prefix}: {len(files)} files, {sum(files) / 1e6:.0f} MB")
    print("hosts  launchpad  rsync -a  ratio  again  peak memory of the launcher")
    for count in map(int, options.hosts.split(",")):
        with tempfile.TemporaryDirectory(prefix="lp-bench-") as folder, Hosts(Path(folder), count, apart=True) as hosts:
            print(row(hosts, options.python, prefix, options.runs), flush=True)


def row(hosts: Hosts, python: str, prefix: Path, runs: int) -> str:
    """Medians for these hosts. The two take turns, so that neither has the quieter hours."""
    ours, theirs, again = [], [], []
    for _ in range(runs):
        ours.append(timed(lambda: launchpad(hosts, python)))
        again.append(timed(lambda: launchpad(hosts, python)))
        clear(hosts)
        theirs.append(timed(lambda: rsync(hosts, prefix)))
        clear(hosts)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    mine, other = statistics.median(ours), statistics.median(theirs)
    return (
        f"{len(hosts.names):5}  {mine:7.1f} s  {other:6.1f} s  {mine / other:5.2f}  "
        f"{statistics.median(again):.2f} s  {memory:.0f} MB"
    )


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def launchpad(hosts: Hosts, python: str) -> None:
    """One job."""
    words = ["--ssh-config", str(hosts.ssh_config), "-H", ",".join(hosts.names), "--python", python, "--sync-env"]
    run([sys.executable, "-m", "launchpad", "run", *words, "true"])


def rsync(hosts: Hosts, prefix: Path) -> None:
    """The same tree, to all hosts at once."""
    ssh = f"ssh -F {hosts.ssh_config}"
    argvs = [["rsync", "-a", "-e", ssh, f"{prefix}/", f"{name}:{hosts.cache(name)}/rsync/"] for name in hosts.names]
    processes = [subprocess.Popen(argv, stdin=subprocess.DEVNULL) for argv in argvs]
    assert [process.wait(DEADLINE) for process in processes] == [0] * len(processes)


def run(argv: Sequence[str]) -> None:
    """A command that must succeed."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr


def clear(hosts: Hosts) -> None:
    """Remove what was sent, and let nothing of it be written while the next one is measured."""
    for name in hosts.names:
        for path in hosts.cache(name).glob("*"):
            for part in [*path.glob("env-*"), *([path] if path.name == "rsync" else [])]:
                shutil.rmtree(part) if part.is_dir() else part.unlink()
    os.sync()


if __name__ == "__main__":
    main()
