"""head/outside_files: what is sent of a folder that an editable install or PYTHONPATH leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchpad.errors import UsageError
from launchpad.head import folder_listing
from launchpad.head.outside_files import look_outside, topmost
from tests.support.trees import write


def test_links_that_a_strict_editable_install_consists_of_are_followed(tmp_path: Path) -> None:
    source = write(tmp_path / "src" / "mine.py", "here\n", 0o600)
    links = tmp_path / "build"
    write(links / "own.py", "")
    for name, target in (
        ("mine.py", source),
        ("again.py", "own.py"),
        ("gone.py", "nowhere.py"),
        ("all", source.parent),
    ):
        (links / name).symlink_to(target)
    found = {file.path: file for file in look_outside(str(links), {}).files}
    assert found["mine.py"][1:] == (0o600, 5, source.stat().st_mtime_ns, "")
    assert [found[name].link for name in ("again.py", "gone.py", "all")] == ["own.py", "nowhere.py", str(source.parent)]


def test_too_much_is_refused_with_what_else_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "large", "x")
    monkeypatch.setattr(folder_listing, "MOST_FILES", 0)
    said = "--sync-env: .* has more than 256 MiB or 0 files; .*, or install what is in it without --editable"
    with pytest.raises(UsageError, match=said):
        look_outside(str(tmp_path), {})


def test_folders_in_others_are_not_sent_twice() -> None:
    assert topmost(["/a/b", "/a", "/ab", "/c/module.py", "/c/d"]) == ["/a", "/ab", "/c"]
