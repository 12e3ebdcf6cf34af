"""head/run_paths: which folders shared libraries name, and where those are on a host."""

from __future__ import annotations

from pathlib import Path

from launchpad.head.run_paths import Linked, library_folders, named_folders, on_hosts
from launchpad.protocol.commands import CACHE, HERE
from tests.support.elf import RPATH, RUNPATH, write_elf


def test_folders_that_are_named_absolutely_are_found(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    new = write_elf(lib / "new.so", (RPATH, "/old"), (RUNPATH, f"/opt/b/:$ORIGIN/x:{lib}/x:{lib}/y:relative"))
    assert named_folders(str(new)) == ["/opt/b", f"{lib}/y"], "one is named relative to the library, too"
    assert named_folders(str(write_elf(lib / "old.so", (RPATH, "/old")))) == ["/old"]
    assert named_folders(str(lib)) == []


def test_they_are_elsewhere_on_a_host(tmp_path: Path) -> None:
    prefix, source = tmp_path / "src" / "venv", tmp_path / "src"
    for folder in (prefix / "lib", source / "build"):
        folder.mkdir(parents=True)
    places = {str(source): f"{CACHE}/copy-src-1", str(prefix): HERE}
    named = [
        f"{prefix}/lib",
        f"{source}/build",
        "/usr/lib",
        f"{prefix}/gone",
        f"{prefix}/lib",
        f"{source}/venvy",
        str(prefix),
    ]
    assert on_hosts([*named, *named], places) == [f"{HERE}/lib", f"{CACHE}/copy-src-1/build", HERE]


def test_files_that_can_be_no_library_are_not_looked_at(tmp_path: Path) -> None:
    def named(name: str, permissions: int) -> list[str]:
        path = write_elf(tmp_path / name, (RUNPATH, f"{tmp_path}"))
        return library_folders([Linked(str(path), permissions)], {str(tmp_path): HERE})

    assert named("a.so", 0o644) == named("liba.so.1", 0o644) == named("program", 0o755) == [HERE]
    assert named("data", 0o644) == []
