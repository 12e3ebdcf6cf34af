"""The arithmetic of `launchpad bench`: fits, bandwidths and models; its messages and tables."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from pathlib import Path

import pytest

from launchpad.bench import operations, plot, tables
from launchpad.bench.display import BenchSink
from launchpad.bench.fit import fit
from launchpad.bench.messages import BenchRequest, LinkTiming, Row, Setting, Unavailable, from_line, to_line
from launchpad.bench.operations import FACTORS, OPERATIONS, bandwidths, predicted
from launchpad.errors import UsageError
from launchpad.protocol.events import STDERR, STDOUT, Output
from tests.support.needs import needs_torch


def has(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in modules)


needs_matplotlib = pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")

HAS_ALGORITHMS = (Path(operations.__file__).parents[1] / "collectives" / "algorithms.py").exists()
THERE = [name for name, one in OPERATIONS.items() if HAS_ALGORITHMS or not one.is_algorithm]

ROW = Row("all_reduce", "gloo", 4, 1 << 20, 1 << 18, "float32", 20, 1000.0, 900.0, 2000.0, 1.0, 1.5, 0)


# Arithmetic.


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 3e-4, 0.05])
@pytest.mark.parametrize("beta", [0.0, 1e-11, 1e-9, 4e-7])
@pytest.mark.parametrize("sizes", [[4, 8], [4, 4096, 1 << 20], [0, 1, 10, 10**9], [1 << n for n in range(2, 30, 3)]])
def test_a_fit_finds_the_line_that_made_the_points(alpha: float, beta: float, sizes: list[int]) -> None:
    points = [(size, alpha + beta * size) for size in sizes]
    found = fit(points)
    if len([seconds for _, seconds in points if seconds > 0]) < 2:
        assert found is None
        return
    assert found is not None
    for size, seconds in points:
        assert found.at(size) == pytest.approx(seconds, rel=1e-6, abs=1e-12)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_a_fit_by_hand() -> None:
    """Weights 1/t²: of 2 s and 4 s at one size, the best constant is where 1/2 and 1/4 of it are nearest to 1 each."""
    found = fit([(1, 2.0), (1, 4.0), (10**6, 2.0), (10**6, 4.0)])
    assert found is not None
    assert found.latency == pytest.approx((1 / 2 + 1 / 4) / (1 / 4 + 1 / 16))
    assert found.per_byte == pytest.approx(0, abs=1e-12)
    assert found.error == pytest.approx(math.sqrt(((2.4 / 2 - 1) ** 2 + (2.4 / 4 - 1) ** 2) / 2))


@pytest.mark.parametrize(
    "points",
    [[(4, 9.0), (1024, 1.0)], [(4, 5e-3), (64, 4e-3), (4096, 1e-3)], [(4, 1e-9), (8, 1.0), (16, 5.0)]],
)
def test_neither_parameter_is_negative(points: list[tuple[float, float]]) -> None:
    found = fit(points)
    assert found is not None
    assert found.latency >= 0
    assert found.per_byte >= 0
    nearby = [fit_error(points, found.latency * a, found.per_byte * b) for a, b in [(0.99, 1), (1.01, 1), (1, 0.99)]]
    assert fit_error(points, found.latency, found.per_byte) <= min(nearby) + 1e-9


def fit_error(points: list[tuple[float, float]], latency: float, per_byte: float) -> float:
    return sum(((latency + per_byte * size - seconds) / seconds) ** 2 for size, seconds in points)


@pytest.mark.parametrize("points", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)], [(4, 0.0), (8, 1.0)]])
def test_one_size_makes_no_line(points: list[tuple[float, float]]) -> None:
    assert fit(points) is None


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("gather", 2, 0.5),
        ("scatter", 2, 0.5),
        ("broadcast", 7, 1.0),
        ("reduce", 7, 1.0),
        ("send_recv", 7, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(kind: operations.Kind, ranks: int, factor: float) -> None:
    assert bandwidths(kind, ranks, 3 * 10**9, 2.0) == (1.5, 1.5 * factor)


def test_every_operation_has_a_factor() -> None:
    assert {one.kind for one in OPERATIONS.values()} <= FACTORS.keys()


@pytest.mark.parametrize(
    ("name", "ranks", "seconds"),
    [
        ("ring_all_reduce", 4, 3 * (10 + 8 * 2 + 8 * 3)),
        ("chunked_ring_all_reduce", 4, 6 * 10 + 1.5 * 8 * 2 + 0.75 * 8 * 3),
        ("recursive_doubling_all_reduce", 8, 3 * (10 + 8 * 2 + 8 * 3)),
        ("recursive_doubling_all_reduce", 5, 4 * (10 + 8 * 2) + 3 * 8 * 3),
        ("tree_broadcast", 5, 3 * (10 + 8 * 2)),
        ("bruck_all_gather", 4, 2 * 10 + 0.75 * 8 * 2),
    ],
)
def test_the_models_are_the_textbooks(name: str, ranks: int, seconds: float) -> None:
    model = OPERATIONS[name].model
    assert model is not None
    assert predicted(model, ranks, 8, (10, 2, 3)) == seconds


# What travels, and what is shown.


def test_messages_come_back_as_they_were() -> None:
    messages = [
        BenchRequest("gloo", ("all_reduce",), (4, 8), "float32", 1.5, ("a", "b")),
        Setting("gloo", 4, ("a",), (4,), (2,), "float32", "2.13", "gloo", 7, {"nccl": "no GPU"}),
        ROW,
        LinkTiming("gloo", "a", "b", 12.5, 0.8),
        Unavailable("mpi", 'no "mpi4py"'),
    ]
    assert [from_line(to_line(message)) for message in messages] == messages
    for line in ("", "{}", "[1]", '{"is": "Row"}', '{"is": "Nothing"}', "all is well"):
        with pytest.raises(ValueError):
            from_line(line)


def test_the_sink_puts_pieces_of_lines_together() -> None:
    taken: list[object] = []
    strays: list[bytes] = []
    sink = BenchSink(taken.append, strays.append)
    data = (to_line(ROW) + "\nhello\n").encode() * 3
    for start in range(0, len(data), 7):
        assert not sink.on(Output(0, 0, STDOUT, data[start : start + 7]))
        sink.on(Output(0, 1, STDERR, b"a warning\n"))
    assert taken == [ROW] * 3
    assert strays == [b"hello"] * 3


def test_the_link_matrix() -> None:
    links = [
        LinkTiming("gloo", "a", "a", 10, 4),
        LinkTiming("gloo", "a", "b", 50, 1.25),
        LinkTiming("gloo", "b", "b", 11, 5),
    ]
    _, header, first, second = tables.link_matrix(links)
    assert header.split() == ["a", "b"]
    assert re.split("  +", first) == ["a", "10.0 µs, 4.00 GB/s", "50.0 µs"]
    assert re.split("  +", second) == ["b", "1.25 GB/s", "11.0 µs, 5.00 GB/s"]
    assert tables.link_matrix([]) == []


def test_a_row() -> None:
    assert tables.row(ROW).split() == "all_reduce 1 MiB 262144 20 1000 900.0 2000 1.00 1.50 yes".split()
    wrong = Row(**{**vars(ROW), "wrong": 17, "model_us": 12.34})
    assert tables.row(wrong).split()[-3:] == ["17", "WRONG", "12.3"]
    assert "can't be done: no such thing" in tables.row(Row(**{**vars(ROW), "error": "no such thing"}))


@pytest.mark.parametrize(
    ("size", "words"), [(4, "4 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (8 << 20, "8 MiB"), (1 << 30, "1 GiB")]
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert tables.size_in_words(size) == words


@needs_matplotlib
def test_a_plot_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--plot .*nothing: Format .* ending in .png"):
        plot.draw([ROW], str(tmp_path / "x.nothing"))
    with pytest.raises(UsageError, match="No such file or directory"):
        plot.draw([ROW], str(tmp_path / "missing" / "x.png"))


# The ranks' part.


@needs_torch
@pytest.mark.parametrize("count", range(2, 10))
def test_every_pair_sends_once_and_nobody_twice_in_a_round(count: int) -> None:
    from launchpad.bench.measure import plan_links, rounds

    found = rounds(range(count))
    assert sorted(pair for one in found for pair in one) == list(itertools.combinations(range(count), 2))
    for one in found:
        assert len({member for pair in one for member in pair}) == 2 * len(one)
    assert len(found) == count - 1 + count % 2
    assert all(len(one) == 1 for one in plan_links([range(count)]))
    between = plan_links([[2 * node, 2 * node + 1] for node in range(count)])
    assert between[0] == [(2 * node, 2 * node + 1) for node in range(count)]
    assert sum(map(len, between)) == count + math.comb(count, 2)
