"""What is known of collected tests: which have a mark, and which process they run in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from launchpad.testing.marks import RanksMark

# The parameter that a test with several numbers of ranks has.
SIZE = "_launchpad_ranks"

# In a configuration's stash: who runs marked tests; None in a process that was forked from pytest's.
RUNNER: pytest.StashKey[Any] = pytest.StashKey()

_NAMES = ("ranks", "parallel")


def is_marked(item: pytest.Item) -> bool:
    """Whether the test is to run on ranks."""
    return any(item.get_closest_marker(name) is not None for name in _NAMES)


def in_forked_process(config: pytest.Config) -> None:
    """Note that this process was forked from pytest's: from now on it runs tests itself."""
    config.stash[RUNNER] = None


def mark_of(item: pytest.Item) -> RanksMark | None:
    """What the test's mark asks for; None if it has none. A mark that makes no sense fails the collection."""
    for name in _NAMES:
        mark = item.get_closest_marker(name)
        if mark is not None:
            from launchpad.testing import marks

            read = marks.read_ranks if name == "ranks" else marks.read_parallel
            try:
                return read(mark.args, mark.kwargs)
            except ValueError as error:
                problem = str(error)
            pytest.fail(problem, pytrace=False)
    return None
