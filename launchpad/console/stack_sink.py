"""A sink for the ranks' stacks: shows them, sends them to whoever asked, and keeps them in the job's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from launchpad.job.plan import Plan
from launchpad.protocol.events import Restarted, StacksTaken


class StackSink:
    """The sink."""

    def __init__(
        self,
        say: Callable[[str], None],
        folder: str,
        plan: Plan,
        answer: Callable[[int, str], None],
    ) -> None:
        """`say` shows text; `folder` is where full stacks are kept, unless it is ""; `answer` responds to a request."""
        self._say = say
        self._folder = folder
        self._answer = answer
        self._nodes: Sequence[Sequence[Any]] = plan.by_node
        self._cwd = plan.nodes[0].cwd
        self._roles = plan.roles
        self._count = 0

    def on(self, event: Any) -> bool:
        """Handle stacks that were taken."""
        if type(event) is Restarted and event.nodes:
            self._nodes = event.nodes
        if type(event) is not StacksTaken or event.why in ("failure", "idle"):  # those are in the report or a note
            return False
        text, whole = self._in_words(event)
        if event.asker:
            self._answer(event.asker, f"{text}\n\n{whole}" if event.full else text)
            return False
        self._say(text)
        if self._folder:
            self._keep(whole)
        return False

    def _in_words(self, taken: StacksTaken) -> tuple[str, str]:
        """The summary, and all stacks."""
        if self._roles:
            from launchpad.diagnosis.role_stacks import full_by_role, merged_by_role

            return merged_by_role(taken, self._cwd, self._roles), full_by_role(taken, self._cwd, self._roles)
        from launchpad.diagnosis.stack_summary import full, hosts_of, merged  # few jobs need it

        hosts = hosts_of(self._nodes)
        return merged(taken, self._cwd, hosts), full(taken, self._cwd, hosts)

    def _keep(self, text: str) -> None:
        self._count += 1
        path = os.path.join(self._folder, f"stacks_{self._count}.txt")
        try:
            with open(path, "w", encoding="utf-8", errors="backslashreplace", opener=_private) as file:
                file.write(f"{time.strftime('%F %T')}\n{text}\n")
        except OSError as error:
            self._say(f"{path}: {error.strerror}")
        else:
            self._say(f"all stacks: {path}")

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Nothing is held open."""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
