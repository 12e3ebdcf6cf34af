"""Values from JSON, which a peer has sent, as what our classes declare them to be."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

Convert = Callable[[Any], Any]

# How deep a value of which no more is declared may be nested: Python's own functions end at about 1000.
_MOST_DEPTH = 40

_LARGEST = 1 << 63


def typed(hint: Any, value: Any) -> Any:
    """The value as one of this declared type. Raises TypeError if it is none.

    Lists become the tuples, NamedTuples and messages that were sent as such. Numbers fit into 64 bits. The second
    argument of Annotated has the values that there are or, for a list, its lengths.
    """
    return converter(hint)(value)


@functools.cache
def converter(hint: Any) -> Convert:
    """What `typed` does for this type. Made once for each type: a large head asks millions of times."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _within(converter(inner[0]), inner[1], len if typing.get_origin(inner[0]) is list else None)
    if origin is Literal:
        return _within(converter(str), inner)
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner)
    if origin in (list, Sequence):
        return _list(converter(inner[0]))
    if origin is tuple and inner[1:] == (...,):
        return _list(converter(inner[0]), tuple)
    if origin is tuple:
        return _row(inner, lambda *values: values)
    if origin in (dict, Mapping):
        return _dict(*map(converter, inner))
    if hasattr(hint, "_fields"):
        return _row(typing.get_type_hints(hint, include_extras=True).values(), hint)
    if typing.is_typeddict(hint):
        return _typed_dict(hint)
    return _exactly(hint)


def _refuse(value: Any) -> typing.NoReturn:
    shown = f"{value!r:.40}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    raise TypeError(f"{shown} is not what it should be")


def _exactly(hint: Any) -> Convert:
    return lambda value: value if type(value) is hint else _refuse(value)


def _integer(value: Any) -> Any:
    return value if type(value) is int and -_LARGEST <= value < _LARGEST else _refuse(value)


def _number(value: Any) -> Any:
    return value if type(value) in (int, float) and -_LARGEST <= value < _LARGEST else _refuse(value)


def _anything(value: Any, depth: int = 0) -> Any:
    """What JSON may hold."""
    if depth > _MOST_DEPTH:
        raise TypeError("it is nested too deeply")
    if type(value) is list:
        for one in value:
            _anything(one, depth + 1)
    elif type(value) is dict:
        for one in value.values():
            _anything(one, depth + 1)
    elif type(value) in (int, float):
        _number(value)
    return value


_PLAIN: dict[Any, Convert] = {int: _integer, float: _number, Any: _anything}


def _within(convert: Convert, allowed: Container[Any], measure: Callable[[Any], int] | None = None) -> Convert:
    def within(value: Any) -> Any:
        found = convert(value)
        return found if (found if measure is None else measure(found)) in allowed else _refuse(value)

    return within


def _one_of(hints: Iterable[Any]) -> Convert:
    converters = [converter(hint) for hint in hints]

    def one_of(value: Any) -> Any:
        for convert in converters:
            try:
                return convert(value)
            except TypeError:
                pass
        _refuse(value)

    return one_of


def _list(convert: Convert, kind: Callable[[list[Any]], Any] | None = None) -> Convert:
    def whole(value: Any) -> Any:
        if type(value) is not list:
            _refuse(value)
        found = [convert(one) for one in value]
        return found if kind is None else kind(found)

    return whole


def _row(hints: Iterable[Any], kind: Callable[..., Any]) -> Convert:
    converters = [converter(hint) for hint in hints]

    def row(value: Any) -> Any:
        if type(value) is not list or len(value) != len(converters):
            _refuse(value)
        return kind(*[convert(one) for convert, one in zip(converters, value, strict=True)])

    return row


def _dict(of_key: Convert, of_value: Convert) -> Convert:
    def whole(value: Any) -> Any:
        if type(value) is not dict:
            _refuse(value)
        return {of_key(key): of_value(one) for key, one in value.items()}

    return whole


def _typed_dict(hint: Any) -> Convert:
    required: frozenset[str] = hint.__required_keys__
    kinds = typing.get_type_hints(hint, include_extras=True)
    converters = {key: converter(kind) for key, kind in kinds.items()}

    def whole(value: Any) -> Any:
        if type(value) is not dict or not required <= value.keys() <= kinds.keys():
            _refuse(value)
        return {key: converters[key](one) for key, one in value.items()}

    return whole
