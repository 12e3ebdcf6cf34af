"""Values as messages declare them, edges included: Hypothesis reads the annotations."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from hypothesis import strategies as st

from launchpad.protocol.events import Between
from launchpad.protocol.printable import Printable, printable

# What a process reads, what a terminal or a CI system would obey, and halves of characters.
TEXT = (
    st.sampled_from(
        ["", "half \ud83d!", "\x1b]0;title\x07", "a\n::error::forged", "\0", "\u2028", "9" * 5000, "x" * 200]
    )
    | st.text(max_size=8)
    | st.binary(max_size=8).map(lambda data: data.decode("utf-8", "surrogateescape"))
)
INTEGER = st.sampled_from([0, 1, -1, 255, 1 << 31, -(1 << 63), (1 << 63) - 1]) | st.integers(-(2**63), 2**63 - 1)
NUMBER = st.sampled_from([0.0, -0.0, -1.0, 5e-324, 9.2e18, -9.2e18]) | st.floats(-9.2e18, 9.2e18)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGER | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=6,
)
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGER,
    float: NUMBER,
    str: TEXT,
    bool: st.booleans(),
    bytes: st.binary(max_size=300),
    type(None): st.none(),
    Any: ANYTHING,
}


@functools.cache
def declared(hint: Any, of_rank: int | None = None) -> st.SearchStrategy[Any]:
    """Values of this type; messages too. `of_rank`: the rank of which it speaks, as far as it speaks of one."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated(*inner, of_rank)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([declared(one, of_rank) for one in inner])
    if origin in (list, Sequence):
        return st.lists(declared(inner[0], of_rank), max_size=4)
    if origin is tuple:
        return st.tuples(*[declared(one, of_rank) for one in inner])
    if origin is dict:
        return st.dictionaries(declared(inner[0]), declared(inner[1], of_rank), max_size=4)
    kinds = typing.get_type_hints(hint, include_extras=True)
    if typing.is_typeddict(hint):
        fields = {name: declared(kind, of_rank) for name, kind in kinds.items()}
        optional = {name: fields.pop(name) for name in hint.__optional_keys__}
        return st.fixed_dictionaries(fields, optional=optional)
    if getattr(hint, "raw", None):
        return _raw(hint, kinds, of_rank)
    return st.builds(hint, **{name: declared(kind, of_rank) for name, kind in kinds.items()})


def _annotated(kind: Any, allowed: Any, of_rank: int | None) -> st.SearchStrategy[Any]:
    if typing.get_origin(kind) is list:
        inner = declared(typing.get_args(kind)[0], of_rank)
        return st.lists(inner, min_size=allowed[0], max_size=min(allowed[-1], 4))
    if of_rank is not None and allowed == range(1 << 31):
        return st.just(of_rank)
    if isinstance(allowed, Between):
        return st.sampled_from([allowed.low]) | st.floats(allowed.low, allowed.high, exclude_max=True)
    if isinstance(allowed, Printable):
        return TEXT.map(printable)
    if isinstance(allowed, range):
        return st.sampled_from([allowed[0], allowed[-1]]) | st.integers(allowed[0], allowed[-1])
    return st.sampled_from(allowed)


def _raw(hint: Any, kinds: dict[str, Any], of_rank: int | None) -> st.SearchStrategy[Any]:
    """A message whose last field is bytes, and whose others have the sizes of a struct."""
    sizes = hint.raw.format.lstrip("!")
    fields = {}
    for size, (name, kind) in zip(f"{sizes}*", kinds.items(), strict=True):
        unsigned = st.integers(0, 2**32 - 1)
        fields[name] = unsigned if size == "I" and kind is int else declared(kind, of_rank)
    return st.builds(hint, **fields)
