"""What the tests of doctor share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launchpad.doctor.seen import Examination, HostSeen
from launchpad.protocol.health import (
    CodeFiles,
    Folder,
    GpuHealth,
    Gpus,
    Heard,
    Identity,
    Inlet,
    KeptImages,
    Load,
    LookUp,
    MemoryLeft,
    MpiThere,
    Network,
    Probed,
    ResourceLimits,
    Software,
    SshServer,
)

GIB = 1 << 30
DISK = Folder("/tmp", "", 100 * GIB, 200 * GIB, 10**6, False)
MPI = MpiThere("MPICH", "MPICH Version:      4.2.3", "/usr/lib/libmpi.so.12", "")
NO_GPUS = Gpus("", [], [], [], [], False, "", "")


def address(place: int) -> str:
    return f"10.0.0.{place + 1}"


def healthy(count: int = 4) -> Examination:
    """Hosts a, b, c … with which nothing is wrong."""
    names = "abcdefgh"[:count]
    hosts = []
    for place, name in enumerate(names):
        inlets = [Inlet(address(place), "eth0", 1500, 1000, 1001), Inlet("127.0.0.1", "lo", 65536, 1002, 1003)]
        facts = {
            "identity": Identity(name, f"boot-{name}", "/usr/bin/python3", 0.0),
            "network": Network(inlets, ["lo", "eth0"]),
            "lookup": LookUp([[address(other)] for other in range(count)]),
            "heard": Heard([[other, 100] for other in range(count) if other != place]),
            "limits": ResourceLimits(1024, 1 << 20, 8 << 20, 30000, 8.0, 8, False),
            "tmp": DISK,
            "cache": DISK._replace(path="/home/me/.cache"),
            "shm": Folder("/dev/shm", "", 8 * GIB, 8 * GIB, 10**6, False),
            "memory": MemoryLeft(16 * GIB, 12 * GIB, -1, 0.0),
            "load": Load(0.2, 0.05),
            "software": Software("3.11.7", "2.13.0", "12.6", {"numpy": "2.0", "mpich": "4.2"}),
            "code": CodeFiles("", {"train.py": "1234", "lib/net.py": "5678"}, True),
            "sshd": SshServer(0, 10),
            "mpi": MPI,
            "kept": KeptImages([]),
            "gpus": NO_GPUS,
        }
        hosts.append(HostSeen(name, facts=facts, skew=0.001, uncertain=0.01))
    paths = {
        (start, to): Probed(to, address(to), address(start), "eth0", [], 1e-4, 100, 100, 1500, 1)
        for start in range(count)
        for to in range(count)
        if start != to
    }
    return Examination(hosts, paths, dict.fromkeys(paths, 1e9), {"gloo": 0.001}, cwd="/work")


def changed(seen: Examination, place: int, **subjects: Any) -> Examination:
    """With other facts about one host."""
    hosts = list(seen.hosts)
    hosts[place] = hosts[place]._replace(facts={**hosts[place].facts, **subjects})
    return seen._replace(hosts=hosts)


GPU = GpuHealth(0, "H100", 0, "", 0, 80 * GIB)


def on_all(**fields: Any) -> Callable[[Examination], Examination]:
    """All have two GPUs, host c these."""

    def make(seen: Examination) -> Examination:
        normal = Gpus("550.1", [GPU, GPU._replace(number=1)], [["X", "NV18"], ["NV18", "X"]], [], [], False, "", "")
        for place in seen.present:
            seen = changed(seen, place, gpus=normal)
        return changed(seen, 2, gpus=normal._replace(**fields))

    return make


# As nvidia-smi prints it, driver 550, on a machine with two GPUs.
QUERY = """\
0, NVIDIA H100 80GB HBM3, 550.54.15, 0, 4, 81559, Not Active, Not Active, Not Active, Not Active
1, NVIDIA H100 80GB HBM3, 550.54.15, 3, 70211, 81559, Not Active, Not Active, Active, Not Active
"""
