"""The groups that a rank knows of, for its stacks and for who is slow."""

from __future__ import annotations

from tests.support.command import Launchpad
from tests.support.needs import needs_torch

SHOW = """
import torch.distributed as dist
from launchpad.rank import collective_times, stack_server

dist.init_process_group("gloo")
dist.new_group([0])
groups = stack_server.collectives(True)["groups"]
print({name: ranks for name, (_, ranks) in groups.items()}, collective_times._sizes()["0"])
"""


@needs_torch
def test_a_rank_that_is_in_no_later_group_still_tells_its_own(launchpad: Launchpad) -> None:
    (launchpad.folder / "show.py").write_text(SHOW)
    done = launchpad.run("run", "-n", 2, "show.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] {'0': [[0, 1, 1]], '1': [[0, 0, 1]]} 2",
        "[1] {'0': [[0, 1, 1]]} 2",
    ]
