"""Click pieces that the commands share: options in named groups that also read as torchrun's argparse reads them."""

from __future__ import annotations

from typing import Any

import click


class GroupedOption(click.Option):
    """An option that stands under a heading in --help, and whose default PET_<NAME> may give, as torchrun's."""

    def __init__(self, *args: Any, group: str = "Options", pet: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        if pet:
            longest = max((name for name in self.opts if name.startswith("--")), key=len)
            self.envvar = f"PET_{longest[2:].replace('-', '_').upper()}"


class GroupedCommand(click.Command):
    """A command whose --help shows its options under headings, and that takes unambiguous abbreviations of them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each group, in the order in which the groups first appear."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = parameter.group if isinstance(parameter, GroupedOption) else "Other"
                sections.setdefault(group, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Complete abbreviated long options up to the target, then read the command line."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        ctx.meta["args"] = _complete(options, list(args))
        return super().parse_args(ctx, list(ctx.meta["args"]))


def _complete(options: list[click.Option], args: list[str]) -> list[str]:
    by_name = {name: option for option in options for name in option.opts if not option.hidden}
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
        word, equals, value = args[at].partition("=")
        if word.startswith("--"):
            word = _full_name(word.replace("_", "-"), by_name)
            args[at] = word + equals + value
        option = by_name.get(word) or _last_short(args[at], by_name)
        takes_value = option is not None and not option.is_flag and not option.count
        attached = equals or (word not in by_name and not _ends_with(args[at], option))
        at += 2 if takes_value and not attached else 1
    return args


def _full_name(word: str, by_name: dict[str, click.Option]) -> str:
    if word in by_name:
        return word
    found = [name for name in by_name if name.startswith(word)]
    theirs = [name for name in found if getattr(by_name[name], "envvar", None)]
    # An abbreviation that torchrun takes goes on to mean the same, whatever options we have beside its own.
    meant = {by_name[name] for name in theirs or found}
    if len(meant) == 1:
        return (theirs or found)[0]
    if meant:
        raise click.UsageError(f"{word} could be {' or '.join(sorted(theirs or found))}")
    return word


def _last_short(word: str, by_name: dict[str, click.Option]) -> click.Option | None:
    """Of short options that stand together (-qm, -n4) the one that the rest of the word, or the next, is a value of."""
    for letter in word[1:]:
        option = by_name.get(f"-{letter}")
        if option is None or not option.is_flag:
            return option
    return None


def _ends_with(word: str, option: click.Option | None) -> bool:
    return option is not None and f"-{word[-1]}" in option.opts


def rank_count(text: str) -> int | str:
    """A number of ranks, at least 1, or auto, cpu, gpu."""
    if text in ("auto", "cpu", "gpu"):
        return text
    try:
        number = int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of ranks; give one, or auto, cpu or gpu") from None
    if number < 1:
        raise click.BadParameter(f"{number} ranks can't be started; a job needs at least 1")
    return number


def seconds(text: str) -> float:
    """A time that is not negative, in seconds; s, m, h or d may follow the number."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:])
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise click.BadParameter(f"{text!r} is not a time; give seconds (30), or 5m, 2h, 1d")
    return value


def positive_seconds(text: str) -> float:
    """A time that is not nothing, in seconds, as `seconds` reads it."""
    value = seconds(text)
    if value == 0:
        raise click.BadParameter(f"{text!r} is no time at all; give seconds (30), or 5m, 2h, 1d")
    return value


def local_ranks(text: str) -> frozenset[int]:
    """Local ranks separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of local ranks; separate them with commas, like 0,3")
    return frozenset(int(part) for part in parts)


def signal_names(text: str) -> frozenset[int]:
    """Names of signals separated by commas, as numbers."""
    import signal

    found = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.add(signal.Signals[name])
        except KeyError:
            raise click.BadParameter(f"{name!r} is not a signal; write names like SIGTERM,SIGUSR1") from None
        if name in ("SIGKILL", "SIGSTOP"):
            raise click.BadParameter(f"{name} can't be handled by any program; leave it out")
    return frozenset(found)
