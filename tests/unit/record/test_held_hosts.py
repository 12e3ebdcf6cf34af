"""record/held_hosts: the file that says where ranks go on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from launchpad.record import checkpoint, held_hosts, job_store
from launchpad.record.held_hosts import HeldHost

HOST = HeldHost("h1", "ann", 22, "/venv/bin/python", "", "", False, "/tmp/launchpad-1", "secret")


def test_what_was_noted_is_read_by_its_owner_only(tmp_path: Path) -> None:
    held_hosts.write(str(tmp_path), [HOST])
    assert held_hosts.read(str(tmp_path)) == [HOST]
    assert (tmp_path / job_store.HELD).stat().st_mode & 0o777 == 0o600
    held_hosts.remove(str(tmp_path))
    assert held_hosts.read(str(tmp_path)) == []
    held_hosts.remove(str(tmp_path))


def test_ranks_that_nobody_has_taken_over_have_ended(tmp_path: Path) -> None:
    (tmp_path / job_store.EVENTS).write_text("")
    (tmp_path / checkpoint.CHECKPOINT).write_text("")
    held_hosts.write(str(tmp_path), [HOST._replace(seconds=60.0)])
    goes_on = held_hosts.headless(str(tmp_path))
    assert goes_on is not None
    assert not goes_on.ended
    assert "takes it over, or its ranks end at" in str(goes_on)
    (tmp_path / checkpoint.CHECKPOINT).rename(tmp_path / "away")
    name = tmp_path.name
    only_stopped = re.escape(f"; `launchpad stop {name}` ends its ranks, or they end at ")
    assert re.fullmatch(rf"without launchpad since .*{only_stopped}.*", str(held_hosts.headless(str(tmp_path))))
    (tmp_path / "away").rename(tmp_path / checkpoint.CHECKPOINT)
    os.utime(tmp_path / checkpoint.CHECKPOINT, (1e9, 1e9))
    ended = held_hosts.headless(str(tmp_path))
    assert ended is not None
    assert ended.ended
    assert re.fullmatch(r"without launchpad since 2001-.*; its ranks ended at about 2001-09-\d\d \d\d:\d\d", str(ended))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[["h1"]]', "nonsense", '[["h1", "", "22", "", "", "", false, "", ""]]']
)
def test_anything_else_is_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / job_store.HELD).write_text(text)
    assert held_hosts.read(str(tmp_path)) == []


def test_a_job_whose_ranks_may_go_on_is_not_removed_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever many jobs there have been since."""
    monkeypatch.setattr(job_store, "MOST_JOBS", 0)
    monkeypatch.setattr(job_store, "SLACK", 0)
    for name in ("goes-on", "ended"):
        folder = tmp_path / "launchpad" / "jobs" / name
        folder.mkdir(parents=True)
        (folder / job_store.EVENTS).write_text("")
    held_hosts.write(str(tmp_path / "launchpad" / "jobs" / "goes-on"), [HOST])
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    job_store.prune(environ, by_size=False)
    assert job_store.jobs(environ) == ["goes-on"]
