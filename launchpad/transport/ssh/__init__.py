"""The transport to nodes over SSH."""

import importlib
import sys
import types
from typing import Any


class _LazyModule(types.ModuleType):
    """Stands in for a module until one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# paramiko imports invoke for `Match exec` in its ssh_config parser, which we don't use. It would take a third of
# paramiko's import time.
sys.modules.setdefault("invoke", _LazyModule("invoke"))
