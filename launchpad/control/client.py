"""Asks a running job, and sends it signals."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any

from launchpad import linux
from launchpad.control.sockets import ANSWER_SECONDS, REQUEST_SECONDS, folder, is_gone
from launchpad.errors import UsageError


class NoAnswer(UsageError):
    """The job is there, and doesn't answer."""


def ask(job: str, what: str, **details: float | str) -> str:
    """Ask a running job: `what` is "stacks", with `native` and `full`, perhaps `rank` or `role`, "debug", with `rank`
    and `port`, "profile", with `rank`, -1 for all, and `seconds`, "stop" or "restart", with `role`, or "sample".

    `job`: an id, the start of one, or "" for the latest running job. Raises UsageError if no job matches, or several
    do, and if the job doesn't answer.
    """
    return _ask(job, REQUEST_SECONDS if what == "sample" else ANSWER_SECONDS, {"what": what, **details})


def send_signal(job: str, signum: int) -> str:
    """Have a running job act as if launchpad had got this signal; returns what was done, in words.

    `job`: as in `ask`. Raises UsageError likewise, and if the job doesn't answer.
    """
    return _ask(job, REQUEST_SECONDS, {"what": "signal", "signum": signum})


def _ask(job: str, seconds: float, request: dict[str, Any]) -> str:
    with _call(job) as line:
        line.settimeout(seconds)
        try:
            line.sendall(json.dumps(request).encode() + b"\n")
            return line.makefile("rb").read().decode(errors="replace")
        except TimeoutError:
            raise NoAnswer("the job doesn't answer; its launchpad may be suspended") from None
        except OSError:  # nobody took the connection
            return ""


def _call(job: str) -> socket.socket:
    found: dict[str, tuple[float, socket.socket]] = {}
    with suppress(FileNotFoundError, PermissionError):
        for entry in os.scandir(folder()):
            name, _, listener = entry.name.rpartition("@")
            if not name.startswith(job):
                continue
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                linux.by_short_path(entry.path, line.connect)
                found[name] = (entry.stat(follow_symlinks=False).st_mtime, line)
            except OSError:  # on another machine, or left behind by a launchpad that was killed
                line.close()
                if is_gone(listener):
                    with suppress(OSError):
                        os.unlink(entry.path)
    if not found:
        which = f"job {job}…" if job else "job"
        raise UsageError(f"you have no running {which} on {socket.gethostname()}; `launchpad jobs` lists all jobs")
    chosen = job if job in found else max(found, key=lambda name: found[name][0])
    if job and job != chosen and len(found) > 1:
        raise UsageError(
            f"job {job}: {len(found)} running jobs match ({', '.join(sorted(found))}); type more of the id"
        )
    for name, (_, line) in found.items():
        if name != chosen:
            line.close()
    return found[chosen][1]
