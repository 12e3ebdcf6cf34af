"""A real Slurm for tests on one machine: munged, slurmctld, and a slurmd for each of its nodes.

    with Slurm(folder, 2) as slurm:
        ... slurm.salloc(launchpad, ["-N2"], "run", "show.py") ...

The nodes c1 … cN are this machine, and differ by their port; with a Network they are its hosts h1 … hN. All servers are
children of ours, with ports, keys and files of their own, so any number of clusters can be up. At the end all jobs are
cancelled, and what carries the cluster's mark is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.netns import HEAD, Network
from tests.support.ports import free_port
from tests.support.processes import with_variable
from tests.support.sshd import USER, Running

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "scontrol", "squeue")
_MARK = "LAUNCHPAD_TEST_SLURM"

needs_slurm = pytest.mark.skipif(
    not all(shutil.which(program, path=_PATH) for program in _PROGRAMS), reason="Slurm is not installed"
)

CPUS = 2  # of each node

_CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=30
SlurmctldTimeout=60
SlurmdTimeout=60
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""


class Slurm(Running):
    """A cluster of `count` nodes. `environ` has what its commands need; `nodes` are the nodes' names."""

    def __init__(self, folder: Path, count: int, network: Network | None = None) -> None:
        self.folder = folder
        self.network = network
        self.nodes = [f"{'h' if network else 'c'}{number}" for number in range(1, count + 1)]
        self.mark = uuid.uuid4().hex
        self.environ = {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._started: list[subprocess.Popen[bytes]] = []
        self._slurmd: dict[str, subprocess.Popen[bytes]] = {}

    # The cluster.

    def start(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        self.folder.chmod(0o755)
        address = HEAD if self.network else "127.0.0.1"
        conf = _CONF.format(
            host=socket.gethostname().split(".")[0],
            address=address,
            port=free_port(),
            user=USER,
            folder=self.folder,
            nodes=",".join(self.nodes),
        )
        for name in self.nodes:
            (self.folder / name).mkdir()
            if self.network:
                where = f"NodeHostname={name} NodeAddr={self.network.hosts[name].address} Port=6818"
            else:
                where = f"NodeHostname={socket.gethostname().split('.')[0]} NodeAddr=127.0.0.1 Port={free_port()}"
            conf += f"NodeName={name} {where} CPUs={CPUS} RealMemory=1000 State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        self._run("munged", "--foreground", "--force", *files)
        wait_until((self.folder / "munge.socket").exists, "munged to listen", self._logs)
        self._run("slurmctld", "-D", "-i", "-f", self.environ["SLURM_CONF"])
        for name in self.nodes:
            self.start_slurmd(name)
        wait_until(self.is_idle, "all nodes to be idle", self._logs)

    def start_slurmd(self, name: str) -> None:
        """Start a node's slurmd."""
        self._slurmd[name] = self._run("slurmd", "-D", "-N", name, "-f", self.environ["SLURM_CONF"], on=name)

    def kill_slurmd(self, name: str) -> None:
        """Kill a node's slurmd; its steps go on."""
        self._slurmd[name].kill()
        self._slurmd[name].wait(DEADLINE)

    def stop(self) -> None:
        if self._started:
            subprocess.run(self._argv("scancel", "--user", USER), env=self._whole(), timeout=DEADLINE)
        for process in reversed(self._started):
            process.terminate()
        for process in reversed(self._started):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(DEADLINE)
        wait_until(lambda: not self._kill_marked(), "the cluster's processes to be gone", self._kill_marked)

    def _kill_marked(self) -> list[str]:
        """Kill all processes of the cluster; returns those that there were."""
        found = []
        for pid in with_variable(_MARK, self.mark):
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(str(pid))
                    os.kill(pid, signal.SIGKILL)
            except (OSError, IndexError):
                continue
        return found

    def _whole(self) -> dict[str, str]:
        return {"HOME": os.environ.get("HOME", "/"), **self.environ, _MARK: self.mark}

    def _argv(self, *words: object, on: str = "") -> list[str]:
        argv = [str(word) for word in words]
        if self.network and on:
            inside = ("--net", "--pid", "--mount", "--uts", "--ipc", "--")
            return ["nsenter", "-t", str(self.network.hosts[on].pid), *inside, *argv]
        return self.network.argv(*argv) if self.network else argv

    def _run(self, *words: object, on: str = "") -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        argv = self._argv(*words, on=on)
        started = subprocess.Popen(argv, env=self._whole(), stdin=null, stdout=null, stderr=null)
        self._started.append(started)
        return started

    def _logs(self) -> str:
        return "\n".join("\n".join(log.read_text().splitlines()[-5:]) for log in sorted(self.folder.glob("*.log")))

    # Its users.

    def ask(self, *words: object) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            self._argv(*words), env=self._whole(), capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def is_idle(self) -> bool:
        """Whether no node has a job, or the rest of one."""
        done = subprocess.run(
            self._argv("sinfo", "-h", "-N", "-o", "%T"), env=self._whole(), capture_output=True, text=True, check=False
        )
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def salloc(
        self, launchpad: Launchpad, options: Sequence[str], *words: object, **more: object
    ) -> subprocess.CompletedProcess[str]:
        """Run `launchpad WORDS` in an allocation of its own."""
        argv = self._argv("salloc", "--quiet", *options, *launchpad.argv(*words))
        environ = launchpad.environ | self.environ
        given = {"stdin": subprocess.DEVNULL} if "input" not in more else {}
        return subprocess.run(
            argv, env=environ, cwd=launchpad.folder, capture_output=True, text=True, timeout=DEADLINE, **given, **more
        )

    def sbatch(self, launchpad: Launchpad, options: Sequence[str], script: str) -> BatchJob:
        """Submit a batch script, in which `launchpad` is the command. TERM doesn't end the script itself."""
        file = launchpad.folder / f"job-{uuid.uuid4().hex}.sh"
        command = " ".join(launchpad.argv())
        file.write_text(f'#!/bin/bash\ntrap : TERM\nlaunchpad() {{ {command} "$@"; }}\n{script}\necho "code $?"\n')
        out = file.with_suffix(".out")
        argv = self._argv("sbatch", "--parsable", "--open-mode=append", f"--output={out}", *options, file)
        done = subprocess.run(
            argv,
            env=launchpad.environ | self.environ,
            cwd=launchpad.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return BatchJob(self, done.stdout.strip(), out)


class BatchJob:
    """A batch job, and what it has written so far."""

    def __init__(self, slurm: Slurm, number: str, out: Path) -> None:
        self.slurm = slurm
        self.number = number
        self._out = out

    @property
    def output(self) -> str:
        """Standard output and standard error."""
        return self._out.read_text() if self._out.exists() else ""

    def await_output(self, text: str, count: int = 1) -> None:
        """Wait until it has written this so many times."""
        wait_until(lambda: self.output.count(text) >= count, f"{text!r} in the output", lambda: self.output)

    def signal(self, *words: str) -> None:
        """Run scancel on it."""
        self.slurm.ask("scancel", *words, self.number)

    def end(self) -> tuple[int, str]:
        """Wait for its end; returns the exit code of the last command of the script, and the output."""
        self.await_output("\ncode ")
        lines = self.output.splitlines()
        at = next(at for at, line in enumerate(lines) if line.startswith("code "))
        return int(lines[at].split()[1]), "\n".join(lines[:at]) + "\n"
