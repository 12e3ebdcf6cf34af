"""Shows the plan for `--dry-run`, in words or as JSON. It is the same value that would be run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping

from launchpad.job import binding
from launchpad.job.plan import Plan

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
    lines += [f"MPI: {plan.mpi_why}"] if plan.mpi else []
    for node in plan.nodes:
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
            lines += [f"  rank {rank.rank}: {shlex.join(rank.argv)}", *([f"    {own}"] if own else [])]
            lines += [f"    {binding.in_words(*binding.written(rank.binding))}"] if rank.binding else []
    return "\n".join(lines)
