"""`launchpad warm`: starts the keeper of images, asks it what it has, and ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from launchpad.errors import NodeError, UsageError
from launchpad.image import place
from launchpad.job.plan import defaults_for
from launchpad.runner.imports import NOT_FORKED, TORCH, module_names
from launchpad.runner.spec import find_python
from launchpad.transport.image import KeeperLink, connect
from launchpad.transport.local import Cold, guard_environ

# An import of torch from a slow network file system.
IMPORT_SECONDS = 600.0

_START = "import sys; sys.path.insert(0, {root!r}); from launchpad.forkserver import keeper; keeper.main()"


def warm(seconds: float, preload: str | None, python: str | None) -> None:
    """Keep images from now on: of torch and these modules, in this interpreter. Raises UsageError, NodeError."""
    environ = guard_environ()
    for name in NOT_FORKED:
        if environ.get(name):
            raise UsageError(f"{name} is set, which takes effect in executed ranks only; unset it")
    extra = module_names(preload or "")
    found = os.path.abspath(find_python(python, environ, sys.executable))
    keeper = _connected(os.environ) or _start()
    try:
        cores = keeper.cores
        ranks = {**environ}
        for name, value in defaults_for(cores, cores).items():
            ranks.setdefault(name, value)
        settings = {
            "seconds": seconds,
            "python": found,
            "preload": [*(TORCH if _has_torch(found, environ) else ()), *extra],
            "extra": extra,
            "ranks": ranks,
            "thread": threading.get_native_id(),
        }
        keeper.ask({"warm": settings})
        answer = keeper.answer(IMPORT_SECONDS)
    except Cold as error:
        raise NodeError(f"nothing is kept: {error}") from None
    finally:
        keeper.close()
    if "off" in answer or "cold" in answer:
        raise UsageError(f"nothing is kept: {answer.get('off') or answer['cold']}")


def _has_torch(python: str, environ: Mapping[str, str]) -> bool:
    code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))"
    try:
        return subprocess.run([python, "-c", code], env=environ, capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise UsageError(f"{python} can't be run: {error.strerror}") from None


def _connected(environ: Mapping[str, str]) -> KeeperLink | None:
    """A connection to a keeper that answers."""
    keeper = connect(environ)
    try:
        return keeper if keeper is not None and keeper.cores else None
    except Cold:
        return None


def _start() -> KeeperLink:
    root = os.path.dirname(place.PACKAGE)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START.format(root=root), "launchpad-warm"],
        env=guard_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        line = said.readline().decode(errors="replace").strip()
    keeper = _connected(os.environ) if line == "ready" else None
    if keeper is None:
        raise NodeError(f"the keeper of images can't be started: {line or 'it ended'}")
    process.returncode = 0  # it outlives us
    return keeper


def status() -> dict[str, Any] | None:
    """What is kept, None if nothing is."""
    return _ask("status")


def stop() -> bool:
    """End the keeper and its images. Returns whether there was one."""
    return _ask("stop") is not None


def _ask(what: str) -> dict[str, Any] | None:
    keeper = _connected(os.environ)
    if keeper is None:
        return None
    try:
        keeper.ask({what: True})
        return keeper.answer()
    except Cold:
        return None
    finally:
        keeper.close()
