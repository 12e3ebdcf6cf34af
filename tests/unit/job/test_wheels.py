"""job/wheels: whether an environment can run on a host, by the tags of its wheels."""

from __future__ import annotations

import pytest

from launchpad.job.wheels import Platform, Wheel, glibc_needed, remedy, why_not

TORCH = Wheel("torch", ("cp311-cp311-manylinux_2_28_x86_64",))
NUMPY = Wheel("numpy", ("cp311-cp311-manylinux_2_17_x86_64", "cp311-cp311-manylinux2014_x86_64"))
CLICK = Wheel("click", ("py3-none-any",))
OWN = Wheel("own", ("cp311-cp311-linux_x86_64",))


@pytest.mark.parametrize(
    ("wheel", "needed"),
    [
        (TORCH, (2, 28)),
        (NUMPY, (2, 17)),
        (CLICK, (0, 0)),
        (OWN, (0, 0)),
        (Wheel("old", ("cp311-cp311-manylinux1_x86_64",)), (2, 5)),
        (Wheel("either", ("cp311-cp311-manylinux_2_34_x86_64", "cp311-cp311-manylinux2014_x86_64")), (2, 17)),
        (Wheel("untagged", ()), (0, 0)),
    ],
)
def test_the_oldest_glibc(wheel: Wheel, needed: tuple[int, int]) -> None:
    assert glibc_needed(wheel) == needed


@pytest.mark.parametrize(
    ("there", "text"),
    [
        (Platform("x86_64", "2.28", True), ""),
        (Platform("x86_64", "2.36", True), ""),
        (Platform("x86_64", "2.17", True), "old glibc: torch's wheel needs glibc 2.28, and it has 2.17"),
        (Platform("x86_64", "2.9", True), "old glibc: torch's wheel needs glibc 2.28, and it has 2.9"),
        (Platform("x86_64", "", True), "no glibc: torch's wheel needs glibc 2.28, and it has another C library"),
        (
            Platform("aarch64", "2.36", True),
            "other platform: it is aarch64, and this machine's packages are for x86_64",
        ),
        (Platform("x86_64", "2.36", False), "no Python: it has no python3.11, which this environment is for"),
    ],
)
def test_why_not(there: Platform, text: str) -> None:
    assert why_not([CLICK, NUMPY, TORCH, OWN], "3.11", "x86_64", there) == text


def test_pure_python_runs_with_any_c_library() -> None:
    assert why_not([CLICK], "3.11", "x86_64", Platform("x86_64", "", True)) == ""
    assert why_not([], "3.11", "x86_64", Platform("x86_64", "2.5", True)) == ""


def test_the_advice_is_for_what_is_wrong() -> None:
    old = why_not([TORCH], "3.11", "x86_64", Platform("x86_64", "2.17", True))
    none = why_not([TORCH], "3.11", "x86_64", Platform("x86_64", "2.36", False))
    assert (
        remedy("3.11", [old]) == "install wheels here that an older glibc will do for, or leave out the hosts with one"
    )
    assert remedy("3.11", [none]).startswith(
        "install python3.11 there, or make the environment with uv's Python or conda's"
    )
    assert remedy("3.11", [old, none]) == f"{remedy('3.11', [none])}; {remedy('3.11', [old])}"
    assert remedy("3.11", ["/home: Permission denied"]) == ""
