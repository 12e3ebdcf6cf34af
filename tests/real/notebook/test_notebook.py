"""`%%ranks` and `launchpad.ranks` in a real notebook: an ipykernel, driven by `jupyter execute` and as Jupyter does."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launchpad.api import magic
from launchpad.errors import UsageError
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.needs import needs_torch

# Imported where they are used: that takes a while.
pytestmark = [
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("jupyter_client", "nbformat", "nbclient", "ipykernel")
    ),
    # Those of zmq and traitlets are theirs.
    pytest.mark.filterwarnings("default", "ignore:Unclosed socket:ResourceWarning"),
]


def transport(environ: dict[str, str]) -> dict[str, str]:
    """Sockets by name: Jupyter chooses TCP ports a second before the kernel binds them, and anybody may be first."""
    return {"transport": "ipc", "ip": f"{environ['JUPYTER_RUNTIME_DIR']}/kernel"}


@pytest.fixture
def jupyter(launchpad: Launchpad, tmp_path: Path, scratch: Path) -> Iterator[dict[str, str]]:
    """The test's environment, with folders of its own for Jupyter."""
    own = {name: str(tmp_path / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    runtime = scratch / "jupyter"  # a short path, for the sockets
    runtime.mkdir()
    own["JUPYTER_RUNTIME_DIR"] = str(runtime)
    yield {**launchpad.environ, **own, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    shutil.rmtree(runtime)


@pytest.fixture
def kernels(jupyter: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts this interpreter's kernel, in the test's own folders."""
    import jupyter_client

    for name in set(os.environ) - set(jupyter):
        monkeypatch.delenv(name)
    for name, value in jupyter.items():
        monkeypatch.setenv(name, value)
    manager = jupyter_client.KernelManager(kernel_name="python3", **transport(jupyter))
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    yield manager
    if manager.has_kernel:
        manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    manager.context.destroy(linger=0)
    del manager
    gc.collect()  # the clients' sockets, whose warnings must not reach other tests


def executed(notebook: Any, launchpad: Launchpad, environ: dict[str, str], *options: str) -> list[Any]:
    """The cells of a notebook after `jupyter execute`, a process of its own: zmq leaves descriptors in its process."""
    import nbformat

    path = launchpad.folder / "notebook.ipynb"
    nbformat.write(notebook, path)
    by = [f"--ConnectionFileMixin.{name}={value}" for name, value in transport(environ).items()]
    command = [Path(sys.executable).with_name("jupyter-execute"), "--inplace", "--kernel_name=python3", *by, *options]
    done = subprocess.run(
        [*command, path], env=environ, capture_output=True, text=True, timeout=4 * DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    cells: list[Any] = nbformat.read(path, as_version=4).cells
    return cells


def text_of(cell: Any) -> str:
    """What a cell shows, on stdout and stderr."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


CELLS = (
    "%load_ext launchpad",
    "%%ranks 2 --backend none\nimport os\nrank = int(os.environ['RANK'])\nsquare = rank ** 2\n"
    "print('in', rank)\nsquare",
    "%%ranks\nsquare += 10\nsquare",
    "ranks.run(lambda: (rank, square))",
    "def broken():\n    if rank: raise ValueError('in the cell')\nranks.run(broken)",
    "%%ranks\nfrom rich.progress import track\nfor _ in track(range(3), description='steps'): pass",
    "%ranks --restart\nranks.run(lambda: 'square' in globals())",
    "%%ranks --size 3\n1",
    "%ranks --close\n'ranks' in globals()",
    "%%ranks 2 --backend none\n1",  # the end of the kernel ends them
)


def test_cells_on_ranks(launchpad: Launchpad, jupyter: dict[str, str]) -> None:
    """What the ranks print is in the cell that made the call."""
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    cells = executed(notebook, launchpad, jupyter, "--allow-errors")
    assert sorted(text_of(cells[1]).splitlines()) == ["[0] 0", "[0] in 0", "[1] 1", "[1] in 1"]
    assert sorted(text_of(cells[2]).splitlines()) == ["[0] 10", "[1] 11"]
    assert cells[3].outputs[0].data["text/plain"] == "Results(((0, 10), (1, 11)))"
    (error,) = cells[4].outputs
    assert (error.ename, error.evalue) == ("ValueError", "in the cell")
    assert "if rank: raise ValueError" in "\n".join(error.traceback)
    assert text_of(cells[5]).count("100%") >= 2
    assert cells[6].outputs[-1].data["text/plain"] == "Results((False, False))"
    assert cells[7].outputs[-1].ename == "UsageError"
    assert cells[8].outputs[-1].data["text/plain"] == "False"
    wait_until(lambda: not launchpad.survivors(), "the kernel to be gone", show=launchpad.survivors)


def test_the_kernels_interrupt_ends_the_call_and_not_the_ranks(launchpad: Launchpad, kernels: Any) -> None:
    kernels.start_kernel(cwd=str(launchpad.folder))
    client = kernels.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE)
        shown: list[str] = []

        def take(message: Any) -> None:
            content, kind = message["content"], message["msg_type"]
            before = "".join(shown).count("waits")
            shown.append(content[{"stream": "text", "error": "ename"}[kind]] if kind in ("stream", "error") else "")
            if before < 2 == "".join(shown).count("waits"):  # once
                kernels.interrupt_kernel()

        def execute(code: str) -> str:
            shown.clear()
            client.execute_interactive(code, timeout=DEADLINE, output_hook=take)
            return "".join(shown)

        execute("import launchpad, os, time\nranks = launchpad.ranks(2, backend=None)\npids = ranks.run(os.getpid)")
        waits = "def waits():\n    print('waits', flush=True)\n    time.sleep(1000)\nranks.run(waits)"
        assert "KeyboardInterrupt" in execute(waits)
        assert execute("print(ranks.run(os.getpid) == pids)") == "True\n"
        pids = [int(word) for word in execute("print(*pids)").split()]
        os.kill(kernels.provisioner.pid, signal.SIGKILL)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the ranks to be gone")
    finally:
        client.stop_channels()
    wait_until(lambda: not [one for one in launchpad.survivors() if "ipykernel" not in one], "nothing to be left")


@needs_torch
def test_the_example_notebook(launchpad: Launchpad, jupyter: dict[str, str]) -> None:
    import nbformat

    path = Path(__file__).parents[3] / "examples" / "ranks.ipynb"
    cells = executed(nbformat.read(path, as_version=4), launchpad, jupyter)
    assert "[0] loss" in "".join(text_of(cell) for cell in cells if cell.cell_type == "code")


class Started:
    """Stands in for ranks."""

    closed = False
    gone = False
    restarts = 0

    def run(self, *words: object, **more: object) -> None:
        """Nothing runs."""

    def restart(self) -> None:
        """They are new ones."""
        self.restarts += 1

    def close(self) -> None:
        self.closed = True


def test_ranks_that_run_are_kept_unless_others_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magic, "ranks", lambda *_, **__: Started())
    shell: Any = SimpleNamespace(user_ns={})
    run = magic.RanksMagic(shell)
    for wrong in ("", "--backend none", "2 '"):
        with pytest.raises(UsageError, match="usage: %%ranks"):
            run(wrong)
    run("2 --backend none")
    first = shell.user_ns["ranks"]
    for same in ("", "2", "--backend none", "2 --backend none"):
        run(same)
        assert shell.user_ns["ranks"] is first
    with pytest.raises(UsageError, match="say how many ranks to start"):
        run("--backend gloo")
    assert (shell.user_ns["ranks"], first.closed) == (first, False)
    run("3")
    assert first.closed
    assert shell.user_ns["ranks"] is not first


def test_ranks_that_have_ended_are_started_again_if_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(magic, "ranks", lambda *_, **__: Started())
    shell: Any = SimpleNamespace(user_ns={})
    run = magic.RanksMagic(shell)
    run("2 --backend none")
    first = shell.user_ns["ranks"]
    first.gone = True
    run("")  # a cell that counts on what they held
    assert (first.restarts, capsys.readouterr().err) == (0, "")
    run("2 --backend none")
    assert first.restarts == 1
    assert "the ranks have ended; starting new ones" in capsys.readouterr().err
    assert shell.user_ns["ranks"] is first


@pytest.mark.parametrize(("name", "notes"), [("known", 1), ("unknown", 0)])
def test_a_name_that_only_the_notebook_has_is_explained(monkeypatch: pytest.MonkeyPatch, name: str, notes: int) -> None:
    class Raising(Started):
        def run(self, *_: object, **__: object) -> None:
            raise NameError(f"name {name!r} is not defined")

    monkeypatch.setattr(magic, "ranks", lambda *_, **__: Raising())
    compiler = SimpleNamespace(cache=lambda *_: "<cell>")
    shell: Any = SimpleNamespace(user_ns={"known": 1}, compile=compiler, execution_count=1)
    with pytest.raises(NameError) as caught:
        magic.RanksMagic(shell)("2", f"print({name})")
    found = [note for note in getattr(caught.value, "__notes__", []) if "namespace of their own" in note]
    assert len(found) == notes


def test_a_cell_has_no_future_of_ours() -> None:
    source = "class A:\n    x: int\nfound = A.__annotations__['x']\nfound"
    magic._runner()(source, "<cell>")
    assert vars(sys.modules["__main__"]).pop("found") is int
