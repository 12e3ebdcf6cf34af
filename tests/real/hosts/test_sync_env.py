"""`--sync-env`: hosts are given this machine's environment, and their ranks run in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import launchpad as lp
from launchpad.errors import UsageError
from launchpad.head.environment_source import EnvironmentSource
from tests.support.command import DEADLINE, Launchpad
from tests.support.hosts import Hosts
from tests.support.hosts import hosts as hosts
from tests.support.netns import Network, needs_namespaces
from tests.support.sshd import needs_sshd

pytestmark = needs_sshd

SHOW = "import own, editable, sys; print(own.WHAT, editable.WHAT, sys.prefix)"


class Made:
    """An environment of this machine: a package, an editable one, a console script."""

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / "venv"
        venv.create(self.prefix, symlinks=True)
        self.python = self.prefix / "bin" / "python"
        (self.packages,) = self.prefix.glob("lib/python3*/site-packages")
        (self.packages / "own.py").write_text("WHAT = 'own'\n")
        self.source = folder / "source"
        self.source.mkdir()
        (self.source / "editable.py").write_text("WHAT = 'first'\n")
        (self.packages / "__editable__.pth").write_text(f"{self.source}\n")
        script = self.prefix / "bin" / "own-tool"
        script.write_text(f"#!{self.prefix}/bin/python\n{SHOW}\n")
        script.chmod(0o755)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "made")


def ran(done: subprocess.CompletedProcess[str]) -> tuple[list[str], list[str]]:
    """What the ranks printed, and what launchpad said."""
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), done.stderr.splitlines()


def test_a_host_is_sent_the_environment_once(launchpad: Launchpad, hosts: Hosts, made: Made) -> None:
    words = ("--python", made.python, "-H", "n1:2", "--sync-env", "where.py")
    (launchpad.folder / "where.py").write_text(f"{SHOW}\n")
    shown, said = ran(hosts.run(launchpad, *words))
    assert all(re.fullmatch(rf"\[\d\] own first {hosts.cache}/launchpad/env-venv-\w+", line) for line in shown), shown
    assert len(shown) == 2
    assert re.fullmatch(rf"launchpad: sent \d+ MB of {made.prefix} to n1", said[0])
    again, said = ran(hosts.run(launchpad, *words))
    assert again == shown
    assert said == [f"launchpad: n1 had {made.prefix} already; nothing was sent"]
    (made.source / "editable.py").write_text("WHAT = 'second'\n")
    changed, _ = ran(hosts.run(launchpad, *words))
    assert [line.replace("second", "first") for line in changed] == shown


def test_what_is_kept_is_shown_and_removed_but_not_while_it_is_used(
    launchpad: Launchpad, hosts: Hosts, made: Made
) -> None:
    on = ("--ssh-config", hosts.ssh_config, "-H", "n1")
    words = (*on, "--python", made.python, "--sync", "--sync-env")
    process = launchpad.start("run", *words, "sh", "-c", "echo here; read line", stdin=subprocess.PIPE)
    assert process.stdout.readline() == b"[0] here\n"
    shown = launchpad.run("clean", *on)
    assert shown.returncode == 0, shown.stderr
    names = [line.split()[1] for line in shown.stdout.splitlines()[1:]]
    assert [name.rpartition("-")[0] for name in names] == [
        f"copy-{made.source.name}", f"copy-{launchpad.folder.name}", "env-venv",
    ]  # fmt: skip
    assert shown.stdout.splitlines()[-1].endswith(f":{made.prefix}")
    refused = launchpad.run("clean", *on, "env-*")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert refused.stderr.splitlines()[1] == f"  n1  {names[2]} is in use by a job"
    process.communicate(b"\n", timeout=DEADLINE)
    removed = launchpad.run("clean", *on, "*")
    assert [line.split(",")[0] for line in removed.stdout.splitlines()] == [f"n1: removed {name}" for name in names]
    again = launchpad.run("clean", *on)
    assert (again.returncode, again.stderr) == (0, "nothing is kept\n")
    assert not [path.name for path in (hosts.cache / "launchpad").iterdir() if not path.name.startswith("agent-")]


def test_ranks_may_ask_how_long_they_have_although_it_has_no_launchpad(
    launchpad: Launchpad, hosts: Hosts, made: Made
) -> None:
    (launchpad.folder / "asks.py").write_text("import launchpad, own; print(3000 < launchpad.stop_by() < 3600)\n")
    hosts.forget_agent()  # launchpad comes with it
    shown, _ = ran(
        hosts.run(launchpad, "--python", made.python, "-H", "n1", "--sync-env", "--timeout", "1h", "asks.py")
    )
    assert shown == ["[0] True"]


def test_its_programs_are_found_there(launchpad: Launchpad, hosts: Hosts, made: Made) -> None:
    words = ("--python", made.python, "-H", "n1", "--sync-env", "--no-python", "own-tool")
    (shown,), _ = ran(hosts.run(launchpad, *words))
    assert shown.startswith(f"[0] own first {hosts.cache}/launchpad/env-venv-")


def test_a_health_check_finds_its_programs_too(launchpad: Launchpad, hosts: Hosts, made: Made) -> None:
    words = ("--python", made.python, "-H", "n1", "--sync-env", "--health", "python -c 'import own; exit(own.WHAT)'")
    done = hosts.run(launchpad, *words, "true")
    assert done.returncode == 3
    assert done.stderr.endswith("  n1  its health check ended with exit code 1, and said:\n        own\n")


def test_functions_are_called_in_it(hosts: Hosts, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played by a caller whose interpreter is that of a small environment."""

    def where() -> tuple[str, str, str]:
        import editable  # type: ignore[import-not-found]
        import own  # type: ignore[import-not-found]

        return own.WHAT, editable.WHAT, sys.prefix

    monkeypatch.setattr(sys, "executable", str(made.python))
    hosts.forget_agent()  # what ranks need of launchpad comes with it
    there = {"hosts": "n1", "ssh_config": str(hosts.ssh_config)}
    (found,) = lp.run(where, backend=None, sync_env=True, **there)
    assert found[:2] == ("own", "first")
    assert found[2].startswith(f"{hosts.cache}/launchpad/env-venv-")
    with pytest.raises(lp.NodeError, match=r"n1  its health check ended with exit code 1, and said:\n *own"):
        lp.run(where, backend=None, sync_env=True, health="python -c 'import own; exit(own.WHAT)'", **there)


