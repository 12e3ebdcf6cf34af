"""Several hosts over SSH, beside mpirun and torchrun in one run: python tests/bench/ssh.py [--runs N] [--part PART]

noop: a rank on each of 2, 8, 16 hosts that prints and leaves. sum: 2 hosts with 2 ranks each, to the first gloo
all_reduce and out; warm: the same, with images that `launchpad warm` keeps on both. mpi: the same hosts and ranks, to
the first sum over an MPI_COMM_WORLD of Open MPI and out, then all told to leave out the adapters that launchpad leaves
out itself where they are missing, and then launchpad's from images. lines: MB (10^6 bytes) a second of
a rank's lines over one link into a file; damaged: how many of them did not arrive whole and once. cpu, memory: of the
launcher's processes on this machine, for each of 16 hosts. ways (only where asked for): launchpad's paramiko beside
its --ssh openssh, with 16 and 64 hosts.

The hosts are pretended (hosts.py), for which root is needed; they share this machine's cores. mpirun is Open MPI's,
with the same ssh_config; torchrun is started by one ssh for each host. Peers take turns. Figures are medians; the last
column is the peer's figure over Launchpad's, or for MB/s the other way round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Hosts, why_not

PROGRAMS = Path(__file__).parent / "programs"
BESIDE = Path(sys.executable).parent
DEADLINE = 240.0
MOST_HOSTS = 16
WAYS = ("paramiko", "openssh")
HOSTS_OF_WAYS = (16, 64)
THOUSANDS = 2000  # of lines, 100 bytes each
PORT = 29511
WITHOUT_PSM = "^ofi,psm,psm2"  # ofi is left out by Debian's file of parameters
PARTS = ["noop", "sum", "warm", "mpi", "lines", "memory"]
ASKED_FOR = ["ways"]


class Ended(NamedTuple):
    """A launcher's run."""

    seconds: float
    cpu: float  # seconds of its own and of its children on this machine
    out: bytes


class Peer(NamedTuple):
    """A launcher; `argv(hosts, ranks per host, tagged, words of a Python program)`."""

    name: str
    argv: Callable[[Sequence[str], int, bool, Sequence[str]], list[str]]


def installed(cluster: Hosts) -> list[Peer]:
    """Launchpad, then what there is of the others."""
    config = ["-F", str(cluster.ssh_config)]

    def launchpad(hosts: Sequence[str], ranks: int, _: bool, words: Sequence[str]) -> list[str]:
        named = ",".join(f"{host}:{ranks}" for host in hosts)
        return [str(BESIDE / "launchpad"), "run", "--ssh-config", str(cluster.ssh_config), "--hosts", named, *words]

    found = [Peer("launchpad", launchpad)]
    # With the mpich wheel installed, the mpirun beside the interpreter is Hydra, and Open MPI's is the system's.
    elsewhere = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != str(BESIDE))
    mpirun = shutil.which("mpirun", path=elsewhere)
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout if mpirun else ""
    if mpirun and "Open MPI" in version:

        def openmpi(hosts: Sequence[str], ranks: int, tagged: bool, words: Sequence[str]) -> list[str]:
            named = ",".join(f"{host}:{ranks}" for host in hosts)
            rsh = ["--mca", "plm_rsh_agent", "ssh", "--mca", "plm_rsh_args", " ".join(config)]
            world = ["-x", "MASTER_ADDR", "-x", "MASTER_PORT", "-x", "OMP_NUM_THREADS"]
            tag = ["--tag-output"] if tagged else []
            options = [*rsh, *world, *tag, "-n", str(len(hosts) * ranks), "--host", named]
            return [mpirun, "--allow-run-as-root", *options, sys.executable, "-u", *words]

        found.append(Peer(f"mpirun (Open MPI {version.splitlines()[0].split()[-1]})", openmpi))
    if (BESIDE / "torchrun").exists():

        def torchrun(hosts: Sequence[str], ranks: int, _: bool, words: Sequence[str]) -> list[str]:
            world = f"--nnodes {len(hosts)} --nproc-per-node {ranks} --master-addr {cluster.address(hosts[0])}"
            line = f"OMP_NUM_THREADS=1 {BESIDE}/torchrun {world} --master-port {PORT} --node-rank %d {' '.join(words)}"
            each = [f"ssh {' '.join(config)} {host} '{line % rank}' &" for rank, host in enumerate(hosts)]
            return ["sh", "-c", " ".join([*each, "wait"])]

        found.append(Peer("ssh + torchrun", torchrun))
    return found


