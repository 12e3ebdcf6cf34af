"""head/environment: what an environment consists of, as values of trees made here."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import pytest

from launchpad.head.environment import Environment, Interpreter, describe
from launchpad.head.environment_files import EnvironmentFile, Listing
from launchpad.head.environment_records import digests, installed_wheels
from launchpad.head.folder_listing import name_of_copy
from launchpad.protocol.commands import CACHE, HERE
from tests.support.trees import write

ABI = ".cpython-311-x86_64-linux-gnu.so"
PACKAGES = "lib/python3.11/site-packages"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A venv with a package, a console script, and what each machine has of its own."""
    prefix = tmp_path / "venv"
    write(prefix / "pyvenv.cfg", "home = /usr/bin\n")
    write(prefix / "bin" / "activate", f"VIRTUAL_ENV={prefix}\n")
    (prefix / "bin" / "python").symlink_to("/usr/bin/python3.11")
    (prefix / "bin" / "python3.11").symlink_to("python")
    write(prefix / "bin" / "tool", f"#!{prefix}/bin/python\nimport tool\n", 0o755)
    write(prefix / "bin" / "program", "\x7fELF", 0o755)
    write(prefix / PACKAGES / "tool.py", "pass\n")
    (prefix / "lib64").symlink_to("lib")
    return prefix


def interpreter(prefix: Path, base: str = "/usr", *, relocatable: bool = False, **more: list[str]) -> Interpreter:
    folders = [str(prefix / PACKAGES), *more.get("folders", [])]
    packages, library = str(prefix / PACKAGES), [f"{base}/lib/python3.11"]
    return Interpreter(
        str(prefix), base, "3.11", ABI, relocatable, folders, more.get("editable", []), packages, library
    )


def files(of: Interpreter) -> list[EnvironmentFile]:
    return describe(of)[1].all()


def kept(listing: Listing) -> list[EnvironmentFile]:
    """Without the compiled files."""
    return sorted(file for folder in listing.folders for file in folder.files())


def paths(of: Interpreter) -> list[str]:
    return [file.path for file in files(of)]


def texts(environment: Environment) -> dict[str, str]:
    return {path: text for path, _, text in environment.texts}


def test_a_venv_is_sent_without_what_is_made_there(venv: Path) -> None:
    found, listing = describe(interpreter(venv))
    assert [file.path for file in kept(listing)] == ["bin/program", f"{PACKAGES}/tool.py", "lib64"]
    assert kept(listing)[0].permissions == 0o755
    assert kept(listing)[2].link == "lib"
    assert texts(found)["bin/tool"] == f"#!{HERE}/bin/python\nimport tool\n"
    assert (found.venv, found.python, found.outside) == (True, "", [])
    assert listing.places == {str(venv): HERE}
    assert found.name.startswith("env-venv-")


def test_the_name_changes_with_any_file_but_not_with_compiled_ones(venv: Path) -> None:
    before, _ = describe(interpreter(venv))
    compiled = write(venv / PACKAGES / "__pycache__" / "tool.cpython-311.pyc", "x")
    assert describe(interpreter(venv))[0].name == before.name
    assert str(compiled.relative_to(venv)) in paths(interpreter(venv))
    with open(venv / PACKAGES / "tool.py", "r+") as in_place:  # which its folder does not show
        in_place.write("1")
    assert describe(interpreter(venv))[0].name != before.name


def test_links_that_lead_out_are_followed(venv: Path, tmp_path: Path) -> None:
    """uv can make all files of a venv links into its cache."""
    cached = write(tmp_path / "cache" / "pkg" / "mod.py", "cached\n")
    (venv / PACKAGES / "mod.py").symlink_to(cached)
    (venv / PACKAGES / "pkg").symlink_to(cached.parent)
    (venv / PACKAGES / "pkg" / "again").symlink_to(cached.parent)
    (venv / PACKAGES / "inside").symlink_to(venv / PACKAGES / "tool.py")
    (venv / PACKAGES / "nowhere").symlink_to("gone/file")
    found = {file.path: file for file in files(interpreter(venv))}
    assert found[f"{PACKAGES}/mod.py"].size == found[f"{PACKAGES}/pkg/mod.py"].size == len("cached\n")
    assert found[f"{PACKAGES}/inside"].link == "tool.py"


