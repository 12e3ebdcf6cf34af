"""console/lines: whole lines with their prefixes, however the bytes are split and the streams interleaved."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.console.fold import Fold, FoldingDevice
from launchpad.console.lines import (
    LEAST_PENDING_BYTES,
    QUIET_SECONDS_PLAIN,
    QUIET_SECONDS_TERMINAL,
    TURN_SECONDS_PLAIN,
    TURN_SECONDS_TERMINAL,
    Device,
    LineStream,
)
from launchpad.console.prefix import encoded, of_several, torch_mark
from tests.support.unhurried import UNHURRIED

ERASE = b"\r\x1b[K"
LINE = st.binary(max_size=30).map(lambda data: re.sub(rb"[\r\n]", b"", data))
COLUMNS = st.sampled_from([None, 80])


def stream(rank: int = 0, fd: int = 1) -> LineStream:
    prefix = b"[%d] " % rank
    return LineStream(fd, prefix, len(prefix))


def text(pieces: list[tuple[int, bytes]]) -> bytes:
    return b"".join(data for _, data in pieces)


@st.composite
def chunks(draw: st.DrawFn, lines: st.SearchStrategy[bytes]) -> tuple[list[list[bytes]], list[tuple[int, bytes]]]:
    """The lines of some streams, and the (stream, bytes) in which they arrive."""
    wanted = draw(st.lists(st.lists(lines, max_size=6), min_size=1, max_size=4))
    queues = []
    for own in wanted:
        data = b"".join(line + b"\n" for line in own)
        edges = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
        queues.append([data[start:end] for start, end in itertools.pairwise([0, *edges, len(data)])])
    turns = draw(st.permutations([number for number, queue in enumerate(queues) for _ in queue]))
    return wanted, [(number, queues[number].pop(0)) for number in turns]


def by_stream(shown: bytes, count: int) -> list[list[bytes]]:
    """Each stream's lines without their prefixes; every line must have one."""
    found: list[list[bytes]] = [[] for _ in range(count)]
    assert shown.endswith(b"\n") or not shown
    for line in shown.split(b"\n")[:-1]:
        match = re.match(rb"\[(\d)\] ", line)
        assert match, line
        found[int(match[1])].append(line[match.end() :])
    return found


@UNHURRIED
@given(arriving=chunks(LINE), columns=COLUMNS)
def test_each_line_is_shown_once_and_whole_and_in_order(
    arriving: tuple[list[list[bytes]], list[tuple[int, bytes]]], columns: int | None
) -> None:
    wanted, pieces = arriving
    streams = [stream(rank) for rank in range(len(wanted))]
    device = Device(len(streams), columns)
    shown = b"".join(text(device.feed(streams[number], data, 0.0)) for number, data in pieces)
    assert by_stream(shown, len(streams)) == wanted
    assert device.close(streams) == []
    assert device.deadline is None


@UNHURRIED
@given(arriving=chunks(LINE), columns=COLUMNS, waits=st.lists(st.booleans(), min_size=40, max_size=40))
def test_no_byte_is_lost_if_time_passes_in_between(
    arriving: tuple[list[list[bytes]], list[tuple[int, bytes]]], columns: int | None, waits: list[bool]
) -> None:
    wanted, pieces = arriving
    streams = [stream(rank) for rank in range(len(wanted))]
    device = Device(len(streams), columns)
    shown = b""
    for now, ((number, data), waits_here) in enumerate(zip(pieces, waits, strict=False)):
        shown += text(device.feed(streams[number], data, now))
        if waits_here:
            shown += text(device.tick(now + 0.5))
    shown += text(device.close(streams))
    assert [b"".join(lines) for lines in by_stream(shown, len(streams))] == [b"".join(lines) for lines in wanted]


@UNHURRIED
@given(data=st.data(), columns=COLUMNS)
def test_crlf_passes_through_wherever_it_is_split(data: st.DataObject, columns: int | None) -> None:
    whole = b"one\r\n\r\ntwo\r\n"
    edges = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    device, own = Device(1, columns), stream()
    shown = b""
    for now, (start, end) in enumerate(itertools.pairwise([0, *edges, len(whole)])):
        shown += text(device.feed(own, whole[start:end], now))
        shown += text(device.tick(now + 0.5)) if data.draw(st.booleans()) else b""
    assert shown == b"[0] one\r\n[0] \r\n[0] two\r\n"


