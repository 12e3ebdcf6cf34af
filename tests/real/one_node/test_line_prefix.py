"""--log-line-prefix-template: what stands before each line, wherever lines are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad.console import prefix
from launchpad.protocol.events import JobPlanned, Restarted
from launchpad.record.console_record import ConsoleEntry
from launchpad.record.event_lines import line_of
from launchpad.record.log_dir import Filter
from tests.support.command import DEADLINE, Launchpad
from tests.support.detach import write
from tests.support.fold import ROUNDS, TOGETHER
from tests.support.hosts import Hosts
from tests.support.hosts import hosts as hosts
from tests.support.joined import c10d, ends
from tests.support.line_prefix import BY_HOST, HERE, PIECES
from tests.support.logs import JOB, logs, record
from tests.support.needs import needs_torch
from tests.support.ports import free_port
from tests.support.sshd import needs_sshd
from tests.support.terminal import COLUMNS, WIDE_BAR, Start, states_of_wide_bar
from tests.support.terminal import terminal as terminal

OPTION = prefix.OPTION


# Where it comes from.


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("option", "pet", "other", "shown"),
    [
        ("o$rank ", "p$rank ", "t$rank ", "o0 x"),
        (None, "p$rank ", "t$rank ", "p0 x"),
        (None, None, "t$rank ", "t0 x"),
        (None, "", "t$rank ", "t0 x"),
        ("", "p$rank ", "t$rank ", "t0 x"),  # as torchrun does
        ("", None, None, "[0] x"),
    ],
)
def test_the_option_and_torchruns_variables(
    launchpad: Launchpad, option: str | None, pet: str | None, other: str | None, shown: str
) -> None:
    given = {"PET_LOG_LINE_PREFIX_TEMPLATE": pet, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": other}
    launchpad.environ |= {name: value for name, value in given.items() if value is not None}
    words = [] if option is None else [f"{OPTION}={option}"]
    assert lines(launchpad.run("run", *words, "echo", "x")) == [shown]


def test_in_a_job_file_and_with_underscores(launchpad: Launchpad) -> None:
    (launchpad.folder / "job.toml").write_text('target = ["echo", "x"]\nlog-line-prefix-template = "f$rank "\n')
    assert lines(launchpad.run("run", "--config", "job.toml")) == ["f0 x"]
    assert lines(launchpad.run("run", "--log_line_prefix_template", "u$rank ", "echo", "x")) == ["u0 x"]


@pytest.mark.parametrize("mark", ["\n", "\r", "\x07"])
def test_what_can_not_stand_before_a_line_is_refused(launchpad: Launchpad, mark: str) -> None:
    done = launchpad.run("run", OPTION, f"$rank{mark}", "echo", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"launchpad: error: {OPTION}: it contains {mark!r}, which can't stand before a line; leave it out\n"
    )
    launchpad.environ[prefix.VARIABLE] = f"$rank{mark}"
    done = launchpad.run("run", "echo", "x")
    assert done.returncode == 2
    assert done.stderr.startswith(f"launchpad: error: {prefix.VARIABLE}: it contains {mark!r}")


def test_what_is_no_macro_is_shown_as_it_is_and_said(launchpad: Launchpad) -> None:
    done = launchpad.run("run", OPTION, "${host}:$rank: ", "echo", "x")
    assert (done.returncode, done.stdout) == (0, "${host}:0: x\n")
    assert done.stderr == (
        f"launchpad: {OPTION}: there is no macro host, so it is shown as it is; there are "
        "${role_name} ${local_rank} ${rank} ${hostname}\n"
    )
    assert lines(launchpad.run("run", "-q", OPTION, "${host}:$rank: ", "echo", "x")) == ["${host}:0: x"]


def test_bytes_that_are_not_text_pass_through(launchpad: Launchpad) -> None:
    assert lines(launchpad.run("run", OPTION, "\udcff$rank ", "echo", "x")) == ["\udcff0 x"]


@needs_torch
def test_torchrun_shows_the_same(launchpad: Launchpad) -> None:
    """What it has long had; ${hostname} is new in 2.15."""
    launchpad.environ[prefix.VARIABLE] = "$rank|${local_rank}|${role_name}|$$|$(x)|${nope}|$RANK| "
    (launchpad.folder / "says.py").write_text("import sys; print('out'); print('err', file=sys.stderr)\n")
    words = ["--standalone", "--nproc-per-node=2", "--role=eval", "--tee=3", "says.py"]
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=launchpad.folder,
        env={**launchpad.environ, "TMPDIR": str(launchpad.folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE,
    )
    ours = launchpad.run("run", *words)
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines()) != []
    assert sorted(ours.stderr.splitlines()) == sorted(line for line in theirs.stderr.splitlines() if "| err" in line)


# Where lines are shown.


def test_folded_lines(launchpad: Launchpad) -> None:
    (launchpad.folder / "says.py").write_text(f"{TOGETHER}    print('ready', flush=True)\n")
    shown = lines(launchpad.run("run", "-n", 3, "--fold", "equal", OPTION, BY_HOST, "says.py"))
    assert f"{HERE}:0-2: ready" in shown
    assert all(re.fullmatch(rf"{HERE}:\d[-,\d]*: ready", line) for line in shown)
    for path in launchpad.folder.glob("here*"):
        path.unlink()
    shown = lines(launchpad.run("run", "-n", 3, "--fold", "equal", OPTION, "> ", "says.py"))
    assert set(shown) == {"> ready"}
    assert ROUNDS <= len(shown) < 3 * ROUNDS


def test_on_a_terminal_prefixes_are_coloured_unless_the_template_is(terminal: Start) -> None:
    text = terminal("run", OPTION, "$rank: ", "echo", "x").rest()
    assert re.search(r"\x1b\[0;\d+m0:\x1b\[0m x\r\n", text)
    text = terminal("run", OPTION, "\x1b[7m$rank\x1b[0m ", "echo", "x").rest()
    assert "\x1b[0m\x1b[7m0\x1b[0m x\r\n" in text


def test_folded_lines_on_a_terminal(launchpad: Launchpad, terminal: Start) -> None:
    (launchpad.folder / "says.py").write_text(f"{TOGETHER}    print('ready', flush=True)\n")
    assert "\x1b[0;1mat 0-3:\x1b[0m ready\r\n" in terminal("run", "-n", 4, OPTION, "at $rank: ", "says.py").rest()


@pytest.mark.parametrize(("text", "width"), [("rank ${rank} > ", 9), ("火${rank} ", 4)])
def test_a_bar_is_redrawn_and_cut_to_the_terminal(terminal: Start, launchpad: Launchpad, text: str, width: int) -> None:
    one = terminal("run", OPTION, text, "--no-python", "python3", "-c", WIDE_BAR, NO_COLOR="1")
    states = states_of_wide_bar(one, launchpad.folder)
    assert states[1].rstrip() == text.replace("${rank}", "0") + "b" * (COLUMNS - width - 1)


def test_bars_in_a_file(launchpad: Launchpad) -> None:
    done = launchpad.run("run", OPTION, "$rank|", "printf", "\r1%%\r2%%\n")
    assert done.stdout == "0|1%\n0|2%\n"  # a carriage return is read as a newline


def test_the_ranks_terminal_is_as_wide_as_the_widest_prefix_leaves(terminal: Start) -> None:
    code = "import os; os.environ['RANK'] == '0' and print(os.get_terminal_size().columns)"  # which only rank 0 has
    one = terminal("run", "-n", 2, OPTION, "local rank ${local_rank}: ", "--no-python", "python3", "-c", code)
    assert f"local rank 0:\x1b[0m {COLUMNS - 14}\r\n" in one.rest()


def recorded(launchpad: Launchpad, template: str) -> Path:
    """The record of a job on two hosts, which have changed places in its second attempt."""
    folder = record(launchpad, PIECES)
    path = folder / "events.jsonl"
    nodes = [["a", [0, 1]], ["b", [2, 3]]]
    folders = {str(rank): str(rank) for rank in range(4)}
    planned = JobPlanned(0, 0.0, JOB, 1, "", [], "/", nodes, folders, 0.0, "", line_prefix=template, role="eval")
    _, *others = path.read_text().splitlines()
    moved = [line_of(Restarted(0, 1, 1, 1, 1, -1, nodes=[["b", [0, 1]], ["a", [2, 3]]]))]
    changed = [*(moved if '"Restarted"' in line else [line] for line in others)]
    path.write_text("".join(f"{line}\n" for line in [line_of(planned), *(one for part in changed for one in part)]))
    return folder


def test_logs(launchpad: Launchpad) -> None:
    recorded(launchpad, "${role_name} " + BY_HOST)
    assert logs(launchpad, "--rank", 3) == [
        "eval b:3: up",
        "eval b:3: rank 3",
        "launchpad: restart 1",
        "eval a:3: again",
    ]
    assert logs(launchpad, "--fold", "equal", "--attempt", 0) == [
        "eval a,b:0-3: up",
        *(f"eval {'ab'[rank // 2]}:{rank}: rank {rank}" for rank in range(4)),
    ]


def test_attach(launchpad: Launchpad) -> None:
    folder = recorded(launchpad, BY_HOST)
    entries = [
        ConsoleEntry("output", 1.0, "up\n", rank, 1, f"{host}:{rank}: ", local_rank=rank % 2, host=host)
        for rank, host in enumerate("aabb")
    ]
    entries += [ConsoleEntry("output", 2.0, "own\n", 3, 1, "b:3: ", 1, "b"), ConsoleEntry("over", 3.0)]
    write(folder, 1, *entries)
    done = launchpad.run("attach", "--fold", "equal", JOB)
    assert done.stdout == "a,b:0-3: up\nb:3: own\n"
    assert launchpad.run("attach", JOB).stdout == "a:0: up\na:1: up\nb:2: up\nb:3: up\nb:3: own\n"


def test_a_detached_job(launchpad: Launchpad) -> None:
    job = launchpad.run("run", "--detach", "-n", 2, OPTION, BY_HOST, "echo", "x").stdout.strip()
    assert launchpad.run("wait", job).returncode == 0
    assert sorted(launchpad.run("attach", job).stdout.splitlines()) == [f"{HERE}:0: x", f"{HERE}:1: x"]


def test_lines_that_a_filter_picks(launchpad: Launchpad) -> None:
    words = (OPTION, BY_HOST, "--log-dir", "logs", "--duplicate-stdout-filters", "x")
    assert launchpad.run("run", "-n", 2, *words, "echo", "x").returncode == 0
    (found,) = launchpad.folder.glob("logs/*/attempt_0/filtered_stdout.log")
    assert sorted(found.read_text().splitlines()) == [f"{HERE}:0: x", f"{HERE}:1: x"]
    assert Filter(("x",)).pick(3, b"x\n") == b"[3] x\n"


def test_each_node_that_joins_has_its_own(launchpad: Launchpad) -> None:
    port = free_port()
    jobs = [
        launchpad.start("run", *c10d(port), "-n", 2, f"{OPTION}={name} {BY_HOST}", "sh", "-c", "echo $LOCAL_RANK")
        for name in ("one", "two")
    ]
    for job, name in zip(jobs, ("one", "two"), strict=True):
        code, out, err = ends(job)
        assert (code, err) == (0, "")
        found = [re.fullmatch(rf"{name} {HERE}:(\d): (\d)", line) for line in out.splitlines()]
        assert sorted(match[2] for match in found if match) == ["0", "1"]


@needs_sshd
def test_the_names_of_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n2:1,n1:2", OPTION, BY_HOST, "echo", "x")
    assert lines(done) == ["n1:1: x", "n1:2: x", "n2:0: x"]
