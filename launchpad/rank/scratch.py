"""Has multiprocessing keep its sockets in the job's folder, which is removed even if those who made them were killed.

In a folder of its own (/tmp/pymp-…), which names nobody, they would stay there for ever.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A socket's path has up to 107 bytes: room for what multiprocessing adds, /listener-abcdefgh.
LONGEST = 107 - 18


def install() -> None:
    """Give this process, and those that it will start, such a folder; multiprocessing must be imported."""
    module: Any = sys.modules["multiprocessing.process"]
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    folder = error_file.removesuffix(".error.json") + ".mp"
    if not error_file.endswith(".error.json") or len(os.fsencode(folder)) > LONGEST:
        return
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        module.current_process()._config.setdefault("tempdir", folder)
    except (OSError, AttributeError):  # a full disk, another multiprocessing
        pass
