"""The manual and the README: pages are reachable and shipped, links lead somewhere, options exist, tables say what the
code says, and every command that can run on one machine prints what is shown below it.

In a `console` block each line with `$ ` is run by bash, in a folder with the scripts of programs/manual and a copy of
examples/. Below it stands its output, in any order, as ranks print at the same time; `…` alone stands for lines that
are left out, at the end of a line for the rest of it. Without output the command has to succeed. What differs from run
to run (times, pids, ids …) is not compared. `console while FILE` runs beside a job of that script. What is in `sh`
blocks is not run; NOT_RUN says why.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from launchpad import errors
from launchpad.agent.mpi import node_worlds, open_mpi_settings, pmix_worlds
from launchpad.cli.help import TOPICS
from launchpad.cli.main import cli
from launchpad.diagnosis import candidates, verdict
from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict_json import as_json
from launchpad.job import mpi, user_environment
from launchpad.job.outcome import Cause
from launchpad.job.plan import CONTRACT
from launchpad.protocol.events import STDOUT, Output
from launchpad.record import event_lines
from tests.support.command import DEADLINE, PROGRAMS, Launchpad, wait_until

ROOT = Path(__file__).parents[3]
MANUAL = ROOT / "launchpad" / "manual"
README = ROOT / "README.md"
PAGES = [*sorted(MANUAL.glob("*.md")), README]

# Listed by `launchpad help`, and comes with another change.
TO_COME: set[str] = set()

# Commands whose options are not ours.
OTHERS = ("launchpad ", "pytest ", "python ", "pip ", "tests/", "sbatch ", "salloc ", "srun ", "docker ")

# Its options that the text names, of which the first is the plugin's.
PYTESTS = ("--ranks-backend", "--pdb", "--lf", "--durations", "--junitxml")

# Commands that are not run here: a pattern, and why.
NOT_RUN = {
    r"^python3 -m venv|^pip (install|download)|^source ": "installs, from the network",
    r"tests/suites/|^mkdir built": "needs somebody else's suite; tests/real/bench/test_suites.py has a small one",
    r"-H |--hosts |--hostfile ": "needs other hosts; tests/real/hosts/test_run_hosts.py has real ones",
    r"--nnodes [24]|^launchpad join": "needs another node; tests/real/joined/test_join.py starts several",
    r"^salloc ": "needs Slurm; tests/real/slurm has a real one",
    r"^kubectl": "needs a cluster; tests/real/joined/test_kubernetes.py reads the file",
    r"--enter ": "needs a container; tests/real/hosts/test_enter.py makes some",
    r"-n gpu|--nproc gpu|--gpus": "needs a GPU",
    r"^launchpad attach .*takes the job over": "needs a killed launchpad; tests/real/hosts/test_resume.py kills some",
    r"\./solver": "needs an MPI program in C; tests/real/mpi/test_run_mpi.py has one",
    r"^launchpad doctor": "depends on the machine; tests/real/hosts/test_doctor_hosts.py has some with known faults",
    r"^launchpad bench": "measures for a minute; tests/real/bench/test_bench_command.py has short ones",
    r"configs/torchft": "needs torchft; test_examples.py runs it where it is",
    r"^launchpad (stacks --role|logs --role|restart|stop --role)": (
        "asks a job that runs; tests/real/one_node/test_role_requests.py has one"
    ),
    r"(configs|examples)/frameworks|dask-mpi": "needs a framework; test_frameworks.py runs those that are there",
    r"^python -m pytest|^\.ci/run|^ruff ": "the tests themselves",
}


class Command(NamedTuple):
    """What stands behind a `$ `, and below it."""

    line: str
    output: list[str]


class Block(NamedTuple):
    """A fenced block."""

    page: str
    number: int  # of its first line
    info: str
    lines: list[str]

    @property
    def commands(self) -> list[Command]:
        found: list[Command] = []
        for line in self.lines:
            if line.startswith("$ "):
                found.append(Command(line[2:], []))
            else:
                found[-1].output.append(line)
        return found


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
            if inside:
                found.append(Block(page.stem, number, line[3:], []))
        elif inside:
            found[-1].lines.append(line)
    assert not inside, f"{page.name}: a block has no end"
    return found


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first column is called so, without the two lines of its head."""
    lines = (MANUAL / f"{page}.md").read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Pages.


def test_every_page_is_a_topic_and_is_linked() -> None:
    pages = {page.stem for page in MANUAL.iterdir()}
    assert pages | TO_COME == set(TOPICS)
    assert all(f"(launchpad/manual/{topic}.md)" in README.read_text() for topic in TOPICS)
    assert all(page.read_text().startswith("# ") for page in PAGES)
    assert README.read_text().count("\n") <= 150


