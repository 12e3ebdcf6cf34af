"""The functions that ranks are to call: receives them from the head, and sends it what they return."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...protocol.commands import Call, EndCall, EndSession, NextCall, Start
from ...protocol.events import RESULT, ChunksTaken
from ..outbox import OutputStream
from ..part import AgentHub, AgentPart
from . import rundir
from .rank import Rank

if TYPE_CHECKING:
    from .call_lines import CallLines


class Calls(AgentPart):
    """The first call is in the job's folder, and each rank's result too. Those of a session come over its lines."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._lines: CallLines | None = None
        self._window = 0  # bytes of a result that may be in flight

    def on(self, command: Call | NextCall | EndCall | EndSession) -> None:
        """Take a piece of a call, or end one."""
        if isinstance(command, Call):
            rundir.add_to_call(self._hub.folder, command.data)
            self._hub.outbox.say(ChunksTaken(time.monotonic_ns(), len(command.data)))
        elif self._lines is not None:
            self._on_line(self._lines, command)

    def _on_line(self, lines: CallLines, command: NextCall | EndCall | EndSession) -> None:
        match command:
            case NextCall():
                lines.take(command)
                self._hub.outbox.say(ChunksTaken(time.monotonic_ns(), len(command.data)))
            case EndCall():
                lines.end_call(command.rank)
            case EndSession():
                lines.close()

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """In a session, open the lines to its ranks."""
        self._window = start.window
        if start.calls == "session":
            from .call_lines import CallLines

            self._lines = CallLines(
                self._hub.poll, self._hub.outbox, [one["rank"] for one in start.ranks], start.window
            )

    def environ(self, rank: int) -> Mapping[str, str]:
        """Where the rank finds its call."""
        found = rundir.call_files(self._hub.folder, rank)
        return {**found, "LAUNCHPAD_CALL_LINE": self._lines.name} if self._lines else found

    def exited(self, rank: Rank, code: int) -> None:
        """Send the rank's result, unless its results come over its line."""
        if self._lines is not None and self._lines.admitted(rank.rank):
            return
        result = rundir.open_result(self._hub.folder, rank.rank)
        if result >= 0:
            self._hub.outbox.send_file(OutputStream(rank.rank, RESULT, result, self._window))
