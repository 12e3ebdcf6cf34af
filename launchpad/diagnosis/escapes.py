"""Removes the escape sequences by which a program colours its output, or moves the cursor. Pure.

Python 3.13 and later colour tracebacks on a terminal and where FORCE_COLOR is set.
"""

from __future__ import annotations

import re
from typing import AnyStr

_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"


def removed(text: AnyStr) -> AnyStr:
    """The text as it would be without them."""
    if isinstance(text, bytes):
        return re.sub(_ESCAPES.encode(), b"", text) if b"\x1b" in text else text
    return re.sub(_ESCAPES, "", text) if "\x1b" in text else text
