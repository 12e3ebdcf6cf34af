"""Several programs in one world: on which hosts each runs, and what each is, by the options between the `:`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from launchpad.errors import UsageError
from launchpad.job.hosts import Host, Nproc
from launchpad.job.programs import check_order
from launchpad.job.spec import JobSpec, Program, Share, Target
from launchpad.job.world import WorldSpec
from launchpad.runner.connect import read_hosts
from launchpad.runner.imports import READ_AT_IMPORT, executes_ranks, look_through, what_to_preload
from launchpad.runner.options import ProgramOptions, RunOptions
from launchpad.runner.spec import check_together, collect_environ, find_python, make_spec, target_of, working_folder


class Layout(NamedTuple):
    """Where the programs run."""

    hosts: tuple[Host, ...]  # none: on this machine
    shares: tuple[tuple[Share, ...], ...]  # of each program

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(share.ranks for shares in self.shares for share in shares)

    def is_here(self, shares: Sequence[Share]) -> bool:
        """Whether some of these ranks run on this machine."""
        return not self.hosts or any(self.hosts[share.node].here for share in shares)


def parts_of(options: RunOptions) -> list[ProgramOptions]:
    """The options of each program, the first one's too."""
    names = [name for name in ProgramOptions._fields if name not in ("hosts", "hostfile")]
    first = {name: getattr(options, name) for name in names}
    return [ProgramOptions(**first, hosts=options.hosts.hosts, hostfile=options.hosts.hostfile), *options.programs]


def lay_out(options: RunOptions) -> Layout:
    """Where the programs run. Raises UsageError."""
    _check(options)
    parts = parts_of(options)
    counts = [_count(part.nproc) for part in parts]
    pool = _Pool(options)
    if pool.is_here and all(part.hosts is None and part.hostfile is None for part in parts):
        return Layout((), tuple((Share(0, count or 1),) for count in counts))
    return pool.layout(parts, counts)


def _check(options: RunOptions) -> None:
    """Raise UsageError for options that are for one program."""
    nodes = options.nodes
    if nodes.nnodes != "1" or nodes.node_rank is not None:
        raise UsageError("--nnodes and --node-rank are for one program; name the hosts of each: a : -H b:2")
    if options.hosts.spares:
        raise UsageError(f"--spares {options.hosts.spares}: each program has hosts of its own, so leave it out")
    if options.hosts.sync and any(part.wdir is not None for part in options.programs):
        raise UsageError("--sync copies one folder, so all programs run there; leave --wdir out after a ':'")


def _count(nproc: Nproc | None) -> int | None:
    if isinstance(nproc, str):
        raise UsageError(f"-n {nproc}: several programs are numbered before they start; give each a number of ranks")
    return nproc


