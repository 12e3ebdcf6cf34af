"""protocol/typed: what a peer has sent is what our classes declare, or an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import pytest

from launchpad.protocol.typed import typed


class Place(NamedTuple):
    """A host, and its ports."""

    host: str
    ports: list[int]


class _Named(TypedDict):
    name: str


class Thread(_Named, total=False):
    """A thread, perhaps with its number."""

    number: int


NUMBER = Annotated[int, range(1, 65)]
NESTED: list[Any] = []
for _ in range(100):
    NESTED = [NESTED]
PAIR = Annotated[list[str], (2,)]


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 5, 5),
        (float, 5, 5),
        (bool, True, True),
        (int | None, None, None),
        (Literal["a", "b"], "b", "b"),
        (list[int], [1, 2], [1, 2]),
        (tuple[str, ...], ["a", "b"], ("a", "b")),
        (tuple[int, str], [1, "a"], (1, "a")),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
        (list[Place], [["a", [1]]], [Place("a", [1])]),
        (NUMBER, 64, 64),
        (list[tuple[NUMBER, str]], [[1, "a"]], [(1, "a")]),
        (PAIR, ["a", "b"], ["a", "b"]),
        (Thread, {"name": "main"}, {"name": "main"}),
        (Any, {"a": [1, None, True, "b", 0.5]}, {"a": [1, None, True, "b", 0.5]}),
    ],
)
def test_values_become_what_is_declared(hint: Any, value: Any, expected: Any) -> None:
    found = typed(hint, value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True),
        (int, 1.0),
        (int, 1 << 63),
        (int, "1"),
        (float, math.nan),
        (float, math.inf),
        (int | None, "1"),
        (Literal["a"], "c"),
        (Literal["a"], ["a"]),
        (list[int], {"a": 1}),
        (list[int], [1, "a"]),
        (tuple[int, str], [1]),
        (tuple[str, ...], ["a", 1]),
        (dict[str, int], {"a": "b"}),
        (Place, ["a"]),
        (Place, ["a", 1]),
        (Place, "ab"),
        (float, 1e300),
        (float, 1 << 64),
        (NUMBER, 65),
        (NUMBER, 1.0),
        (list[NUMBER], [1, 0]),
        (PAIR, ["a"]),
        (Thread, {"number": 1}),
        (Thread, {"name": "main", "other": 1}),
        (Thread, {"name": "main", "number": "1"}),
        (Thread, ["name"]),
        (Any, {"a": [1 << 70]}),
        (Any, [math.nan]),
        (Any, NESTED),
        (dict[str, Any], {"a": NESTED}),
    ],
)
def test_nothing_else_does(hint: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=r"is not what it should be|it is nested too deeply"):
        typed(hint, value)
