"""console/fold: equal lines of several ranks are one, nothing is lost, and the order within a rank is kept."""

from __future__ import annotations

import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.console.fold import HOLD_SECONDS, MOST_LINES_A_SECOND, Fold, FoldedLine, FoldingDevice, merged
from launchpad.console.lines import QUIET_SECONDS_TERMINAL, Device, LineStream
from launchpad.console.prefix import of_several
from tests.conftest import Launchpad
from tests.test_lines import UNHURRIED
from tests.test_run_output import memory_of, wait_until_blocked
from tests.test_terminal import Start
from tests.test_terminal import terminal as terminal

# (rank, stream, lines, seconds until the next)
Said = tuple[int, int, list[bytes], float]

WORDS = st.sampled_from([b"", b"a", b"b", b"c", b"d", b"step 1", b"step 2", b"x -3.5 of 7"])
TALK = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from([1, 2]),
        st.lists(WORDS, min_size=1, max_size=6),
        st.sampled_from([0.0, 0.0, 0.02, 0.06]),
    ),
    max_size=40,
)


def folded(talk: list[Said], fold: Fold) -> list[FoldedLine]:
    shown: list[FoldedLine] = []
    now = 100.0
    for rank, stream, lines, pause in talk:
        shown += fold.add(rank, stream, lines, now)
        now += pause
        shown += fold.tick(now)
    return shown + fold.rest()


def of_rank(talk: list[Said], rank: int) -> list[tuple[int, bytes]]:
    return [(stream, line) for own, stream, lines, _ in talk for line in lines if own == rank]


@UNHURRIED
@given(talk=TALK)
def test_what_is_folded_unfolds_to_the_lines_of_each_rank(talk: list[Said]) -> None:
    shown = folded(talk, Fold(5))
    for rank in range(5):
        assert [(line.stream, line.text) for line in shown if rank in line.ranks] == of_rank(talk, rank)


@UNHURRIED
@given(talk=TALK)
def test_a_line_with_spans_stands_for_lines_whose_numbers_are_within(talk: list[Said]) -> None:
    shown = folded(talk, Fold(5, numbers=True))
    for rank in range(5):
        own = [line for line in shown if rank in line.ranks]
        assert len(own) == len(of_rank(talk, rank))
        for line, (stream, text) in zip(own, of_rank(talk, rank), strict=True):
            assert line.stream == stream
            spans = re.split(rb"(-?[\d.]*\d(?:\xe2\x80\xa6-?[\d.]*\d)?)", line.text)
            pattern = b"".join(b"(.*)" if at % 2 else re.escape(span) for at, span in enumerate(spans))
            found = re.fullmatch(pattern, text)
            assert found, (line.text, text)
            for span, number in zip(spans[1::2], found.groups(), strict=True):
                low, _, high = span.partition("…".encode())
                assert float(low) <= float(number) <= float(high or low)


@UNHURRIED
@given(talk=TALK)
def test_no_line_is_held_for_longer_than_it_may_be(talk: list[Said]) -> None:
    fold = Fold(5)
    now, waiting = 100.0, 0
    for rank, stream, lines, pause in talk:
        waiting += len(lines) - sum(len(line.ranks) for line in fold.add(rank, stream, lines, now))
        since = now
        now += pause
        waiting -= sum(len(line.ranks) for line in fold.tick(now))
        assert (fold.deadline is None) == (waiting == 0)
        assert fold.deadline is None or now < fold.deadline <= since + HOLD_SECONDS


@UNHURRIED
@given(talk=TALK, shared=st.booleans(), columns=st.sampled_from([None, 80]))
def test_a_device_that_folds_shows_what_one_that_does_not_shows(
    talk: list[Said], shared: bool, columns: int | None
) -> None:
    """Lines that come in pieces too, and on one descriptor or two."""
    plain, device = Device(10, columns), folding(5, columns)
    streams = [
        {
            (rank, number): LineStream(1 if shared else number, b"[%d] " % rank, 4, rank, number)
            for rank in range(5)
            for number in (1, 2)
        }
        for _ in range(2)
    ]
    shown: list[list[tuple[int, bytes]]] = [[], []]
    now = 100.0
    for rank, number, lines, pause in talk:
        data = b"\n".join(lines)  # the last one is left unfinished
        for own, which, out in zip((plain, device), streams, shown, strict=True):
            out += own.feed(which[rank, number], data, now)
            out += own.tick(now + pause)
        now += pause
    for own, which, out in zip((plain, device), streams, shown, strict=True):
        out += own.close(list(which.values()))
    for fd in (1, 2):
        one, two = (b"".join(data for to, data in out if to == fd) for out in shown)
        for rank in range(5):
            texts = b"".join(by_rank(one)[rank]), b"".join(by_rank(two)[rank])
            if shared:  # which of a rank's two unfinished lines is continued first depends on the lines of others
                assert sorted(texts[0]) == sorted(texts[1])
            else:
                assert texts[0] == texts[1]


