"""For CI: --junit, GitHub annotations, --events; no colours, no redraws."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from launchpad.record import junit
from tests.conftest import Launchpad
from tests.test_journal import FAILS


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

    (line,) = [line for line in done.stderr.splitlines() if line.startswith("::")]
    head, data = line[2:].split("::", 1)
    assert head == "error file=src/fails%2C 100%25.py,line=7,title=rank 1 failed first%3A ValueError%3A no good"
    text = data.replace("%0A", "\n").replace("%25", "%")
    report = [line.removeprefix("launchpad: ") for line in done.stderr.splitlines() if line.startswith("launchpad: ")]
    assert text.splitlines() == report

    suite = ET.parse(launchpad.folder / "out.xml").getroot()[0]
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


def test_a_suite_is_added_to_a_report_that_has_none_yet(tmp_path: Path) -> None:
    """An element without children is false; from Python 3.12 on it warns when it is asked."""
    report = tmp_path / "out.xml"
    report.write_text('<testsuites name="all of them" />')
    for tests in ("2", "3"):
        assert junit.write(str(report), ET.Element("testsuite", tests=tests), adds=True) == ""
    root = ET.parse(report).getroot()
    assert (root.get("name"), root.get("tests"), len(root)) == ("all of them", "5", 2)


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
    assert (done.returncode, done.stderr) == (0, "")
    suite = ET.parse(launchpad.folder / "out.xml").getroot()[0]
    assert [len(case) for case in suite.iter("testcase")] == [0, 0]
    done = launchpad.run("run", "-n", 2, "--junit", "out.xml", "--timeout", "0.3", "exits.py", "wait", "0")
    assert done.returncode == 124
    assert "::error title=the job was stopped%3A it ran longer than --timeout 0.3 s::" in done.stderr
    suite = ET.parse(launchpad.folder / "out.xml").getroot()[0]
    assert [[child.get("type") for child in case] for case in suite.iter("testcase")] == [["timeout"], []]


def test_places_that_can_not_be_written_are_refused(launchpad: Launchpad) -> None:
    for option in ("--junit", "--events"):
        done = launchpad.run("run", option, "no/such/file", "true")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"launchpad: error: {option} no/such/file: No such file or directory; choose a writable file"
        )
