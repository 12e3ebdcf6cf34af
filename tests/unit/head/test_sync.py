"""head/sync, head/folder_listing and agent/host/synced_folder: which files are sent, and how a copy is updated."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent.host import synced_folder
from launchpad.agent.host.synced_folder import SyncedFolder
from launchpad.errors import NodeError, UsageError
from launchpad.head import folder_listing, sender, sync
from launchpad.head.bringup import BringUp
from launchpad.head.folder_listing import SyncedFile, list_files
from launchpad.head.nodes import Nodes
from launchpad.protocol.commands import FileChunk, Finish, Ping, Sync
from launchpad.protocol.events import ChunksTaken, Pong, Synced, Wanted
from launchpad.transport.memory import MemoryLink

DEADLINE = 30.0


def test_outside_of_git_everything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "sub" / "__pycache__").mkdir(parents=True)
    (tmp_path / "sub" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "sub" / "a.py").write_text("1")
    (tmp_path / "b").write_text("22")
    (tmp_path / "b").chmod(0o640)
    (tmp_path / "to a folder").symlink_to("sub")
    (tmp_path / "to nothing").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    files = {file.path: file for file in list_files(str(tmp_path))}
    assert sorted(files) == ["b", "sub/a.py", "to a folder", "to nothing"]
    assert files["b"][1:3] == (0o640, 2)
    assert (files["to a folder"].link, files["to a folder"].size) == ("sub", 0)


def test_a_file_that_has_become_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data")
    with pytest.raises(UsageError, match=r"^--sync: .*/data shrank while it was being sent"):
        list(sync._read(sync.SourceFile(str(tmp_path / "data"), 5, "leave it out"), "--sync"))


def test_too_much_outside_of_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(bytes(100))
    monkeypatch.setattr(folder_listing, "MOST_BYTES", 99)
    with pytest.raises(UsageError, match=r"^--sync: .* has more than 0 MiB or 20000 files; run git init in it"):
        list_files(str(tmp_path))


def test_a_node_that_accepts_nothing_is_given_up_despite_other_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("12")
    monkeypatch.setattr(sender, "STUCK_SECONDS", 0.3)
    link = MemoryLink("a", remote=True)

    def agent() -> None:
        while type(asked := link.heard.get(timeout=DEADLINE)) is not Finish:
            if isinstance(asked, Sync):
                link.say(Wanted(0, "/copy", [[0, 1]], ""))
            elif isinstance(asked, Ping):
                link.say(Pong(0, asked.time))

    thread = threading.Thread(target=agent)
    thread.start()
    bringup = BringUp()
    bringup.nodes = Nodes([link], bringup.inbox.put, silence=0.1)
    bringup.nodes.read()
    with pytest.raises(NodeError, match=r"^a: accepted nothing of the folder for 0\.3 s"):
        sync.sync(bringup, [0], str(tmp_path), list_files(str(tmp_path)), lambda *_: None)
    link.send(Finish(True))
    thread.join(DEADLINE)
    link.hang_up()


def test_where_git_fails_nothing_is_guessed(tmp_path: Path) -> None:
    """The files that git would ignore may be secret."""
    (tmp_path / ".git").write_text("not a repository")
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        with pytest.raises(UsageError, match=r"^--sync: git can't list the files of .*; fix that first$"):
            list_files(str(folder))


def test_logs_in_the_folder_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old").touch()
    (tmp_path / "logs.py").touch()
    assert [file.path for file in list_files(str(tmp_path), str(tmp_path / "logs"))] == ["logs.py"]


# The copy.


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(synced_folder, "base_folder", lambda: str(tmp_path))
    return tmp_path


def wanted_by(one: SyncedFolder) -> list[int]:
    """Begin. Returns the indices of the files that it wants."""
    said = one.begin()[0]
    assert isinstance(said, Wanted)
    assert said.problem == ""
    return [place for first, end in said.files for place in range(first, end)]


def receive(files: list[SyncedFile], data: dict[str, bytes]) -> list[str]:
    """Sync these files in pieces of 2 bytes. Returns the names of those that were wanted."""
    one = SyncedFolder(Sync("copy-x", [list(file) for file in files], []))
    said: list[Any] = one.begin()
    wanted = said[0]
    assert isinstance(wanted, Wanted)
    assert wanted.problem == ""
    places = [place for first, end in wanted.files for place in range(first, end)]
    for place in places:
        content = data.get(files[place].path, b"")
        for start in range(0, len(content), 2):
            said += one.take(FileChunk(place, content[start : start + 2]))
    assert said[-1]._replace(time=0) == Synced(0, "")
    assert sum(event.size for event in said if isinstance(event, ChunksTaken)) == sum(
        files[place].size for place in places
    )
    one.close()
    return [files[place].path for place in places]


def test_a_copy_takes_what_changed(base: Path) -> None:
    files = [
        SyncedFile("a", 0o600, 3, 10**18, ""),
        SyncedFile("d/b", 0o755, 0, 10**18, ""),
        SyncedFile("d/c", 0o777, 0, 0, "b"),
    ]
    assert receive(files, {"a": b"abc"}) == ["a", "d/b", "d/c"]
    assert (base / "copy-x" / "a").read_bytes() == b"abc"
    assert (base / "copy-x" / "d" / "c").readlink() == Path("b")
    assert receive(files, {}) == []
    (base / "copy-x" / "a").write_bytes(b"xyz")  # by a rank, which changes its mtime
    assert receive([files[0]], {"a": b"abc"}) == ["a"]
    assert sorted(os.listdir(base)) == ["copy-x", "copy-x.json"]
    assert os.listdir(base / "copy-x") == ["a"], "what the folder has no more is gone"


def test_permissions_alone_need_no_bytes(base: Path) -> None:
    receive([SyncedFile("a", 0o600, 1, 10**18, "")], {"a": b"a"})
    assert receive([SyncedFile("a", 0o755, 1, 10**18, "")], {}) == []
    assert (base / "copy-x" / "a").stat().st_mode & 0o777 == 0o755


def test_nothing_is_written_through_a_link(base: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (base / "copy-x").mkdir()
    (base / "copy-x" / "d").symlink_to(outside)
    receive([SyncedFile("d/file", 0o600, 2, 10**18, "")], {"d/file": b"ab"})
    assert (outside / "file").read_text() == "mine"
    assert not (base / "copy-x" / "d").is_symlink()


def test_nothing_is_removed_through_a_link(base: Path, tmp_path: Path) -> None:
    """The user has moved the data elsewhere since, and the folder no longer has that file."""
    receive([SyncedFile("d/file", 0o600, 2, 10**18, "")], {"d/file": b"ab"})
    outside = tmp_path / "outside"
    (base / "copy-x" / "d").rename(outside)
    (base / "copy-x" / "d").symlink_to(outside)
    receive([], {})
    assert (outside / "file").read_bytes() == b"ab"


def test_two_nodes_with_one_home_receive_at_once(base: Path) -> None:
    files = [list(SyncedFile(f"a/b/{name}", 0o600, 2, 10**18, "")) for name in "xy"]
    first, second = SyncedFolder(Sync("copy-x", files, [])), SyncedFolder(Sync("copy-x", files, []))
    for one in (first, second):
        assert wanted_by(one) == [0, 1]
    for place, data in ((0, b"a"), (0, b"b"), (1, b"c"), (1, b"d")):
        said = [one.take(FileChunk(place, data))[-1] for one in (first, second)]
    assert [event._replace(time=0) for event in said] == [Synced(0, ""), Synced(0, "")]
    assert (base / "copy-x" / "a" / "b" / "y").read_bytes() == b"cd"
    first.close()
    second.close()


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_paths_that_lead_out_are_refused(path: str) -> None:
    said = SyncedFolder(Sync("copy-x", [[path, 0o600, 1, 1, ""]], [])).begin()
    assert said[0].problem == f"{path} is not inside the folder"
    with pytest.raises(ValueError, match="not a valid name for a copy"):
        SyncedFolder(Sync("../x", [], []))


def test_a_folder_of_the_ranks_is_not_removed_for_a_file(base: Path) -> None:
    (base / "copy-x" / "a").mkdir(parents=True)
    (base / "copy-x" / "a" / "result").touch()
    one = SyncedFolder(Sync("copy-x", [["a", 0o600, 1, 1, ""]], []))
    one.begin()
    (said,) = one.take(FileChunk(0, b"a"))
    assert "Directory not empty" in said.problem
    assert (base / "copy-x" / "a" / "result").exists()
    assert one.take(FileChunk(0, b"a")) == []
    one.close()
    assert not list(base.rglob("*.unfinished"))


def test_a_copy_may_be_on_another_disk(base: Path) -> None:
    disk = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        (base / "copy-x").symlink_to(disk)
        files = [SyncedFile("d/file", 0o600, 2, 10**18, "")]
        assert receive(files, {"d/file": b"ab"}) == ["d/file"]
        assert (disk / "d" / "file").read_bytes() == b"ab"
        assert receive(files, {}) == [], "it is there already"
        receive([], {})
        assert list(disk.iterdir()) == []
    finally:
        shutil.rmtree(disk)


def test_a_link_to_a_folder_that_others_can_write_to_is_refused(base: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    (base / "copy-x").symlink_to(shared)
    said = SyncedFolder(Sync("copy-x", [["a", 0o600, 1, 1, ""]], [])).begin()
    assert said[0].problem == f"{base}/copy-x leads to {shared}, which others can write to"


# An environment's files.


def test_one_chunk_may_hold_several_files(base: Path) -> None:
    rows = [["a", 0o600, 2, 1, ""], ["b", 0o600, 0, 1, ""], ["c", 0o600, 3, 1, ""]]
    one = SyncedFolder(Sync("copy-x", rows, []))
    one.begin()
    assert [type(said) for said in one.take(FileChunk(0, b"aac"))] == [ChunksTaken]
    assert [type(said) for said in one.take(FileChunk(2, b"cc"))] == [ChunksTaken, Synced]
    assert [(base / "copy-x" / name).read_bytes() for name in "abc"] == [b"aa", b"", b"ccc"]
    one.close()


def test_a_transfer_that_was_cut_off_goes_on_where_it_was(base: Path) -> None:
    rows = [["a", 0o600, 2, 10**18, ""], ["b", 0o600, 2, 10**18, ""]]
    cut = SyncedFolder(Sync("env-x", rows, ["1", "2"]))
    cut.begin()
    cut.take(FileChunk(0, b"aab"))
    cut.close()
    assert wanted_by(SyncedFolder(Sync("env-x", rows, ["1", "2"]))) == [1]
    assert sorted(path.name for path in base.iterdir()) == ["env-x"]


def whole(name: str, rows: list[list[Any]], digests: list[str], data: bytes) -> list[int]:
    """Receive an environment. Returns which files were wanted."""
    one = SyncedFolder(Sync(name, rows, digests))
    wanted = wanted_by(one)
    if wanted:
        one.take(FileChunk(wanted[0], data))
    one.close()
    return wanted


def test_equal_files_of_two_environments_are_one(base: Path) -> None:
    whole("env-x", [["lib/a.so", 0o755, 2, 10**18, ""], ["lib/b.py", 0o644, 1, 10**18, ""]], ["A", "B"], b"aab")
    rows = [
        ["else/a.so", 0o755, 2, 7, ""],
        ["else/a2.so", 0o644, 2, 7, ""],  # other permissions
        ["else/b.py", 0o644, 1, 7, ""],  # compiled files name the time of their source
        ["else/b2.py", 0o644, 1, 10**18, ""],
    ]
    assert whole("env-y", rows, ["A", "A", "B", "B"], b"aab") == [1, 2]
    assert (base / "env-y" / "else" / "a.so").samefile(base / "env-x" / "lib" / "a.so")
    assert (base / "env-y" / "else" / "b2.py").samefile(base / "env-x" / "lib" / "b.py")


def test_a_file_that_has_changed_there_is_not_linked(base: Path) -> None:
    whole("env-x", [["a.so", 0o755, 2, 10**18, ""]], ["A"], b"aa")
    (base / "env-x" / "a.so").write_bytes(b"longer")
    assert whole("env-y", [["a.so", 0o755, 2, 10**18, ""]], ["A"], b"aa") == [0]


@pytest.mark.usefixtures("base")
def test_more_than_there_is_room_for_is_refused() -> None:
    (said,) = SyncedFolder(Sync("env-x", [["a", 0o600, 1 << 60, 1, ""]], ["A"])).begin()
    assert isinstance(said, Wanted)
    assert re.search(r"env-x needs \d+ MiB more, and \d+ MiB are free$", said.problem)
