"""What becomes of a job under a torch whose inside is another one: names that launchpad uses there are gone.

An import hook in the ranks' interpreter renames them in torch's own source, so that torch itself goes on working.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from launchpad.rank import flight_recorder
from tests.support.command import Launchpad
from tests.support.needs import needs_torch

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "launchpad" / "manual" / "compatibility.md"

# Defined and used by torch's own Python code; by hand, as there they can be renamed.
IN_PYTHON = "_create_c10d_store _check_valid_timeout _get_default_store _world _new_process_group_helper _MPI_AVAILABLE"
# Of torch's C++ code, where they can only be removed.
IN_C = ("_dump_fr_trace", "_dump_nccl_trace")

OTHER_TORCH = f"""
import importlib.machinery, re, sys

NAMES = re.compile(rb"\\b(" + b"|".join({IN_PYTHON.encode()!r}.split()) + rb")\\b")

class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(NAMES.sub(rb"\\1_of_another_torch", self.get_data(path)), path, "exec", dont_inherit=True)

    def exec_module(self, module):
        super().exec_module(module)
        if module.__name__ == "torch.distributed":
            inside = sys.modules["torch._C._distributed_c10d"]
            for name in {IN_C!r}:
                if hasattr(inside, name):
                    delattr(inside, name)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[:2] != ["torch", "distributed"]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec

sys.meta_path.insert(0, Finder)
"""

FUNCTION = """
import sys
import torch
from launchpad import collectives as dist

def total():
    assert hasattr(torch.distributed.distributed_c10d, "_world_of_another_torch")
    tensor = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=group)
    print(tensor.tolist())
"""


@pytest.fixture
def other_torch(launchpad: Launchpad) -> Launchpad:
    """The ranks' torch has other names inside."""
    (launchpad.folder / "sitecustomize.py").write_text(OTHER_TORCH)
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    return launchpad


@needs_torch
def test_collectives_are_right_without_the_names(other_torch: Launchpad) -> None:
    (other_torch.folder / "job.py").write_text(FUNCTION)
    done = other_torch.run("run", "-n", 2, "--backend", "gloo", "--report", "job.html", "job.py:total")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[6.0, 6.0, 6.0]") == 2
    assert done.stderr == ""
    assert (other_torch.folder / "job.html").stat().st_size > 0


@needs_torch
def test_a_script_of_torchs_own_meets_without_the_names(other_torch: Launchpad) -> None:
    done = other_torch.run("run", "-n", 2, ROOT / "examples" / "all_reduce.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the sum of all ranks is [1.0, 1.0, 1.0]") == 2
    assert done.stderr == ""


@needs_torch
def test_a_hang_is_found_without_the_names(other_torch: Launchpad) -> None:
    (other_torch.folder / "hang.py").write_text(
        "import os, socket, threading, torch, torch.distributed as dist\n"
        # Once the store listens: torch tries to connect ever less often, which on a busy machine is a stall.
        "store = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "while os.environ['RANK'] == '1' and socket.socket().connect_ex(store): pass\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n"
        "    threading.Event().wait()\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    done = other_torch.run("run", "-n", 2, "--stall-timeout", 2, "hang.py")
    assert done.returncode == 124, done.stderr
    assert "hang.py:7" in done.stderr  # where rank 1 is
    assert "hang.py:8" in done.stderr


@needs_torch
def test_the_mpi_frontend_says_that_it_does_not_know_this_torch(other_torch: Launchpad) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    (other_torch.folder / "job.py").write_text(FUNCTION)
    done = other_torch.run("run", "-n", 2, "--backend", "mpi", "job.py:total")
    assert done.returncode == 2
    sentence = "the mpi frontend can't be used with torch"
    assert sentence in done.stderr, done.stderr
    assert "_new_process_group_helper is missing" in done.stderr


class Recorders:
    """Stands in for torch._C._distributed_c10d of a build with CUDA."""

    def __init__(self, hooked: bool) -> None:
        if hooked:
            self._dump_fr_trace = lambda *args: self._dump("".join(args[3:]) or "gloo")
        else:
            self._dump_fr_trace = lambda one, two, three: self._dump("gloo")  # type: ignore[misc,assignment]  # noqa: ARG005
        self._dump_nccl_trace = lambda *_: self._dump("legacy")

    @staticmethod
    def _dump(name: str) -> bytes:
        import pickle

        return pickle.dumps({"of": name})


class Cuda:
    """Stands in for torch.cuda."""

    def __init__(self, used: bool) -> None:
        self.is_initialized = lambda: used


@pytest.mark.parametrize(
    ("hooked", "used", "wanted"),
    [
        (False, False, ["gloo"]),
        (False, True, ["gloo", "legacy"]),
        (True, True, ["gloo", "legacy", "nccl", "nccl2", "nccl-lazy"]),
    ],
)
def test_nccls_flight_recorder_is_read_too(
    hooked: bool, used: bool, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", Recorders(hooked))
    monkeypatch.setitem(sys.modules, "torch.cuda", Cuda(used))
    assert [dumped["of"] for dumped in flight_recorder.dumps(True, False, False)] == wanted


def test_the_manual_names_all_that_is_used_of_torchs_inside() -> None:
    found = {name for path in sorted((ROOT / "launchpad").rglob("*.py")) for name in private_names(path)}
    table = PAGE.read_text().partition("## torch's inside")[2].partition("\n## ")[0]
    named = set(re.findall(r"\b_[A-Za-z]\w+", table))
    assert found <= named
    code = "".join(path.read_text() for path in (ROOT / "launchpad").rglob("*.py"))
    assert [name for name in sorted(named) if name not in code] == []


# Private names of Python's and of other packages.
OF_OTHERS = {
    *("_replace", "_fields", "_asdict", "_exit", "_getframe", "_current_frames", "_current_exceptions", "_shutdown"),
    *("_active", "_popen", "_children", "_pool", "_threads_queues", "_state"),
    *("_excepthook", "_run_exitfuncs", "_clear", "_run_module_as_main", "_registry", "_DummyThread", "_names"),
}
FOLDERS = {"collectives", "rank", "bench"}


def private_names(path: Path) -> set[str]:
    """The names of torch's that are not public, in code that runs beside torch."""
    text = path.read_text()
    if not FOLDERS & set(path.relative_to(ROOT / "launchpad").parts[:1]) or "torch" not in text:
        return set()
    tree = ast.parse(text)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {*(node.module or "").split("."), *(one.name for one in node.names)} - {"_C"}
        if isinstance(node, ast.Attribute) and node.attr != "_C" and rooted_in_torch(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            found |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
    return {name for name in found if re.match(r"_[A-Za-z]", str(name))} - own - OF_OTHERS


def rooted_in_torch(node: ast.expr) -> bool:
    """Whether this is a module of torch's, or a thing that is only there."""
    words = ast.unparse(node)
    return bool(re.match(r"(torch|dist|c10d|groups|rendezvous|module|world|cuda|profiler|group|_autograd)\b", words))
