"""job/offer: what a node that joins says of itself, as far as the head believes it."""

from __future__ import annotations

import pytest

from launchpad.job.offer import NodeOffer


@pytest.mark.parametrize("name", ["a\x1b]0;title\x07", "a\n::error::forged", "a\x9b2J"])
def test_a_name_that_is_not_printable_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        NodeOffer.from_json(NodeOffer(name, "python").as_json())


def test_the_reason_of_a_failed_node_is_one_line() -> None:
    offer = NodeOffer.from_json(NodeOffer("a", "python", failed="no\nlaunchpad: all well\x1b[2J").as_json())
    assert offer.failed == "no\\nlaunchpad: all well\\x1b[2J"
