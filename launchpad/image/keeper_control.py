"""Carries out `launchpad warm` on the machine that it runs on: starts the keeper of images, asks it, and ends it.

On a host it is started by agent/arrival.py, and must leave nothing behind that holds the SSH session open.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from . import Cold, place
from .keeper_link import IMPORT_SECONDS, KeeperLink, Message, connect, connect_at

# Prints which of two packages this interpreter has.
_HAS = (
    "import sys; from importlib.util import find_spec; sys.path[:] = filter(None, sys.path); "
    "print(*(name for name in ('torch', 'launchpad') if find_spec(name)))"
)


def ask(request: Message, environ: Mapping[str, str]) -> Message:
    """Carry out {"warm": settings}, {"status": True} or {"stop": True}.

    The answer is {"found": what is kept or None}, {"stopped": whether anything was kept}, or why nothing is kept:
    {"off": what the user has to change} or {"failed": what went wrong}.

    Settings are those of `launchpad warm`, and what only the head knows: "seconds", "python" ("" for this interpreter),
    "extra" (--preload), "torch" (what programs with torch import), "environ" and "defaults" (variables for ranks, and
    where those are unset), "never" (variables that forked ranks would not heed), "head" (if there is to be a kept head:
    its functions "rehearse" and "main", "python", "environ", and the variables with which it is "never" used).
    `environ`: of the keeper.
    """
    try:
        if "warm" in request and (why_not := _warm(request["warm"], environ)):
            return {"off": why_not}
        if "stop" in request:
            return {"stopped": _ask_keeper("stop", environ) is not None}
        return {"found": _ask_keeper("status", environ)}
    except Cold as error:
        return {"failed": str(error)}


def ready(path: str) -> list[Message]:
    """The images of the keeper that listens there, as `launchpad warm --status` describes them. Raises Cold."""
    keeper = connect_at(path)
    if keeper is None:
        return []
    try:
        keeper.ask({"status": True})
        return [image for image in keeper.answer()["images"] if image["state"] == "ready"]
    finally:
        keeper.close()


def _warm(wanted: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Keep images from now on. Returns why that can't be, or "". Raises Cold."""
    ranks = {**wanted["defaults"], **environ, **wanted["environ"]}
    for name in wanted["never"]:
        if ranks.get(name):
            return f"{name} is set, which takes effect in executed ranks only; unset it"
    python = place.interpreter(wanted["python"] or sys.executable)
    try:
        done = subprocess.run(
            [python, "-c", _HAS],
            env=ranks,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} can't be run: {getattr(error, 'strerror', 'it does not answer')}"
    has = done.stdout.split()
    keeper = _connected(environ) or _start(environ)
    try:
        settings = {
            "seconds": wanted["seconds"],
            "python": python,
            "preload": [*(wanted["torch"] if "torch" in has else ()), *wanted["extra"]],
            "extra": wanted["extra"],
            "brings": "launchpad" not in has,
            "ranks": ranks,
            "head": wanted.get("head"),
            "thread": threading.get_native_id(),
        }
        keeper.ask({"warm": settings})
        return keeper.why_no_image(IMPORT_SECONDS)
    finally:
        keeper.close()


def _connected(environ: Mapping[str, str]) -> KeeperLink | None:
    """A connection to a keeper that answers."""
    keeper = connect(environ)
    try:
        return keeper if keeper is not None and keeper.cores else None
    except Cold:
        return None


def _start(environ: Mapping[str, str]) -> KeeperLink:
    process = subprocess.Popen(
        [*place.keeper_command("main"), "launchpad-warm"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        line = said.readline().decode(errors="replace").strip()
    keeper = _connected(environ) if line == "ready" else None
    if keeper is None:
        raise Cold(f"the keeper of images can't be started: {line or 'it ended'}")
    process.returncode = 0  # it outlives us
    return keeper


def _ask_keeper(what: str, environ: Mapping[str, str]) -> Message | None:
    keeper = _connected(environ)
    if keeper is None:
        return None
    try:
        keeper.ask({what: True})
        return keeper.answer()
    except Cold:
        return None
    finally:
        keeper.close()
