"""Our named tuples, beside Python's: what is true of one is true of the other."""

from __future__ import annotations

import copy
import pickle
import typing
from functools import cached_property
from typing import Any

import pytest

from launchpad.named import Named, NamedTuple


class OursHere(NamedTuple):
    """One of ours."""

    name: str
    slots: int = 1
    tags: tuple[str, ...] = ()


class PythonsHere(typing.NamedTuple):
    """The same of Python's."""

    name: str
    slots: int = 1
    tags: tuple[str, ...] = ()


both = pytest.mark.parametrize("kind", [OursHere, PythonsHere])


@both
def test_items_have_names_places_and_defaults(kind: Any) -> None:
    made = kind("a", tags=("x",))
    assert (made.name, made.slots, made[2]) == ("a", 1, ("x",))
    assert made == ("a", 1, ("x",)) == tuple(made)
    assert kind._fields == kind.__match_args__ == ("name", "slots", "tags")
    assert kind._make(["b", 2, ()]) == kind("b", 2)
    assert made._asdict() == {"name": "a", "slots": 1, "tags": ("x",)}
    assert repr(made) == f"{kind.__name__}(name='a', slots=1, tags=('x',))"


@both
@pytest.mark.parametrize("words", [{}, {"name": "a", "slot": 2}])
def test_what_is_missing_or_unknown_is_refused(kind: Any, words: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        kind(**words)
    made = kind("a")
    with pytest.raises((TypeError, ValueError)):
        made._replace(slot=2)
    with pytest.raises(AttributeError):
        made.name = "b"


@both
def test_copies_are_of_the_same_kind(kind: Any) -> None:
    made = kind("a", 2)
    for same in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made._replace()):
        assert same == made
        assert type(same) is kind
    assert made._replace(slots=3) == kind("a", 3)
    assert hash(made) == hash(("a", 2, ()))


@both
def test_patterns_take_items_by_their_names(kind: Any) -> None:
    match kind("a", 2):
        case kind(slots=slots):
            assert slots == 2


def test_what_was_computed_once_is_kept() -> None:
    class Sized(Named):
        text: str

        @cached_property
        def size(self) -> list[int]:
            return [len(self.text)]

    made = Sized("four")
    assert made.size == [4]
    assert made.size is made.size
