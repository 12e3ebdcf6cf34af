"""What each rank does and uses, and the screen of `launchpad top`."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from launchpad.agent.host import gpus, process_trees
from launchpad.agent.host.process_trees import ProcessTrees
from launchpad.cli.top_loop import keys
from launchpad.console.top_screen import KEYS, RankList, ScreenSize, amount, once
from launchpad.diagnosis import activity
from launchpad.diagnosis.activity import (
    ENDED,
    RUNNING,
    WAITING,
    JobLook,
    RankLook,
    child_rows,
    folded,
    host_rows,
    last_line,
    matching,
    ordered,
    plain_lines,
    rows,
    state_in_words,
)

GIB = 1 << 30


# Values.


def rank_look(rank: int, second: float, **known: Any) -> RankLook:
    """A rank that has used half a core so far, and has printed a line a second."""
    figures = {
        "taken": int(second * 1e9),
        "cpu": second / 2,
        "memory": GIB,
        "threads": 4,
        "read": int(1000 * second),
        "written": int(10 * second),
        "lines": int(second),
    }
    return RankLook(rank, f"node{rank // 8}", 100 + rank, **{"state": RUNNING, **figures, **known})


def job(second: float, ranks: list[RankLook]) -> JobLook:
    hosts = [[name, ""] for name in dict.fromkeys(rank.host for rank in ranks)]
    return JobLook("4f2a91c3", ["t.py"], int(second * 1e9), 0, RUNNING, 0, 0, 0, hosts, [], ranks)


def test_what_happens_per_second_comes_from_two_looks() -> None:
    before, after = (job(second, [rank_look(0, second)]) for second in (10.0, 12.0))
    (row,) = rows(before, after)
    assert (row.cpu, row.read, row.written, row.lines, row.memory) == (0.5, 1000.0, 10.0, 1.0, GIB)
    (row,) = rows(None, after)
    assert (row.cpu, row.read, row.lines, row.memory) == (-1, -1, -1, GIB)
    (row,) = rows(before._replace(attempt=1), after)  # the ranks were other processes then
    assert row.cpu == -1
    shown = activity.as_json(before, after)["ranks"][0]
    assert (shown["cpu"], shown["cpu_seconds"], shown["waits"], shown["exit_code"]) == (0.5, 6.0, None, None)


def many(count: int) -> list[activity.RankRow]:
    """Ranks that wait, but 3, which computes; 5, which has ended; and 7, with a lot of memory."""

    def looks(second: float) -> list[RankLook]:
        wait = {"state": WAITING, "operation": "all_reduce", "number": 812, "seconds": 2.0}
        found = [rank_look(rank, second, cpu=second * (0.02 + rank % 5 / 100), **wait) for rank in range(count)]
        found[3] = rank_look(3, second, cpu=second)
        found[5] = RankLook(5, "node0", 105, ENDED, 3)
        found[7] = found[7]._replace(memory=9 * GIB)
        return found

    return rows(job(10.0, looks(10.0)), job(11.0, looks(11.0)))


def test_512_ranks_fit_a_screen_and_the_odd_ones_stand_out() -> None:
    found = folded(many(512), 10)
    assert [row.ranks for row in found if len(row.ranks) == 1] == [[3], [5], [7]]
    (most,) = [row for row in found if len(row.ranks) > 1]
    assert sorted({*most.ranks, 3, 5, 7}) == list(range(512))
    assert len(most.hosts) == 64
    assert state_in_words(most) == "waiting in all_reduce #812 for 2 s"
    assert 0.02 < most.cpu < 0.06
    assert folded(many(512), 512) == many(512)


def test_the_screen_has_as_many_lines_as_the_terminal() -> None:
    every = many(512)
    look = job(11.0, [rank_look(rank, 11.0) for rank in range(512)])
    for size in (ScreenSize(24, 80), ScreenSize(8, 40), ScreenSize(60, 200)):
        for fold in (True, False):
            screen = RankList()
            shown = screen.lines(
                *(look, every, host_rows(look, every), lambda room, fold=fold: folded(every, room if fold else 512)),
                *(size, [], KEYS),
            )
            assert len(shown) == size.rows
            screen.move(400)
            shown = screen.lines(look, every, host_rows(look, every), lambda _: every, size, [], KEYS)
            assert len(shown) == size.rows
            assert screen.row in every
            plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown]
            assert all(len(line) <= size.columns for line in plain)
    text = "\n".join(once(look, host_rows(look, every[:16]), every[:16], {}, 160, plain=True))
    assert "\x1b" not in text
    assert re.search(r"3 +node0 +running +100% +1G +4 +1000 +10 +1\n", text), text


def test_processes_have_lines_below_their_rank_where_there_is_room() -> None:
    every = many(8)
    looks = [
        job(second, [rank_look(rank, second) for rank in range(8)])._replace(
            children=[[2, 71, "ffmpeg -i 3.mp4\x1b[2J", "R", second / 2, GIB, 5], [2, 72, "", "S", 1.0, 4096, 1]]
        )
        for second in (10.0, 12.0)
    ]
    children = child_rows(*looks)
    assert [(child.pid, child.state, child.cpu) for child in children[2]] == [(71, RUNNING, 0.5), (72, "asleep", 0.0)]
    assert child_rows(None, looks[0])[2][0].cpu == -1
    text = "\n".join(once(looks[1], host_rows(looks[1], every), every, children, 160, plain=True))
    assert re.search(
        r"\n +2 .*\n +└ +71 running +50% +1G +5 +ffmpeg -i 3\.mp4\\x1b\[2J\n +└ +72 asleep .*\n +3 ", text
    ), text
    screen = RankList()
    for size, lines in ((16, 2), (15, 0)):
        shown = screen.lines(looks[1], every, [], lambda _: every, ScreenSize(size, 160), [], KEYS, children)
        assert len(shown) == size
        assert len([line for line in shown if "└" in line]) == lines
    for _ in range(3):
        screen.move(1)
    shown = screen.lines(looks[1], every, [], lambda _: every, ScreenSize(24, 160), [], KEYS, children)
    (selected,) = [line for line in shown if "\x1b[7" in line]
    assert re.search(r"m +3 ", selected), selected
    found = activity.as_json(*looks)["ranks"][2]["children"]
    assert found[0] == {
        "pid": 71,
        "command": "ffmpeg -i 3.mp4\x1b[2J",
        "state": "running",
        "cpu": 0.5,
        "memory": GIB,
        "threads": 5,
    }


def test_columns_stay_where_they_are_from_look_to_look() -> None:
    every = many(8)
    look = job(11.0, [rank_look(rank, 11.0) for rank in range(8)])
    screen = RankList()

    def last_lines_begin(shown: list[activity.RankRow]) -> int:
        lines = screen.lines(look, every, [], lambda _: shown, ScreenSize(24, 120), [], KEYS)
        (head,) = [line for line in lines if "last line" in line]
        return re.sub(r"\x1b\[[0-9;]*m", "", head).index("last line")

    waits = last_lines_begin(every)
    running = [row for row in every if not state_in_words(row).startswith("waiting")]
    assert 0 < len(running) < 8
    assert last_lines_begin(running) == waits
    assert last_lines_begin(every) == waits


def test_rows_are_filtered_and_sorted() -> None:
    every = many(16)
    assert [row.ranks[0] for row in matching(every, "2-4, 9")] == [2, 3, 4, 9]
    assert [row.ranks[0] for row in matching(every, "Exit code")] == [5]
    assert [row.ranks[0] for row in matching(every, "node1")] == list(range(8, 16))
    assert ordered(every, "CPU")[0].ranks[0] == 3
    assert ordered(every, "memory")[0].ranks[0] == 7
    assert ordered(reversed(every), "rank") == every


@pytest.mark.parametrize(
    ("tail", "line"),
    [
        (b"one\ntwo\n", "two"),
        (b"one\ntwo", "two"),
        (b"\r 10%|#  \r 20%|## ", "20%|##"),
        (b"\x1b[31mred\x1b[0m\n\n", "red"),
        (b"\x1b]0;title\x07here\x00\xff\n", "here �"),
        (b"a\tb\r\n", "a       b"),
        (b"", ""),
    ],
)
def test_the_last_line(tail: bytes, line: str) -> None:
    assert last_line(tail) == line


def test_sizes() -> None:
    sizes = (-1, 0, 999, 1023, 300 << 20, GIB + GIB // 4, 1023 << 20, 1 << 60)
    assert [amount(size) for size in sizes] == ["", "0", "999", "1023", "300M", "1.25G", "0.999G", "1E"]


def test_keys_are_told_apart() -> None:
    assert keys(b"\x1b[A\x1b[Bq") == ["up", "down", "q"]
    assert keys("/ä\r".encode()) == ["/", "ä", "enter"]
    assert keys(b"\x1b") == ["escape"]
    assert keys(b"ab\x7f\x1b[6~\x03") == ["a", "b", "backspace", "page down", "quit"]


# Real processes.


def test_a_pid_that_was_used_again_makes_no_endless_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc is read one process after the other: a parent's pid may be that of a new child by then."""
    read = process_trees._process
    one = read(os.getpid())
    assert one is not None
    parents = {1: os.getppid(), os.getppid(): 1}
    monkeypatch.setattr(
        process_trees, "_process", lambda pid: one._replace(parent=parents[pid]) if pid in parents else None
    )
    assert ProcessTrees().read([os.getpid()]) == {}


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_LIBRARY", "libnosuch-ml.so.1")
    wake = os.eventfd(0)
    try:
        reader = gpus.GpuReader(wake)
        reader.begin()
        assert os.eventfd_read(wake) == 1
        assert reader.gpus == []
    finally:
        os.close(wake)


# On a terminal.


def test_lines_are_plain() -> None:
    assert plain_lines(b"a\r\nb\rc\n\x1b[1md") == ["a", "c", "d"]
