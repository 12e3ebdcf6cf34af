"""Shared fixtures: `launchpad` as a user runs it, with a check after each test that nothing of it is left."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launchpad.image import WITH_OPTIMIZERS
from launchpad.job.hosts import ALLOCATION_VARIABLES

# pytest explains their assertions like those of tests, if it knows of them before they are imported.
pytest.register_assert_rewrite("tests.support")

from tests.support.command import Launchpad, kept_images  # noqa: E402

# nohup, and a shell's & without job control, ignore these signals, and the commands that we start would inherit that.
for _signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signum) == signal.SIG_IGN:
        signal.signal(_signum, signal.SIG_DFL)

# A batch allocation that the tests run in is not theirs to use.
for _name in ALLOCATION_VARIABLES & os.environ.keys():
    del os.environ[_name]

# Rewriting the assertions is three quarters of the collection: what it makes is kept, whatever the environment says.
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What was collected stays to the end: looking for garbage in it took a fifth of a worker's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Of several workers, one rewrites a module's assertions, and the others find that done."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as module:
        with contextlib.suppress(OSError):  # NFS locks no file that is open for reading
            fcntl.flock(module, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _torchs_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Torch makes a folder for what it compiles as soon as there is an optimizer: one for all tests."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    # What g++ is made to do takes half a minute else.
    os.environ |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


@pytest.fixture(scope="session")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launchpad]:
    """`launchpad warm` was typed: its images are for those who have its XDG_RUNTIME_DIR.

    That with torch has what optimizers import, too: the first program that makes one would have another image made.
    """
    options = ("--preload", WITH_OPTIMIZERS) if find_spec("torch") else ()
    with kept_images(tmp_path_factory.mktemp("keeper"), *options) as command:
        yield command


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder with a short path, as a user's would be: Unix socket paths are limited to 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="lp-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def launchpad(tmp_path: Path, scratch: Path) -> Iterator[Launchpad]:
    """The command, run in an empty folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    command = Launchpad(folder, scratch)
    yield command
    command.close()


@pytest.fixture
def from_image(launchpad: Launchpad, keeper: Launchpad) -> Launchpad:
    """The command forks its ranks from a kept image: for tests whose subject is not the start, which is then short."""
    launchpad.use_images(keeper)
    return launchpad