def python_in(prefix: Path) -> Path:
    """Make a copy of this Python there, which works from any folder and says that it is conda's."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    left_out = ("test", "idlelib", "site-packages", "dist-packages", "config-*", "lib2to3", "tkinter")
    shutil.copytree(sysconfig.get_path("stdlib"), prefix / "lib" / name, ignore=shutil.ignore_patterns(*left_out))
    for library in Path(sysconfig.get_config_var("LIBDIR")).glob(f"lib{name}*.so*"):
        shutil.copy2(library, prefix / "lib", follow_symlinks=False)
    (prefix / "bin").mkdir()
    shutil.copy2(os.path.realpath(sys.executable), prefix / "bin" / name)
    (prefix / "bin" / "python").symlink_to(name)
    (prefix / "conda-meta").mkdir()
    return prefix / "bin" / "python"


@pytest.mark.parametrize("kind", ["prefix", "venv"])
def test_an_interpreter_that_works_from_any_folder_comes_along(
    launchpad: Launchpad, hosts: Hosts, tmp_path: Path, kind: str
) -> None:
    prefix, python = tmp_path / "conda", python_in(tmp_path / "conda")
    if kind == "venv":
        prefix = tmp_path / "venv"
        subprocess.run([python, "-m", "venv", "--without-pip", prefix], check=True, timeout=DEADLINE)
        python = prefix / "bin" / "python"
    show = "import own, os, sys; print(own.WHAT, sys.prefix, sys.base_prefix, os.__file__)"
    (launchpad.folder / "where.py").write_text(f"{show}\n")
    packages = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(exist_ok=True)
    (packages / "own.py").write_text("WHAT = 'own'\n")
    (shown,), _ = ran(hosts.run(launchpad, "--python", python, "-H", "n1", "--sync-env", "where.py"))
    _, what, copy, base, library = shown.split()
    assert what == "own"
    assert copy.startswith(f"{hosts.cache}/launchpad/env-{kind.replace('prefix', 'conda')}-")
    assert base == (f"{copy}/python" if kind == "venv" else copy)
    assert library.startswith(f"{base}/lib/")


def test_a_missing_module_says_if_sync_env_would_help(launchpad: Launchpad, hosts: Hosts, made: Made) -> None:
    """The hosts share this machine's files, so the program forgets where the packages are."""
    forgets = "import sys; sys.path[:] = [path for path in sys.path if 'site-packages' not in path]"
    for package, helps in (("own", True), ("nowhere_at_all", False)):
        (launchpad.folder / "lacks.py").write_text(f"{forgets}\nimport {package}.part\n")
        done = hosts.run(launchpad, "--python", made.python, "-H", "n1", "lacks.py")
        assert done.returncode == 1
        said = f"launchpad: {made.python} has own on this machine: --sync-env gives n1 this environment\n"
        assert (said in done.stderr) == helps, done.stderr
        assert f"It was looked for by {made.python}" in done.stderr


