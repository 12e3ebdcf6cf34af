"""job/gpus: what --gpus may say."""

from __future__ import annotations

import pytest

from launchpad.errors import UsageError
from launchpad.job.gpus import GpuChoice, parse_gpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,3,5", GpuChoice(("1", "3", "5"))),
        ("03,", GpuChoice(("3",))),
        ("GPU-8c1f,MIG-77/1/0", GpuChoice(("GPU-8c1f", "MIG-77/1/0"))),
        ("GPU-8c1f", GpuChoice(("GPU-8c1f",))),
        ("4", GpuChoice(number=4)),
        ("free", GpuChoice(free=True)),
        ("free:4", GpuChoice(number=4, free=True)),
    ],
)
def test_what_is_chosen(text: str, expected: GpuChoice) -> None:
    assert parse_gpus(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "x", "free:", "free:0", "free:x", "1,,2", "1;2", "-1", "GPU-", "1,1", "1,01"]
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--gpus {text}: "):
        parse_gpus(text)
