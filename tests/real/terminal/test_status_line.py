"""The line that says what is awaited: on a terminal, after a second, and gone without a trace."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launchpad.console.terminal import HowFar, _Bar, waiting
from launchpad.output import status_line
from tests.support.command import MARK, Launchpad
from tests.support.needs import needs_torch
from tests.support.sshd import Cluster, keygen, needs_sshd
from tests.support.terminal import Terminal

COLUMNS = 100

Start = Callable[..., Terminal]


@pytest.fixture
def terminal(launchpad: Launchpad) -> Iterator[Start]:
    """Starts `launchpad ARGS` on a wide terminal."""
    opened: list[Terminal] = []

    def start(*args: object, **environ: str) -> Terminal:
        opened.append(Terminal(launchpad.argv(*args), launchpad, environ, COLUMNS))
        return opened[-1]

    yield start
    for one in opened:
        if one.process.poll() is None:
            one.end()


def screen(text: str, columns: int = COLUMNS) -> list[str]:
    """What a terminal shows when it has received this; only the escapes that launchpad and rich need are known."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", text):
        wraps = column == columns and part.isprintable()
        if wraps or part == "\n":
            row, column = row + 1, 0 if wraps else column
            lines += [""] * (row == len(lines))
        line = lines[row]
        if part == "\r":
            column = 0
        elif part == "\x1b[K":
            lines[row] = line[:column]
        elif part == "\x1b[J":
            lines[row:] = [line[:column]]
        elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(up.group(1))
            assert row >= 0, text
        elif part.startswith("\x1b"):
            assert part.endswith("m"), f"{part!r} in {text!r}"
        elif part != "\n":
            lines[row] = line[:column].ljust(column) + part + line[column + 1 :]
            column += 1
    return lines