def test_doctor_says_which_wheel_would_not_run_there(launchpad: Launchpad, hosts: Hosts, made: Made) -> None:
    facts = made.packages / "own-1.0.dist-info"
    facts.mkdir()
    (facts / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_9_99_x86_64\n")
    words = ("doctor", "--ssh-config", hosts.ssh_config, "--python", made.python, "-H", "n1")
    said = "--sync-env can't give it this environment: old glibc: own's wheel needs glibc 9.99, and it has "
    done = launchpad.run(*words, "--sync-env")
    assert (done.returncode, said in done.stdout) == (3, True), done.stdout
    assert "glibc" not in launchpad.run(*words).stdout


def test_an_environment_that_changes_meanwhile_goes_to_no_further_host(made: Made) -> None:
    source = EnvironmentSource(str(made.python), "/")
    first = source.environment()
    source.rest()
    assert f"{made.packages.relative_to(made.prefix)}/own.py" in [file.path for file in source.contents().files]
    late = EnvironmentSource(str(made.python), "/")
    assert late.environment() == first
    late.rest()
    with open(made.packages / "own.py", "r+") as in_place:  # which its folder's time does not show
        in_place.write("X")
    with pytest.raises(UsageError, match=f"^--sync-env: {made.prefix} has changed since the job began, and further "):
        late.contents()


def test_an_interpreter_that_says_nothing_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^--sync-env: /bin/true doesn't say what it imports; does it start\?$"):
        EnvironmentSource("/bin/true", "/").environment()


def test_a_python_that_no_host_has_is_one_line(launchpad: Launchpad, hosts: Hosts, made: Made) -> None:
    wrapper = launchpad.folder / "other"
    newer = """s/"3[.][0-9]*"/"3.99"/; s/[.]cpython-3[0-9]*/.cpython-399/"""
    wrapper.write_text(f'#!/bin/sh\n[ $1 = -c ] || exec {made.python} "$@"\n{made.python} "$@" | sed \'{newer}\'\n')
    wrapper.chmod(0o755)
    done = hosts.run(launchpad, "--python", wrapper, "-H", "n1", "--sync-env", "true")
    assert (done.returncode, done.stdout) == (3, "")
    first, line, advice = done.stderr.splitlines()
    assert first == "launchpad: error: the only host can't take part, so nothing was started:"
    assert line == "  n1  no Python: it has no python3.99, which this environment is for"
    assert advice.startswith("launchpad: install python3.99 there, or make the environment with uv's Python")


@pytest.fixture
def bare(tmp_path: Path, made: Made) -> Iterator[Network]:
    """Two hosts that have a Python, but neither this environment nor launchpad's."""
    with Network(tmp_path / "net", 2) as network:
        for host in network.hosts.values():
            for folder in (made.prefix, made.source, Path(sys.prefix)):
                hide = ["nsenter", "-t", str(host.pid), "--mount", "mount", "-t", "tmpfs", "none", str(folder)]
                subprocess.run(hide, check=True, timeout=DEADLINE)
        yield network


def run_in(network: Network, launchpad: Launchpad, made: Made, *words: str) -> tuple[list[str], list[str]]:
    """Run a program on the hosts; see `ran`."""
    options = ("--ssh-config", network.ssh_config, "--python", made.python, "-H", "h1,h2", "--sync", "--sync-env")
    argv = network.argv(*launchpad.argv("run", *options, *words))
    return ran(
        subprocess.run(
            argv, env=launchpad.environ, cwd=launchpad.folder, capture_output=True, text=True, timeout=DEADLINE
        )
    )


@needs_namespaces
def test_hosts_without_any_packages_run_a_program_of_several_ranks(
    launchpad: Launchpad, bare: Network, made: Made
) -> None:
    (launchpad.folder / "where.py").write_text(f"{SHOW}\n")
    shown, said = run_in(bare, launchpad, made, "--check", "where.py")
    assert [line.split()[:4] for line in shown] == [["[h1", "0]", "own", "first"], ["[h2", "1]", "own", "first"]]
    assert re.fullmatch(rf"launchpad: sent \d+ MB of {made.prefix} to h1, h2", said[-1])


@needs_namespaces
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_libraries_find_each_other_where_they_name_folders_of_this_machine(
    launchpad: Launchpad, bare: Network, made: Made
) -> None:
    """One in the environment, and one that was built in the source tree of an editable install."""

    def compiled(library: Path, text: str, *more: str) -> Path:
        library.parent.mkdir(parents=True, exist_ok=True)
        source = library.with_suffix(".c")
        source.write_text(text)
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source, *more]
        subprocess.run(command, check=True, timeout=DEADLINE)
        return library

    show = ["import ctypes, own, editable, os.path as p"]
    for number, folder, module in ((1, made.prefix / "lib", "own"), (2, made.source / "build", "editable")):
        needed = compiled(folder / f"libneeded{number}.so", f"int needed{number}(void) {{ return {number}; }}")
        beside = made.packages if module == "own" else made.source
        text = f"int needed{number}(void); int user(void) {{ return needed{number}(); }}"
        compiled(beside / "user.so", text, str(needed), f"-Wl,-rpath,{folder}", "-Wl,--enable-new-dtags")
        show.append(f"print(ctypes.CDLL(p.join(p.dirname({module}.__file__), 'user.so')).user(), end=' ')")
    (launchpad.folder / "where.py").write_text("\n".join([*show, "print(p.dirname(own.__file__))\n"]))
    for _ in range(2):  # the second time, nobody looks at the libraries in the environment
        shown, _ = run_in(bare, launchpad, made, "where.py")
        assert [line.split()[2:4] for line in shown] == [["1", "2"]] * 2