def run(
    argv: Sequence[str], cluster: Hosts, out: Path | None = None, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run a launcher to its end."""
    environ = {**os.environ, "MASTER_ADDR": cluster.address("n1"), "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1"}
    environ |= variables or {}
    path = out or cluster.folder / "out"
    with path.open("wb") as file:
        start = time.monotonic()
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, env=environ)
        killer = threading.Timer(DEADLINE, process.kill)
        killer.start()
        assert process.stderr is not None
        complaints = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        killer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (argv, complaints.decode(errors="replace"))
    return Ended(seconds, usage.ru_utime + usage.ru_stime, b"" if out else path.read_bytes())


def noop(peer: Peer, cluster: Hosts, count: int) -> Ended:
    """A rank on each of so many hosts that prints and leaves."""
    ended = run(peer.argv(cluster.names[:count], 1, False, [str(PROGRAMS / "noop.py")]), cluster)
    assert ended.out.count(b"here") == count, ended
    return ended


def first_sum(peer: Peer, cluster: Hosts) -> float:
    """Seconds for 2 hosts with 2 ranks each to meet, sum once, and leave."""
    return run(peer.argv(cluster.names[:2], 2, False, [str(PROGRAMS / "first_sum.py")]), cluster).seconds


def mpi_sum(peer: Peer, cluster: Hosts, variables: Mapping[str, str], *options: str) -> float:
    """Seconds for 2 hosts with 2 ranks each to form a world of Open MPI, sum once, and leave.

    `options`: of launchpad.
    """
    own = ["--backend", "mpi", "--mpi", "openmpi", *options] if peer.name == "launchpad" else []
    argv = peer.argv(cluster.names[:2], 2, False, [*own, str(PROGRAMS / "openmpi_sum.py")])
    ended = run(argv, cluster, variables=variables)
    assert ended.out.count(b"here") == 4, ended
    return ended.seconds


def warm(cluster: Hosts, *words: str) -> None:
    """`launchpad warm` on the first two hosts."""
    argv = ["warm", "--ssh-config", str(cluster.ssh_config), "-H", ",".join(cluster.names[:2]), *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [str(BESIDE / "launchpad"), *argv], env=environ, stdout=subprocess.DEVNULL, timeout=DEADLINE, check=True
    )


def lines(peer: Peer, cluster: Hosts) -> tuple[float, int]:
    """MB of lines a second, from the command to its end; and how many of them did not arrive whole, once, in order."""
    out = cluster.folder / "lines"
    words = [str(PROGRAMS / "pours.py"), str(THOUSANDS)]
    seconds = run(peer.argv(cluster.names[:1], 1, True, words), cluster, out).seconds
    whole = b"rank 0 line %07d" + b" of a program that pours out its log".ljust(99 - len("rank 0 line 0000000"), b".")
    last = -1
    arrived = 0
    with out.open("rb") as file:
        for line in file:
            text = line[line.find(b"rank ") : -1]
            number = int(text[12:19]) if text[12:19].isdigit() else -1
            if number > last and text == whole % number:
                arrived += 1
                last = number
    return THOUSANDS * 1000 * 100 / 1e6 / seconds, THOUSANDS * 1000 - arrived


def memory(peer: Peer, cluster: Hosts) -> float:
    """KB (10^3 bytes) of proportional set size for each of 16 hosts, at its peak: the launcher and what it started."""
    hosts = cluster.names[:MOST_HOSTS]
    own, others = peak(peer.argv(hosts, 1, False, [str(PROGRAMS / "naps.py")]), cluster)
    return (own + others) / 1e3 / len(hosts)


def peak(argv: Sequence[str], cluster: Hosts) -> tuple[int, int]:
    """Bytes of proportional set size when there are most: of the launcher itself, and of what it has started here."""
    largest = (0, 0)
    done = threading.Event()
    ours = {one.pid for one in psutil.Process().children(recursive=True)}  # the hosts

    def pss(one: psutil.Process) -> int:
        try:
            away = {parent.pid for parent in one.parents()} | {one.pid}
            return 0 if away & ours else int(one.memory_full_info().pss)
        except psutil.Error:
            return 0

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.1):
            launchers = [one for one in psutil.Process().children() if one.pid not in ours]
            own = sum(map(pss, launchers))
            others = sum(pss(child) for one in launchers for child in _children(one))
            largest = max(largest, (own, others), key=sum)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run(argv, cluster)
    finally:
        done.set()
        watcher.join()
    return largest


def _children(one: psutil.Process) -> list[psutil.Process]:
    try:
        return one.children(recursive=True)
    except psutil.Error:
        return []


class Way(NamedTuple):
    """A run of a rank on each host that prints and leaves, over SSH one way."""

    seconds: float
    ready: float  # seconds until all hosts have an agent that is ready to start ranks
    cpu: float  # seconds of the head itself
    cpu_others: float  # seconds of the ssh processes on this machine


def way(cluster: Hosts, count: int, how: str) -> Way:
    """Run it once."""
    state = cluster.folder / "state"
    shutil.rmtree(state, ignore_errors=True)
    environ = {**os.environ, "XDG_STATE_HOME": str(state)}
    argv = _argv_of(cluster, count, how, "noop.py")
    start = time.monotonic()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    killer = threading.Timer(DEADLINE, process.kill)
    killer.start()
    assert process.stdout is not None
    out = process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seconds = time.monotonic() - start
    # Of a process that has ended and has not been waited for: utime, stime, and those of its children.
    used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    own, own_system, others, others_system = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in used)
    _, complaints = process.communicate()
    killer.cancel()
    assert process.returncode == 0, (argv, complaints.decode(errors="replace"))
    assert out.count(b"here") == count, out
    (journal,) = state.glob("launchpad/jobs/*/events.jsonl")
    with journal.open() as file:
        planned = json.loads(file.readline())
    assert planned["event"] == "JobPlanned", planned
    return Way(seconds, planned["time"] / 1e9 - start, own + own_system, others + others_system)


def _argv_of(cluster: Hosts, count: int, how: str, program: str) -> list[str]:
    named = ",".join(f"{host}:1" for host in cluster.names[:count])
    words = ["run", "--ssh", how, "--ssh-config", str(cluster.ssh_config), "--hosts", named]
    return [str(BESIDE / "launchpad"), *words, str(PROGRAMS / program)]


def compare_ways(cluster: Hosts, runs: int) -> None:
    """Print a table of both ways to connect."""
    print(f"| what | {' | '.join(WAYS)} | ratio |")
    print("|---" * (len(WAYS) + 2) + "|", flush=True)
    for count in HOSTS_OF_WAYS:
        figures: dict[str, list[Way]] = {how: [] for how in WAYS}
        for number in range(runs + 1):
            for how, results in figures.items():
                one = way(cluster, count, how)
                if number > 0:
                    results.append(one)
        load = os.getloadavg()[0]

        def cells(what: str, unit: str, part: Callable[[Way], float], of: dict[str, list[Way]] = figures) -> None:
            row(what, [[part(one) for one in results] for results in of.values()], unit)

        cells(f"{count} hosts, a rank on each prints and leaves", "s", lambda one: one.seconds)
        cells("… until all hosts are connected and ready", "s", lambda one: one.ready)
        cells("… CPU time of the head", "s", lambda one: one.cpu)
        cells("… CPU time of ssh processes here", "s", lambda one: one.cpu_others)
        peaks = [peak(_argv_of(cluster, count, how, "naps.py"), cluster) for how in WAYS]
        row("… peak memory (PSS) of the head", [[own / 1e6] for own, _ in peaks], "MB")
        row("… of ssh processes here at that moment", [[others / 1e6] for _, others in peaks], "MB")
        print(f"(load {load:.1f})", flush=True)


def row(what: str, figures: list[list[float]], unit: str, *, more_is_better: bool = False) -> None:
    """One line of the table: medians, and each peer's ratio to ours."""
    medians = [statistics.median(results) if results else None for results in figures]
    cells = ["" if m is None else f"{m:.3g} {unit}" if m < 1000 else f"{m:.0f} {unit}" for m in medians]
    ours = medians[0]
    ratios = [
        f"{(ours / m if more_is_better else m / ours):.2g}x" if m is not None and ours and m else ""
        for m in medians[1:]
    ]
    print(f"| {what} | {' | '.join(cells)} | {', '.join(filter(None, ratios))} |", flush=True)


def main() -> None:
    """Run the parts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each peer in each part (after one more)")
    parser.add_argument("--part", choices=[*PARTS, *ASKED_FOR], action="append", help="only this part")
    options = parser.parse_args()
    parts = options.part or PARTS
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return
    # With it, whatever launchpad imports here and on the hosts would be compiled again in each run.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    most = max(HOSTS_OF_WAYS) if "ways" in parts else MOST_HOSTS
    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder), most) as cluster:
        found = installed(cluster)
        machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
        print(f"{platform.platform()}, {machine}; {options.runs} runs each, load {os.getloadavg()[0]:.1f}\n")
        if "ways" in parts:
            compare_ways(cluster, options.runs)
            print()
        if not set(parts) & set(PARTS):
            return
        print("| what | " + " | ".join(peer.name for peer in found) + " | ratios |")
        print("|---" * (len(found) + 2) + "|", flush=True)
        bench(found, cluster, parts, options.runs)


def bench(found: list[Peer], cluster: Hosts, parts: Sequence[str], runs: int) -> None:
    """Print the table's rows."""

    def turns(peers: list[Peer], measure: Callable[[Peer], float]) -> list[list[float]]:
        figures: list[list[float]] = [[] for _ in found]
        for number in range(runs + 1):
            for peer, results in zip(found, figures, strict=True):
                if peer in peers:
                    figure = measure(peer)
                    if number > 0 or runs == 0:
                        results.append(figure)
        return figures

    slow = [peer for peer in found if peer.name != "ssh + torchrun"]  # a minute a run, from 8 hosts on
    if "noop" in parts:
        for count in (2, 8, MOST_HOSTS):
            cpu: dict[str, list[float]] = {peer.name: [] for peer in found}

            def measure(peer: Peer, count: int = count, cpu: dict[str, list[float]] = cpu) -> float:
                ended = noop(peer, cluster, count)
                cpu[peer.name].append(ended.cpu * 1000 / count)
                return ended.seconds

            row(f"{count} hosts, a rank on each prints and leaves", turns(found if count < 8 else slow, measure), "s")
            row("… the launcher's CPU time here, for each host", list(cpu.values()), "ms")
    if "sum" in parts:
        row(
            "2 hosts, 2 ranks each: start, first all_reduce, exit",
            turns(found, lambda peer: first_sum(peer, cluster)),
            "s",
        )
    if "warm" in parts:
        warm(cluster, "--for", "1h")
        try:
            row(
                "… with images kept on the hosts",
                turns(found, lambda peer: first_sum(peer, cluster)),
                "s",
            )
        finally:
            warm(cluster, "--stop")
    if "mpi" in parts:
        row(
            "2 hosts, 2 ranks each: an MPI world of Open MPI, sum, exit",
            turns(slow, lambda peer: mpi_sum(peer, cluster, {})),
            "s",
        )
        row(
            f"… all with OMPI_MCA_mtl={WITHOUT_PSM}",
            turns(slow, lambda peer: mpi_sum(peer, cluster, {"OMPI_MCA_mtl": WITHOUT_PSM})),
            "s",
        )
        os.environ["MPI4PY_MPIABI"] = "openmpi"
        warm(cluster, "--preload", "mpi4py.MPI", "--for", "1h")
        try:
            row(
                "… with images of mpi4py.MPI kept on the hosts",
                turns(slow, lambda peer: mpi_sum(peer, cluster, {}, "--preload", "mpi4py.MPI")),
                "s",
            )
        finally:
            warm(cluster, "--stop")
    if "lines" in parts:
        damaged: dict[str, list[float]] = {peer.name: [] for peer in found}

        def pour(peer: Peer) -> float:
            speed, bad = lines(peer, cluster)
            damaged[peer.name].append(bad)
            return speed

        row(f"{THOUSANDS // 1000} million marked lines over one link", turns(slow, pour), "MB/s", more_is_better=True)
        row("… of them cut, lost or mixed up", list(damaged.values()), "lines")
    if "memory" in parts:
        row(
            "16 hosts: the launcher's peak memory (PSS) here, for each", turns(slow, lambda p: memory(p, cluster)), "KB"
        )


if __name__ == "__main__":
    main()
