"""What a program imports, as it is found before the program runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchpad.job.spec import Target
from launchpad.runner.imports import Found, look_through


def of(folder: Path, source: str, **others: str) -> Found:
    """What is found in a script with this source, and local modules beside it."""
    for name, text in {**others, "script": source}.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return look_through(Target("script", "script.py"), str(folder), {})


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import os, torch.nn as nn",
        "from torch import nn",
        "def main():\n    import torch\n",
        "try:\n    import torch\nexcept ImportError:\n    pass\n",
        "from torchvision import models",
        "from launchpad import collectives as dist",
        "from local import f",
        "import package.part",
        "from package import part",
        "from package.deep import g",
        "from package import (\n    nothing,  # yet\n    part,\n)",
    ],
)
def test_torch_is_found(tmp_path: Path, source: str) -> None:
    others = {"local": "from other import g", "other": "import torch"}
    others |= {
        "package__part": "from . import sub",
        "package__sub": "import torch",
        "package__deep": "from .sub import g",
    }
    assert of(tmp_path, source, **others) == Found(True, "")


@pytest.mark.parametrize(
    "source",
    [
        "print('torch')",
        "'''\nimport torch\n'''",
        "import torchless",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "import local",
        "def broken(:\nimport torch",
    ],
)
def test_torch_is_not_seen_where_it_is_not(tmp_path: Path, source: str) -> None:
    assert of(tmp_path, source, local="import json") == Found(False, "")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n", "script.py, line 2 sets OMP_NUM_THREADS"),
        ("import os\nos.environ.setdefault('TORCH_LOGS', '+dynamo')\nimport torch\n", "line 2 sets TORCH_LOGS"),
        ("import os\nos.environ.update({'A': '1', 'MKL_NUM_THREADS': '1'})\nimport torch\n", "line 2 sets MKL_NUM"),
        ("import os\nos.environ.update(KMP_AFFINITY='none')\nimport torch\n", "line 2 sets KMP_AFFINITY"),
        ("import os\nos.putenv('PYTORCH_JIT', '0')\nimport torch\n", "line 2 sets PYTORCH_JIT"),
        (
            "from os import environ\nfor k in 'ab': environ[k] = '1'\nimport torch\n",
            "line 2 sets a variable whose name",
        ),
        ("import config\nimport torch\n", "config.py, line 2 sets OMP_NUM_THREADS"),
        ("import torch, os\nos.environ['OMP_NUM_THREADS'] = '2'\n", ""),
        ("import os\nos.environ['MASTER_ADDR'] = 'localhost'\nimport torch\n", ""),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch\n", ""),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'])\nimport torch\n", ""),
    ],
)
def test_what_torch_is_to_find_at_its_import_is_named(tmp_path: Path, source: str, named: str) -> None:
    torch, why_not, _ = of(tmp_path, source, config="import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    assert torch
    assert named in why_not
    assert bool(named) == bool(why_not)


def test_a_module_target_is_looked_through(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("from . import model")
    (tmp_path / "package" / "model.py").write_text("import torch")
    assert look_through(Target("module", "package"), str(tmp_path), {}) == Found(True, "")
    assert look_through(Target("module", "package.model"), "/", {"PYTHONPATH": str(tmp_path)}) == Found(True, "")


@pytest.mark.parametrize(
    ("source", "optimizes"),
    [
        ("import torch\ntorch.optim.SGD([torch.ones(1)])\n", True),
        ("import torch\nfrom torch import nn, optim\n", True),
        ("from torch.optim import Adam\n", True),
        ("import torch.optim as optim\n", True),
        ("import torch, local\n", True),
        ("import torch\nprint(optim, torch.nn, 'torch.optim')\n", False),
        ("import torch, os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = 'c'\ntorch.optim.SGD\n", False),
        ("import torch, os\nos.environ['MASTER_ADDR'] = 'localhost'\ntorch.optim.SGD\n", True),
    ],
)
def test_optimizers_are_found(tmp_path: Path, source: str, optimizes: bool) -> None:
    assert of(tmp_path, source, local="from torch import optim\n") == Found(True, "", optimizes)
