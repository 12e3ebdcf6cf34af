"""Click classes and types shared by the commands: grouped options, parsed the way torchrun's argparse does."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import click

from launchpad.job.duration import parse_seconds
from launchpad.job.hosts import ACCELERATORS
from launchpad.job.limits import RestartLimit

FOLD: dict[str, Any] = {"type": click.Choice(["equal", "numbers", "never"]), "metavar": "equal|numbers|never"}


class GroupedOption(click.Option):
    """An option listed under a heading in --help. With `pet`, PET_<NAME> sets its default, as with torchrun."""

    def __init__(self, *args: Any, group: str = "Options", pet: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        if pet:
            longest = max((name for name in self.opts if name.startswith("--")), key=len)
            self.envvar = f"PET_{longest[2:].replace('-', '_').upper()}"


class GroupedCommand(click.Command):
    """A command that groups its options in --help, and accepts unambiguous abbreviations of them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group, in order of first appearance."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                group = parameter.group if isinstance(parameter, GroupedOption) else "Other"
                sections.setdefault(group, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Expand abbreviated long options before the target, then parse the command line."""
        ctx.meta["args"] = complete(ctx, list(args))
        return super().parse_args(ctx, list(ctx.meta["args"]))


def complete(ctx: click.Context, args: list[str]) -> list[str]:
    """The words of the context's command, its options before the target with their full names. Raises UsageError.

    Of a short option click first looks for a long one of that name, and then for similar ones, which takes 2 ms.
    """
    by_name = named(one for one in ctx.command.get_params(ctx) if isinstance(one, click.Option))
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
        try:
            args[at], option, takes_next = read_option(args[at], by_name)
        except click.UsageError as error:
            error.ctx = ctx
            raise
        if option is not None and args[at] in option.opts and (not takes_next or at + 1 < len(args)):
            args[at] = next((name for name in option.opts if name.startswith("--")), args[at])
        at += 2 if takes_next else 1
    return args


def named(options: Iterable[click.Option]) -> dict[str, click.Option]:
    """The options by all of their names."""
    return {name: option for option in options for name in option.opts if not option.hidden}


def read_option(word: str, by_name: dict[str, click.Option]) -> tuple[str, click.Option | None, bool]:
    """A word that begins with a dash: with its name in full, the option, and whether the next word is its value.

    Raises UsageError for an ambiguous abbreviation.
    """
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        name = _full_name(name.replace("_", "-"), by_name)
        word = name + equals + value
    option = by_name.get(name) or _last_short(word, by_name)
    takes_value = option is not None and not option.is_flag and not option.count
    attached = equals or (name not in by_name and not _ends_with(word, option))
    return word, option, takes_value and not attached


def _full_name(word: str, by_name: dict[str, click.Option]) -> str:
    if word in by_name:
        return word
    found = [name for name in by_name if name.startswith(word)]
    theirs = [name for name in found if getattr(by_name[name], "envvar", None)]
    # torchrun's abbreviations keep their meaning, whatever options we add.
    meant = {by_name[name] for name in theirs or found}
    if len(meant) == 1:
        return (theirs or found)[0]
    if meant:
        raise click.UsageError(f"{word} could be {' or '.join(sorted(theirs or found))}")
    return word


def _last_short(word: str, by_name: dict[str, click.Option]) -> click.Option | None:
    """Of bundled short options (-qm, -n4), the one that takes the rest of the word, or the next word, as its value."""
    for letter in word[1:]:
        option = by_name.get(f"-{letter}")
        if option is None or not option.is_flag:
            return option
    return None


def _ends_with(word: str, option: click.Option | None) -> bool:
    return option is not None and f"-{word[-1]}" in option.opts


# What says which hosts, and how to reach them.
_HOST_OPTIONS = ("hosts", "hostfile", "include", "exclude", "ssh", "ssh_config", "accept_new_host_keys")


def take_host_options(command: click.Command, run: click.Command, text: str, *more: str) -> None:
    """Give a command the host options of `launchpad run`, and `more` of its options; `text` is the help of -H."""
    for option in run.params:
        if option.name == "hosts":
            assert isinstance(option, click.Option)
            option = copy.copy(option)
            option.metavar, option.help = "HOST,…", text
        if option.name in (*_HOST_OPTIONS, *more):
            command.params.append(option)


def rank_count(text: str) -> int | str:
    """A number of ranks, at least 1, or auto, cpu, gpu or an accelerator's name in torch."""
    if text in ("auto", "cpu", "gpu", *ACCELERATORS):
        return text
    try:
        number = int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of ranks; give one, or auto, cpu, gpu, xpu …") from None
    if number < 1:
        raise click.BadParameter(f"{number} ranks can't be started; a job needs at least 1")
    return number


def rank_count_or_gpus(text: str) -> int | str:
    """The same, or gpu:1,3,5: the GPUs to have a rank each."""
    kind, colon, gpus = text.partition(":")
    return text if kind == "gpu" and gpus and colon else rank_count(text)


def seconds(text: str) -> float:
    """A non-negative time in seconds; the number may be followed by s, m, h or d."""
    try:
        return parse_seconds(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time; give seconds (30), or 5m, 2h, 1d") from None


def positive_seconds(text: str) -> float:
    """A time greater than 0, in seconds, parsed like `seconds`."""
    value = seconds(text)
    if value == 0:
        raise click.BadParameter(f"{text!r} is too short; give a time above 0, like 30, 5m or 2h")
    return value


def since(text: str) -> float:
    """A time in seconds, or "start", which is infinitely long ago."""
    return float("inf") if text == "start" else positive_seconds(text)


def restart_limit(text: str) -> RestartLimit:
    """A number of restarts, or N/TIME: so many in any such time."""
    number, slash, period = text.partition("/")
    if not number.isdecimal():
        raise click.BadParameter(f"{text!r} is not a number of restarts; give one, or one per time, like 10/1h")
    return RestartLimit(int(number), positive_seconds(period) if slash else None)


def local_ranks(text: str) -> frozenset[int]:
    """Comma-separated local ranks."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of local ranks; separate them with commas, like 0,3")
    return frozenset(int(part) for part in parts)


def stop_signal(text: str) -> int:
    """The number of a signal that can be caught, given by its name, with or without SIG, or its number."""
    import signal

    name = text.strip().upper()
    try:
        signum = int(name) if name.isdecimal() else signal.Signals[f"SIG{name.removeprefix('SIG')}"].value
    except KeyError:
        signum = 0
    if signum not in signal.valid_signals():
        raise click.BadParameter(f"{text!r} is not a signal; write a name like USR1 or SIGUSR1, or a number")
    if signum in (signal.SIGKILL, signal.SIGSTOP):
        raise click.BadParameter(f"{text} can't be caught, so no program can save its state on it; choose another")
    return signum


def rank_and_port(text: str) -> tuple[int, int]:
    """R or R:PORT: a rank and the port of its debugger, 0 for any free one."""
    rank, colon, port = text.partition(":")
    if not rank.isdecimal() or (colon and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise click.BadParameter(f"{text!r} is not a rank, or a rank and a port; write 2 or 2:5678")
    return int(rank), int(port or 0)


def signal_names(text: str) -> frozenset[int]:
    """The numbers of comma-separated signal names."""
    import signal

    found = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.add(signal.Signals[name])
        except KeyError:
            raise click.BadParameter(f"{name!r} is not a signal; write names like SIGTERM,SIGUSR1") from None
        if name in ("SIGKILL", "SIGSTOP"):
            raise click.BadParameter(f"{name} can't be caught; leave it out")
    return frozenset(found)