class Silent:
    """Takes connections at 127.0.0.9 and says nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.9", 0))
        self.config = f"Host silent\n HostName 127.0.0.9\n Port {self._listener.getsockname()[1]}\n"

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    one = Silent()
    yield one
    one.close()


@pytest.fixture
def cluster(launchpad: Launchpad, tmp_path: Path, silent: Silent) -> Iterator[Cluster]:
    """n1, and `silent`, which takes a connection and never answers."""
    scratch = tmp_path / "ssh" / "tmp"
    scratch.mkdir(parents=True)
    environ = {MARK: launchpad.mark, "XDG_CACHE_HOME": str(tmp_path / "ssh" / "cache"), "TMPDIR": str(scratch)}
    with Cluster(tmp_path / "ssh", 1, config=silent.config, environ=environ) as one:
        yield one


@needs_sshd
def test_hosts_that_are_awaited_are_named_until_ctrl_c(terminal: Start, cluster: Cluster) -> None:
    one = terminal("run", "--ssh-config", cluster.ssh_config, "-H", "n1,silent", "true")
    assert one.expect(r"1/2.*reaching 2 hosts: waiting for (\w+) *\x1b\[K").group(1) == "silent"
    one.type("\x03")
    text = one.rest()
    assert one.end() == 130
    assert not any("reaching" in line for line in screen(one.shown)), one.shown
    assert "Traceback" not in text


@needs_sshd
@pytest.mark.parametrize("how", ["pipe", "dumb", "quiet"])
def test_where_none_can_be_shown_there_is_none(
    launchpad: Launchpad, terminal: Start, cluster: Cluster, how: str
) -> None:
    """Until the host that never answers is given up, after more than a second."""
    cluster.configure(cluster.ssh_config.read_text().replace("Port", "ConnectTimeout 2\n Port", 1))
    words = ("run", "--ssh-config", cluster.ssh_config, "-H", "n1,silent", *(["-q"] if how == "quiet" else []), "true")
    if how == "pipe":
        text, code = (done := launchpad.run(*words)).stderr, done.returncode
    else:
        one = terminal(*words, **{"dumb": {"TERM": "dumb"}, "quiet": {"NO_COLOR": "1"}}[how])
        text, code = one.rest().replace("\r\n", "\n"), one.end()
    assert code == 3
    assert text.startswith("launchpad: error: 1 of 2 hosts can't take part")
    assert not re.search(r"[\x1b\r]|reaching", text)


@needs_sshd
def test_a_prompt_has_the_terminal_for_itself(terminal: Start, launchpad: Launchpad, tmp_path: Path) -> None:
    """Two hosts need the passphrase, and the one prompt stands as long as it takes to type."""
    key = keygen(tmp_path / "locked", passphrase="open sesame")
    scratch = tmp_path / "ssh" / "tmp"
    scratch.mkdir(parents=True)
    environ = {MARK: launchpad.mark, "XDG_CACHE_HOME": str(tmp_path / "ssh" / "cache"), "TMPDIR": str(scratch)}
    with Cluster(tmp_path / "ssh", 2, environ=environ) as cluster:
        for host in cluster.hosts:
            host.authorized_keys.unlink()
            host.authorize(key)
        cluster.configure(f"Host *\n IdentityFile {key}\n")
        one = terminal("run", "--ssh-config", cluster.ssh_config, "-H", "n1,n2", "true")
        one.expect("Enter passphrase for key '[^']+': $")
        assert one.is_silent(status_line.DELAY_SECONDS + 1)
        one.type("wrong\n")
        one.expect("Wrong passphrase. Enter passphrase for key '[^']+': $")
        assert one.is_silent(status_line.DELAY_SECONDS)
        one.type("open sesame\n")
        text = one.rest()
        assert one.end() == 0, text
    assert screen(text) == ["", ""], text


@needs_sshd
def test_sync_tells_how_far_it_is(terminal: Start, launchpad: Launchpad, cluster: Cluster) -> None:
    """While what reads the files waits."""
    (launchpad.folder / "data").write_bytes(os.urandom(2_000_000))
    (launchpad.folder / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if sys.orig_argv[3:4] == ['run']:\n"
        "    import launchpad.head.sync as sync\n"
        "    read = sync._read\n"
        "    def held_up(*args):\n"
        "        for piece in read(*args):\n"
        "            while len(piece) > 1000 and not os.path.exists('go'):\n"
        "                time.sleep(0.01)\n"
        "            yield piece\n"
        "    sync._read = held_up\n"
    )
    one = terminal("run", "--ssh-config", cluster.ssh_config, "-H", "n1", "--sync", "true", PYTHONPATH=".")
    one.expect(r"0\.0/2\.0.* MB.*sync to n1: \d of \d+ files")
    (launchpad.folder / "go").touch()
    text = one.rest()
    assert one.end() == 0, text
    assert screen("x" + text)[-1] == "", text


@pytest.mark.parametrize("width", [12, 40, 100, 300])
def test_it_is_one_line_and_leaves_the_last_column_free(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("launchpad.console.terminal.columns", lambda _: width)
    for of_bytes in (False, True):
        line = _Bar(lambda: HowFar("reaching 9 hosts " * 9, 3, 0), of_bytes).line()
        assert b"\n" not in line
        assert len(screen(line.decode(), width)[0]) < width


@pytest.mark.parametrize(("width", "height", "shown"), [(100, 24, 9), (100, 5, 4), (100, 0, 1), (12, 24, 1)])
def test_parts_have_lines_of_their_own_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int, shown: int
) -> None:
    monkeypatch.setattr("launchpad.console.terminal.columns", lambda _: width)
    monkeypatch.setattr("launchpad.console.terminal.lines", lambda _: height)
    parts = {f"n{number}": HowFar(f"n{number}: 3 of 9 files", 10**6 * number, 10**7) for number in range(12)}
    bar = _Bar(lambda: HowFar("sync to 12 hosts", 66 * 10**6, 12 * 10**7, parts), True)
    lines = screen(bar.line().decode().replace("\n", "\r\n"))
    assert len(lines) == shown
    assert all(
        f"{number}.0/10.0 MB" in line and f"n{number}: 3 of 9 files" in line for number, line in enumerate(lines[1:])
    )
    del parts["n0"]
    lines = screen(bar.line().decode().replace("\n", "\r\n"))
    assert len(lines) == shown
    assert all(f"n{number}: 3" in line for number, line in enumerate(lines[1:], 1))


# A sum of so many elements waits for its file.
HELD_UP = """
import os, time
if os.environ.get("HELD_UP"):
    import torch.distributed as dist
    done = dist.all_reduce
    def all_reduce(tensor, op=dist.ReduceOp.SUM, *args, **options):
        while op == dist.ReduceOp.SUM and not os.path.exists(f"go{len(tensor)}"):
            time.sleep(0.01)
        return done(tensor, op, *args, **options)
    dist.all_reduce = all_reduce
