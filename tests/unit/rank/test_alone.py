"""Which exceptions of a wait would end the program: told from functions that wait at the same call."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import CodeType

import pytest

from launchpad.rank.alone import catches, is_alone

seen: list[tuple[CodeType, int]] = []


def wait() -> None:
    frame = sys._getframe(1)
    seen[:] = [(frame.f_code, frame.f_lasti)]


def plain() -> None:
    wait()


def looped() -> None:
    for _ in range(2):
        wait()


def cleans_up() -> None:
    try:
        wait()
    finally:
        seen.copy()


def cleans_up_twice() -> None:
    try:
        try:
            wait()
        finally:
            seen.copy()
    finally:
        seen.copy()


def expects_another() -> None:
    try:
        seen.copy()
    except OSError:
        seen.clear()
    wait()


def excepts() -> None:
    try:
        wait()
    except OSError:
        seen.clear()


def excepts_all() -> None:
    try:
        wait()
    except:  # noqa: E722
        seen.clear()


def excepts_outside() -> None:
    try:
        try:
            wait()
        finally:
            seen.copy()
    except OSError:
        seen.clear()


def suppresses() -> None:
    with contextlib.suppress(OSError):
        wait()


def returns() -> int:
    try:
        wait()
    finally:
        return 1  # noqa: B012


CATCHES = {
    plain: False,
    looped: False,
    cleans_up: False,
    cleans_up_twice: False,
    expects_another: False,
    excepts: True,
    excepts_all: True,
    excepts_outside: True,
    suppresses: True,
    returns: True,
}


@pytest.mark.parametrize("waits", CATCHES, ids=lambda one: one.__name__)
def test_who_catches_what_a_wait_raises(waits: Callable[[], object]) -> None:
    waits()
    ((code, at),) = seen
    assert catches(code, at) is CATCHES[waits]


def test_a_rank_with_another_thread_is_not_alone() -> None:
    found: list[bool] = []
    asks = threading.Thread(target=lambda: found.append(is_alone(threading.main_thread().ident or 0, 0)))
    asks.start()
    asks.join()
    assert found == [False]
