"""JUnit reports: suites that are put together, and characters that XML has not."""

from __future__ import annotations

import json
import queue
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import xmlschema

from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import verdict_on
from launchpad.diagnosis.verdict_text import describe
from launchpad.protocol.events import Output, RanksSpawned, Restarted
from launchpad.record import junit
from launchpad.record.event_lines import EventLines
from tests.support.failures import exits, job, over, raises, stopping


def report_in(path: Path) -> ET.Element:
    """The report, which is one that Jenkins and GitLab can read."""
    xmlschema.XMLSchema(Path(__file__).parents[2] / "support" / "junit.xsd").validate(path)
    return ET.parse(path).getroot()


@pytest.mark.parametrize(
    ("kept", "changed"),
    [('tests="2"', 'tests="two"'), (' type="ValueError"', ' kind="ValueError"'), ('name="rank 1"', 'names="rank 1"')],
)
def test_the_schema_finds_what_is_wrong(tmp_path: Path, kept: str, changed: str) -> None:
    report = tmp_path / "out.xml"
    events = [*job(2), *raises(5, 1, "ValueError", "no \x00 good"), stopping(8, [0]), exits(9, 0, -15), over(10)]
    history = History(events)
    verdict = verdict_on(history)
    assert junit.write(str(report), junit.suite(history, verdict, describe(history, verdict)), adds=False) == ""
    assert report_in(report).get("failures") == "1"
    text = report.read_text()
    assert kept in text
    report.write_text(text.replace(kept, changed))
    with pytest.raises(xmlschema.XMLSchemaValidationError):
        report_in(report)


def test_a_spawned_rank_has_a_name_as_in_no_sentence() -> None:
    history = History([*job(1), RanksSpawned(2, 0, 0, [1], ["s.py"]), exits(5, 1, 7), stopping(8, [0]), over(10)])
    verdict = verdict_on(history)
    lines = describe(history, verdict)
    assert lines[0].startswith("rank 1, spawned by rank 0, failed first: exit code 7")
    names = [case.get("name") for case in junit.suite(history, verdict, lines).iter("testcase")]
    assert names == ["rank 0", "rank 1, spawned by rank 0"]


def test_a_suite_is_added_to_a_report_that_has_none_yet(tmp_path: Path) -> None:
    """An element without children is false; from Python 3.12 on it warns when it is asked."""
    report = tmp_path / "out.xml"
    report.write_text('<testsuites name="all of them" />')
    for tests in ("2", "3"):
        assert junit.write(str(report), ET.Element("testsuite", tests=tests), adds=True) == ""
    root = ET.parse(report).getroot()
    assert (root.get("name"), root.get("tests"), len(root)) == ("all of them", "5", 2)


def test_a_character_may_come_in_two_pieces(tmp_path: Path) -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    lines = EventLines(str(tmp_path / "events"), events.put)
    for rank, data in ((0, b"a\xe2\x82"), (1, b"\xac"), (0, b"\xac\n"), (0, b"\xe2")):
        assert lines.on(Output(7, rank, 1, data))
    lines.on(Restarted(8, 1, 1, 0, 1, -1))
    lines.on(Output(9, 0, 1, b"new"))
    lines.close()
    said = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    texts = [(one["rank"], one["text"]) for one in said if one["event"] == "Output"]
    assert texts == [(0, "a"), (1, "\ufffd"), (0, "\u20ac\n"), (0, ""), (0, "\ufffd"), (0, "new")]
