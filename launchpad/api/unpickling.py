"""Unpickles what ranks return and raise, and leaves the caller's own classes as they are."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any


def unpickle(data: bytes | memoryview, *, buffers: Iterable[memoryview] | None = None) -> Any:
    """Like pickle.loads. Raises whatever unpickling raises."""
    return _Unpickler(io.BytesIO(data), buffers=buffers).load()


class _Unpickler(pickle.Unpickler):
    """cloudpickle sends a class of `__main__` with all that is in it, and sets that on the receiver's own class.

    The methods would then have the globals of the rank, as a copy, and class attributes its values.
    """

    def __init__(self, file: io.BytesIO, buffers: Iterable[memoryview] | None) -> None:
        super().__init__(file, buffers=buffers)
        from cloudpickle import cloudpickle

        self._set_class = cloudpickle._class_setstate
        self._known = set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)

    def find_class(self, module: str, name: str, /) -> Any:
        """What a pickle means by this name."""
        found = super().find_class(module, name)
        return self._set_unknown if found is self._set_class else found

    def _set_unknown(self, cls: type, state: Any) -> type:
        set_class: Any = self._set_class
        return cls if cls in self._known else set_class(cls, state)
