"""What pytest loads at its start: marks, fixtures and hooks. Everything else waits for a collected test with a mark."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from launchpad.testing import collected

if TYPE_CHECKING:
    from launchpad.testing.runner import TestRunner

# None: this process is not pytest's own, but forked from it.
_RUNNER: pytest.StashKey[TestRunner | None] = collected.RUNNER
_LIMIT: pytest.StashKey[float | None] = pytest.StashKey()

_MARKS = (
    "ranks(n, ..., timeout=None): run the test on n ranks, each a process forked from one that has collected it; for "
    "several numbers once on each; timeout in seconds (launchpad help pytest)",
    "parallel(nprocs=3): the same with MPI_COMM_WORLD, spelled as in mpi-pytest",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("launchpad", "tests on several ranks (launchpad)")
    group.addoption(
        "--ranks-backend",
        choices=("gloo", "mpi", "nccl"),
        help="the frontend of the process groups of tests marked with ranks (default: nccl too if each rank has a GPU, "
        "else gloo)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKS:
        config.addinivalue_line("markers", line)
    if config.getoption("ranks_backend") == "mpi":
        from importlib.util import find_spec

        from launchpad.rank import mpi_init
        from launchpad.testing import worlds

        if find_spec("mpi4py") is None:
            raise pytest.UsageError("--ranks-backend mpi: there is no mpi4py here; pip install mpi4py mpich")
        if problem := worlds.why_not():
            raise pytest.UsageError(f"--ranks-backend mpi: {problem}")
        mpi_init.hold()  # a test module that imports mpi4py.MPI must not join an MPI world before the fork


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = collected.mark_of(metafunc.definition)
    if mark is not None and len(mark.sizes) > 1:
        metafunc.fixturenames.append(collected.SIZE)
        metafunc.parametrize(collected.SIZE, mark.sizes, ids=mark.ids, scope="function")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    """Fork the process that the ranks come from before any test has run, and end it when all have."""
    marked = [item for item in getattr(session, "items", ()) if collected.is_marked(item)]
    option = session.config.option
    stops = session.testsfailed and not option.continue_on_collection_errors
    if not marked or option.collectonly or stops:
        return (yield)
    from launchpad.testing.runner import TestRunner

    runner = session.config.stash[_RUNNER] = TestRunner(session, marked)
    try:
        return (yield)
    finally:
        runner.close()
        del session.config.stash[_RUNNER]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    runner = item.config.stash.get(_RUNNER, None)
    if runner is None or not collected.is_marked(item):
        return None
    return runner.run(item, nextitem, item.stash.get(_LIMIT, None))


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout: the ranks have this long. Its own ways end all of pytest, or don't interrupt a rank in C++."""
    if not collected.is_marked(item):
        return None
    if item.config.stash.get(_RUNNER, None) is not None:
        item.stash[_LIMIT] = settings.timeout
    elif settings.func_only:
        from launchpad.testing import member

        member.limit(settings.timeout)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """pytest-timeout: the time of a rank's call no longer counts."""
    if not collected.is_marked(item):
        return None
    if item.config.stash.get(_RUNNER, None) is None:
        from launchpad.testing import member

        member.limit(None)
    return True


def _place(name: str, request: pytest.FixtureRequest) -> int:
    if request.config.stash.get(_RUNNER, 0) is not None or not _has_rank():
        pytest.fail(
            f"the fixture {request.fixturename!r} has a value only in a rank: mark the test with @pytest.mark.ranks(2)",
            pytrace=False,
        )
    return int(os.environ[name])


def _has_rank() -> bool:
    member = sys.modules.get("launchpad.testing.member")
    return member is not None and member.is_rank()


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """This process's rank, 0 … world_size - 1."""
    return _place("RANK", request)


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that run this test."""
    return _place("WORLD_SIZE", request)


@pytest.fixture(scope="session")
def process_group(request: pytest.FixtureRequest) -> Generator[Any]:
    """torch.distributed's default process group of all ranks, over --ranks-backend."""
    _place("RANK", request)
    from launchpad.testing import group

    yield group.begin()
    group.end()
