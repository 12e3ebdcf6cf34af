"""What can stand at the cursor of a command line: answers the completion scripts of shells (completion.py)."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

import click

from launchpad.cli.help import TOPICS
from launchpad.cli.main import COMMANDS, cli
from launchpad.cli.options import named, read_option
from launchpad.cli.shells import COMPLETION
from launchpad.errors import UsageError

# Jobs that have ended are nothing for these.
_OF_RUNNING = ("stop", "restart", "stacks", "top", "debug", "profile")

# Of a description, menus show no more.
_MOST_COLUMNS = 80


class Possibility(NamedTuple):
    """A word that can stand at the cursor, or a kind of file."""

    kind: Literal["whole", "part", "file", "dir"]  # part: more of the word may follow; of files, the shell knows which
    value: str = ""
    about: str = ""


def answer() -> NoReturn:
    """Write what the shell asks for, one possibility a line, and exit. Nothing may fail visibly: a user is typing."""
    try:
        sys.stdout.write(_answer(os.environ[COMPLETION], sys.argv[1:], os.environ))
        sys.stdout.flush()
    except Exception:
        pass
    os._exit(0)


def _answer(shell: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """`words`: those up to the cursor, from zsh and fish. bash and tcsh give the line."""
    if shell == "bash":
        line = os.fsencode(environ["COMP_LINE"])[: int(environ["COMP_POINT"])]
        words = _split(os.fsdecode(line))[1:]
    elif shell == "tcsh":
        words = _split(environ["COMMAND_LINE"])[1:]
    before, word = list(words[:-1]), words[-1]
    found = list(possibilities(before, word, environ))
    if shell == "bash":
        # It takes these for the ends of words, and what it replaces begins after the last one; with @ a word begins.
        ends = {":": 1, "=": 1, "@": 0}
        breaks = max([0, *(word.rfind(mark) + ends[mark] for mark in ends if mark in environ["COMP_WORDBREAKS"])])
        return "".join(f"{one.kind}\t{one.value[breaks:]}\n" for one in found)
    if shell == "tcsh":
        values = [
            value for one in found for value in (_files(word, one) if one.kind in ("file", "dir") else [one.value])
        ]
        return "".join(f"{value}\n" for value in values)
    return "".join(f"{one.kind}\t{one.value}\t{_short(one.about)}\n" for one in found)


def _split(line: str) -> list[str]:
    """The words of a line that may end within one, as a shell would split it; the last one is the one at the cursor."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # within quotes
        words.append(lexer.token)
    else:
        if not line or line[-1].isspace():
            words.append("")
    while "=" in words[0]:  # a variable
        del words[0]
    return words


def possibilities(before: Sequence[str], word: str, environ: Mapping[str, str]) -> Iterator[Possibility]:
    """What can stand where `word` has been begun, after these words of launchpad's. Raises UsageError for bad ones."""
    if not before:
        if word.startswith("-"):
            yield from _options(cli, word)
            return
        yield from (Possibility("whole", name, _about(name)) for name in COMMANDS if name.startswith(word))
        return
    command = cli.get_command(click.Context(cli), before[0])
    if command is not None:
        yield from _of_command(command, before[1:], word, environ)


def _of_command(
    command: click.Command, before: Sequence[str], word: str, environ: Mapping[str, str]
) -> Iterator[Possibility]:
    by_name = named(_params(command))
    arguments, over, at = 0, False, 0  # how many there are, and whether no option can follow
    while at < len(before):
        if over or not before[at].startswith("-") or before[at] == "-":
            arguments += 1
            over = over or not command.context_settings.get("allow_interspersed_args", True)
        elif before[at] == "--":
            over = True
        else:
            _, option, takes_next = read_option(before[at], by_name)
            if takes_next and at + 1 == len(before):
                assert option is not None
                yield from _values(option, command, word, environ)
                return
            at += takes_next
        at += 1
    if word.startswith("-") and not over:
        name, equals, value = word.partition("=")
        if equals and name.startswith("--"):
            _, option, _ = read_option(name, by_name)
            for one in _values(option, command, value, environ) if option is not None else ():
                yield one._replace(value=f"{name}={one.value}" if one.value else "")
            return
        yield from _options(command, word)
        return
    takers = [param for param in command.params if isinstance(param, click.Argument)]
    last = next((param for param in takers if param.nargs < 0), None)
    if arguments < len(takers) or last is not None:
        taker = takers[min(arguments, len(takers) - 1)]
        yield from _values(taker, command, word, environ, first=arguments == takers.index(taker))


def _params(command: click.Command) -> list[click.Option]:
    context = click.Context(command, info_name=command.name, **command.context_settings)
    return [param for param in command.get_params(context) if isinstance(param, click.Option) and not param.hidden]


