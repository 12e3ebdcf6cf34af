"""typing.NamedTuple, made more cheaply: immutable tuples whose items have names.

Python's compiles a constructor when the class is created, and makes two classes. Here the constructor is compiled when
it is first called, as there are hundreds of such classes and a job uses few: head and agent start 10 ms earlier.
"""

from __future__ import annotations

from _collections import _tuplegetter  # type: ignore[import-not-found]
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing import Self, dataclass_transform
else:  # nodes may have Python 3.10

    def dataclass_transform(**_: object) -> Any:
        return lambda kind: kind


# The fastest descriptors that there are, one for each position: a namedtuple's own.
_ITEMS = [_tuplegetter(place, None) for place in range(64)]


@dataclass_transform(frozen_default=True)
class Named(tuple[Any, ...]):
    """The annotated names of a subclass, in their order, are its items. It may have cached properties too."""

    if TYPE_CHECKING:  # annotations that typing.get_type_hints doesn't see
        _fields: ClassVar[tuple[str, ...]]
        __match_args__: ClassVar[tuple[str, ...]]
        _defaults: ClassVar[tuple[Any, ...]]  # of the last fields

    def __init_subclass__(cls) -> None:
        """Turn the annotated names into items."""
        fields = cls.__match_args__ = cls._fields = tuple(cls.__annotations__)  # type: ignore[misc]
        assert len(fields) <= len(_ITEMS)
        cls._defaults = tuple([vars(cls)[name] for name in fields if name in vars(cls)])
        for name, item in zip(fields, _ITEMS, strict=False):
            setattr(cls, name, item)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """The first of its kind."""
        cls.compile()
        made: Self = cls.__new__(cls, *args, **kwargs)
        return made

    @classmethod
    def compile(cls) -> None:
        """Make the constructor, which is used from now on."""
        names = "".join([f"{name}, " for name in cls._fields])
        constructor = eval(f"lambda cls, {names}: new(cls, ({names}))", {"new": tuple.__new__})  # noqa: S307
        constructor.__qualname__ = f"{cls.__name__}.__new__"
        constructor.__defaults__ = cls._defaults
        cls.__new__ = staticmethod(constructor)  # type: ignore[method-assign]

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For copies and pickles."""
        return tuple(self)

    def __repr__(self) -> str:
        """The class and its fields by name."""
        items = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({items})"

    def _replace(self, **changes: Any) -> Self:
        """A copy with other values of some fields."""
        return type(self)(**self._asdict() | changes)

    def _asdict(self) -> dict[str, Any]:
        """The values by the names of their fields."""
        return dict(zip(self._fields, self, strict=True))

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Self:
        return cls(*values)


if TYPE_CHECKING:  # as type checkers know it best
    from typing import NamedTuple as NamedTuple
else:
    NamedTuple = Named
