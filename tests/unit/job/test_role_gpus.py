"""job/role_gpus: disjoint GPUs for the worlds on one host."""

from __future__ import annotations

import pytest

from launchpad.errors import UsageError
from launchpad.job.role_gpus import Wish, share_gpus

DEVICES = {"x": ["0", "1", "2", "3"], "y": ["GPU-a", "GPU-b"]}


def test_worlds_get_the_next_ones_of_their_host() -> None:
    wishes = [
        Wish("a", "x", 1, 1),
        Wish("b", "x", 1, 2),
        Wish("b", "y", 2, 1),
        Wish("c", "x", 1, 0),
        Wish("d", "x", 3, None),
    ]
    assert share_gpus(wishes, DEVICES, "f") == [["0"], ["1", "2"], ["GPU-a", "GPU-b"], [], None]


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(3, "f.b, gpus: it needs 3, and x has 4, of which 2 are left; ask for fewer"), (9, "it needs 9, and x has 4, of")],
)
def test_more_than_there_are(gpus: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        share_gpus([Wish("a", "x", 2, 1), Wish("b", "x", 1, gpus)], DEVICES, "f")