@UNHURRIED
@given(lines=st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b and not b.startswith(b"\r"))))
def test_binary_lines_are_unchanged_on_a_plain_device(lines: list[bytes]) -> None:
    shown = Device(1, None).feed(stream(), b"".join(line + b"\n" for line in lines), 0.0)
    assert text(shown) == b"".join(b"[0] " + line + b"\n" for line in lines)


@pytest.mark.parametrize("columns", [None, 80])
def test_an_unfinished_line_is_shown_after_a_pause_and_continued_by_its_stream(columns: int | None) -> None:
    quiet = QUIET_SECONDS_PLAIN if columns is None else QUIET_SECONDS_TERMINAL
    device, own = Device(2, columns), stream()
    assert device.feed(own, b"name? ", 10.0) == []
    assert device.deadline == 10.0 + quiet
    assert device.tick(10.0 + quiet / 2) == []
    assert text(device.tick(10.0 + quiet)) == b"[0] name? "
    assert device.deadline is None
    assert text(device.feed(own, b"Ada", 20.0)) == b"Ada"
    assert text(device.feed(own, b", hello\nnext\n", 20.0)) == b", hello\n[0] next\n"


def test_another_stream_ends_the_open_line_and_the_rest_gets_a_prefix() -> None:
    device, one, two = Device(2, None), stream(0), stream(1)
    device.feed(one, b"half", 0.0)
    shown = text(device.tick(3.0)) + text(device.feed(two, b"other\n", 3.0)) + text(device.feed(one, b" rest\n", 3.0))
    assert shown == b"[0] half\n[1] other\n[0]  rest\n"


def test_another_streams_unfinished_line_does_not_end_the_open_one_before_it_is_due() -> None:
    device, one, two = Device(2, None), stream(0), stream(1)
    device.feed(one, b"half", 0.0)
    shown = text(device.tick(3.0)) + text(device.feed(two, b"ot", 3.0)) + text(device.feed(one, b" rest\n", 3.0))
    assert shown + text(device.tick(9.0)) == b"[0] half rest\n[1] ot"


def test_the_newline_goes_to_the_descriptor_of_the_open_line() -> None:
    device, out, err = Device(2, None), stream(0, fd=1), stream(0, fd=2)
    device.feed(out, b"half", 0.0)
    device.tick(3.0)
    assert device.feed(err, b"oops\n", 3.0) == [(1, b"\n"), (2, b"[0] oops\n")]


def test_two_devices_do_not_disturb_each_other() -> None:
    stdout, stderr = Device(1, None), Device(1, None)
    out, err = stream(0, fd=1), stream(0, fd=2)
    stdout.feed(out, b"half", 0.0)
    stdout.tick(3.0)
    assert stderr.feed(err, b"oops\n", 3.0) == [(2, b"[0] oops\n")]
    assert stdout.feed(out, b" whole\n", 3.0) == [(1, b" whole\n")]


def test_a_note_ends_the_open_line_first() -> None:
    device, own = Device(1, None), stream()
    device.feed(own, b"half", 0.0)
    device.tick(3.0)
    assert device.note(b"launchpad: stopping", 2) == [(1, b"\n"), (2, b"launchpad: stopping\n")]
    assert device.note(b"launchpad: again", 2) == [(2, b"launchpad: again\n")]
    assert text(device.feed(own, b" rest\n", 3.0)) == b"[0]  rest\n"


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_last_line_without_a_newline_gets_one_at_the_end(is_shown: bool) -> None:
    device, one, two = Device(2, None), stream(0), stream(1)
    shown = text(device.feed(one, b"last words", 0.0)) + text(device.feed(two, b"mine too", 0.0))
    if is_shown:
        shown += text(device.tick(3.0))
    shown += text(device.close([one, two]))
    assert sorted(shown.splitlines(keepends=True)) == [b"[0] last words\n", b"[1] mine too\n"]
    assert device.close([one, two]) == []


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_a_line_goes_on_when_another_stream_ends(folds: bool, shown: bool) -> None:
    """As when another role of a job starts again. `shown`: it is the open line."""
    device = FoldingDevice(2, None, Fold(2), lambda *_: (b"", 0)) if folds else Device(2, None)
    one, two = stream(0), stream(1)
    out = device.feed(one, b"ends ", 0.0) + device.feed(two, b"goes ", 0.1)
    if shown:
        out += device.tick(0.1 + QUIET_SECONDS_PLAIN)
        assert text(out) == b"[0] ends \n[1] goes "
    out += device.close([one])
    out += device.feed(two, b"on\n", 9.0)
    out += device.close([two])
    assert text(out) == b"[0] ends \n[1] goes on\n"


