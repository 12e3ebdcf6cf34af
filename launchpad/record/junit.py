"""`--junit`: a JUnit report with one suite per job and one case per rank (passed, failed, or skipped).

With roles, the class of a case is its rank's world: rl.train.0.
"""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import Verdict
from launchpad.errors import UsageError

# Characters that XML 1.0 can't represent, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def check(path: str, *, adds: bool) -> None:
    """Raise UsageError before anything runs if the report can't be written. Truncates an old one, unless `adds`."""
    try:
        with open(path, "a" if adds else "w", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--junit {path}: {error.strerror}; choose a writable file") from None


def write(path: str, suite: ET.Element, *, adds: bool) -> str:
    """Write the suite or, with `adds`, add it to the report. Returns an error message, or ""."""
    root = _read(path) if adds else None
    if root is None:
        root = ET.Element("testsuites", name="launchpad")
    root.append(suite)
    for count in ("tests", "failures", "errors"):
        root.set(count, str(sum(int(one.get(count, "0")) for one in root)))
    ET.indent(root)
    try:
        ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        return f"--junit {path}: {error.strerror}; the report was not written"
    return ""


def _read(path: str) -> ET.Element | None:
    try:
        return ET.parse(path).getroot()
    except (OSError, ET.ParseError):  # no job before this one got as far as writing it
        return None


def suite(history: History, verdict: Verdict, lines: Sequence[str], job: str = "") -> ET.Element:
    """One job's testsuite element; `job` is its name in a job file."""
    planned = history.planned
    name = " ".join(planned.words[:2] if planned.words[:1] == ["-m"] else planned.words[:1])
    suite = ET.Element("testsuite", name=f"launchpad {job or name}", hostname=history.host(0) if planned.nodes else "")
    suite.set("timestamp", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(planned.wall)))
    properties = ET.SubElement(suite, "properties")
    for key, value in (("job", planned.job), ("exit_code", verdict.exit_code), ("attempts", history.attempt + 1)):
        ET.SubElement(properties, "property", name=key, value=str(value))
    text = _clean("\n".join(lines))
    blamed = {verdict.cause.rank} if verdict.cause else set()
    reasons = {one.rank: one.why for one in verdict.victims}
    failures = skipped = 0
    last = planned.time
    for rank in sorted(history.ranks):
        one = history.of(rank)
        end = one.exited.time if one.exited else history.stop.time if history.stop else one.started
        last = max(last, end)
        seconds = max(0, end - one.started) / 1e9 if one.started else 0.0
        of = ".".join(filter(None, (job, history.role(rank)))) if history.role(rank) else name.replace("/", ".")
        case = ET.SubElement(suite, "testcase", classname=of, name=history.name(rank), time=f"{seconds:.3f}")
        said = _clean(lines[0]) if lines else ""
        if rank in blamed and verdict.kind != "lost":
            ET.SubElement(case, "failure", message=said, type=_type(verdict)).text = text
            failures += 1
        elif rank in (*verdict.close, *verdict.alike, *verdict.failed_too):
            ET.SubElement(case, "failure", message="failed too", type="failure").text = text
            failures += 1
        elif rank in verdict.early:
            ET.SubElement(case, "failure", message="left early, with exit code 0", type="early").text = text
            failures += 1
        elif rank in history.never_started:
            ET.SubElement(case, "skipped", message="not started: its role waited for others")
            skipped += 1
        elif rank in reasons:
            ET.SubElement(case, "skipped", message=_clean(f"died because another rank failed: {reasons[rank]}"))
            skipped += 1
        elif verdict.kind in ("timeout", "stall", "signal", "console", "lost", "start", "cut off"):
            if one.exited is None or one.exited.code != 0:
                ET.SubElement(case, "failure", message=said, type=verdict.kind).text = text
                failures += 1
        elif rank in verdict.stopped:
            ET.SubElement(case, "skipped", message="stopped because another rank failed")
            skipped += 1
    suite.set("tests", str(len(history.ranks)))
    suite.set("failures", str(failures))
    suite.set("errors", "0")
    suite.set("skipped", str(skipped))
    suite.set("time", f"{(last - planned.time) / 1e9:.3f}")
    return suite


def _type(verdict: Verdict) -> str:
    cause = verdict.cause
    assert cause is not None
    return (cause.traceback.type or cause.traceback.roots[0].type if cause.traceback else "") or cause.kind


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
