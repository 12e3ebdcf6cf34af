"""The health of the NVIDIA GPUs, as nvidia-smi and the kernel's log tell it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence

from ...protocol.health import GpuHealth, Gpus
from ..host import kernel_log, nvidia_smi
from ..host.nvidia_smi import Ask

# For all its answers.
ANSWER_SECONDS = 4.0

# Each "Active" or not; where several are, the first says most.
_SLOWED = {
    "hw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "its power supply brakes it",
    "hw_slowdown": "the hardware slows it down",
    "sw_thermal_slowdown": "it is too hot",
}
_FIELDS = (
    *("index", "name", "driver_version", "ecc.errors.uncorrected.volatile.total", "memory.used", "memory.total"),
    *(f"clocks_throttle_reasons.{reason}" for reason in _SLOWED),
)
_XID = re.compile(r"NVRM: Xid .*")


def look() -> Gpus:
    """The GPUs of this host; none without nvidia-smi."""
    xids, hidden = _xids()
    problem = unknown = ""
    try:
        end = time.monotonic() + ANSWER_SECONDS
        return read(lambda words: nvidia_smi.ask(words, max(0.0, end - time.monotonic())), xids, hidden)
    except FileNotFoundError:
        return Gpus("", [], [], [], [], False, "", "")
    except subprocess.CalledProcessError as error:
        problem = nvidia_smi.trouble(error)
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        unknown = nvidia_smi.trouble(error, ANSWER_SECONDS)
    return Gpus("", [], [], [], xids, hidden, problem, unknown)


def read(ask: Ask, xids: list[str], hidden: bool) -> Gpus:
    """What nvidia-smi's answers mean. Raises ValueError, and what `ask` raises for the first of them."""
    gpus = []
    driver = ""
    for line in ask([f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]).splitlines():
        index, name, driver, ecc, used, total, *reasons = (word.strip() for word in line.split(", "))
        active = [text for text, word in zip(_SLOWED.values(), reasons, strict=True) if word == "Active"]
        gpus.append(
            GpuHealth(int(index), name, _number(ecc), (active or [""])[0], _number(used) << 20, _number(total) << 20)
        )
    if len(gpus) < 2:
        return Gpus(driver, gpus, [], [], xids, hidden, "", "")
    links = _table(ask, ["topo", "-m"], len(gpus))
    reads = _table(ask, ["topo", "-p2p", "r"], len(gpus))
    apart = [
        [one, other]
        for one, row in enumerate(reads)
        for other, word in enumerate(row)
        if one < other and word not in ("OK", "X")
    ]
    return Gpus(driver, gpus, links, apart, xids, hidden, "", "")


def _table(ask: Ask, arguments: Sequence[str], count: int) -> list[list[str]]:
    try:
        return matrix(ask(arguments), count)
    except (OSError, subprocess.SubprocessError, ValueError):  # old drivers and virtual GPUs have none
        return []


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else 0


def matrix(text: str, count: int) -> list[list[str]]:
    """The rows GPU0, GPU1 … of a table of nvidia-smi's, without colours. Raises ValueError if they are not there."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    found = [row[1 : count + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > count]
    found = [row for row in found if not any(word.startswith("GPU") for word in row)]  # the heading
    if [len(row) for row in found] != [count] * count:
        raise ValueError(f"a table of {count} GPUs was expected, not {text[:80]!r}")
    return found


def _xids() -> tuple[list[str], bool]:
    """The driver's error messages in the kernel's log, and whether only root may read that."""
    found: list[str] = []
    try:
        for record in kernel_log.records():
            found += _XID.findall(record)
    except PermissionError:
        return found, True
    except OSError:
        pass
    return found, False