@pytest.mark.parametrize("size", [2 * LEAST_PENDING_BYTES, 5 * LEAST_PENDING_BYTES + 7])
def test_a_line_longer_than_the_streams_share_is_shown_in_pieces(size: int) -> None:
    device, own = Device(1 << 20, None), stream()
    line = bytes(b"0123456789"[i % 10] for i in range(size))
    pieces = [text(device.feed(own, line[start : start + 5000], 0.0)) for start in range(0, size, 5000)]
    assert any(pieces[:-1])
    assert b"".join(pieces) + text(device.feed(own, b"\n", 0.0)) == b"[0] " + line + b"\n"


# Bars.


def test_a_bar_on_a_terminal_is_redrawn_in_place() -> None:
    device, own = Device(1, 80), stream()
    assert device.feed(own, b"\r 10%", 0.0) == []
    assert text(device.tick(1.0)) == b"[0]  10%"
    assert text(device.feed(own, b"\r 20%", 1.0)) == ERASE + b"[0]  20%"
    assert text(device.feed(own, b"\r 30%\r 40%", 1.0)) == ERASE + b"[0]  40%"
    assert text(device.feed(own, b"\r100%\ndone\n", 1.0)) == ERASE + b"[0] 100%\n[0] done\n"


def test_a_bar_with_trailing_carriage_returns_is_redrawn_in_place_too() -> None:
    device, own = Device(1, 80), stream()
    device.feed(own, b"10%\r", 0.0)
    assert text(device.tick(1.0)) == b"[0] 10%"
    assert text(device.feed(own, b"20%\r", 1.0)) == ERASE + b"[0] 20%"
    assert text(device.feed(own, b"\n", 1.0)) == b"\r\n"


def test_a_bar_on_a_plain_device_keeps_every_state_with_its_prefix() -> None:
    device, own = Device(1, None), stream()
    shown = text(device.feed(own, b"\r 10%", 0.0)) + text(device.tick(1.0))
    shown += text(device.feed(own, b"\r 20%\r 30%", 1.0)) + text(device.tick(1.0 + TURN_SECONDS_PLAIN))
    shown += text(device.feed(own, b"\r100%\ndone\n", 10.0))
    assert shown == b"[0]  10%\r[0]  20%\r[0]  30%\r[0] 100%\n[0] done\n"


def test_a_bar_that_arrives_at_once_keeps_every_state_or_only_the_newest() -> None:
    data = b"\r 10%\r 20%\r100%\n"
    assert text(Device(1, None).feed(stream(), data, 0.0)) == b"[0]  10%\r[0]  20%\r[0] 100%\n"
    assert text(Device(1, 80).feed(stream(), data, 0.0)) == b"[0] 100%\n"


def two_bars(device: Device, turn: float) -> tuple[bytes, int]:
    """The output of two bars that advance ten times a second for twenty turns, and the number of states of each."""
    streams = [stream(0), stream(1)]
    shown = b""
    states = int(20 * turn * 10)
    for step in range(states):
        for number, own in enumerate(streams):
            now = step / 10 + number / 100
            shown += text(device.feed(own, b"\r%05d" % step, now)) + text(device.tick(now))
    return shown + text(device.close(streams)), states


@pytest.mark.parametrize(("columns", "turn"), [(None, TURN_SECONDS_PLAIN), (80, TURN_SECONDS_TERMINAL)])
def test_two_bars_take_turns_but_not_too_often(columns: int | None, turn: float) -> None:
    lines = two_bars(Device(2, columns), turn)[0].split(b"\n")
    for prefix in (b"[0] ", b"[1] "):
        assert 8 <= sum(line.startswith(prefix) for line in lines) <= 21


def test_two_bars_on_a_plain_device_keep_every_state() -> None:
    shown, states = two_bars(Device(2, None), TURN_SECONDS_PLAIN)
    fragments = [fragment for fragment in re.split(rb"[\r\n]", shown) if fragment]
    for prefix in (b"[0] ", b"[1] "):
        own = [fragment.removeprefix(prefix) for fragment in fragments if fragment.startswith(prefix)]
        assert own == [b"%05d" % step for step in range(states)]


