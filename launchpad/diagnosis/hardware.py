"""Decides whether an attempt failed because of a node's own hardware: its GPUs, memory or disks. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from launchpad.diagnosis.candidates import LAST_BYTES
from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import Verdict

# In an exception's words or a rank's last output, and what is said of it.
_SIGNS = (
    (re.compile(r"uncorrectable ECC error|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE"), "ECC errors"),
    (re.compile(r"\bXid\b.{0,40}: \d+"), "Xid errors"),
    (re.compile(r"GPU (?:is lost|has fallen off the bus)|fallen off the bus"), "a GPU off the bus"),
    (re.compile(r"\[Errno 5\]|\bInput/output error\b"), "I/O errors"),
)


class HardwareFault(NamedTuple):
    """A node's own failure."""

    node: int
    reason: str


def hardware_fault(history: History, verdict: Verdict) -> HardwareFault | None:
    """The one that made the attempt fail, if any did."""
    cause = verdict.cause
    if cause is None or cause.rank < 0:
        return None
    if cause.kind == "memory":
        return HardwareFault(cause.node, "the OOM killer")
    one = history.of(cause.rank)
    if one.exited is not None and one.exited.hardware:
        return HardwareFault(cause.node, f"the kernel's log: {one.exited.hardware}")
    said = cause.traceback.roots[0].title if cause.traceback is not None else one.errors[-LAST_BYTES:]
    return next((HardwareFault(cause.node, reason) for sign, reason in _SIGNS if sign.search(said)), None)
