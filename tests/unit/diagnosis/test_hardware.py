"""diagnosis/hardware: whether an attempt failed because of a node's own hardware."""

from __future__ import annotations

from typing import Any

import pytest

from launchpad.diagnosis.hardware import hardware_fault
from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import verdict_on
from launchpad.protocol.events import STDERR, Output
from tests.support.failures import exits, job, over, raises, stopping


def reason(*events: Any) -> str:
    """Why rank 1's node is to blame, if it is."""
    history = History([*job(2), *events, stopping(11, [0]), exits(12, 0, -15), over(13)])
    found = hardware_fault(history, verdict_on(history))
    return found.reason if found is not None else ""


def printed(text: str) -> Output:
    return Output(0, 1, STDERR, text.encode())


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("OSError", "[Errno 5] Input/output error: '/data/shard-7'", "I/O errors"),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", "ECC errors"),
        ("RuntimeError", "NVML: GPU is lost", "a GPU off the bus"),
        ("OSError", "[Errno 2] No such file or directory: 'x'", ""),
        ("ValueError", "loss is nan", ""),
    ],
)
def test_exceptions(kind: str, message: str, expected: str) -> None:
    assert reason(*raises(5, 1, kind, message)) == expected


def test_the_last_words_of_a_program() -> None:
    assert reason(printed("ncclCommWatchdog: NVRM: Xid (PCI:0000:07:00): 79\n"), exits(10, 1, 1)) == "Xid errors"
    assert reason(printed("cp: error reading 'a': Input/output error\n"), exits(10, 1, 1)) == "I/O errors"
    assert reason(printed("no luck\n"), exits(10, 1, 1)) == ""


def test_what_the_kernel_did_and_said() -> None:
    assert reason(exits(10, 1, -9, True)) == "the OOM killer"
    ended = exits(10, 1, 1)._replace(hardware="NVRM: Xid (PCI:0000:07:00): 79")
    assert reason(ended) == "the kernel's log: NVRM: Xid (PCI:0000:07:00): 79"