def _prefix(ranks: tuple[int, ...], _: int) -> tuple[bytes, int]:
    return of_several(ranks).encode(), len(of_several(ranks))


def folding(ranks: int, columns: int | None = None) -> FoldingDevice:
    return FoldingDevice(2 * ranks, columns, Fold(ranks), _prefix)


def by_rank(shown: bytes) -> dict[int, list[bytes]]:
    """The lines of each rank, from folded ones."""
    found: dict[int, list[bytes]] = {rank: [] for rank in range(100)}
    for line in shown.split(b"\n")[:-1]:
        match = re.match(rb"\[([\d,-]+)\] ", line)
        assert match, line
        for part in match[1].split(b","):
            first, _, last = part.partition(b"-")
            for rank in range(int(first), int(last or first) + 1):
                found[rank].append(line[match.end() :])
    return found


# Examples.


def one_block_each(*blocks: bytes, numbers: bool = False) -> list[tuple[str, bytes]]:
    fold = Fold(len(blocks), numbers=numbers)
    shown = [line for rank, block in enumerate(blocks) for line in fold.add(rank, 1, block.split(), 0.0)]
    return [(",".join(map(str, line.ranks)), line.text) for line in shown + fold.rest()]


def test_equal_blocks_are_one() -> None:
    assert one_block_each(b"a b c", b"a b c", b"a b c") == [("0,1,2", b"a"), ("0,1,2", b"b"), ("0,1,2", b"c")]


def test_ranks_that_differ_in_one_line_share_the_rest() -> None:
    assert one_block_each(b"a x b c", b"a y b c") == [
        ("0,1", b"a"),
        ("0", b"x"),
        ("1", b"y"),
        ("0,1", b"b"),
        ("0,1", b"c"),
    ]


def test_a_line_of_its_own_at_first_does_not_keep_a_rank_from_the_others() -> None:
    greeted = one_block_each(b"i0 load go", b"i1 load go", b"i2 load go")
    assert greeted == [("0", b"i0"), ("1", b"i1"), ("2", b"i2"), ("0,1,2", b"load"), ("0,1,2", b"go")]


def test_lines_in_another_order_are_not_folded() -> None:
    assert one_block_each(b"a b", b"b a") == [("0", b"a"), ("0,1", b"b"), ("1", b"a")]


def test_lines_that_differ_only_in_numbers() -> None:
    assert one_block_each(b"step:1 loss=0.71", b"step:1 loss=-2e-3", b"step:1 loss=nan", numbers=True) == [
        ("0,1,2", b"step:1"),
        ("0,1", "loss=-2e-3…0.71".encode()),
        ("2", b"loss=nan"),
    ]


@pytest.mark.parametrize(
    ("texts", "one"),
    [
        ([b"rank 3 of 8", b"rank 12 of 8", b"rank 4 of 8"], "rank 3…12 of 8"),
        ([b"cuda:0", b"cuda:7"], "cuda:0…7"),
        ([b"a-1 1-2", b"a-2 1-3"], "a-1…2 1-2…3"),
        ([b"-1 (-4)", b"1 (-3)"], "-1…1 (-4…-3)"),
        ([b"no number", b"no number"], "no number"),
        ([b"1.0", b"1.00"], "1.0"),
    ],
)
def test_the_smallest_and_the_largest_number_stand_for_all(texts: list[bytes], one: str) -> None:
    assert merged(texts).decode() == one


def test_stdout_and_stderr_are_not_mixed() -> None:
    fold = Fold(2)
    shown = fold.add(0, 1, [b"x"], 0.0) + fold.add(1, 2, [b"x"], 0.0) + fold.rest()
    assert [(line.stream, line.ranks) for line in shown] == [(1, (0,)), (2, (1,))]


def test_a_line_of_all_ranks_waits_for_nobody_and_others_until_they_are_due() -> None:
    fold = Fold(2)
    assert fold.add(0, 1, [b"x", b"y"], 1.0) == []
    assert fold.add(1, 1, [b"x"], 1.01) == [FoldedLine(1, (0, 1), b"x")]
    assert fold.deadline == 1.0 + HOLD_SECONDS
    assert fold.tick(1.04) == []
    assert fold.tick(1.0 + HOLD_SECONDS) == [FoldedLine(1, (0,), b"y")]
    assert fold.add(1, 1, [b"y"], 1.1) == []
    assert fold.rest() == [FoldedLine(1, (1,), b"y")]
    assert fold.deadline is None


