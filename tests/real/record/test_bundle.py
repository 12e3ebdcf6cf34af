"""`launchpad bundle`, and what reads one in place of a job."""

from __future__ import annotations

import json
import tarfile

import pytest

from tests.support.command import Launchpad

pytestmark = pytest.mark.usefixtures("from_image")

PROGRAM = 'echo "$RANK: $SOME_TOKEN" >&2; echo postgres://me:hunter33@host/; test $RANK = 0 || exit 3'


def test_a_bundle_is_read_like_a_record_and_has_no_secrets(launchpad: Launchpad) -> None:
    launchpad.environ["SOME_TOKEN"] = "hunter22"
    assert launchpad.run("run", "-n", 2, "sh", "-c", PROGRAM).returncode == 3
    why = launchpad.run("why", "--json")
    done = launchpad.run("bundle")
    assert (done.returncode, done.stdout) == (0, f"{launchpad.folder / 'job.tar.gz'}\n")
    with tarfile.open(launchpad.folder / "job.tar.gz") as archive:
        found = {one.name.partition("/")[2]: archive.extractfile(one) for one in archive if one.isreg()}
        texts = {name: file.read() for name, file in found.items() if file is not None}
    assert {"events.jsonl", "job.json", "why.txt", "report.html", "doctor.json"} <= texts.keys()
    assert not [name for name, text in texts.items() if b"hunter" in text]
    assert json.loads(texts["doctor.json"])["hosts"]
    # Somebody else reads it, who has no such job.
    launchpad.environ["XDG_STATE_HOME"] = str(launchpad.folder / "other")
    assert (
        json.loads(launchpad.run("why", "--json", "job.tar.gz").stdout)["rank"] == json.loads(why.stdout)["rank"] == 1
    )
    assert "logs: job.tar.gz" in launchpad.run("why", "job.tar.gz").stdout
    logs = launchpad.run("logs", "--rank", 1, "job.tar.gz")
    assert sorted(logs.stdout.splitlines()) == ["[1] 1: ********", "[1] postgres://me:********@host/"]
    for command in ("report", "trace"):
        assert launchpad.run(command, "-o", "page", "job.tar.gz").returncode == 0
        assert (launchpad.folder / "page").stat().st_size > 1000
    assert not list(launchpad.scratch.glob("launchpad-bundle-*"))


def test_the_bundle_of_a_running_job_says_that_it_runs(launchpad: Launchpad) -> None:
    running = launchpad.start("run", "sh", "-c", "echo up; sleep 600")
    assert running.stdout is not None
    assert running.stdout.readline() == b"[0] up\n"
    done = launchpad.run("bundle", "-o", "now.tgz")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        0,
        "launchpad: the job is still running: its record ends here",
    )
    with tarfile.open(launchpad.folder / "now.tgz") as archive:
        text = next(archive.extractfile(one) for one in archive if one.name.endswith("/why.txt"))
        assert text is not None
        assert b"the job is running" in text.read()
    running.terminate()
    running.wait(timeout=60)


def test_bundles_that_can_not_be_written_are_refused(launchpad: Launchpad) -> None:
    assert launchpad.run("run", "true").returncode == 0
    for output, message in (
        ("none/job.tar.gz", "--output none/job.tar.gz: No such file or directory; name a file that can be written"),
        ("job.zip", "--output job.zip: a bundle's name ends with .tar.gz; type job.zip.tar.gz"),
    ):
        done = launchpad.run("bundle", "-o", output)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == f"launchpad: error: {message}"
