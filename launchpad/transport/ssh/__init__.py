"""Nodes that are reached over SSH."""

import importlib
import sys
import types
from typing import Any


class _Late(types.ModuleType):
    """Stands in for a module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# paramiko runs the command of `Match exec` with it and nothing else, and it takes a third of paramiko's own import.
sys.modules.setdefault("invoke", _Late("invoke"))
