"""agent/checkup/quick: what a host tells of itself in a moment."""

from __future__ import annotations

from launchpad.agent.checkup.quick import LOOKS, seen
from launchpad.protocol.health import SUBJECTS, facts_of


def test_each_subject_is_one_that_the_head_knows() -> None:
    assert LOOKS.keys() <= SUBJECTS.keys()
    facts, problem = seen(LOOKS["limits"], {})
    assert problem == ""
    assert facts_of("limits", facts)


def test_what_can_not_be_seen_says_why() -> None:
    assert seen(lambda request: request["environ"], {}) == ([], "KeyError: 'environ'")
