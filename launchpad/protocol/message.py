"""What messages are: immutable tuples whose items have names, some of which end with raw bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, ClassVar

from ..named import Named


class Message(Named):
    """The base of all messages. The annotated names of a subclass, in their order, are its items."""

    if TYPE_CHECKING:  # an annotation that typing.get_type_hints doesn't see
        raw: ClassVar[struct.Struct | None]  # its last field is raw bytes, and this is the layout of those before it

    raw = None

    def __init_subclass__(cls, *, raw: struct.Struct | None = None) -> None:
        """Turn the annotated names into items."""
        super().__init_subclass__()
        if raw is not None:
            cls.raw = raw
