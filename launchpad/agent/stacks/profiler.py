"""Has py-spy watch ranks for some seconds, and reports what it saw."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Collection

from ...protocol.commands import Profile
from ...protocol.events import ProfileTaken
from ..part import AgentHub, AgentPart
from ..poll import earliest
from . import spy

# How much longer than it watches py-spy may take: it reads the rank's symbols first, and writes a file at the end.
EXTRA_SECONDS = 30.0

# The most that is sent of a compressed profile.
_MOST_BYTES = 16 << 20

NOT_INSTALLED = "py-spy is not installed on its node; run pip install py-spy in the environment of its Python there"
NOT_PERMITTED = (
    "py-spy may not look into it (ptrace is not permitted); allow it with sysctl kernel.yama.ptrace_scope=0, or in a "
    "container with the capability SYS_PTRACE"
)


class Profiler(AgentPart):
    """The py-spys at work."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._spies: dict[tuple[int, int], spy.Spy] = {}  # by request and rank
        self._pids: set[int] = set()  # all that there have been

    def on(self, command: Profile) -> None:
        """Start one for each rank."""
        pids = {one.rank: one.pid for one in self._hub.ranks.values()}
        path = spy.find()
        for rank in command.ranks:
            if rank not in pids:
                self._say(command.number, rank, "it has exited")
            elif path is None:
                self._say(command.number, rank, NOT_INSTALLED)
            else:
                self._watch(command, rank, pids[rank], path)

    def _watch(self, request: Profile, rank: int, pid: int, command: str) -> None:
        key = request.number, rank
        # Waiting for other ranks is what many profiles are about, so a sleeping thread counts (--idle).
        argv = [command, "record", "--pid", str(pid), "--duration", f"{max(1, round(request.seconds))}", "--idle"]
        argv += ["--subprocesses", "--format", "speedscope", "--output", self._path(*key)]
        seconds = request.seconds + EXTRA_SECONDS
        try:
            self._spies[key] = spy.Spy(self._hub.poll, argv, seconds, functools.partial(self._done, *key, pid))
        except OSError as error:
            self._say(*key, f"{command} can't be started: {error.strerror}")
            return
        self._pids.add(self._spies[key].pid)

    def _path(self, number: int, rank: int) -> str:
        return os.path.join(self._hub.folder, f"profile-{number}-{rank}")

    def _done(self, number: int, rank: int, pid: int, said: str) -> None:
        self._spies.pop((number, rank), None)
        path = self._path(number, rank)
        try:
            with open(path, "rb") as file:
                data = file.read()
            os.unlink(path)
        except OSError:
            data = b""
        if not data:
            self._say(number, rank, _why(said))
            return
        import base64
        import zlib

        packed = zlib.compress(data)
        if len(packed) > _MOST_BYTES:
            self._say(number, rank, "its profile is too large; ask for fewer seconds")
        else:
            self._say(number, rank, "", base64.b64encode(packed).decode(), pid)

    def _say(self, number: int, rank: int, problem: str, profile: str = "", pid: int = 0) -> None:
        self._hub.outbox.say(ProfileTaken(time.monotonic_ns(), rank, number, problem, profile, pid))

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        return earliest(one.deadline for one in self._spies.values())

    def tick(self, now: float) -> None:
        """End those that take too long."""
        for one in list(self._spies.values()):
            one.tick(now)

    def end(self) -> Collection[int]:
        """There is nobody left to watch. The py-spys are ours."""
        for one in self._spies.values():
            one.end()
        self._spies.clear()
        return self._pids


def _why(said: str) -> str:
    """Why py-spy has left no profile, from what it said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("permission denied" in line.lower() or "operation not permitted" in line.lower() for line in lines):
        return NOT_PERMITTED
    said = next((line for line in lines if line.lower().startswith("error")), lines[-1] if lines else "nothing")
    return f"py-spy saw nothing of it; it said: {said[:200]}"
