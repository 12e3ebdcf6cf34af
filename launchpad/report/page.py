"""The report: one HTML file that needs no network, and no scripts for its main parts.

Everything that comes from the job is escaped, and the page's policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

from launchpad._version import __version__
from launchpad.diagnosis import tracebacks
from launchpad.errors import UsageError
from launchpad.job.masking import masked_words
from launchpad.job.outcome import ranks_in_words
from launchpad.report.fold import MOST_ROWS, ShownRow, folded, outcomes, outermost
from launchpad.report.recorded import Recorded, read
from launchpad.report.timeline import JOB, Curve, Mark, Outcome, Span, Timeline

# How many lines of its output stand below the verdict.
TAIL_LINES = 30

# Of more events than this the first and the last ones are shown; the others are left to the timeline and events.jsonl.
MOST_EVENTS = 2000

# Of so many collectives in all rows the last ones are shown.
MOST_COLLECTIVES = 20_000

_STATUS = {
    "none": ("well", "succeeded"),
    "running": ("running", "running"),
    "unknown": ("running", "maybe running"),
    "signal": ("failed", "stopped"),
    "cut off": ("failed", "cut off"),
}

_OUTCOMES = {
    "well": "exited with 0",
    "failed": "failed",
    "victim": "failed because of another",
    "stopped": "stopped",
    "lost": "lost with its host",
    "running": "was running",
}

# What a mark looks like, around the point where it is.
_SHAPES = {
    "milestone": "M-3,-4.5 3,0 -3,4.5z",
    "exception": "M-4,-4 4,4M4,-4 -4,4",
    "signal": "M-4.5,-4h9l-4.5,8z",
    "exit": "M-3.5,-3.5h7v7h-7z",
    "lost": "M0,-5 5,0 0,5 -5,0z",
    "joined": "M0,-5 5,0 0,5 -5,0z",
    "restart": "M0,-7v14",
    "hang": "M-2.5,-5v10M2.5,-5v10",
    "note": "M-1.5,-1.5h3v3h-3z",
}


def check(path: str) -> None:
    """Raise UsageError before anything runs if the report can't be written. Truncates an old one."""
    try:
        with open(path, "w", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--report {path}: {error.strerror}; choose a writable file") from None


def write(path: str, folder: str, shown: str = "") -> str:
    """Write the report on the job that is recorded in this folder. Returns an error message, or "".

    `shown`: where the page says that the record is, if not in the folder.
    """
    try:
        text = page(read(folder, shown))
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        return f"{path}: {error.strerror}; the report was not written"
    except UsageError as error:
        return f"{path}: the report was not written: {error}"
    return ""


def page(job: Recorded) -> str:
    """The page."""
    planned, timeline = job.history.planned, job.timeline
    rows, without = folded(timeline.rows)
    style, script = _asset("page.css"), _asset("page.js")
    outcome, status = _STATUS.get(job.verdict.kind, ("failed", "failed"))
    if job.history.over is not None and outcome == "failed":
        status += f", exit code {job.history.over.code}"
    target = shlex.join(masked_words(planned.words))
    ranks = len(timeline.ranks)
    hosts = sorted({one.host for one in timeline.ranks})
    on = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts"
    began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(planned.wall))
    facts = f"job {planned.job} · began {began} · took {_seconds(timeline.end)} · {ranks} ranks {on}"
    stacks = _stacks(job)
    parts = ["verdict", "timeline", "output", *(["stacks"] if stacks else []), "ranks-table", "events", "run"]
    names = {"ranks-table": "Ranks", "run": "How it was run"}
    return Template(_asset("page.html")).substitute(
        policy="; ".join(
            (
                "default-src 'none'",
                f"style-src {_source(style)}",
                f"script-src {_source(script)}",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        title=escape(f"{status}: {target}"),
        style=style,
        script=script,
        outcome=outcome,
        status=escape(status),
        target=escape(target),
        facts=escape(facts),
        links=" ".join(f'<a href="#{part}">{names.get(part, part.capitalize())}</a>' for part in parts),
        verdict=_paragraphs(job.lines),
        end=f"{_axis(timeline) / 1e9:.6f}",
        rows="\n".join(_rows(timeline, rows)),
        legend=_legend(rows),
        left_out="".join(f'<p class="hint">{escape(line)}</p>' for line in _left_out(job, without)),
        tail=_tail(job),
        stacks=stacks,
        ranks=_ranks(timeline),
        events=_events(rows),
        run=_run(job),
        footer=escape(f"launchpad {__version__} · {planned.host} · {job.place}"),
        chunks="\n".join(f'<script type="text/plain" class="chunk">{chunk}</script>' for chunk in job.output.chunks),
    )


def _asset(name: str) -> str:
    return (resources.files("launchpad") / "report" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """A script or style in the page, as its policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _paragraphs(lines: Sequence[str]) -> str:
    """Sentences as paragraphs; what is indented, as it is."""
    found: list[str] = []
    block: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("    "):
            block.append(line[4:])
            continue
        if block:
            found.append(_pre("\n".join(block)))
            block = []
        if line:
            found.append(f"<p>{escape(line)}</p>")
    return "\n".join(found)


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _axis(timeline: Timeline) -> int:
    """Where the axis ends: a little after the job, whose last marks would be cut off."""
    return timeline.end + timeline.end // 60


def _rows(timeline: Timeline, rows: Sequence[ShownRow]) -> Iterable[str]:
    ticks = "".join(
        f'<line x1="{10 * tick}%" x2="{10 * tick}%" y1="17" y2="24"/>'
        f'<text x="{10 * tick}%" y="14" dx="2">{_seconds(_axis(timeline) * tick // 10)}</text>'
        for tick in range(10)
    )
    yield f'<div class="row axis"><span class="label"></span><svg class="track" aria-hidden="true">{ticks}</svg></div>'
    end = _axis(timeline)
    for row in rows:
        label = f'<span class="label">{escape(row.name)}</span>'
        if row.ranks:
            label = f'<button type="button" class="label" data-rank="{row.ranks}">{escape(row.name)}</button>'
        collectives = [one for one in row.spans if one.kind == "collective"][-max(1, MOST_COLLECTIVES // len(rows)) :]
        spans = [*(one for one in row.spans if one.kind != "collective"), *collectives]
        drawn = "".join([*(_span(row, one, end) for one in spans), *(_mark(row, one, end) for one in row.marks)])
        track = f'<svg class="track" role="img" aria-label="{_told(row)}">{drawn}</svg>'
        yield f'<div class="row {row.kind}">{label}{track}</div>'
    for curve in timeline.curves:
        yield _curve(outermost(curve), end)


def _left_out(job: Recorded, without: int) -> Iterable[str]:
    """What of a large record is not on the page."""
    if len(job.timeline.ranks) > MOST_ROWS:
        more = f"; of {without} other ranks there is none" if without else ""
        yield f"Ranks to which the same happened have one row{more}."
        if any(len(curve.by_rank) > MOST_ROWS for curve in job.timeline.curves):
            yield f"The curves are those of {MOST_ROWS} ranks, with the highest and the lowest peaks."
    if job.passed:
        of = "Attempt 0 is" if job.passed == 1 else f"Attempts 0 to {job.passed - 1} are"
        yield (
            f"{of} in the first row only, and not in what follows. `launchpad logs --attempt N` prints the output "
            "that is kept of one."
        )
    if job.apart:
        yield f"The ranks were sampled more often than the curves show, which have a value every {job.apart:.0f} s."


def _told(row: ShownRow) -> str:
    """The row for those who don't see it."""
    said = [one.words for one in row.spans if one.kind in ("run", "attempt")] + [one.text for one in row.marks]
    return escape(f"{row.name}: {'; '.join(said[:8])}")


def _span(row: ShownRow, one: Span, end: int) -> str:
    height = 'y="5" height="14"' if one.kind in ("run", "attempt") else 'y="9" height="6"'
    width = max(one.end - one.start, end // 10_000)  # what has none is not drawn
    place = f'x="{_percent(one.start, end)}" width="{_percent(width, end)}"'
    words = f"{row.name}: {one.words}, {_seconds(one.start)} to {_seconds(one.end)}"
    drawn = f'<rect class="{one.kind} {one.outcome}" {place} {height}{_texts(words)}</rect>'
    if one.kind == "attempt":
        drawn += (
            f'<svg {place} height="24" aria-hidden="true"><text class="in" x="6" y="16">{escape(one.text)}</text></svg>'
        )
    return drawn


def _mark(row: ShownRow, one: Mark, end: int) -> str:
    shape = f'<circle r="8"/><path d="{_SHAPES[one.kind]}"/>'
    words = f"{row.name}, {_seconds(one.time)}: {one.text}"
    place = f'x="{_percent(one.time, end)}" y="12" overflow="visible"'
    return f'<svg {place} class="mark {one.kind}"{_texts(words)}{shape}</svg>'


def _texts(words: str) -> str:
    return f' data-text="{escape(words)}"><title>{escape(words)}</title>'


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4f}".rstrip("0").rstrip(".") + "%"


def _curve(curve: Curve, end: int) -> str:
    most = max((value for points in curve.by_rank.values() for _, value in points), default=0) or 1.0
    paths = []
    for rank, points in curve.by_rank.items():
        steps = " ".join(f"{1000 * at / end:.2f},{54 - 50 * value / most:.2f}" for at, value in points)
        name = "all ranks" if rank == JOB else f"rank {rank}"
        paths.append(f'<path d="M{steps}"><title>{name}</title></path>')
    label = f'<span class="label">{escape(curve.unit)}<br>most {most:,.3g}</span>'
    words = escape(f"{curve.name} over time, in {curve.unit}, at most {most:,.3g}")
    track = f'<svg class="track" viewBox="0 0 1000 60" preserveAspectRatio="none" role="img" aria-label="{words}">'
    return f'<div class="row curve">{label}{track}{"".join(paths)}</svg></div>'


def _legend(rows: Sequence[ShownRow]) -> str:
    spans = [one for row in rows for one in row.spans]
    outcomes = [one for one in _OUTCOMES if any(span.kind == "run" and span.outcome == one for span in spans)]
    found = [_key(f"run {one}", _OUTCOMES[one]) for one in outcomes]
    more = {"start": "connecting, importing, forking", "prompt": "at a prompt", "collective": "in a collective"}
    found += [_key(kind, text) for kind, text in more.items() if any(span.kind == kind for span in spans)]
    kinds = {one.kind for row in rows for one in row.marks}
    for kind, shape in _SHAPES.items():
        if kind in kinds:
            drawn = f'<svg x="7" y="7" overflow="visible" class="mark {kind}"><path d="{shape}"/></svg>'
            found.append(f'<span><svg aria-hidden="true">{drawn}</svg>{kind}</span>')
    return "".join(found)


def _key(kind: str, text: str) -> str:
    return f'<span><svg class="dot" aria-hidden="true"><rect class="{kind}"/></svg>{text}</span>'


def _tail(job: Recorded) -> str:
    """The last lines of the rank that is to blame."""
    held = job.history.held.ranks if job.history.held else []
    rank = job.verdict.cause.rank if job.verdict.cause else held[0] if held else -1
    text = job.output.tails.get(rank, b"").decode(errors="replace").rstrip("\n")
    if not text:
        return "" if job.output.lines else "<p>No output is recorded.</p>"
    return f"<h3>The last lines of rank {rank}</h3>{_pre(chr(10).join(text.split(chr(10))[-TAIL_LINES:]))}"


def _stacks(job: Recorded) -> str:
    """Where the ranks were, tracebacks, and all stacks that were taken."""
    found = []
    if job.history.held:
        found.append(f"<h3>Where the ranks were</h3>{_pre(chr(10).join(job.history.held.lines))}")
    same: dict[str, list[int]] = {}
    for rank, one in sorted(job.history.ranks.items()):
        for raised in one.raised:
            traceback = tracebacks.from_event(raised.traceback)
            if traceback is not None and (traceback.type, traceback.message) != ("SystemExit", "0"):
                same.setdefault("\n".join(traceback.lines), []).append(rank)
        if one.crash:
            same.setdefault(one.crash, []).append(rank)
    for text, ranks in same.items():
        found.append(f"<h3>{ranks_in_words(ranks).capitalize()}</h3>{_pre(text)}")
    for name, text in job.stacks.items():
        found.append(f"<details><summary>All stacks: {escape(name)}</summary>{_pre(text)}</details>")
    return f'<section id="stacks">\n<h2>Stacks</h2>\n{"".join(found)}\n</section>' if found else ""


def _ranks(timeline: Timeline) -> str:
    rows = [
        (
            f'<td class="n">{ranks}</td><td>{escape(hosts)}</td><td class="n">{one.pid or ""}</td>'
            f'<td class="n">{_seconds(one.started)}</td><td class="n">{_seconds(one.ended)}</td>'
            f"<td>{_dot(one.outcome)}{_OUTCOMES.get(one.outcome, '')}</td><td>{escape(one.how)}</td>"
            f'<td class="n">{f"{one.memory / 2**20:,.0f} MiB" if one.memory else ""}</td>'
        )
        for ranks, hosts, one in outcomes(timeline.ranks)
    ]
    numbers = {"rank", "pid", "started", "ended", "most memory"}
    head = ("rank", "host", "pid", "started", "ended", "outcome", "how it ended", "most memory")
    return _table(head, rows, numbers, open=len(rows) <= 64)


def _dot(outcome: Outcome) -> str:
    return f'<svg class="dot" aria-hidden="true"><rect class="run {outcome}"/></svg>'


def _events(rows: Sequence[ShownRow]) -> str:
    marks = sorted(((one.time, row.name, one) for row in rows for one in row.marks), key=lambda one: one[0])
    more = len(marks) - MOST_EVENTS
    half = MOST_EVENTS // 2
    lines = [
        f'<td class="n">{_seconds(at)}</td><td>{escape(name)}</td><td>{one.kind}</td>'
        f'<td class="text">{escape(one.text)}</td>'
        for at, name, one in (marks if more <= 0 else [*marks[:half], *marks[-half:]])
    ]
    if more > 0:
        lines.insert(half, f"<td></td><td></td><td></td><td>… {more} more …</td>")
    return _table(("time", "where", "kind", "what"), lines, {"time"}, open=len(lines) <= 64)


def _table(head: Sequence[str], rows: Sequence[str], numbers: Iterable[str], *, open: bool) -> str:
    if not rows:
        return "<p>There are none.</p>"
    cells = "".join(f'<th scope="col"{" class=n" if name in numbers else ""}>{name}</th>' for name in head)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    return table if open else f"<details><summary>{len(rows)} rows</summary>{table}</details>"


def _run(job: Recorded) -> str:
    planned, said = job.history.planned, job.run_with
    command = said.get("command")
    words = command if isinstance(command, list) else masked_words(planned.words)
    found = [_pre(f"$ cd {shlex.quote(planned.cwd)}\n$ {shlex.join(map(str, words))}")]
    hosts = [f"{name}: {ranks_in_words(ranks) if ranks else 'a spare'}" for name, ranks in planned.nodes[:MOST_ROWS]]
    if len(hosts) < len(planned.nodes):
        hosts.append(f"… and {len(planned.nodes) - len(hosts)} more")
    found.append(f"<h3>Hosts</h3>{_pre(chr(10).join(hosts))}")
    for title, key, hidden in (("Versions", "versions", False), ("Environment", "environment", True)):
        values = said.get(key)
        if isinstance(values, dict) and values:
            rows = "".join(f"<tr><th>{escape(str(a))}</th><td>{escape(str(b))}</td></tr>" for a, b in values.items())
            table = f'<div class="wide"><table class="env">{rows}</table></div>'
            fold = f"<details><summary>{len(values)} variables; secrets are masked</summary>{table}</details>"
            found.append(f"<h3>{title}</h3>{fold if hidden else table}")
    if said.get("plan"):
        found.append(
            f"<h3>Plan</h3><details><summary>What each rank was to run</summary>{_pre(str(said['plan']))}</details>"
        )
    return "\n".join(found)


def _seconds(ns: int) -> str:
    seconds = ns / 1e9
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
