"""Who failed in an attempt, and what is known of it: on its own, as an echo of another's end, or stopped. Pure."""

from __future__ import annotations

import json
import signal
from typing import Literal, NamedTuple

from launchpad.job.outcome import exit_in_words
from launchpad.report import accounts, echoes
from launchpad.report.accounts import Account
from launchpad.report.echoes import Strength
from launchpad.report.story import RankStory, Story

What = Literal["exception", "exit", "signal", "memory", "mpi", "thread", "start", "lost", "hang"]

# Of the ends of processes only the order is known in which the agent has waited for them; it looks after each wait.
BLUR_NS = 1_000_000

# After we have told the ranks to stop, whoever has died otherwise within this time, in ns, did so unasked.
UNASKED_NS = 1_000_000_000

# Of a rank's last words so much may tell why it ended.
LAST_BYTES = 2048


class Suspect(NamedTuple):
    """A rank's failure, or the loss of a node."""

    kind: What
    rank: int = -1
    node: int = 0
    time: int = 0
    blur: int = 0  # ns by which the time of an exit is uncertain
    code: int = 0  # the rank's exit code, -n for signal n
    account: Account | None = None
    text: str = ""  # what it did, if that is not an exit: start, lost, mpi, hang
    thread: str = ""
    crash: str = ""  # faulthandler's
    memory: int = 0  # the largest resident set, in bytes
    leaving: bool = False  # its program had come to its end by then
    echo: Strength = ""
    said: str = ""  # the line of its last words that makes it an echo

    @property
    def short(self) -> str:
        """Why, in a few words."""
        if self.account is not None:
            return self.account.roots[0].title
        return self.said or self.text or exit_in_words(self.code)

    def is_like(self, other: Suspect) -> bool:
        """Whether both failed in the same way: at the same place, by the same kind of exception, signal or code."""
        if self.account is None or other.account is None:
            return self.account is other.account and (self.kind, self.code) == (other.kind, other.code)
        here, there = self.account.place, other.account.place
        same = here == there if here is None or there is None else here[:3] == there[:3]
        return same and self.account.type == other.account.type


class Suspects:
    """By what they are."""

    def __init__(self) -> None:
        self.own: list[Suspect] = []
        self.echoes: list[Suspect] = []
        self.threads: list[Suspect] = []  # in the order of time
        self.left: list[tuple[int, int]] = []  # (time, rank) of those that came to their end
        self.stuck: list[Suspect] = []  # have raised, and had not left when they were stopped
        self.others: list[int] = []  # failed, after we had told them to stop


def suspects_in(story: Story) -> Suspects:
    """All of an attempt's."""
    found = Suspects()
    for node, loss in story.lost.items():
        found.own.append(Suspect("lost", node=node, time=loss.time, text=loss.reason))
    for one in story.ranks.values():
        # What a node says happened before may be a little late by its clock.
        stopping = story.stop.time + story.doubts.get(one.node, 0) if story.stop else None
        _look_at(one, story, stopping, found)
    found.threads.sort(key=lambda suspect: suspect.time)
    return found


def _look_at(one: RankStory, story: Story, stopping: int | None, found: Suspects) -> None:
    code = one.exited.code if one.exited else 0
    main = None
    leaving = False
    for raised in one.raised:
        account = accounts.from_event(raised.account)
        if account is None or (one.pid and raised.pid != one.pid):  # a child's: the rank has gone on
            continue
        suspect = Suspect("exception", one.rank, one.node, raised.time, code=code, account=account, crash=one.crash)
        if raised.thread:
            if stopping is None or raised.time <= stopping:
                found.threads.append(suspect._replace(kind="thread", thread=raised.thread))
        elif account.type == "SystemExit" and account.message == "0":
            found.left.append((raised.time, one.rank))
            leaving = True
        else:
            main = suspect
    if one.not_started:
        found.own.append(Suspect("start", one.rank, one.node, one.not_started.time, text=one.not_started.reason))
        return
    if one.failed:
        failed = Suspect("mpi", one.rank, one.node, one.failed.time, code=one.failed.code, text=one.failed.reason)
        found.own.append(failed._replace(account=main.account if main else None))
        return
    if one.exited is None:
        if main is not None and main.account is not None and main.account.kind != "SystemExit":
            found.stuck.append(main)
        return
    if code == 0:
        if stopping is None or one.exited.time <= stopping:
            found.left.append((one.exited.time, one.rank))
        return
    if main is not None and stopping is not None and main.time > stopping:
        if code > 0 and not _is_echo(main):
            found.others.append(one.rank)
        return
    if main is not None and code < 0 and _sent(story, -code) and not _stopped_for_failure(story):
        found.stuck.append(main)  # on its way out when we stopped it
        return
    if main is not None:
        _sort(main, found)
        return
    _take_exit(one, story, stopping, found, leaving)


def _take_exit(one: RankStory, story: Story, stopping: int | None, found: Suspects, leaving: bool) -> None:
    assert one.exited is not None
    end = one.exited
    unasked = stopping is None or end.time <= stopping
    if not unasked:
        late = stopping is not None and end.time <= stopping + UNASKED_NS
        odd = end.memory_killed or (end.code < 0 and not _sent(story, -end.code))
        if not (late and odd and _stopped_for_failure(story)):
            if end.code > 0 or odd:
                found.others.append(one.rank)
            return
    tail = accounts.without_marks(one.tail[-LAST_BYTES:].decode(errors="replace"))
    account = _recorded(one.recorded)
    if account is None and end.code > 0:
        account = accounts.from_text(one.tail.decode(errors="replace"))
    kind: What = "memory" if end.memory_killed else "signal" if end.code < 0 else "exit"
    if account is not None and kind == "exit":
        kind = "exception"
    said = ""
    if account is None and end.code not in (-signal.SIGKILL, -signal.SIGSEGV):
        said = echoes.reason_in(tail)
    suspect = Suspect(
        kind,
        one.rank,
        one.node,
        end.time,
        blur=BLUR_NS,
        code=end.code,
        account=account,
        crash=one.crash or (one.tail.decode(errors="replace") if "Fatal Python error:" in tail else ""),
        memory=end.memory,
        leaving=leaving,
        echo=echoes.echo_in(said) if said else "",
        said=said,
    )
    _sort(suspect, found)


def _sort(suspect: Suspect, found: Suspects) -> None:
    strength = suspect.echo or (echoes.echo_of(suspect.account) if suspect.account else "")
    if strength:
        found.echoes.append(suspect._replace(echo=strength))
    else:
        found.own.append(suspect)


def _is_echo(suspect: Suspect) -> bool:
    return bool(suspect.account and echoes.echo_of(suspect.account))


def _sent(story: Story, signum: int) -> bool:
    return any(one == signum for _, one in story.sent)


def _stopped_for_failure(story: Story) -> bool:
    return story.stop is not None and story.stop.cause == "failure"


def _recorded(error: str) -> Account | None:
    """What an error file says, as torch's @record writes it; None where it says nothing.

    {"message": {"message": "Type: text", "extraInfo": {"py_callstack": "…", "timestamp": "…"}}}, or a plain string
    as the inner message.
    """
    try:
        message = json.loads(error)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    text = message
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        found = accounts.from_text(stack) if isinstance(stack, str) else None
        if found is not None:
            return found
        text = stack or message.get("message")
    if not isinstance(text, str) or not text.strip():
        return None
    kind, colon, rest = text.partition(": ")
    return Account(kind, rest) if colon and kind.isidentifier() else Account("", text)