def rows(shown: bytes) -> list[bytes]:
    """What a wide terminal shows afterwards."""
    screen, column = [bytearray()], 0
    for word in re.findall(rb"\x1b\[K|[\x00-\xff]", shown):
        if word == b"\x1b[K":
            del screen[-1][column:]
        elif word == b"\r":
            column = 0
        elif word == b"\n":
            screen.append(bytearray())
            column = 0
        else:
            screen[-1][column : column + 1] = word
            column += 1
    return [bytes(row) for row in screen]


@UNHURRIED
@given(
    states=st.lists(st.text("abc", min_size=1, max_size=6).map(str.encode), min_size=1, max_size=5),
    edges=st.lists(st.integers(0, 40), max_size=8),
    waits=st.lists(st.booleans(), min_size=12, max_size=12),
    comes_first=st.booleans(),
)
def test_a_bar_leaves_its_last_state_with_the_prefix_wherever_it_is_split(
    states: list[bytes], edges: list[int], waits: list[bool], comes_first: bool
) -> None:
    data = b"".join(b"\r" + state if comes_first else state + b"\r" for state in states) + b"\n"
    device, own = Device(1, 80), stream()
    shown = b""
    cuts = sorted(edge % (len(data) + 1) for edge in edges)
    for now, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(data)])):
        shown += text(device.feed(own, data[start:end], now))
        shown += text(device.tick(now + 0.5)) if waits[now] else b""
    assert rows(shown) == [b"[0] " + states[-1], b""]


def test_a_bar_wider_than_the_terminal_is_clipped_so_that_it_can_be_erased() -> None:
    device, own = Device(1, 40), stream()
    bar = b"\r" + "█".encode() * 100
    device.feed(own, bar, 0.0)
    first = text(device.tick(1.0))
    assert len(first.decode()) == 39
    assert text(device.feed(own, bar, 1.0)) == ERASE + first


def test_the_final_state_of_a_bar_is_not_clipped() -> None:
    device, own = Device(1, 40), stream()
    device.feed(own, b"\r 10%", 0.0)
    device.tick(1.0)
    assert text(device.feed(own, b"\r" + b"x" * 100 + b"\n", 1.0)) == ERASE + b"[0] " + b"x" * 100 + b"\n"


MARKED = b"[rank3]: Traceback\n[rank3]:   in f\n[rank3]:W1126 slow\n[rank0]: of another\n\nsaid [rank3]: by me\n"
UNMARKED = b"[3] Traceback\n[3]   in f\n[3] W1126 slow\n[3] [rank0]: of another\n[3] \n[3] said [rank3]: by me\n"


def test_a_mark_that_the_prefix_repeats_is_not_shown_wherever_the_lines_are_split() -> None:
    for cut in range(len(MARKED)):
        device, one = Device(1, None), LineStream(2, b"[3] ", 4, 3, mark=b"[rank3]:")
        pieces = device.feed(one, MARKED[:cut], 0.0) + device.feed(one, MARKED[cut:], 0.0)
        assert text(pieces) == UNMARKED


def test_a_mark_is_not_shown_before_an_unfinished_line_and_stays_in_what_continues_it() -> None:
    device, one = Device(1, None), LineStream(2, b"[3] ", 4, 3, mark=b"[rank3]:")
    pieces = device.feed(one, b"[rank3]: go on? ", 0.0) + device.tick(QUIET_SECONDS_PLAIN)
    pieces += device.feed(one, b"[rank3]: yes\n[rank3]: so\n", 3.0)
    assert text(pieces) == b"[3] go on? [rank3]: yes\n[3] so\n"


def test_lines_that_only_their_marks_tell_apart_are_folded() -> None:
    device = FoldingDevice(2, None, Fold(2, numbers=False), lambda ranks, _: (encoded(of_several(ranks)), 6))
    pieces = []
    for rank in (0, 1):
        own = LineStream(2, b"[%d] " % rank, 4, rank, mark=torch_mark(rank, 2, None))
        pieces += device.feed(own, b"[rank%d]: RuntimeError: closed\n" % rank, 0.0)
    assert text(pieces) == b"[0-1] RuntimeError: closed\n"
