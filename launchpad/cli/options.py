"""Click pieces that the commands share: options in named groups, and readers of their values."""

from __future__ import annotations

from typing import Any

import click


class GroupedOption(click.Option):
    """An option that stands under a heading in --help."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose --help shows its options under their headings."""

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


def local_ranks(text: str) -> frozenset[int]:
    """Local ranks separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of local ranks; separate them with commas, like 0,3")
    return frozenset(int(part) for part in parts)