def _options(command: click.Command, word: str) -> Iterator[Possibility]:
    """The options whose names begin so; with underscores too where these are taken."""
    underscores = "_" in word and command.context_settings.get("token_normalize_func") is not None
    for param in _params(command):
        for name in param.opts:
            shown = f"--{name[2:].replace('-', '_')}" if underscores and name.startswith("--") else name
            if shown.startswith(word):
                yield Possibility("whole", shown, param.help or "")


def _values(
    param: click.Parameter, command: click.Command, word: str, environ: Mapping[str, str], *, first: bool = True
) -> Iterator[Possibility]:
    """What the parameter can be: that is what it is called in the help."""
    name = param.metavar or ("" if isinstance(param, click.Option) else str(param.name).upper())
    if name.startswith(("FILE", "PATH", "GLOB", "TARGET", "[OPTIONS")):
        yield Possibility("file")
    elif name.startswith("DIR"):
        yield Possibility("dir")
    elif name.startswith("HOST"):
        yield from _hosts(word)
    elif name.startswith(("JOB", "[JOB]")) and isinstance(param, click.Argument):
        if first or name.endswith("..."):
            yield from _jobs(word, environ, running=command.name in _OF_RUNNING)
    elif name == "TOPIC":
        yield from _topics(word)
    else:
        words = [one for one in name.split("|") if re.fullmatch("[a-z][a-z-]*", one)]
        if not words and isinstance(param.type, click.Choice):
            words = [str(one) for one in param.type.choices]
        yield from (Possibility("whole", one) for one in words if one.startswith(word))


def _hosts(word: str) -> Iterator[Possibility]:
    """Hosts that ssh knows, for the last of a list. One may be followed by a comma, or its number of ranks."""
    from launchpad.transport.ssh.known_hosts import names

    listed, comma, last = word.rpartition(",")
    user, at, host = last.rpartition("@")
    given = {one.rpartition("@")[2].partition(":")[0] for one in listed.split(",")}
    for name in names():
        if name.startswith(host) and name not in given:
            yield Possibility("part", f"{listed}{comma}{user}{at}{name}")


def _jobs(word: str, environ: Mapping[str, str], *, running: bool) -> Iterator[Possibility]:
    """The ids of recorded jobs, latest first, or only of the running ones."""
    from launchpad.record import job_store, replay

    place = job_store.jobs_folder(environ)
    for job in job_store.jobs(environ):
        folder = os.path.join(place, job)
        if not job.startswith(word):
            continue
        runs = job_store.state_of(folder) == "running"
        try:
            planned = replay.first_event(folder)
        except UsageError:  # it is unreadable
            continue
        if planned is None or (running and not runs):
            continue
        when = "running" if runs else time.strftime("%Y-%m-%d %H:%M", time.localtime(planned.wall))
        ranks = sum(len(ranks) for _, ranks in planned.nodes)
        yield Possibility("whole", job, f"{when}, {ranks} rank{'s' * (ranks != 1)}, {' '.join(planned.words)}")


def _topics(word: str) -> Iterator[Possibility]:
    yield from (Possibility("whole", topic, about) for topic, about in TOPICS.items() if topic.startswith(word))
    commands = [name for name in COMMANDS if name not in TOPICS]
    yield from (Possibility("whole", name, _about(name)) for name in commands if name.startswith(word))


def _about(name: str) -> str:
    """What a command does, from the first line of its module: to import all of them would take too long."""
    try:
        path = os.path.join(os.path.dirname(__file__), f"{COMMANDS[name].rpartition('.')[2]}.py")
        with open(path, encoding="utf-8") as file:
            return file.readline().strip().strip('"').partition(": ")[2]
    except OSError:
        return ""


def _files(word: str, one: Possibility) -> list[str]:
    """The files, or folders, whose paths begin so: tcsh doesn't look for any that it isn't told."""
    option = word.partition("=")[0] + "=" if word.startswith("--") and "=" in word else ""
    folder, slash, begun = word.removeprefix(option).rpartition("/")
    try:
        entries = list(os.scandir(os.path.expanduser(folder + slash) or "."))
    except OSError:
        return []
    shown = [
        entry
        for entry in entries
        if entry.name.startswith(begun) and entry.name.startswith(".") <= begun.startswith(".")
    ]
    return sorted(
        f"{option}{folder}{slash}{entry.name}{'/' * entry.is_dir()}"
        for entry in shown
        if entry.is_dir() or one.kind == "file"
    )


def _short(about: str) -> str:
    """The first sentence of a description, on one line."""
    text = re.split(r"(?<=[^.][\w)])\.\s|:\s+\n", about, maxsplit=1)[0].rstrip(".")
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= _MOST_COLUMNS else f"{text[: _MOST_COLUMNS - 2]} …"