class _Pool:
    """The hosts that the programs take their ranks from, one after the other."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._hosts: list[Host] = []
        self._counts: dict[int, int] = {}  # by host, the ranks of the programs so far
        self._free: list[int] = []  # by host of an allocation, the slots that are left
        allocation = options.hosts.allocation
        self.is_here = not allocation and not options.hosts.enter
        if allocation:
            own = options.hosts._replace(hosts=None, hostfile=None)
            self._hosts = list(read_hosts(own, 1))
            self._free = [host.mentions for host in self._hosts]

    def layout(self, parts: Sequence[ProgramOptions], counts: Sequence[int | None]) -> Layout:
        """Give each part its hosts. Raises UsageError."""
        found = [tuple(self._shares(part, count)) for part, count in zip(parts, counts, strict=True)]
        used = sorted(self._counts)  # an allocation may have more
        place = {host: node for node, host in enumerate(used)}
        hosts = tuple(self._hosts[host]._replace(slots=self._counts[host]) for host in used)
        shares = tuple(tuple(Share(place[host], count) for host, count in one) for one in found)
        check_order(shares, [host.name for host in hosts])
        return Layout(hosts, shares)

    def _shares(self, part: ProgramOptions, count: int | None) -> list[Share]:
        named = part.hosts is not None or part.hostfile is not None
        if self._free and not named:
            found = self._next_slots(count or 1)
        else:
            own = self._options.hosts._replace(
                hosts=part.hosts if named else "localhost", hostfile=part.hostfile, allocation=()
            )
            hosts = read_hosts(own, count)
            found = [Share(self._index(host), host.slots or count or host.mentions) for host in hosts]
        for share in found:
            self._counts[share.node] = self._counts.get(share.node, 0) + share.ranks
            if self._free:
                self._free[share.node] = max(0, self._free[share.node] - share.ranks)
        return found

    def _next_slots(self, count: int) -> list[Share]:
        """Free slots of the allocation, in order, after those of the program before."""
        found = []
        left = count
        for host in range(max(self._counts, default=0), len(self._free)):
            taken = min(left, self._free[host])
            if taken:
                found.append(Share(host, taken))
                left -= taken
        if left:
            raise UsageError(
                f"-n {count}: only {count - left} of the allocation's {sum(host.mentions for host in self._hosts)} "
                "slots are left for it; ask for more tasks, or say where it runs: -H HOST:N"
            )
        return found

    def _index(self, host: Host) -> int:
        """The number of a host, which another program may have named already."""
        for number, known in enumerate(self._hosts):
            if known.name.lower() == host.name.lower() or (known.here and host.here):
                if (known.user, known.port) != (host.user, host.port):
                    raise UsageError(f"{host.where}: {host.name} is named again with another user or port; keep one")
                return number
        if self._free:
            names = ", ".join(one.name for one in self._hosts)
            raise UsageError(f"{host.where}: {host.name} is none of the allocation's nodes, which are {names}")
        self._hosts.append(host)
        return len(self._hosts) - 1


def spec_of(options: RunOptions, layout: Layout, world: WorldSpec) -> JobSpec:
    """The job of these programs. Raises UsageError."""
    check_together(options)
    start = working_folder(None)
    folders = _Folders(start, os.path.join(start, options.wdir or ""))
    shared = options._replace(
        env=(), env_file=(), python=None, preload=None, start_method="exec", debug=None, nproc=layout.size
    )
    spec = make_spec(shared, layout.hosts, world)
    found = []
    try:
        for number, (part, shares) in enumerate(zip(parts_of(options), layout.shares, strict=True)):
            here = not options.hosts.enter and (options.hosts.by_srun or layout.is_here(shares))
            found.append(_made(options, part, shares, folders, number=number, here=here))
    finally:
        os.chdir(spec.cwd if os.path.isdir(spec.cwd) else folders.start)
    image = next((one.program for one in found if one.preload and not one.program.cwd), None)
    made = tuple(_with_fork(one, image, options) for one in found)
    preload = next((one.preload for one in found if one.program is image), ())
    return spec._replace(
        programs=made,
        preload=preload,
        executes=executes_ranks(options),
        debug=options.debug,
        torch=bool(layout.hosts) and any(one.torch for one in found),
    )


class _Folders(NamedTuple):
    start: str  # the one that launchpad was started in
    first: str  # the first program's


class _Made(NamedTuple):
    program: Program
    preload: tuple[str, ...]  # what is imported before its ranks are forked; none if they can't be
    torch: bool  # it imports torch


def _made(
    options: RunOptions, part: ProgramOptions, shares: Sequence[Share], folders: _Folders, *, number: int, here: bool
) -> _Made:
    """One of the programs. Raises UsageError. `here`: it has ranks on this machine."""
    cwd = folders.start if part.wdir is None else os.path.join(folders.start, part.wdir)
    try:
        os.chdir(cwd)
    except OSError as error:
        if here:
            raise UsageError(f"--wdir {part.wdir}: {error.strerror}; give a folder that can be entered") from None
    environ = collect_environ(part.env, part.env_file, os.environ)
    target = target_of(part, here=here)
    python = find_python(part.python, os.environ, sys.executable, here=here) if part.python else ""
    found = look_through(target, cwd, {**os.environ, **environ})
    silent = options._replace(target=part.target, reports=options.reports._replace(quiet=True))
    preload = what_to_preload(silent, target, lambda: found, {**os.environ, **environ})
    own = "" if os.path.realpath(cwd) == os.path.realpath(folders.first) else os.path.abspath(cwd)
    return _Made(Program(number, target, tuple(shares), python, own, environ), preload, found.torch)


def _with_fork(made: _Made, image: Program | None, options: RunOptions) -> Program:
    """The program, forked if a fork of the image can't be told from a process of its own."""
    one = made.program
    read_at_import = any(re.fullmatch(READ_AT_IMPORT, name) for name in one.environ)
    unsound = read_at_import or (bool(options.preload) and bool(one.environ))
    forks = (
        image is not None
        and bool(made.preload)
        and not unsound
        and (one.python, one.cwd) == (image.python, image.cwd)
        and _first_on_path(one.target) == _first_on_path(image.target)
    )
    return one._replace(forks=forks)


def _first_on_path(target: Target) -> tuple[str, str]:
    """What decides where its imports are looked for first."""
    place = target.name.rpartition(":")[0] if target.kind == "function" else target.name
    return target.kind, os.path.dirname(os.path.realpath(place)) if place.endswith(".py") else ""
