"""An agent that the test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from launchpad import __version__
from launchpad.protocol.commands import Finish, Hello, StopBy
from launchpad.protocol.events import (
    AgentReady,
    RankExited,
)
from launchpad.transport.memory import MemoryLink

DEADLINE = 30.0
READY = AgentReady(0, 0.0, 1, "node0", 2, 0, None, 1 << 20, 1 << 20, 29501)


class Agent:
    """The far end of a link: a thread that runs `script`, which calls `hear` to wait for a command."""

    def __init__(self, script: Callable[[Agent], None], ready: Any = READY) -> None:
        self.link = MemoryLink()
        self.say = self.link.say
        self._script = script
        self._ready = ready
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._play, daemon=True)

    def hear(self, kind: Any) -> Any:
        """The head's next command, which must be of this kind; how long the ranks have may come before any other."""
        while type(command := self.link.heard.get(timeout=DEADLINE)) is StopBy:
            pass
        assert type(command) is kind, command
        return command

    def leave(self, code: int = 0) -> None:
        """Rank 0 exits, the head sends Finish, and the agent hangs up."""
        self.say(RankExited(0, 0, code, 0, False))
        while type(self.link.heard.get(timeout=DEADLINE)) is not Finish:
            pass
        self.link.hang_up()

    def _play(self) -> None:
        try:
            assert self.hear(Hello).version == __version__
            self.say(self._ready)
            self._script(self)
        except BaseException as error:
            self.error = error
            self.link.hang_up()