"""


@pytest.fixture
def bench(terminal: Start, launchpad: Launchpad) -> Terminal:
    """Two points, of 1 and of 16384 elements, each held up."""
    (launchpad.folder / "sitecustomize.py").write_text(HELD_UP)
    words = ("-n", 2, "--backend", "gloo", "--op", "all_reduce", "--sizes", "4,64K", "-s", 0.1, "-x", "HELD_UP=1")
    return terminal("bench", *words, PYTHONPATH=str(launchpad.folder))


@needs_torch
def test_a_bench_tells_what_it_measures(bench: Terminal, launchpad: Launchpad) -> None:
    bench.expect("0/2.*gloo: all_reduce, 4 B *\x1b")
    (launchpad.folder / "go1").touch()
    bench.expect(r"1/2.*gloo: all_reduce, 64 KiB; about \d+ s left *\x1b")
    (launchpad.folder / "go16384").touch()
    text = bench.rest()
    assert bench.end() == 0, text
    shown = screen(text[text.index("\r") :])
    assert not any(" 2/2 " in line or "left" in line for line in shown), text
    assert re.search("\x1b\\[36mall_reduce .*64 KiB.*\x1b\\[32m  yes", text)
    assert [line.split()[:3] for line in shown if line.startswith("all_reduce ")] == [
        ["all_reduce", "64", "KiB"],
        ["all_reduce", "gloo", shown[-2].split()[2]],
    ]


@needs_torch
def test_ctrl_c_ends_a_bench_without_a_trace(bench: Terminal) -> None:
    bench.expect("gloo: all_reduce, 4 B *\x1b\\[K")
    bench.type("\x03")
    bench.rest()
    assert bench.end() == 130
    shown = screen(bench.shown)
    assert not any("gloo: all_reduce" in line or " 0/2 " in line for line in shown), bench.shown


ASIDE = """
import os, time
from launchpad.output import status_line
from launchpad.output.writer import Writer
status_line.DELAY_SECONDS = 0.01
drawn = 0
def draw():
    global drawn
    drawn += 1
    return b"<status>"
def wait():
    until = drawn + 3
    while drawn < until:
        time.sleep(0.01)
writer = Writer(lambda _: None, lambda *_: None)
with status_line.StatusLine(draw, 0.01, shows=True):
    for text in (b"whole\\n", b"begun ", b"and ended\\n"):
        wait()
        writer.put([(2, text)])
    wait()
    with status_line.aside:
        os.write(2, b"question? ")
        wait()
        os.write(2, b"answer\\n")
    wait()
writer.close()
"""


@pytest.mark.parametrize("several", [False, True])
def test_what_is_written_meanwhile_is_written_aside(launchpad: Launchpad, several: bool) -> None:
    """The status line makes room, and comes back behind a line's end only."""
    program = ASIDE.replace("<status>", "<status>\\n<of a>\\n<of b>") if several else ASIDE
    one = Terminal([sys.executable, "-c", program], launchpad, {}, COLUMNS)
    text = one.rest()
    assert one.end() == 0, text
    assert screen(text) == ["whole", "begun and ended", "question? answer", ""], text
    status = r"(\r<status>\x1b\[K)+\r\x1b\[K"
    if several:
        again = r"\x1b\[2A\r\x1b\[J"
        status = rf"\r(<status>\x1b\[K\r+\n<of a>\x1b\[K\r+\n<of b>\x1b\[K{again})+"
    parts = ("", "whole\r\n", "begun and ended\r\n", r"question\? answer\r\n", "")
    assert re.fullmatch(status.join(parts), text), text


@needs_sshd
def test_a_host_whose_python_is_slow_is_named(terminal: Start, launchpad: Launchpad, cluster: Cluster) -> None:
    """While the Python that is asked for its torch waits."""
    (launchpad.folder / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        f"while sys.orig_argv[1:2] == ['-c'] and not os.path.exists({str(launchpad.folder / 'go')!r}):\n"
        "    time.sleep(0.01)\n"
    )
    (launchpad.folder / "torch").mkdir()
    (launchpad.folder / "torch" / "__init__.py").touch()
    (launchpad.folder / "torch" / "version.py").write_text("__version__ = '2.0'\n")
    (launchpad.folder / "p.py").write_text("import torch\n")
    words = ("--start-method", "exec", "-x", f"PYTHONPATH={launchpad.folder}", "p.py")
    one = terminal("run", "--ssh-config", cluster.ssh_config, "-H", "n1", *words)
    one.expect(r"0/1.*probing 1 host: waiting for n1")
    (launchpad.folder / "go").touch()
    text = one.rest()
    assert one.end() == 0, text
    assert screen("x" + text)[-1] == "", text


def test_who_is_awaited_in_words() -> None:
    assert waiting("reaching 9 hosts", list("abcdefghi")) == "reaching 9 hosts: waiting for a, b, c and 6 more"
    assert waiting("reaching 3 hosts", list("abc")) == "reaching 3 hosts: waiting for a, b, c"
    assert waiting("reaching 1 host", []) == "reaching 1 host"