def test_a_page_is_printed_as_it_is_into_a_pipe() -> None:
    for topic in TOPICS.keys() - TO_COME:
        done = CliRunner().invoke(cli, ["help", topic])
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout == (MANUAL / f"{topic}.md").read_text(), topic


def test_topics_are_listed(launchpad: Launchpad) -> None:
    done = launchpad.run("help")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == list(TOPICS)
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_a_commands_name_shows_its_options(launchpad: Launchpad) -> None:
    for name in ("run", "why"):
        assert launchpad.run("help", name).stdout == launchpad.run(name, "--help").stdout


def test_another_word_for_a_topic(launchpad: Launchpad) -> None:
    for word, topic in (("exit", "ending"), ("ssh", "hosts"), ("environment", "ranks")):
        assert launchpad.run("help", word).stdout == (MANUAL / f"{topic}.md").read_text()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hots", "there is no topic 'hots'; did you mean hosts?"),
        ("log", "there is no topic 'log'; did you mean logs?"),
        ("zebra", "there is no topic 'zebra'; `launchpad help` lists the topics"),
    ],
)
def test_an_unknown_topic_is_one_sentence(launchpad: Launchpad, word: str, message: str) -> None:
    done = launchpad.run("help", word)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"launchpad: error: {message}\n")


@pytest.mark.parametrize(("rows", "pages"), [(10, True), (500, False)])
def test_on_a_terminal_a_page_is_formatted_and_a_long_one_goes_through_the_pager(
    launchpad: Launchpad, rows: int, pages: bool
) -> None:
    launchpad.environ |= {"TERM": "xterm", "LINES": str(rows), "COLUMNS": "80", "PAGER": "tee paged"}
    ours, theirs = pty.openpty()
    process = launchpad.start("help", "restarts", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while data := os.read(ours, 1 << 16):
            shown += data
    os.close(ours)
    assert process.wait(timeout=DEADLINE) == 0
    assert b"# Restarts" not in shown
    assert b"Restarts" in shown
    assert b"](" not in shown
    assert (launchpad.folder / "paged").exists() is pages


def test_the_pages_are_in_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("launchpad", "README.md", "LICENSE", "pyproject.toml"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=DEADLINE)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"launchpad/manual/{page.name}" for page in MANUAL.iterdir()} <= set(names)
    assert {f"launchpad/report/page.{kind}" for kind in ("html", "css", "js")} <= set(names)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists() or found.stem in TO_COME, target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_whole(page: Path) -> None:
    for is_table, lines in itertools.groupby(prose(page).splitlines(), lambda line: line.startswith("|")):
        if is_table:
            head, rule, *rows = lines
            assert set(rule) == {"|", "-"}, head
            assert all(row.endswith("|") and row.count("|") == rule.count("|") for row in [head, *rows]), head


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`(?:python )?((?:tests|examples|configs)/[\w./]+)", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_rooms_and_modules_that_are_named_are_there() -> None:
    rooms = {code(cells[0])[0].rstrip("/") for cells in table("architecture", "in `launchpad/`")}
    assert rooms == {path.name for path in (ROOT / "launchpad").iterdir() if path.is_dir() and path.name[0] != "_"}
    text = (MANUAL / "architecture.md").read_text() + (MANUAL / "contributing.md").read_text()
    named = re.findall(r"`(launchpad/[\w./]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


# Options.


def command_lines(page: Path) -> Iterator[str]:
    """Everything that is to be typed: in blocks, and in the text."""
    for block in blocks(page):
        if block.info.startswith("console"):
            yield from (command.line for command in block.commands)
        elif block.info == "sh":
            yield from block.lines
    yield from (span for span in code(prose(page)) if span.startswith("launchpad "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_is_one_that_launchpad_takes(page: Path) -> None:
    for line in command_lines(page):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;<>()"):
                words.append(word)
                continue
            name = next((place for place, one in enumerate(words) if one.rpartition("/")[2] == "launchpad"), None)
            if name is not None and words[name + 1 :] and words[name + 1] != "--version":
                check(words[name + 1 :], line)
            words = []


def check(words: list[str], line: str) -> None:
    found = cli.get_command(click.Context(cli), words[0])
    assert found is not None, line
    if not words[1:]:  # the command as such
        return
    # Placeholders of a synopsis: launchpad why [JOB], launchpad COMMAND --help.
    args = [word.strip("[]") for word in words[1:] if word not in ("--help", "…")]
    try:
        found.make_context(words[0], args)
    except click.ClickException as error:
        raise AssertionError(f"{line}: {error.format_message()}") from None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_option_that_the_text_names_exists(page: Path) -> None:
    ctx = click.Context(cli)
    commands = [cli.get_command(ctx, name) for name in cli.list_commands(ctx)]
    known = {name for command in commands for option in command.params for name in option.opts}
    known |= {"--help", *PYTESTS}
    for span in code(prose(page)):
        words = [] if span.startswith(OTHERS) else span.split()
        for word in re.findall(r"(?<![\w-])--[a-z][\w-]+", " ".join(words)):
            assert word.replace("_", "-") in known, span


def test_every_option_is_described() -> None:
    text = " ".join(span for page in PAGES for span in [*code(prose(page)), *command_lines(page)])
    ctx = click.Context(cli)
    for name in cli.list_commands(ctx):
        for option in cli.get_command(ctx, name).params:
            if isinstance(option, click.Option) and not option.hidden:
                assert any(re.search(rf"(?<![\w-]){one}(?![\w-])", text) for one in option.opts), (name, option.opts)


# Tables.


def test_events_are_those_that_are_recorded() -> None:
    told = {code(cells[0])[0]: code(cells[1]) for cells in table("jobs", "event")}
    assert told == {name: list(kind._fields) for name, kind in event_lines.RECORDED.items()}
    said = json.loads(event_lines.text_line(Output(0, 0, STDOUT, b""), ""))
    text = (MANUAL / "jobs.md").read_text()
    assert "it has {}; what is not".format(" ".join(f"`{name}`" for name in said if name != "event")) in flat(text)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_fields_of_a_verdict() -> None:
    rows = {name: cells[1] for cells in table("jobs", "field") for name in code(cells[0])}
    assert rows.keys() - {"first_victim"} == as_json(History(), verdict.Verdict("none", 0), []).keys()
    assert set(code(rows["kind"])) == set(typing.get_args(verdict.Kind))
    assert set(code(rows["how"])) == set(typing.get_args(candidates.What))


def test_exit_codes() -> None:
    def ended(kind: typing.Any, **more: int) -> int:
        return Cause(kind, **more).exit_code

    by_signal = [ended("signal", signum=one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert ended("failure", code=-9) == 137
    assert ended("start") == errors.UsageError.exit_code
    assert ended("stall") == ended("timeout")
    assert [code for _, code in table("ending", "what happened")] == [
        "0",
        "the first failed rank's own; 128+n for signal n",
        str(errors.UsageError.exit_code),
        str(errors.NodeError.exit_code),
        str(ended("lost")),
        str(ended("timeout")),
        " / ".join(map(str, by_signal)),
        str(ended("console")),
    ]


def test_the_variables_of_torchrun() -> None:
    (block,) = [block for block in blocks(MANUAL / "compatibility.md") if block.info == "text"]
    names = {word for line in block.lines for word in line.split() if word.isupper()}
    assert names == CONTRACT | {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def test_what_travels_to_other_hosts() -> None:
    told = [name for cells in table("hosts", "variables") for name in code(cells[0])]
    assert sorted(told) == sorted(user_environment.FORWARDED)


def test_what_an_mpi_rank_finds() -> None:
    told = {name for cells in table("mpi", "variable") for name in code(cells[0])}
    of_open_mpi = {*pmix_worlds.settings(""), node_worlds.YIELD, open_mpi_settings.TRANSPORTS, "PMIX_*"}
    assert told == {*mpi.environ(mpi.MpiSeat(0, 1, 0, 1, "host")), "PMI_FD", *of_open_mpi}


def test_why_a_host_can_not_take_part() -> None:
    told = {name for cells in table("hosts", "it says") for name in code(cells[0])}
    assert set(typing.get_args(errors.ConnectFailure)) <= told


# Commands.


def test_what_is_not_run_has_a_reason() -> None:
    lines = [line for page in PAGES for block in blocks(page) if block.info == "sh" for line in block.lines]
    assert [line for line in lines if not any(re.search(pattern, line) for pattern in NOT_RUN)] == []
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, line) for line in lines)] == []
    infos = {block.info.split()[0] for page in PAGES for block in blocks(page) if block.info}
    assert infos <= {"console", "sh", "text", "toml", "python"}


# What differs from run to run, and from machine to machine; applied to what is shown and to what is printed.
DIFFERS = [
    (rf"\b{re.escape(socket.gethostname())}\b", "node1"),
    (r'"[^" ]*/site-packages/', '"site-packages/'),
    (r'(site-packages/[^"]*", line) \d+', r"\1 N"),
    (r"\b((?:threading|queue|\S*torch/\S*)\.py):\d+", r"\1:N"),
    (r"(pid|process) \d+", r"\1 N"),
    (r"(behind: ).*", r"\1…"),  # one process or the other first
    (r"\d{4}-\d\d-\d\d", "DATE"),
    (r"\d\d:\d\d:\d\d", "TIME"),
    (r"\b[0-9a-f]{8}\b", "ID"),
    (r"\d+(\.\d+)? s\b", "N s"),
    (r"(/usr)?/bin/", "/bin/"),
    (r"then rank \d failed: .*", "then rank N failed: …"),
    (r"failed because of it: .*", "failed because of it: …"),
    (r" +", " "),
]


def same(line: str) -> str:
    for pattern, stands_for in DIFFERS:
        line = re.sub(pattern, stands_for, line)
    return line.rstrip()


def is_mark(line: str) -> bool:
    """Below a line of a traceback, what Python 3.11 and later versions underline, each in its way."""
    return re.fullmatch(r"(launchpad:|\[\d+\])?[\s~^]*[~^]+[\s~^]*", line) is not None


def differences(shown: list[str], printed: list[str]) -> list[str]:
    """What is shown and was not printed; and where nothing is left out, the other way round."""
    wanted = [same(line) for line in shown if line != "…" and not is_mark(line)]
    found = collections.Counter(same(line) for line in printed if not is_mark(line))
    missing = []
    for line in wanted:
        begin = line.removesuffix("…")
        match = next(
            (one for one in found if found[one] and (one == line or (begin != line and one.startswith(begin)))), None
        )
        if match is None:
            missing.append(f"- {line}")
        else:
            found[match] -= 1
    return missing if "…" in shown else [*missing, *(f"+ {line}" for line in found.elements())]


class Shell:
    """bash, in a home folder of its own."""

    def __init__(self, launchpad: Launchpad) -> None:
        self.launchpad = launchpad
        self.home = launchpad.folder / "home"
        self.work = self.home / "work"
        shutil.copytree(PROGRAMS / "manual", self.work, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "examples", self.work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        # HOME is the user's, as in an image: imports read it.
        launchpad.environ |= {"XDG_STATE_HOME": str(self.home / ".local" / "state"), "LC_ALL": "C.UTF-8"}
        launchpad.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(self, commands: list[Command]) -> list[list[str]]:
        """The lines that each command prints, on stdout and stderr; the last one is its exit code."""
        mark = "@@@@ "
        script = "exec 2>&1\nstatus=0\n"
        script += "".join(f"(exit $status)\n{one.line}\nstatus=$?; echo; echo {mark}$status\n" for one in commands)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.work,
            env=self.launchpad.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        text = done.stdout.replace(str(self.home), "/home/ann")
        parts = re.findall(rf"(.*?)\n{mark}(\d+)\n", text, re.S)
        assert len(parts) == len(commands), text
        return [[*printed.strip("\n").splitlines(), code] for printed, code in parts]

    def compare(self, block: Block) -> str:
        """What is different, in words."""
        for command, (*printed, code) in zip(block.commands, self.run(block.commands), strict=True):
            wrong = differences(command.output, printed) if command.output else []
            if not command.output and code != "0":
                wrong = [f"exit code {code}"]
            if wrong:
                lines = "\n".join(["", *wrong, "which printed:", *printed])
                return f"{block.page}.md, line {block.number}: $ {command.line}{lines}"
        return ""

    @contextlib.contextmanager
    def job(self, script: str) -> Iterator[None]:
        """A job of this script runs meanwhile, and can be asked."""
        folder = self.home / ".local" / "state" / "launchpad" / "running"
        job = self.launchpad.start("run", "-n", 2, script, cwd=self.work)
        wait_until(lambda: folder.exists() and any(folder.iterdir()), "the job to take questions")
        yield
        job.terminate()
        job.wait(timeout=DEADLINE)


RUN = [page for page in PAGES if any(block.info.startswith("console") for block in blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_what_is_shown_is_what_is_printed(page: Path, launchpad: Launchpad, keeper: Launchpad) -> None:
    shell = Shell(launchpad)
    typed = [one.line for block in blocks(page) if block.info.startswith("console") for one in block.commands]
    if "launchpad jobs" not in typed:  # which tells of images
        launchpad.use_images(keeper)
    for block in blocks(page):
        kind, *beside = block.info.split()
        if kind != "console":
            continue
        if beside:
            deadline = time.monotonic() + DEADLINE
            with shell.job(beside[1]):
                while (wrong := shell.compare(block)) and time.monotonic() < deadline:
                    time.sleep(0.1)  # the ranks are on their way to where they will wait
        else:
            wrong = shell.compare(block)
        assert not wrong, wrong
