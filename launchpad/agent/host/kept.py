"""Lists and removes what `--sync` and `--sync-env` have left on this node (`launchpad clean`)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time

from ...protocol.commands import ListKept, RemoveKept
from ...protocol.events import KeptListed, KeptRemoved
from ..part import AgentPart
from .environments import MARK
from .synced_folder import base_folder, describe

_KINDS = ("copy-", "env-")


class Cleaner(AgentPart):
    """Carries out the head's ListKept and RemoveKept."""

    def on(self, command: ListKept | RemoveKept) -> None:
        """List, or remove."""
        try:
            base = base_folder()
            answer = list_kept(base) if isinstance(command, ListKept) else remove(base, command.names)
        except (OSError, ValueError) as error:
            kind = KeptListed if isinstance(command, ListKept) else KeptRemoved
            answer = kind(time.monotonic_ns(), [], describe(error))
        self._hub.outbox.say(answer)


def list_kept(base: str) -> KeptListed:
    """The copies and environments in this folder."""
    rows: list[tuple[str, int, int, float, str]] = []
    for name in sorted(os.listdir(base)):
        folder = os.path.join(base, name)
        if name.startswith(_KINDS) and os.path.isdir(folder):
            rows.append((name, *_sizes(folder), _used(folder), _origin(folder)))
    return KeptListed(time.monotonic_ns(), rows, "")


def _sizes(folder: str) -> tuple[int, int]:
    """The bytes of its files, and of those that are in no other folder."""
    whole = own = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it has just been removed
                facts = os.lstat(os.path.join(parent, name))
                whole += facts.st_size
                own += facts.st_size if facts.st_nlink == 1 else 0
    return whole, own


def _used(folder: str) -> float:
    """When it was last used or changed, in seconds since 1970."""
    for path in (os.path.join(folder, MARK), f"{folder}.json", folder):
        with contextlib.suppress(OSError):
            return os.stat(path).st_mtime
    return 0.0


def _origin(folder: str) -> str:
    """Where an environment is on the machine that it came from; "" if it is not whole."""
    try:
        with open(os.path.join(folder, MARK)) as file:
            return str(json.load(file)["origin"])
    except (OSError, ValueError, KeyError):
        return ""


def remove(base: str, names: list[str]) -> KeptRemoved:
    """Remove those with these names, unless a job uses them."""
    removed = []
    problems = []
    for name in names:
        folder = os.path.join(base, name)
        if "/" in name or not name.startswith(_KINDS):
            raise ValueError(f"{name} is none of the folders that are kept")
        try:
            if _in_use(folder):
                problems.append(f"{name} is in use by a job")
                continue
            with contextlib.suppress(FileNotFoundError):  # from here on it is not whole
                os.unlink(os.path.join(folder, MARK))
            shutil.rmtree(folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}.json")
            removed.append(name)
        except FileNotFoundError:  # somebody else has removed it
            continue
        except OSError as error:
            problems.append(describe(error))
    return KeptRemoved(time.monotonic_ns(), removed, "; ".join(problems))


def _in_use(folder: str) -> bool:
    """Whether an agent holds it (synced_folder.hold)."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False
