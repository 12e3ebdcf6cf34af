"""record/keeper: what is in a job's folder while it runs."""

from __future__ import annotations

import os
from pathlib import Path

from launchpad.output.mark import SinkMark
from launchpad.record import checkpoint, held_hosts
from launchpad.record.keeper import CheckpointKeeper
from launchpad.record.resume_lock import ResumeLock
from launchpad.transport.held_link import LinkState

LINK = LinkState(
    "h1", ("ann", 22, "python3", "", "", False), 60.0, 2.0, "/tmp/place", "secret", 0, 0, (), 0, 0, ended=False
)


def marked(**sizes: int) -> SinkMark:
    mark = SinkMark(lambda _: None)
    mark.awaits("journal", 1)
    mark.written(sizes)
    return mark


def test_lengths_of_files_that_have_not_changed_are_remembered(tmp_path: Path) -> None:
    """By the next head, too."""
    keeper = CheckpointKeeper(str(tmp_path), "settings")
    assert not keeper.refusal
    keeper.save(b"1", marked(a=1, b=1))
    keeper.save(b"2", marked(b=2))
    found = checkpoint.read(str(tmp_path))
    assert (found.head, found.settings, dict(found.sizes)) == (b"2", "settings", {"a": 1, "b": 2})
    CheckpointKeeper(str(tmp_path), "settings", found).save(b"3", marked(c=3))
    assert dict(checkpoint.read(str(tmp_path)).sizes) == {"a": 1, "b": 2, "c": 3}


def test_files_outside_the_record_are_known_again(tmp_path: Path) -> None:
    record, events = tmp_path / "record", tmp_path / "all.jsonl"
    record.mkdir()
    events.write_text("")
    keeper = CheckpointKeeper(str(record), "settings")
    keeper.save(b"1", marked(**{str(events): 0, str(record / "events.jsonl"): 0}))
    found = events.stat()
    assert checkpoint.read(str(record)).inodes == {str(events): (found.st_dev, found.st_ino)}


def test_the_hosts_are_noted_until_the_job_is_over(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(str(tmp_path), None)
    assert keeper.refusal
    keeper.hold([LINK])
    keeper.drop()
    assert [(one.name, one.user, one.secret, one.seconds) for one in held_hosts.read(str(tmp_path))] == [
        ("h1", "ann", "secret", 60.0)
    ]
    ResumeLock(str(tmp_path))
    keeper.close()
    assert os.listdir(tmp_path) == []
