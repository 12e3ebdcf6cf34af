"""The pytest plugin beside torch's own test cases: 100 tests on 2 ranks that each make a group and sum a tensor.

    python tests/bench/pytest_plugin.py [--tests 100] [--ranks 2] [--rounds 3]

Each contender is one run of pytest, timed from the command to its end; the rounds take turns. MultiProcessTestCase
starts the ranks of each test afresh, MultiProcContinuousTest keeps those of the class and their default group, so a
test makes a group beside that one. Their module needs `pip install expecttest`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEADLINE = 3600.0

PLUGIN = """
import pytest, torch
import torch.distributed as dist

@pytest.mark.ranks({ranks})
@pytest.mark.parametrize("number", range({tests}))
def test_sum(process_group, rank, number):
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert x[0] == {ranks}
"""

MULTI_PROCESS = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

def sum_up(self):
    store = dist.FileStore(self.file_name, self.world_size)
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert x[0] == {ranks}
    dist.destroy_process_group()

class TestSum(MultiProcessTestCase):
    @property
    def world_size(self):
        return {ranks}

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    for number in range({tests}):
        locals()[f"test_sum_{{number}}"] = sum_up
"""

CONTINUOUS = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

def sum_up(self):
    group = dist.new_group(range({ranks}), backend="gloo")
    x = torch.ones(1000)
    dist.all_reduce(x, group=group)
    assert x[0] == {ranks}
    dist.destroy_process_group(group)

class TestSum(MultiProcContinuousTest):
    world_size = {ranks}

    @classmethod
    def backend_str(cls):
        return "gloo"

    for number in range({tests}):
        locals()[f"test_sum_{{number}}"] = sum_up
"""

CONTENDERS = {
    "launchpad's plugin": PLUGIN,
    "MultiProcContinuousTest": CONTINUOUS,
    "MultiProcessTestCase": MULTI_PROCESS,
}


def seconds(code: str, tests: int) -> float:
    """From the command to its end. Raises RuntimeError unless all tests have passed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_it.py").write_text(code)
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
        start = time.monotonic()
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False)
        took = time.monotonic() - start
    if done.returncode != 0 or f"{tests} passed" not in done.stdout:
        raise RuntimeError(f"{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return took


def main() -> None:
    """Time all contenders, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    figures: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(given.rounds):
        for name, code in CONTENDERS.items():
            figures[name].append(seconds(code.format(tests=given.tests, ranks=given.ranks), given.tests))
            print(f"{name}: {figures[name][-1]:.2f} s", file=sys.stderr, flush=True)
    ours = statistics.median(figures["launchpad's plugin"])
    print(f"{given.tests} tests on {given.ranks} ranks, median of {given.rounds}")
    for name, several in figures.items():
        median = statistics.median(several)
        print(f"{name:26} {median:8.2f} s  {median / ours:6.1f} ×  ({min(several):.2f} - {max(several):.2f})")


if __name__ == "__main__":
    main()