def test_a_rank_that_prints_more_than_anybody_reads_is_not_held() -> None:
    device = folding(2)
    own, other = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    flood = b"".join(b"%d\n" % number for number in range(MOST_LINES_A_SECOND * 2 // 3))
    assert device.feed(other, b"quiet\n", 5.0) == []
    assert device.feed(own, flood, 5.0) == []
    assert device.tick(5.01) == []
    shown = device.feed(own, flood, 5.01) + device.feed(own, b"end\n", 5.9)
    lines = [*flood.split(), *flood.split(), b"end"]
    assert b"".join(data for _, data in shown) == b"[1] quiet\n" + b"".join(b"[0] %s\n" % line for line in lines)
    assert device.feed(own, b"in the next second\n", 6.0) == []


def test_a_prompt_comes_after_all_that_is_held() -> None:
    device = folding(2, 80)
    one, two = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    device.feed(one, b"hello\nname? ", 1.0)
    device.feed(two, b"hello\nwaits\n", 1.0 + QUIET_SECONDS_TERMINAL - 0.01)
    shown = b"".join(data for _, data in device.tick(1.0 + QUIET_SECONDS_TERMINAL))
    assert shown == b"[1] waits\n[0] name? "


def test_notes_and_bars_come_after_all_that_is_held() -> None:
    device = folding(2)
    one, two = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    device.feed(one, b"a\n", 1.0)
    assert device.note(b"launchpad: note", 2) == [(1, b"[0] a\n"), (2, b"launchpad: note\n")]
    device.feed(one, b"b\n", 1.0)
    device.feed(two, b"c\n", 1.0)
    shown = device.feed(two, b"10%\r20%\n", 1.0)
    assert shown == [(1, b"[0] b\n"), (1, b"[1] c\n"), (1, b"[1] 10%\r20%\n")]
    assert device.close([one, two]) == []


def test_many_moves_do_not_lose_the_order() -> None:
    """Each rank's own line is moved in front of the one that all share: the numbers between two rows run out."""
    fold = Fold(301)
    for rank in range(300):
        fold.add(rank, 1, [b"own %d" % rank, b"shared"], 0.0)
    assert [line.text for line in fold.rest()] == [*(b"own %d" % rank for rank in range(300)), b"shared"]


def test_what_was_fed_is_done_when_its_lines_are_shown() -> None:
    device = folding(2)
    one, two = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    for own, data, now in ((one, b"a\nb\n", 1.0), (two, b"c\n", 1.01), (two, b"d\n", 1.02), (one, b"c\n", 1.02)):
        device.feed(own, data, now)
        device.keep(data)
    assert device.done() == [b"a\nb\n", b"c\n"]  # c was everybody's
    device.tick(1.02 + HOLD_SECONDS)
    assert device.done() == [b"d\n", b"c\n"]  # what came at the same time as d is only now known to be shown


# The command.

# Each round begins on all ranks at the same moment: when the last one is there.
ROUNDS = 30
TOGETHER = (
    "import os, sys, time\nrank, size = (int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE'))\n"
    "def together(number):\n"
    "    open(f'here{number}-{rank}', 'w').close()\n"
    "    while not all(os.path.exists(f'here{number}-{one}') for one in range(size)): time.sleep(0.001)\n"
    f"for number in range({ROUNDS}):\n    together(number)\n"
)


def test_a_traceback_that_is_equal_on_all_ranks_is_one(launchpad: Launchpad) -> None:
    """Of several at least one: a busy machine may hold up a rank for more than 50 ms."""
    (launchpad.folder / "fails.py").write_text(
        f"import traceback\ndef f(n): return f(n - 1) if n else 1 / 0\n{TOGETHER}"
        "    try: f(3)\n    except ZeroDivisionError: traceback.print_exc()\n"
    )
    plain = by_rank(launchpad.run("run", "fails.py").stderr.encode())[0]
    for path in launchpad.folder.glob("here*"):
        path.unlink()
    shown = launchpad.run("run", "-n", 3, "--fold", "equal", "fails.py").stderr
    assert all(lines == (plain if rank < 3 else []) for rank, lines in by_rank(shown.encode()).items())
    one = b"".join(b"[0-2] %s\n" % line for line in plain[: len(plain) // ROUNDS])
    assert one.startswith(b"[0-2] Traceback (most recent call last):\n")
    assert one in shown.encode()


def test_lines_are_folded_where_it_is_asked_for_and_nowhere_else(launchpad: Launchpad) -> None:
    script = 'echo ready; test $RANK != 2 || echo own; echo "loss 0.7$RANK" >&2'
    plain = launchpad.run("run", "-n", 5, "sh", "-c", script)
    assert sorted(plain.stdout.splitlines()) == sorted([*(f"[{rank}] ready" for rank in range(5)), "[2] own"])
    for choice in ("equal", "numbers"):
        done = launchpad.run("run", "-n", 5, "--fold", choice, "sh", "-c", script)
        assert done.returncode == 0
        found = by_rank(done.stdout.encode())
        assert found[2] == [b"ready", b"own"]
        assert all(found[rank] == [b"ready"] for rank in (0, 1, 3, 4))
        assert all(len(lines) == (rank < 5) for rank, lines in by_rank(done.stderr.encode()).items())
        if choice == "equal":
            assert sorted(done.stderr.splitlines()) == [f"[{rank}] loss 0.7{rank}" for rank in range(5)]


@pytest.mark.parametrize(("ranks", "words", "folds"), [(4, (), True), (3, (), False), (4, ("--fold", "never"), False)])
def test_on_a_terminal_lines_are_folded_from_four_ranks_on(
    launchpad: Launchpad, terminal: Start, ranks: int, words: tuple[str, ...], folds: bool
) -> None:
    (launchpad.folder / "says.py").write_text(f"{TOGETHER}    print('ready', flush=True)\n")
    one = terminal("run", "-n", ranks, *words, "says.py")
    shown = one.rest().replace("\r\n", "\n")
    assert one.end() == 0
    assert ("\x1b[0;1m[" in shown) == folds
    found = by_rank(re.sub(r"\x1b\[[0-9;]*m", "", shown).encode())
    assert all(lines == [b"ready"] * (ROUNDS if rank < ranks else 0) for rank, lines in found.items())


def test_a_flood_is_shown_whole(launchpad: Launchpad) -> None:
    want = launchpad.run("run", "-n", 4, "flood.py", 20_000, "both")
    done = launchpad.run("run", "-n", 4, "--fold", "equal", "flood.py", 20_000, "both")
    assert done.returncode == 0
    for plain, folded in ((want.stdout, done.stdout), (want.stderr, done.stderr)):
        assert by_rank(plain.encode()) == by_rank(folded.encode())


def test_a_paused_reader_holds_up_ranks_whose_lines_are_folded(launchpad: Launchpad) -> None:
    """Memory stays bounded, and the job can still be ended."""
    process = launchpad.start("run", "-n", 2, "--fold", "equal", "sh", "-c", "echo up >&2; exec yes words")
    assert process.stderr.readline() in (b"[0-1] up\n", b"[0] up\n", b"[1] up\n")
    wait_until_blocked(process, "yes")
    assert memory_of(process) < 100 << 20
    process.send_signal(signal.SIGINT)
    while b"sent SIGINT to ranks 0-1" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_attach_folds_by_the_times_at_which_lines_were_written(launchpad: Launchpad) -> None:
    """What was written together is one line, however late it is looked at; what was not isn't."""
    (launchpad.folder / "turns.py").write_text(
        f"{TOGETHER}    print('together', flush=True)\n"
        "while rank and not os.path.exists('apart'): time.sleep(0.01)\n"
        "if rank: time.sleep(0.3)\nprint('apart', flush=True)\nif not rank: open('apart', 'w').close()\n"
    )
    job = launchpad.run("run", "--detach", "-n", 2, "turns.py").stdout.strip()
    assert launchpad.run("wait", job).returncode == 0
    done = launchpad.run("attach", "--fold", "equal", job)
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["[0] apart", "[1] apart"]
    assert "[0-1] together" in lines
    assert all(found[:-1] == [b"together"] * ROUNDS for found in by_rank(done.stdout.encode()).values() if found)
    assert launchpad.run("attach", job).stdout.count("[0] together\n") == ROUNDS


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--detach",), "--fold says how output is shown, and --detach shows none; give it to launchpad attach"),
        (("--events", "-"), "--fold says how output is shown, and --events - shows none; leave one of them out"),
    ],
)
def test_folding_is_refused_where_nothing_is_shown(launchpad: Launchpad, words: tuple[str, ...], why: str) -> None:
    done = launchpad.run("run", "--fold", "equal", *words, "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {why}\n" in done.stderr
