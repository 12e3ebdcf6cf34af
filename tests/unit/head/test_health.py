"""head/health: what is wrong with a node, and how that is told."""

from __future__ import annotations

import pytest

from launchpad.head.health import Unwell, judged
from launchpad.protocol.events import HealthChecked
from launchpad.protocol.health import Folder, MemoryLeft


def test_doctor_judges_what_a_node_has_seen() -> None:
    memory = ("memory", list(MemoryLeft(1 << 34, 1 << 33, -1, 0.0)), "")
    assert judged(HealthChecked(0, "", False, [], [memory, ("gpus", [], "OSError: no")])) is None
    full = ("tmp", list(Folder("/tmp", "", 1000, 1 << 34, -1, False)), "")
    why = judged(HealthChecked(0, "", False, [], [memory, full]))
    assert why == Unwell("(launchpad doctor) has failed", ("/tmp, for temporary files, has 1 kB left",))
    for wrong in (("tmp", [1], ""), ("nothing", [], "")):
        with pytest.raises(ValueError, match=wrong[0]):
            judged(HealthChecked(0, "", False, [], [wrong]))  # type: ignore[list-item]


def test_it_is_told_on_one_line_or_with_what_it_said() -> None:
    why = Unwell("ended with exit code 3", ("looking", "GPU 3 is gone"))
    assert why.short == "its health check ended with exit code 3: GPU 3 is gone"
    assert str(why) == "its health check ended with exit code 3, and said:\n  looking\n  GPU 3 is gone"
    assert str(Unwell("was killed by SIGKILL")) == "its health check was killed by SIGKILL"
