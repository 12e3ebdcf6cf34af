"""Records that somebody has tampered with: a command says so in one sentence, and reads no files outside of them."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Launchpad
from tests.support.logs import JOB, record

COMMANDS = [("why",), ("logs",), ("report", "-o", "page.html"), ("trace",), ("wait",)]


def fifo(folder: Path) -> None:
    (folder / "events.jsonl").unlink()
    os.mkfifo(folder / "events.jsonl")


def device(folder: Path) -> None:
    (folder / "events.jsonl").unlink()
    os.mknod(folder / "events.jsonl", 0o20600, os.makedev(1, 5))  # /dev/zero


def link(folder: Path) -> None:
    (folder / "events.jsonl").rename(folder.parent.parent / "elsewhere")
    (folder / "events.jsonl").symlink_to("../../elsewhere")


def endless(folder: Path) -> None:
    os.truncate(folder / "events.jsonl", 0)
    os.truncate(folder / "events.jsonl", 1 << 40)


def no_job(folder: Path) -> None:
    (folder / "events.jsonl").write_text('{"event": "RankStarted", "time": 1, "rank": 0, "pid": 1}\n')


ODD = {
    "events.jsonl is a pipe": fifo,
    "events.jsonl is a device": device,
    "events.jsonl is a link": link,
    "events.jsonl has a line of more than 16 MiB": endless,
    "events.jsonl does not begin with a job": no_job,
}


@pytest.mark.parametrize(("why", "spoil"), ODD.items())
def test_an_odd_record_is_one_line_among_the_others(
    why: str, spoil: Callable[[Path], None], launchpad: Launchpad
) -> None:
    well = launchpad.run("run", "true")
    assert well.returncode == 0
    spoil(record(launchpad))
    listed = launchpad.run("jobs")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert len(listed.stdout.splitlines()) == 2
    assert any(line.startswith(JOB) and f" unreadable ({why})" in line for line in listed.stdout.splitlines())
    assert "succeeded" in listed.stdout
    (row,) = [row for row in json.loads(launchpad.run("jobs", "--json").stdout) if row["job"] == JOB]
    assert (row["kind"], row["how"], row["started"]) == ("unreadable", f"unreadable ({why})", None)
    for command in COMMANDS:
        done = launchpad.run(*command, JOB)
        assert (done.returncode, done.stdout) == (2, ""), command
        assert (
            done.stderr == f"launchpad: error: job {JOB}: its record is unreadable: {why}\n" or command[0] == "report"
        )
        assert why in done.stderr


@pytest.mark.parametrize("way", ["absolute", "above", "link", "folder"])
def test_a_record_shows_no_files_outside_of_it(way: str, launchpad: Launchpad) -> None:
    folder = record(launchpad)
    secret = launchpad.folder / "stdout.log"
    secret.write_text("secret words\n")
    events = folder / "events.jsonl"
    match way:
        case "absolute" | "above":
            name = str(secret) if way == "absolute" else os.path.relpath(secret, folder)
            said = {"event": "Output", "time": 0, "rank": 0, "stream": 1, "file": name, "offset": 0, "length": 99}
            with events.open("a") as file:
                print(json.dumps(said), file=file)
        case "link":
            (folder / "attempt_0" / "0" / "stdout.log").unlink()
            (folder / "attempt_0" / "0" / "stdout.log").symlink_to(secret)
        case "folder":
            outside = os.path.relpath(launchpad.folder, folder / "attempt_0")
            events.write_text(events.read_text().replace('"folders": {"0": "0"', f'"folders": {{"0": "{outside}"'))
    for command in (("logs",), ("report", "-o", "page.html"), ("why",), ("trace",)):
        done = launchpad.run(*command, JOB)
        assert (done.returncode, done.stderr) == (0, ""), command
        assert "secret" not in done.stdout
    page = (launchpad.folder / "page.html").read_text()
    chunks = re.findall(r'class="chunk">([^<]+)<', page)
    texts = [zlib.decompress(base64.b64decode(chunk)).decode() for chunk in chunks]
    assert any("a warning" in text for text in texts)
    assert not any("secret" in text for text in (page, *texts))


def test_other_files_of_a_record_may_be_odd(launchpad: Launchpad) -> None:
    folder = record(launchpad)
    for name in ("job.json", "samples.jsonl", "stacks_1.txt", "console.1.jsonl"):
        os.mkfifo(folder / name)
    for command in (("report", "-o", "page.html"), ("trace",)):
        done = launchpad.run(*command, JOB)
        assert (done.returncode, done.stderr) == (0, "")
    done = launchpad.run("attach", JOB)
    assert done.returncode == 2
    assert "console.1.jsonl is a pipe" in done.stderr
