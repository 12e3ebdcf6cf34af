"""Values from JSON, which a peer has sent, as what our classes declare them to be."""

from __future__ import annotations

import collections.abc
import contextlib
import math
import types
import typing
from typing import Any, Literal


def typed(hint: Any, value: Any) -> Any:
    """The value as one of this declared type. Raises TypeError if it is none.

    Lists become the tuples and NamedTuples that were sent as such. Numbers are finite, and integers have 64 bits.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            with contextlib.suppress(TypeError):
                return typed(one, value)
    elif origin is Literal:
        if type(value) is str and value in inner:
            return value
    elif origin is list and type(value) is list:
        return [typed(inner[0], one) for one in value]
    elif origin is tuple and type(value) is list:
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        if len(kinds) == len(value):
            return tuple(map(typed, kinds, value))
    elif origin in (dict, collections.abc.Mapping) and type(value) is dict:
        return {typed(inner[0], key): typed(inner[1], one) for key, one in value.items()}
    elif hasattr(hint, "_fields") and type(value) is list:
        kinds = tuple(typing.get_type_hints(hint).values())
        if len(kinds) == len(value):
            return hint(*map(typed, kinds, value))
    elif hint is float and type(value) in (int, float):
        if math.isfinite(value):
            return value
    elif hint is int and type(value) is int:
        if -(1 << 63) <= value < 1 << 63:
            return value
    elif type(value) is hint:
        return value
    raise TypeError(f"{value!r:.40} is not what it should be")
