"""Answers ssh's prompts: it runs a helper for each (SSH_ASKPASS), which passes it on to us, who have the terminal.

So ssh itself can stay in a session of its own, out of reach of Ctrl-C, and the prompts of several hosts come one at a
time. Prompts and answers go through pipes that only this user can open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from launchpad import linux

Ask = Callable[[str], str | None]

_HELPER = rb"""#!/bin/sh
printf '%s\0%s\0' "$SSH_ASKPASS_PROMPT" "$1" >"$LAUNCHPAD_QUESTIONS" || exit 1
IFS= read -r answer <"$LAUNCHPAD_ANSWERS" || exit 1
case $answer in
=*) printf '%s\n' "${answer#=}" ;;
*) exit 1 ;;
esac
"""

# Messages that want no answer: a security key waits for a touch. ssh kills the helper then.
_NO_ANSWER = b"none"


class Askpass:
    """What the user is asked, and has answered, on behalf of all ssh processes. Thread-safe."""

    def __init__(self, ask: Ask, tell: Callable[[str], object]) -> None:
        """`ask` returns None if the user gives no answer; `tell` shows a message."""
        self._ask = ask
        self.tell = tell
        self._asking = threading.Lock()
        self._closing = threading.Lock()
        self._answers: dict[str, str | None] = {}
        self._helper = os.memfd_create("askpass")
        linux.write_all(self._helper, _HELPER)

    def environ(self, questions: int, answers: int) -> dict[str, str]:
        """The environment of an ssh whose helper writes to and reads from these descriptors of ours."""
        return {
            "DISPLAY": ":0",  # before 8.4, ssh doesn't know the next one, and asks the helper only with a display
            **os.environ,
            "SSH_ASKPASS_REQUIRE": "force",
            "SSH_ASKPASS": linux.path_of(self._helper),
            "LAUNCHPAD_QUESTIONS": linux.path_of(questions),
            "LAUNCHPAD_ANSWERS": linux.path_of(answers),
        }

    def answer(self, prompt: str, refused: str | None) -> str | None:
        """Ask the user, unless another host's ssh had the same prompt. `refused`: what it was answered before."""
        with self._asking:
            if prompt not in self._answers or (refused is not None and refused == self._answers[prompt]):
                self._answers[prompt] = self._ask(prompt)
            return self._answers[prompt]

    def close(self) -> None:
        """Forget the answers."""
        with self._closing:
            if self._helper >= 0:
                os.close(self._helper)
            self._helper = -1
            self._answers = {}


class Prompts:
    """The prompts of one ssh, which are answered by a thread until `end`."""

    def __init__(self, askpass: Askpass) -> None:
        self._askpass = askpass
        # The helper opens the far ends by their paths in /proc, so they stay open here.
        self._questions, self._asked = os.pipe()
        self._answers, self._answered = os.pipe()
        self.environ = askpass.environ(self._asked, self._answers)
        threading.Thread(target=self._serve, name="askpass", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._answer_all()
        finally:
            for fd in (self._questions, self._asked, self._answers, self._answered):
                os.close(fd)

    def _answer_all(self) -> None:
        tried: dict[str, str | None] = {}
        received = b""
        while True:
            received += os.read(self._questions, 65536)
            while received.count(b"\0") >= 2:
                kind, text, received = received.split(b"\0", 2)
                prompt = text.decode(errors="replace")
                if not prompt:
                    return
                if kind == _NO_ANSWER:
                    self._askpass.tell(prompt)
                    continue
                tried[prompt] = answer = self._askpass.answer(prompt, tried.get(prompt))
                os.write(self._answered, b"\n" if answer is None else f"={answer}\n".encode())

    def end(self) -> None:
        """Answer nothing any more; a prompt that is open stays until the user has answered it."""
        os.write(self._asked, b"\0\0")
