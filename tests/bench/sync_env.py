"""An environment's way to hosts: `launchpad run --sync-env` beside rsync: python tests/bench/sync_env.py [--python P]

Each host is a network namespace with its own sshd and a folder of its own for what is sent, where the environment's
own folder is empty; all share this machine's cores and disk, and none has a network that leads further. rsync is
`rsync -a` of the same prefix over the same ssh, one process for each host, all at once. Times are from the command line
to its end; launchpad's are those of a whole job, of a rank on each host that prints nothing. Every run begins with
empty folders, except "again", which is the same job once more, "without", the same without --sync-env, right after it,
and "sums", a job in which a rank of torch on each host takes part in an all_reduce.
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

# How often the same job is run again for one transfer.
AGAIN = 5

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(int(total), "in all:", torch.__file__)
"""


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
    print("hosts  launchpad  rsync -a  ratio  again   without  sums    launcher's peak memory  load")
    for count in map(int, options.hosts.split(",")):
        with (
            tempfile.TemporaryDirectory(prefix="lp-bench-") as folder,
            Hosts(Path(folder), count, apart=True, without=prefix) as hosts,
        ):
            print(row(hosts, options.python, prefix, options.runs), flush=True)


def row(hosts: Hosts, python: str, prefix: Path, runs: int) -> str:
    """Medians for these hosts. The two take turns, so that neither has the quieter hours."""
    ours, theirs, again, without, sums, memory = [], [], [], [], [], 0.0
    for _ in range(runs):
        ours.append(timed(lambda: launchpad(hosts, python)))
        memory = max(memory, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
        for _ in range(AGAIN):
            again.append(timed(lambda: launchpad(hosts, python)))
            without.append(timed(lambda: run([*command(hosts), "true"])))
        sums.append(timed(lambda: all_reduce(hosts, python)))
        clear(hosts)
        theirs.append(timed(lambda: rsync(hosts, prefix)))
        clear(hosts)
    mine, other, second, plain, summed = map(statistics.median, (ours, theirs, again, without, sums))
    return (
        f"{len(hosts.names):5}  {mine:7.1f} s  {other:6.1f} s  {mine / other:5.2f}  {second:.2f} s  {plain:.2f} s   "
        f"{summed:.2f} s  {memory:4.0f} MB                 {os.getloadavg()[0]:.0f}"
    )


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def command(hosts: Hosts) -> list[str]:
    """Of a job on all hosts."""
    return [
        sys.executable,
        "-m",
        "launchpad",
        "run",
        "--ssh-config",
        str(hosts.ssh_config),
        "-H",
        ",".join(hosts.names),
    ]


def launchpad(hosts: Hosts, python: str, *words: str) -> str:
    """One job, and what it prints."""
    return run([*command(hosts), "--python", python, "--sync-env", *(words or ("true",))])


def all_reduce(hosts: Hosts, python: str) -> None:
    """A job of torch, which each host has from here."""
    folder = hosts.folder / "program"
    folder.mkdir(exist_ok=True)
    (folder / "sum.py").write_text(PROGRAM)
    said = launchpad(hosts, python, "--sync", "--wdir", str(folder), "sum.py").splitlines()
    there = f"{len(hosts.names)} in all: {hosts.folder}"
    assert [there in line for line in said] == [True] * len(hosts.names), said


def rsync(hosts: Hosts, prefix: Path) -> None:
    """The same tree, to all hosts at once."""
    ssh = f"ssh -F {hosts.ssh_config}"
    argvs = [["rsync", "-a", "-e", ssh, f"{prefix}/", f"{name}:{hosts.cache(name)}/rsync/"] for name in hosts.names]
    processes = [subprocess.Popen(argv, stdin=subprocess.DEVNULL) for argv in argvs]
    assert [process.wait(DEADLINE) for process in processes] == [0] * len(processes)


def run(argv: Sequence[str]) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def clear(hosts: Hosts) -> None:
    """Remove what was sent, and let nothing of it be written while the next one is measured."""
    for name in hosts.names:
        for path in hosts.cache(name).glob("*"):
            for part in [*path.glob("env-*"), *path.glob("copy-*"), *([path] if path.name == "rsync" else [])]:
                shutil.rmtree(part) if part.is_dir() else part.unlink()
    os.sync()


if __name__ == "__main__":
    main()
