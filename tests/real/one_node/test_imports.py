"""What head, agent and ranks load when they start, and no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import launchpad
from launchpad.protocol.events import JobPlanned
from launchpad.record import job_store
from launchpad.record.liveness import own_process
from tests.support.command import Launchpad
from tests.support.imports import loaded

ROOT = Path(launchpad.__file__).parent

# What a run imports before it asks for an agent that is forked from a kept image, and then.
BEFORE = "import launchpad.cli.entry, launchpad.cli.main, launchpad.cli.run"
AFTER = "import launchpad.head.bringup, launchpad.runner.nodes, launchpad.runner.supervise"


def test_a_plain_run_loads_only_what_it_needs() -> None:
    """Each of these costs milliseconds before the first rank starts."""
    heavy = {"torch", "paramiko", "rich", "psutil", "numpy", "subprocess", "asyncio", "logging", "tempfile", "socket"}
    head = loaded(f"{BEFORE}\n{AFTER}") - loaded("")  # an editable install has Python load some at its start
    heavy |= {"ipaddress", "shutil", "dataclasses", "difflib", "fnmatch", "glob", "termios", "textwrap"}
    assert not head & heavy
    # What only some jobs need: some parts of the head, a batch allocation, a verdict, stacks.
    late = {"head.mpi_worlds", "head.stall", "job.mpi", "job.allocation", "job.binding", "job.slurm"}
    late |= {f"head.{name}" for name in ("debug_clients", "injection", "mpi_service", "stdin_forwarder", "stop_before")}
    late |= {"runner.allocation", "runner.slurm"}
    late |= {f"diagnosis.{name}" for name in ("verdict", "verdict_text", "stack_summary")}
    assert not head & {f"launchpad.{name}" for name in late}


def test_a_run_asks_for_its_agent_before_it_loads_the_rest() -> None:
    """An agent that is forked from a kept image comes up while the head imports what only the ranks need."""
    rest = {"launchpad.console.console", "launchpad.job.plan", "launchpad.runner.nodes", "launchpad.runner.supervise"}
    rest |= {"launchpad.head.planner", "launchpad.head.supervisor", "dataclasses"}
    assert not loaded(BEFORE) & rest


def test_a_job_that_goes_well_loads_neither_psutil_nor_rich(launchpad: Launchpad) -> None:
    """Also where it removes the records of old jobs, which are seen by their locks to be over."""
    jobs = launchpad.state / "launchpad" / "jobs"
    for number in range(job_store.MOST_JOBS + job_store.SLACK):
        folder = jobs / f"{number:08x}"
        folder.mkdir(parents=True)
        first = JobPlanned(0, 0.0, "", 1, "", [], "", [], {}, 0.0, "", *own_process())
        (folder / "events.jsonl").write_text(json.dumps({"event": "JobPlanned", **first._asdict()}) + "\n")
    (launchpad.folder / "p.py").touch()
    launchpad.environ["PYTHONPROFILEIMPORTTIME"] = "1"
    done = launchpad.run("run", "-n", 2, "p.py")
    assert done.returncode == 0
    assert len(list(jobs.iterdir())) == job_store.MOST_JOBS
    seen = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "click" in seen
    assert not seen & {"psutil", "rich", "paramiko"}


def test_the_agent_loads_only_what_it_needs() -> None:
    heavy = {"subprocess", "asyncio", "logging", "tempfile", "dataclasses", "inspect", "pathlib", "shutil", "threading"}
    heavy |= {"zlib"}
    code = "import site; before = set(__import__('sys').modules)\nimport launchpad.agent.loop, launchpad.agent.guard"
    assert not (loaded(code) - loaded("import site")) & heavy


def test_a_bridge_to_a_held_agent_loads_what_is_built_in() -> None:
    """A head that comes back waits for one on each host."""
    text = (ROOT / "agent" / "bridge.py").read_text()
    code = f"import io, os, sys; before = {{*sys.modules}}; exec({text!r}); print(*{{*sys.modules}} - before)"
    found = subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True, timeout=60)
    assert set(found.split()) <= {"_signal", "_socket", "select"}


def test_an_executed_rank_loads_only_what_it_needs(tmp_path: Path) -> None:
    """Every Python rank pays for it; what calls, MPI and failures need is loaded for them."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.modules)\n")
    plain, rank = (
        set(subprocess.check_output([sys.executable, *words, script], text=True, timeout=60).split())
        for words in ((), (ROOT / "rank" / "executed.py",))
    )
    own = {"_launchpad", "_launchpad.rank"}
    own |= {
        f"_launchpad.rank.{name}" for name in ("exceptions", "import_watch", "stack_server", "program", "command_line")
    }
    # atexit is built into the interpreter.
    assert rank - plain <= own | {"__future__", "_ctypes", "atexit", "faulthandler", "fcntl"}


def test_what_every_job_loads_makes_its_named_tuples_cheaply() -> None:
    """One of typing's takes ten times as long, in head and agent, before the first rank starts."""
    more = "import launchpad.image.keeper_link, launchpad.head.mpi_worlds, launchpad.job.mpi, launchpad.protocol.stacks"
    agent = "import launchpad.agent.guard, launchpad.agent.loop, launchpad.agent.mpi.pmi"
    for name in loaded("\n".join([BEFORE, AFTER, more, agent])):
        path = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name.startswith("launchpad.") and path.exists() and "(NamedTuple):" in (text := path.read_text()):
            assert "named import" in text, name
