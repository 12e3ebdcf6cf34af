"""Shows the plan for `--dry-run`, in words or as JSON. It is the same value that would be run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from launchpad.job.outcome import ranks_in_words
from launchpad.job.plan import Plan

if TYPE_CHECKING:
    from launchpad.job.binding import Binding

Sources = Mapping[str, tuple[str, str]]  # by option: its value, and where it came from


def show(plan: Plan, sources: Sources, *, as_json: bool) -> None:
    """Print the plan on stdout, with the options that it follows from."""
    if as_json:
        options = {name: {"value": value, "from": source} for name, (value, source) in sources.items()}
        text = json.dumps({**plan.as_json(), "options": options}, indent=2)
    else:
        chosen = [f"  {name} = {value}  (from {source})" for name, (value, source) in sources.items()]
        text = "\n".join([in_words(plan), *(["options:", *chosen] if chosen else [])])
    sys.stdout.buffer.write(os.fsencode(text + "\n"))  # arguments may not be valid in the terminal's encoding


def in_words(plan: Plan) -> str:
    """The plan for people; what all ranks of a node share is shown once."""
    preload = ", ".join(plan.nodes[0].preload)
    lines = [f"imported once per node, then forked into the ranks: {preload}"] if preload else []
    lines += [f"MPI: {plan.mpi_why}"] if plan.mpi_why else []
    lines += [f"health check on each node before each attempt: {plan.health}"] if plan.health else []
    if plan.programs:
        lines += _programs(plan)
    lines += [f"role {name}: {ranks_in_words(list(ranks))} of the job" for name, ranks in plan.roles]
    lines += _hosts_of_roles(plan) if plan.roles else []
    for node in plan.nodes:
        if why := plan.left_out.get(node.index):
            lines.append(f"node {node.index}: {node.name}, left out: {why}")
            continue
        if not node.ranks:
            lines.append(f"node {node.index}: {node.name}, a spare for {node.slots} ranks, in {node.cwd}")
            continue
        first = node.ranks[0].environ
        shared = {name for name in first if all(rank.environ[name] == first[name] for rank in node.ranks)}
        lines.append(f"node {node.index}: {node.name}, {len(node.ranks)} of {len(plan.ranks)} ranks, in {node.cwd}")
        lines.append("  every rank:")
        lines += [f"    {name}={shlex.quote(first[name])}" for name in first if name in shared]
        lines += [f"    {name}={value}  (if unset)" for name, value in node.defaults.items()]
        lines += [f"    {name}=***" for name in sorted(node.environ)]
        for rank in node.ranks:
            own = " ".join(f"{name}={shlex.quote(value)}" for name, value in rank.environ.items() if name not in shared)
            if rank.program is not None:
                own = " ".join([*filter(None, [own]), *(f"{name}=***" for name in sorted(rank.program.environ))])
            lines += [f"  rank {rank.rank}: {shlex.join(rank.argv)}", *([f"    {own}"] if own else [])]
            lines += [f"    {_bound(rank.binding)}"] if rank.binding else []
    return "\n".join(lines)


def _bound(to: Binding) -> str:
    from launchpad.job import binding  # few jobs bind their ranks

    return binding.in_words(*binding.written(to))


def _hosts_of_roles(plan: Plan) -> Iterator[str]:
    """Who is where, if roles are on hosts."""
    from launchpad.job.roles import RoleNames

    names = RoleNames(plan.roles)
    hosts: dict[str, list[str]] = {}
    for node in plan.nodes:
        if node.name not in {name for name, _ in plan.roles}:
            gpus = node.ranks[0].environ.get("CUDA_VISIBLE_DEVICES")
            seen = f" (GPUs {gpus or 'none'})" if gpus is not None else ""
            hosts.setdefault(node.name, []).append(names.several([rank.rank for rank in node.ranks]) + seen)
    width = max(map(len, hosts), default=0)
    return (f"host {name:<{width}}  {', '.join(ones)}" for name, ones in hosts.items())


def _programs(plan: Plan) -> Iterator[str]:
    """What runs in which ranks."""
    ones = {rank.program.number: rank.program for rank in plan.ranks if rank.program is not None}
    for (_, ranks), one in zip(plan.programs, ones.values(), strict=True):
        where = f", in {one.cwd}" if one.cwd else ""
        python = f", with {one.python}" if one.python else ""
        yield f"program {one.number}: {shlex.join(one.target.words)} ({ranks_in_words(ranks)}{where}{python})"
