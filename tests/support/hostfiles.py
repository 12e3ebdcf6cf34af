"""Hostfiles: what is wrong in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launchpad.errors import UsageError


def message(act: Callable[..., object], *args: object) -> str:
    with pytest.raises(UsageError) as caught:
        act(*args)
    return str(caught.value)
