"""For CI: --junit, GitHub annotations, --events; no colours, no redraws."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import xmlschema

from tests.support.command import Launchpad
from tests.support.records import FAILS

pytestmark = pytest.mark.usefixtures("from_image")


def report_in(path: Path) -> ET.Element:
    """The report, which is one that Jenkins and GitLab can read."""
    xmlschema.XMLSchema(Path(__file__).parents[2] / "support" / "junit.xsd").validate(path)
    return ET.parse(path).getroot()


# What GitHub's log has of a job beside its output: commands are stopped while it runs.
QUIET = r"::stop-commands::([0-9a-f]{32})\n::\1::\n"


def test_a_failed_job_in_actions(launchpad: Launchpad) -> None:
    """All three at once, each with the same verdict."""
    source = launchpad.folder / "src"
    source.mkdir()
    (source / "fails, 100%.py").write_text(FAILS)
    launchpad.environ |= {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(launchpad.folder)}
    words = ("--junit", "out.xml", "--events", "events.jsonl", "src/fails, 100%.py")
    done = launchpad.run("run", "-n", 3, *words)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr

    (line,) = [line for line in done.stderr.splitlines() if line.startswith("::error")]
    head, data = line[2:].split("::", 1)
    assert head == "error file=src/fails%2C 100%25.py,line=7,title=rank 1 failed first%3A ValueError%3A no good"
    text = data.replace("%0A", "\n").replace("%25", "%")
    report = [line.removeprefix("launchpad: ") for line in done.stderr.splitlines() if line.startswith("launchpad: ")]
    assert text.splitlines() == report

    suite = report_in(launchpad.folder / "out.xml")[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["3", "1", "0", "2"]
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == ["rank 0", "rank 1", "rank 2"]
    (failure,) = cases["rank 1"]
    assert (failure.tag, failure.get("type"), failure.get("message")) == ("failure", "ValueError", report[0])
    assert failure.text in text
    assert all([child.tag for child in cases[name]] == ["skipped"] for name in ("rank 0", "rank 2"))
    assert all(re.fullmatch(r"\d+\.\d{3}", case.get("time") or "") for case in cases.values())

    events = [json.loads(line) for line in (launchpad.folder / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    assert names[0] == "JobPlanned"
    assert names[-2:] == ["Verdict", "JobOver"]
    assert names.count("RankStarted") == names.count("RankExited") == 3
    outputs = [event for event in events if event["event"] == "Output" and event["rank"] == 2]
    for stream, text_of_2 in ((1, "out of 2\n"), (2, "err of 2\n")):
        assert "".join(event["text"] for event in outputs if event["stream"] == stream) == text_of_2
    assert (events[-2]["rank"], events[-2]["line"], events[-1]["code"]) == (1, 7, 1)
    assert events[-2]["text"] == text.splitlines()[: len(events[-2]["text"])]


def test_events_on_stdout_are_all_that_is_there(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--events", "-", "sh", "-c", "echo out $RANK; printf '\\377err' >&2")
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    output = {(event["rank"], event["stream"]): event["text"] for event in events if event["event"] == "Output"}
    assert output == {(0, 1): "out 0\n", (1, 1): "out 1\n", (0, 2): "\ufffderr", (1, 2): "\ufffderr"}
    assert events[-1] == {"event": "JobOver", "time": events[-1]["time"], "code": 0}


def test_a_job_that_goes_well_and_one_that_takes_too_long(launchpad: Launchpad) -> None:
    launchpad.environ |= {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(launchpad.folder)}
    done = launchpad.run("run", "-n", 2, "--junit", "out.xml", "true")
    assert done.returncode == 0
    assert re.fullmatch(QUIET, done.stderr)
    suite = report_in(launchpad.folder / "out.xml")[0]
    assert [len(case) for case in suite.iter("testcase")] == [0, 0]
    done = launchpad.run("run", "-n", 2, "--junit", "out.xml", "--timeout", "5", "exits.py", "wait", "0")
    assert done.returncode == 124
    assert "::error title=the job was stopped%3A it ran longer than --timeout 5 s::" in done.stderr
    suite = report_in(launchpad.folder / "out.xml")[0]
    assert [[child.get("type") for child in case] for case in suite.iter("testcase")] == [["timeout"], []]


def test_places_that_can_not_be_written_are_refused(launchpad: Launchpad) -> None:
    for option in ("--junit", "--events"):
        done = launchpad.run("run", option, "no/such/file", "true")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"launchpad: error: {option} no/such/file: No such file or directory; choose a writable file"
        )
    assert "no job is recorded" in launchpad.run("why").stderr  # as no job has begun


def test_reports_lie_where_the_user_is_though_the_ranks_are_elsewhere(launchpad: Launchpad) -> None:
    (launchpad.folder / "src").mkdir()
    names = ("out.xml", "events.jsonl", "job.html")
    words = ("--junit", names[0], "--events", names[1], "--report", names[2])
    assert launchpad.run("run", "--wdir", "src", *words, "true").returncode == 0
    assert {path.name for path in launchpad.folder.iterdir()} >= {*names}
    assert not list((launchpad.folder / "src").iterdir())


def test_what_may_be_secret_stands_in_no_record(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--events", "events.jsonl", "true", "--api-key", "sk-4711", "--token=sk-4711")
    assert done.returncode == 0
    shown = [launchpad.run(*words).stdout for words in (("jobs",), ("jobs", "--json"), ("why",))]
    shown += [path.read_text() for path in launchpad.folder.parent.rglob("*.json*") if path.is_file()]
    assert any("--api-key" in text for text in shown)
    assert not [text for text in shown if "sk-4711" in text]


FORGES = (
    "import os, sys, time\nrank = os.environ['RANK']\n"
    "print('::error::forged\\n--- forged\\r\\n\\x1b[0Ksection_end:1:launchpad_rank_0\\r\\x1b[0K', flush=True)\n"
    "print('##[error]forged ##teamcity[blockClosed name=\\'rank 0\\']\\t\\x1b[31mred\\x1b[0m', flush=True)\n"
    "open(f'up{rank}', 'w').close()\n"
    "while not os.path.exists('up0') or not os.path.exists('up1'): time.sleep(0.01)\n"
    "sys.exit(7) if rank == '1' else time.sleep(600)\n"
)


@pytest.mark.parametrize(
    ("variable", "begin", "end"),
    [
        (("GITHUB_ACTIONS", "true"), r"::group::rank 1: exit code 7", "::endgroup::"),
        (
            ("GITLAB_CI", "true"),
            r"\x1b\[0Ksection_start:\d+:launchpad_rank_1\[collapsed=true\]\n\x1b\[0Krank 1: exit code 7",
            r"\x1b\[0Ksection_end:\d+:launchpad_rank_1\n\x1b\[0K",
        ),
        (
            ("TEAMCITY_VERSION", "2026.1"),
            r"##teamcity\[blockOpened name='rank 1: exit code 7'\]",
            r"##teamcity\[blockClosed name='rank 1: exit code 7'\]",
        ),
        (("BUILDKITE", "true"), r"--- rank 1: exit code 7", r"--- rank 0: killed by SIGTERM \(Terminated\)"),
    ],
)
def test_the_end_of_each_rank_in_a_section(
    launchpad: Launchpad, variable: tuple[str, str], begin: str, end: str
) -> None:
    """The rank that failed first is the first one, and no line of a rank is a command."""
    (launchpad.folder / "forges.py").write_text(FORGES)
    launchpad.environ |= dict([variable])
    done = launchpad.run("run", "-n", 2, "--no-hooks", "forges.py")
    assert done.returncode == 7
    # subprocess makes a newline of each carriage return.
    found = re.search(f"^{begin}\n(.*?)\n{end}\n", done.stderr, re.MULTILINE | re.DOTALL)
    assert found, done.stderr
    lines = found[1].split("\n")
    assert lines[:2] == ["[1] ::error::forged", "[1] --- forged"]
    assert lines[-1] == "[1] # #[error]forged # #teamcity[blockClosed name='rank 0']   red"
    assert all(line.startswith("[1] ") for line in lines)
    assert not re.search("[\r\x1b]", found[1])
    assert done.stderr.index("rank 1: exit code 7") < done.stderr.index("rank 0: killed by")
    assert done.stderr.index("rank 0: killed by") < done.stderr.index("launchpad: rank 1 failed first")
    said = launchpad.run("run", "-n", 2, "echo", "x").stderr
    assert re.fullmatch(QUIET if "GITHUB_ACTIONS" in variable else "", said)


def obeyed(log: str) -> list[str]:
    """The lines of a log that GitHub takes for commands."""
    found, token = [], ""
    for line in log.splitlines():
        word, _, value = line.strip().removeprefix("::").partition("::")
        if token:
            token = "" if word == token else token
        elif line.strip().startswith("::stop-commands::"):
            token = value
        elif line.strip().startswith("::") or "##[" in line:
            found.append(line)
    return found


@pytest.mark.parametrize("template", ["[${rank}] ", ""])
def test_what_ranks_print_is_no_command_to_github(launchpad: Launchpad, template: str) -> None:
    """Whatever stands before it; and launchpad's own commands still are."""
    (launchpad.folder / "forges.py").write_text(FORGES)
    launchpad.environ["GITHUB_ACTIONS"] = "true"
    script = launchpad.folder / "merged.sh"
    script.write_text('exec "$@" 2>&1\n')
    words = launchpad.argv("run", "-n", 2, "--log-line-prefix-template", template, "--no-hooks", "forges.py")
    done = subprocess.run(
        ["sh", script, *words], env=launchpad.environ, cwd=launchpad.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 7
    assert "##[error]forged" in done.stdout
    kinds = [line.strip().split("::")[1].split(" ")[0] for line in obeyed(done.stdout)]
    assert kinds == ["error", "group", "endgroup", "group", "endgroup"]


def test_the_summary_page_in_actions(launchpad: Launchpad) -> None:
    """A step may run several jobs: each adds its part."""
    page = launchpad.folder / "summary.md"
    launchpad.environ |= {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(page)}
    assert launchpad.run("run", "-n", 2, "true").returncode == 0
    (launchpad.folder / "fails_|_.py").write_text(FAILS.replace("no good", "```|<b>"))
    assert launchpad.run("run", "-n", 3, "fails_|_.py").returncode == 1
    first, second = re.findall(r"^### .*?(?=^###|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert re.match(r"### launchpad: \S*true: passed\n\n\| rank \| host \| ended \|  \| seconds \| memory \|\n", first)
    assert re.search(r"^\| 1 \| \S+ \| exit code 0 \|  \| \d+\.\d \| \d+ MiB \|$", first, re.MULTILINE)
    assert second.startswith(
        "### launchpad: fails\\_\\|\\_.py: exit code 1\n\n````text\nrank 1 failed first: ValueError: ```|<b>"
    )
    assert "\n````\n\n| rank |" in second
    assert re.search(r"^\| 1 \| \S+ \| exit code 1 \| failed first \|", second, re.MULTILINE)
    assert second.count("| stopped by launchpad |") == 2


def test_a_summary_page_that_can_not_be_written_is_reported(launchpad: Launchpad) -> None:
    launchpad.environ |= {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "no/such/file"}
    done = launchpad.run("run", "true")
    assert done.returncode == 0
    said = "GITHUB_STEP_SUMMARY no/such/file: No such file or directory; the summary was not written"
    assert re.fullmatch(QUIET + re.escape(f"launchpad: {said}\n"), done.stderr)


ROLES = """
[jobs.rl.roles.serve]
target = ["sleep", "600"]
service = true

[jobs.rl.roles.train]
target = "fails.py"
nproc = 2
replicas = 2
after = "serve"

[jobs.rl.roles.test]
target = "true"
after = "train"
"""

FAILS_IN_ONE = """\
import os, sys, time
print("begins", flush=True)
who = os.environ["LAUNCHPAD_REPLICA"], os.environ["RANK"]
while not os.path.exists("begun-0-0") and who != ("0", "0"):
    time.sleep(0.01)
open("begun-" + "-".join(who), "w").close()
sys.exit(7) if who == ("1", "1") else time.sleep(60)
"""


def test_roles_in_reports(launchpad: Launchpad) -> None:
    """By their names, with ranks in their own numbering."""
    page = launchpad.folder / "summary.md"
    (launchpad.folder / "fails.py").write_text(FAILS_IN_ONE)
    (launchpad.folder / "job.toml").write_text(ROLES)
    launchpad.environ |= {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(page)}
    done = launchpad.run("run", "--junit", "out.xml", "--config", "job.toml", "--job", "rl")
    assert done.returncode == 7
    suite = report_in(launchpad.folder / "out.xml")[0]
    assert (suite.get("name"), suite.get("hostname")) == ("launchpad rl", socket.gethostname())
    cases = {
        f"{case.get('classname')}: {case.get('name')}": [one.tag for one in case] for case in suite.iter("testcase")
    }
    assert cases == {
        "rl.serve: serve rank 0": ["skipped"],
        "rl.train.0: train.0 rank 0": ["skipped"],
        "rl.train.0: train.0 rank 1": ["skipped"],
        "rl.train.1: train.1 rank 0": ["skipped"],
        "rl.train.1: train.1 rank 1": ["failure"],
        "rl.test: test rank 0": ["skipped"],
    }
    assert "::group::train.1 rank 1: exit code 7\n[train.1 1] begins\n" in done.stderr
    text = page.read_text()
    assert "| role | rank | host | ended |  | seconds | memory |\n| --- | ---: |" in text
    host = re.escape(socket.gethostname())
    assert re.search(rf"^\| train\.1 \| 1 \| {host} \| exit code 7 \| failed first \|", text, re.MULTILINE)
    assert re.search(rf"^\| test \| 0 \| {host} \| not started \|  \|  \|  \|$", text, re.MULTILINE)
