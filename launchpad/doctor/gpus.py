"""Judges the GPUs of the hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from launchpad.doctor.seen import Examination, Finding, counted, size
from launchpad.protocol.health import Gpus

# What another process may hold of a GPU's memory without being in the way.
USED = 0.1


def judge_gpus(seen: Examination) -> Iterator[Finding]:
    """What is wrong with the GPUs, and how the hosts differ in them."""
    found: dict[int, Gpus] = seen.facts("gpus")
    for place, one in found.items():
        if one.problem:
            text = f"its GPUs can't be asked: {one.problem}"
            yield Finding("bad", (place,), "gpus", text, "nvidia-smi there; the driver may have to be loaded again")
        if one.unknown:
            text = f"could not be checked: the GPUs ({one.unknown})"
            yield Finding("warn", (place,), "gpus", text, "nvidia-smi there; if it hangs, sudo dmesg | grep NVRM")
        for gpu in one.gpus:
            name = f"GPU {gpu.number} ({gpu.name})"
            if gpu.ecc:
                text = f"{name} has had {counted(gpu.ecc, 'memory error')} that could not be corrected (ECC)"
                yield Finding(
                    "bad", (place,), "gpus", text, f"sudo nvidia-smi -r -i {gpu.number}; replace it if they recur"
                )
            if gpu.slowed:
                text = f"{name} is slowed down: {gpu.slowed}"
                yield Finding("warn", (place,), "gpus", text, f"nvidia-smi -i {gpu.number} -q -d PERFORMANCE")
            if gpu.used > USED * gpu.total > 0:
                text = f"others use {size(gpu.used)} of {size(gpu.total)} of {name}"
                yield Finding("warn", (place,), "gpus", text, f"nvidia-smi -i {gpu.number}")
        if one.xids:
            text = f"its driver has reported {counted(len(one.xids), 'error')}, the last: {one.xids[-1]}"
            yield Finding("warn", (place,), "gpus", text, "sudo dmesg | grep Xid; NVIDIA's Xid catalog explains them")
        if one.apart:
            pairs = ", ".join(f"{first} and {second}" for first, second in one.apart[:3])
            text = f"its GPUs {pairs} can't read each other's memory (P2P)"
            yield Finding("warn", (place,), "gpus", text, "nvidia-smi topo -p2p r; switch off ACS or the IOMMU")
    for what, of in (("GPUs", _count), ("driver", _driver), ("NVLinks", _nvlinks)):
        known = {place: of(one) for place, one in found.items() if not (one.problem or one.unknown)}
        values = {place: mine for place, mine in known.items() if mine is not None}
        usual = Counter(values.values()).most_common(1)[0][0] if values else ""
        for place, mine in values.items():
            if mine != usual:
                text = f"its {what}: {mine or 'none'}, those of the others: {usual or 'none'}"
                yield Finding("warn", (place,), "gpus", text, "nvidia-smi topo -m on both; give hosts like -H a:8,b:4")


def _count(one: Gpus) -> str:
    counts = Counter(gpu.name for gpu in one.gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


def _driver(one: Gpus) -> str:
    return one.driver


def _nvlinks(one: Gpus) -> str | None:
    if not one.links:
        return None
    pairs = [word for place, row in enumerate(one.links) for word in row[place + 1 :] if word.startswith("NV")]
    return counted(len(pairs), "pair") if pairs else ""