def test_editable_installs_and_other_folders_are_copied_beside(venv: Path, tmp_path: Path) -> None:
    source, other = tmp_path / "src", tmp_path / "more"
    package = write(source / "mine" / "__init__.py", "").parent
    other.mkdir()
    write(venv / PACKAGES / "__editable___mine_finder.py", f"MAPPING = {{'mine': '{package}'}}\n")
    found, _ = describe(interpreter(venv, folders=[str(other)], editable=[str(package), str(package / "part")]))
    assert found.outside == sorted([str(other), str(package)])
    mine, more = (f"{CACHE}/{name_of_copy(str(one))}" for one in (package, other))
    assert texts(found)[f"{PACKAGES}/__editable___mine_finder.py"] == f"MAPPING = {{'mine': '{mine}'}}\n"
    assert texts(found)[f"{PACKAGES}/_launchpad.pth"] == f"{more}\n"


def test_packages_of_the_system_come_along_where_they_are_seen(venv: Path, tmp_path: Path) -> None:
    system = write(tmp_path / "dist-packages" / "old.py", "").parent
    seen = interpreter(venv, folders=[str(system), "/usr/lib/python3.11/lib-dynload"])
    assert "lib/site-0/old.py" in paths(seen)
    found, _ = describe(seen)
    assert texts(found)[f"{PACKAGES}/_launchpad.pth"] == f"import site; site.addsitedir('{HERE}/lib/site-0')\n"


def test_a_relocatable_interpreter_comes_along(venv: Path, tmp_path: Path) -> None:
    base = tmp_path / "uv"
    write(base / "bin" / "python3.11", "\x7fELF", 0o755)
    write(base / "lib" / "python3.11" / "os.py", "")
    found, listing = describe(interpreter(venv, str(base), relocatable=True))
    assert {"python/bin/python3.11", "python/lib/python3.11/os.py"} < {file.path for file in kept(listing)}
    assert (found.venv, found.python) == (True, "python/bin/python3.11")
    assert listing.places == {str(venv): HERE, str(base): f"{HERE}/python"}


def test_a_conda_prefix_is_sent_whole(tmp_path: Path) -> None:
    prefix = tmp_path / "conda"
    write(prefix / "bin" / "python3.11", "\x7fELF", 0o755)
    write(prefix / PACKAGES / "x.py", "")
    write(prefix / "lib" / "libz.so", "")
    write(prefix / "conda-meta" / "history", "")
    write(prefix / "pkgs" / "cached", "")
    found, listing = describe(interpreter(prefix, str(prefix), relocatable=True))
    assert [file.path for file in kept(listing)] == ["bin/python3.11", "lib/libz.so", f"{PACKAGES}/x.py"]
    assert (found.venv, found.python) == (False, "bin/python3.11")


def test_hashes_are_taken_from_the_wheels_records_unless_a_file_was_changed(venv: Path) -> None:
    def row(path: Path, text: str) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{path.relative_to(venv / PACKAGES)},sha256={digest},{len(text)}\n"

    same, changed = write(venv / PACKAGES / "same.py", "as it is\n"), write(venv / PACKAGES / "changed.py", "new\n")
    info = venv / PACKAGES / "own-1.0.dist-info"
    write(info / "WHEEL", "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_17_x86_64\nTag: py3-none-any\n")
    record = write(info / "RECORD", row(same, "AS IT WAS") + row(changed, "old\n"))
    os.utime(same, (1, 1))
    os.utime(changed, ns=(1, record.stat().st_mtime_ns + 1))
    found, listing = describe(interpreter(venv))
    by_path = {file.path: one for file, one in zip(kept(listing), digests(kept(listing), found.installed), strict=True)}
    assert by_path[f"{PACKAGES}/same.py"] == hashlib.sha256(b"AS IT WAS").hexdigest(), "it was not read"
    assert by_path[f"{PACKAGES}/changed.py"] == hashlib.sha256(b"new\n").hexdigest()
    assert by_path["lib64"] == ""
    assert [(one.name, len(one.tags)) for one in installed_wheels(found.installed)] == [("own", 2)]
