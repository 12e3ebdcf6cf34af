"""Machines in a few lines of text, and the files by which Linux would show them: sysfs, and the drivers' in /proc.

    node 0: cpus 0-15,32-47 socket 0 memory distances 10 21

describes a NUMA node with the CPUs that are online; without `memory` it has none. `threads +32`: CPU n and n+32 are one
core; `threads 4`: four that follow each other are. `cache 8`: eight cores of a socket that follow each other share the
last level of cache. `gpu 3b:00.0 node 0` is a GPU of NVIDIA's, `amd 3b:00.0 node 0` one of AMD's.
"""

from __future__ import annotations

import re
from pathlib import Path

from launchpad.protocol import cpulist

# Two sockets of 16 cores with two threads each (Xeon Gold 6226R, 2 GPUs at each).
XEON = """
node 0: cpus 0-15,32-47 socket 0 memory distances 10 21
node 1: cpus 16-31,48-63 socket 1 memory distances 21 10
threads +32
cache 16
gpu 18:00.0 node 0
gpu 3b:00.0 node 0
gpu 86:00.0 node 1
gpu af:00.0 node 1
"""

# Two sockets of 64 cores, four NUMA nodes each (EPYC 7763, NPS4), core complexes of 8 cores, and the GPUs of an HGX
# board, which are not at the nodes in order.
EPYC = """
node 0: cpus 0-15,128-143 socket 0 memory distances 10 12 12 12 32 32 32 32
node 1: cpus 16-31,144-159 socket 0 memory distances 12 10 12 12 32 32 32 32
node 2: cpus 32-47,160-175 socket 0 memory distances 12 12 10 12 32 32 32 32
node 3: cpus 48-63,176-191 socket 0 memory distances 12 12 12 10 32 32 32 32
node 4: cpus 64-79,192-207 socket 1 memory distances 32 32 32 32 10 12 12 12
node 5: cpus 80-95,208-223 socket 1 memory distances 32 32 32 32 12 10 12 12
node 6: cpus 96-111,224-239 socket 1 memory distances 32 32 32 32 12 12 10 12
node 7: cpus 112-127,240-255 socket 1 memory distances 32 32 32 32 12 12 12 10
threads +128
cache 8
gpu 07:00.0 node 3
gpu 0b:00.0 node 3
gpu 48:00.0 node 1
gpu 4c:00.0 node 1
gpu 88:00.0 node 7
gpu 8b:00.0 node 7
gpu c8:00.0 node 5
gpu cb:00.0 node 5
"""

# One socket of 72 cores without threads (GH200); the GPU's memory is a NUMA node, and seven more are kept free.
GRACE = """
node 0: cpus 0-71 socket 0 memory distances 10 80 80 80
node 1: memory distances 80 10 255 255
node 2: distances 80 255 10 255
node 3: distances 80 255 255 10
cache 72
gpu 01:00.0 node 0
"""

# A virtual machine, which does not show where its GPUs are.
VM = """
node 0: cpus 0-7 socket 0 memory distances 10
threads 2
cache 4
gpu 05:00.0 node -1
gpu 06:00.0 node -1
"""

# POWER9 (AC922): nodes 0 and 8, four threads a core of which two are switched off, GPU memory as nodes of its own.
POWER = """
node 0: cpus 0-1,4-5,8-9,12-13 socket 0 memory distances 10 40 80 80
node 8: cpus 16-17,20-21,24-25,28-29 socket 8 memory distances 40 10 80 80
node 252: memory distances 80 80 10 80
node 255: memory distances 80 80 80 10
threads 4
cache 2
gpu 04:00.0 node 255
gpu 05:00.0 node 8
"""

# Two sockets, of which one has no memory of its own, and memory on a CXL card.
CXL = """
node 0: cpus 0-3 socket 0 memory distances 10 20 30
node 1: cpus 4-7 socket 1 distances 20 10 25
node 2: memory distances 30 25 10
cache 4
amd c1:00.0 node 1
amd c2:00.0 node 0
"""


def build(text: str, root: Path) -> Path:
    """Write the machine's files below `root`; returns that."""
    numa = re.findall(r"^node (\d+):(?: cpus (\S+) socket (\d+))?( memory)? distances (.*)$", text, re.M)
    _write(root / "sys/devices/system/node/has_memory", ",".join(node for node, _, _, memory, _ in numa if memory))
    sockets: dict[str, list[int]] = {}
    for node, cpus, socket, _, distances in numa:
        folder = root / f"sys/devices/system/node/node{node}"
        _write(folder / "cpulist", cpus)
        _write(folder / "distance", distances)
        sockets.setdefault(socket, []).extend(cpulist.parse(cpus))
    step, threads = re.search(r"^threads (\+?)(\d+)$", text, re.M).groups() if "threads" in text else ("", "1")
    (sharing,) = re.findall(r"^cache (\d+)$", text, re.M)
    for socket, cpus in sockets.items():
        cores: dict[int, list[int]] = {}
        for cpu in sorted(cpus):
            cores.setdefault(cpu % int(threads) if step else cpu // int(threads), []).append(cpu)
        rows = list(cores.values())
        groups = [rows[at : at + int(sharing)] for at in range(0, len(rows), int(sharing))]
        for group in groups:
            for core in group:
                _write_core(root / "sys/devices/system/cpu", socket, core, [cpu for one in group for cpu in one])
    for number, (vendor, address, node) in enumerate(re.findall(r"^(gpu|amd) (\S+) node (\S+)$", text, re.M)):
        _write(root / f"sys/bus/pci/devices/0000:{address}/numa_node", node)
        if vendor == "gpu":
            about = f"Model: \t\t NVIDIA\nGPU UUID: \t GPU-{number}abc\nDevice Minor: \t {number}"
            _write(root / f"proc/driver/nvidia/gpus/0000:{address}/information", about)
            _write(root / f"dev/nvidia{number}", "")
        else:
            place = int(address[:2], 16) << 8
            _write(
                root / f"sys/class/kfd/kfd/topology/nodes/{number + 1}/properties",
                f"cpu_cores_count 0\nsimd_count 256\nlocation_id {place}\ndomain 0",
            )
            _write(root / "sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 64\nsimd_count 0")
    return root


def _write_core(folder: Path, socket: str, core: list[int], sharing: list[int]) -> None:
    caches = [("1", "Data", core), ("1", "Instruction", core), ("2", "Unified", core), ("3", "Unified", sharing)]
    for cpu in core:
        place = folder / f"cpu{cpu}"
        _write(place / "topology/thread_siblings_list", cpulist.written(core))
        _write(place / "topology/physical_package_id", socket)
        for index, (level, kind, cpus) in enumerate(caches):
            for name, value in (("level", level), ("type", kind), ("shared_cpu_list", cpulist.written(cpus))):
                _write(place / f"cache/index{index}/{name}", value)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
