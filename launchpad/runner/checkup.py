"""Carries out a checkup (`launchpad doctor`): has all hosts look at themselves and at each other at the same time."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from launchpad.console.checkup_table import notes
from launchpad.console.message import say_on_stderr
from launchpad.console.terminal import HowFar, status_line, waiting
from launchpad.doctor.judge import judge
from launchpad.doctor.network import late, slow
from launchpad.doctor.seen import Examination, HostSeen, Pair, listed
from launchpad.errors import NodeError
from launchpad.head import own_signals
from launchpad.head.mpi_worlds import MpiWorlds
from launchpad.image.place import path as keeper_path
from launchpad.job.hosts import Host
from launchpad.job.mpi import MpiSeat
from launchpad.job.mpi import environ as mpi_environ
from launchpad.job.plan import NodePlan, RankPlan
from launchpad.job.user_environment import forwarded
from launchpad.protocol import wire
from launchpad.protocol.commands import Check
from launchpad.protocol.events import BarrierIn, Checked, PmixFetched, PmixRequest
from launchpad.protocol.health import PlatformSeen, Probed, facts_of
from launchpad.runner.connect import enter_words, reach
from launchpad.runner.connector import Connector
from launchpad.runner.options import HostOptions, RunOptions
from launchpad.runner.spec import find_python
from launchpad.transport.ssh.bundle import Startup

if TYPE_CHECKING:
    from launchpad.transport import Link

# How long a host may take to let us in, and for each answer.
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
# Three checks in one: who answers, what gets lost, which packets pass. It is the longest where a host does not answer.
PROBE_SECONDS = 8.0
# An import of torch is no check: it may take longer, from a network file system or on a busy host.
IMPORT_SECONDS = 20.0
# By backend. NCCL has to start CUDA, and to try every network and GPU.
REDUCE_SECONDS = {"gloo": 6.0, "nccl": 20.0, "mpi": 10.0}
LEAVE_SECONDS = 1.0

STREAM_SECONDS = 0.1
# Each host sends to so many others, its neighbours first, and is called by so many.
MOST_ROUNDS = 15
MOST_CALLS = 32
# So many pairs that seem slow get a second chance, with nobody else on the network.
AGAIN = 6

_SUBJECTS = ("limits", "tmp", "cache", "shm", "memory", "load", "software", "mpi", "code", "sshd", "kept", "gpus")
_CLOCK_READS = 3


# Events of MPI libraries that concern the other hosts.
ForWorlds = BarrierIn | PmixRequest | PmixFetched


class HostAnswers:
    """The conversation with all hosts. What they say is kept by host and subject."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self.links = dict(sorted(links.items()))
        self.facts: dict[int, dict[str, Any]] = {place: {} for place in links}
        self.problems: dict[int, dict[str, str]] = {place: {} for place in links}
        self.ended: dict[int, str] = {}
        self.skews: dict[int, tuple[float, float]] = {}  # seconds, and by how many at most that is wrong
        self.awaited: set[tuple[int, str]] = set()
        self._due: dict[tuple[int, str], float] = {}
        self._limits: dict[str, float] = {}
        self._asked_at: dict[int, float] = {}  # time of day
        self.worlds: MpiWorlds | None = None  # joins the MPI libraries of these:
        self.members: list[int] = []
        self._inbox: queue.SimpleQueue[tuple[int, Checked | ForWorlds | str, float]] = queue.SimpleQueue()
        for place, link in links.items():
            threading.Thread(target=self._read, args=(place, link), name=f"checkup-{place}", daemon=True).start()

    def _read(self, place: int, link: Link) -> None:
        why = "the connection ended during the check"
        try:
            for message in link.messages():
                if isinstance(message, Checked | ForWorlds):
                    self._inbox.put((place, message, time.time()))
        except (OSError, EOFError, wire.WireError) as error:
            why = f"{why}: {error}" if str(error) else why
        self._inbox.put((place, why, 0.0))

    @property
    def present(self) -> list[int]:
        """The hosts that are still there."""
        return [place for place in self.links if place not in self.ended]

    def ask(self, place: int, subject: str, seconds: float = ANSWER_SECONDS, **request: Any) -> None:
        """Ask a host about a subject, to be answered within so many seconds."""
        if place in self.ended:
            return
        self.awaited.add((place, subject))
        self._due[place, subject] = time.monotonic() + seconds
        self._limits[subject] = seconds
        self._asked_at[place] = time.time()
        self.links[place].send(Check(subject, request))

    def wait(self, *subjects: str) -> None:
        """Until all hosts have answered about these subjects, or their time is up."""
        while wanted := [one for one in self.awaited if one[1] in subjects]:
            left = max(self._due[one] for one in wanted) - time.monotonic()
            try:
                self._take(*self._inbox.get(timeout=max(0.0, left)))
            except queue.Empty:
                for place, subject in wanted:
                    self.awaited.discard((place, subject))
                    self.problems[place][subject] = f"no answer within {self._limits[subject]:g} s"

    def _take(self, place: int, message: Checked | ForWorlds | str, at: float) -> None:
        if isinstance(message, ForWorlds):
            self._relay(place, message)
            return
        if isinstance(message, str):
            self.ended[place] = message
            self.awaited = {one for one in self.awaited if one[0] != place}
            return
        if (place, message.subject) not in self.awaited:  # too late
            return
        self.awaited.discard((place, message.subject))
        try:
            if not message.problem:
                self.facts[place][message.subject] = facts_of(message.subject, message.facts)
        except ValueError as error:
            self.problems[place][message.subject] = str(error)
            return
        if message.problem:
            self.problems[place][message.subject] = message.problem
        elif message.subject == "identity":
            asked = self._asked_at[place]
            uncertain = (at - asked) / 2
            if place not in self.skews or uncertain < self.skews[place][1]:
                self.skews[place] = self.facts[place]["identity"].wall - (at + asked) / 2, uncertain

    def _relay(self, place: int, event: ForWorlds) -> None:
        """Pass on what a rank's MPI library says to those of the other hosts."""
        if self.worlds is None or place not in self.members:
            return
        node = self.members.index(place)
        if isinstance(event, PmixFetched) or self.worlds.makes_sense(node, event):
            for to, command in self.worlds.on(node, event):
                self.links[self.members[to]].send(command)

    def close(self) -> None:
        """Hang up on all, and wait a moment for them to leave."""
        threads = [
            threading.Thread(target=link.close, name=f"leave-{place}", daemon=True)
            for place, link in self.links.items()
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + LEAVE_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def check_up(
    hosts: Sequence[Host],
    options: HostOptions,
    python: str | None,
    *,
    quick: bool = False,
    code: bool = True,
    torch: bool = True,
    mpi: bool = True,
    cwd: str | None = None,
    environ: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Examination:
    """Check these hosts, or this machine. Raises UsageError.

    `quick`: without the speed of the network, and without an all_reduce. `code`: compare that in the working folder.
    `torch`, `mpi`: the ranks need it.
    """
    began = time.monotonic()
    named = hosts or (Host("localhost", here=True),)
    folder = os.getcwd() if cwd is None else cwd
    variables = dict(forwarded(os.environ) if environ is None else environ)
    with ExitStack() as closing, own_signals.exit_on_signals():
        found = find_python(python, os.environ, sys.executable, here=any(host.here for host in named))
        startup = Startup(found, python is not None and not options.sync_env, enter_words(options))
        answers, failures = _open(named, options, startup, closing, quiet=quiet)

        def look() -> HowFar:
            left = sorted({named[place].name for place, _ in answers.awaited.copy()})
            return HowFar(waiting("checking", left), len(named) - len(left), len(named))

        with status_line(look, quiet=quiet):
            subjects = [one for one in _SUBJECTS if (code or one != "code") and (mpi or one != "mpi")]
            paths, rates, reduced, failed = _examine(answers, folder, variables, subjects, quick=quick)
            unfit = _unfit(answers, named, found, folder) if options.sync_env else {}
    failures |= answers.ended
    there = range(0) if options.sync_env else range(len(named))
    sought = {place: startup.sought for place in there if startup.sought and (startup.enter or not named[place].here)}
    seen = [
        HostSeen(
            host.name if hosts else "",
            failures.get(place, ""),
            answers.facts.get(place, {}),
            answers.problems.get(place, {}),
            *answers.skews.get(place, (None, 0.0)),
        )
        for place, host in enumerate(named)
    ]
    gone = failures.keys()
    return Examination(
        hosts=seen,
        paths={pair: path for pair, path in paths.items() if not gone & set(pair)},
        rates={pair: rate for pair, rate in rates.items() if not gone & set(pair)},
        reduced=reduced,
        not_reduced=failed,
        environ=variables,
        cwd=folder,
        torch=torch,
        sought=sought,
        unfit=unfit,
        seconds=time.monotonic() - began,
    )


def _unfit(answers: HostAnswers, hosts: Sequence[Host], python: str, cwd: str) -> dict[int, tuple[str, str]]:
    """The other hosts that can't have this machine's environment, with the reason and the remedy. Raises UsageError."""
    from launchpad.head.environment import ask_interpreter, installed_folders
    from launchpad.head.environment_records import installed_wheels
    from launchpad.job.wheels import Platform, remedy, why_not

    interpreter = ask_interpreter(python, cwd, os.environ)
    far = [place for place in answers.present if not hosts[place].here]
    for place in far:
        answers.ask(place, "platform", version=interpreter.version, abi=interpreter.abi)
    answers.wait("platform")
    wheels = installed_wheels(installed_folders(interpreter))
    found = {}
    for place in far:
        seen: PlatformSeen | None = answers.facts[place].get("platform")
        if seen is not None:
            there = Platform(seen.machine, seen.glibc, seen.python or interpreter.relocatable)
            if why := why_not(wheels, interpreter.version, os.uname().machine, there):
                found[place] = why, remedy(interpreter.version, [why])
    return found


def refuse_unfit(
    hosts: Sequence[Host],
    options: RunOptions,
    cwd: str,
    *,
    torch: bool,
    mpi: bool,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Check the hosts of a job quickly (--check), and show what is not well. Raises NodeError if it can't run there."""
    seen = check_up(
        *(hosts, options.hosts, options.python),
        quick=True,
        code=not options.hosts.sync,
        torch=torch and not options.hosts.sync_env,  # it is about to be sent
        mpi=mpi,
        cwd=cwd,
        environ={**forwarded(os.environ), **(environ or {})},
        quiet=options.reports.quiet,
    )
    findings = judge(seen)
    if bad := [one for one in findings if one.level == "bad"]:
        concerned = listed(sorted({seen.hosts[place].shown for one in bad for place in one.hosts}))
        text = "\n  ".join([f"no job can run on {concerned}, so nothing was started:", *notes(seen, bad)])
        raise NodeError(text)
    if not options.reports.quiet:
        for note in notes(seen, findings):
            say_on_stderr(note)


def _open(
    hosts: Sequence[Host], options: HostOptions, startup: Startup, closing: ExitStack, *, quiet: bool
) -> tuple[HostAnswers, dict[int, str]]:
    """Reach the hosts. Nothing is installed there: what runs is sent over the connection, and stays in memory."""
    # On this machine, images are kept by the launchpad that is installed here.
    keepers = [keeper_path(os.environ) if host.here and not startup.enter else "" for host in hosts]
    startups = [startup._replace(asked=json.dumps({"checkup": keeper})) for keeper in keepers]
    connector = Connector(options)
    closing.callback(connector.abandon)
    links, failures = reach(connector, dict(enumerate(hosts)), startups, quiet=quiet, seconds=CONNECT_SECONDS)
    answers = HostAnswers(links)
    closing.callback(answers.close)
    return answers, failures


def _examine(
    answers: HostAnswers, cwd: str, environ: Mapping[str, str], subjects: Sequence[str], *, quick: bool
) -> tuple[dict[Pair, Probed], dict[Pair, float], dict[str, float], dict[str, str]]:
    secrets = {place: os.urandom(16).hex() for place in answers.present}
    for place in answers.present:
        answers.ask(place, "identity")
        answers.ask(place, "network", secret=secrets[place])
    answers.wait("identity", "network")
    for _ in range(_CLOCK_READS - 1):
        for place in answers.present:
            if "identity" in answers.facts[place]:
                answers.ask(place, "identity")
        answers.wait("identity")
    for place in answers.present:
        for subject in subjects:
            answers.ask(place, subject, cwd=cwd, environ=environ)
    paths = _probe(answers, secrets)
    rates: dict[Pair, float] = {}
    reduced: dict[str, float] = {}
    failed: dict[str, str] = {}
    if not quick:
        answers.wait("software", "gpus", "limits")
        members, backends = _import(answers, paths, cwd, environ)
        if not all(_has_cores(answers, place) for place in answers.present):
            answers.wait("import")
        rates = _streams(answers, secrets, paths)
        answers.wait("import")
        reduced, failed = _reduce(answers, members, backends)
        in_world, no_world = _form_world(answers, paths, cwd, environ)
        reduced, failed = reduced | in_world, failed | no_world
    answers.wait("lookup", *subjects)
    return paths, rates, reduced, failed


def _probe(answers: HostAnswers, secrets: Mapping[int, str]) -> dict[Pair, Probed]:
    """Have the hosts call each other. Each calls its neighbours if there are very many."""
    members = [place for place in answers.present if "network" in answers.facts[place]]
    names = [
        answers.facts[place]["identity"].hostname for place in answers.present if "identity" in answers.facts[place]
    ]
    for place in answers.present:
        answers.ask(place, "lookup", names=names)
    if len(members) < 2:
        return {}
    inlets = {place: answers.facts[place]["network"].inlets for place in members}
    peers: dict[int, list[Any]] = {}
    for at, place in enumerate(members):
        steps = sorted(range(1, len(members)), key=lambda step: min(step, len(members) - step))[:MOST_CALLS]
        others = [members[(at + step) % len(members)] for step in steps]
        alone = not any(_is_outward(inlet.address) for inlet in inlets[place])
        peers[place] = [
            [other, secrets[other], [one for one in inlets[other] if alone or _is_outward(one.address)]]
            for other in others
        ]
        answers.ask(place, "probes", PROBE_SECONDS, number=place, peers=peers[place])
    answers.wait("probes")
    for place in members:
        answers.ask(place, "heard")
    answers.wait("heard")
    paths = _paths(answers, members)
    # What comes late because a host was busy comes sooner the next time.
    again = late(paths)
    for place in {start for start, _ in again}:
        few = [peer for peer in peers[place] if (place, peer[0]) in again]
        answers.ask(place, "probes", PROBE_SECONDS, number=place, peers=few)
    answers.wait("probes")
    for pair, path in _paths(answers, {start for start, _ in again}).items():
        if path.latency >= 0:
            paths[pair] = paths[pair]._replace(latency=min(path.latency, paths[pair].latency))
    return paths


def _paths(answers: HostAnswers, places: Iterable[int]) -> dict[Pair, Probed]:
    """As these hosts found them last."""
    return {
        (place, path.peer): path
        for place in places
        if "probes" in answers.facts[place]
        for path in answers.facts[place]["probes"].paths
    }


def _is_outward(address: str) -> bool:
    return not address.startswith("127.") and address != "::1"


def _has_cores(answers: HostAnswers, place: int) -> bool:
    """Whether an import does not slow down a stream in and one out."""
    limits = answers.facts[place].get("limits")
    return limits is not None and limits.cores >= 3


def _streams(answers: HostAnswers, secrets: Mapping[int, str], paths: Mapping[Pair, Probed]) -> dict[Pair, float]:
    """Measure how fast data flows, each host with one other at a time; then the slow ones again, each alone."""
    open_paths = {pair for pair, path in paths.items() if path.address}
    rates: dict[Pair, float] = {}
    for pairs in rounds(sorted({place for pair in open_paths for place in pair}), MOST_ROUNDS):
        both = [*pairs, *((other, one) for one, other in pairs)]
        _stream(answers, secrets, paths, [pair for pair in both if pair in open_paths], rates)
    seem = slow(rates, paths)
    # First those that are alone: what concerns all paths of a host is no accident.
    for pair in sorted(seem, key=lambda pair: (sum(pair[0] == other[0] for other in seem), pair))[:AGAIN]:
        _stream(answers, secrets, paths, [pair], rates)
    return rates


def _stream(
    answers: HostAnswers,
    secrets: Mapping[int, str],
    paths: Mapping[Pair, Probed],
    pairs: Iterable[Pair],
    rates: dict[Pair, float],
) -> None:
    asked = list(pairs)
    for start, to in asked:
        address = paths[start, to].address
        port = next(one.tcp for one in answers.facts[to]["network"].inlets if one.address == address)
        answers.ask(start, "stream", address=address, port=port, secret=secrets[to], lasts=STREAM_SECONDS)
    answers.wait("stream")
    for pair in asked:
        found = answers.facts[pair[0]].pop("stream", None)
        if found is not None:
            rates[pair] = max(found.rate, rates.get(pair, 0.0))


def rounds(places: Sequence[int], most: int) -> list[list[Pair]]:
    """Rounds in which each place meets another one, until each has met all others, or `most` of them."""
    circle: list[int | None] = [*places, *([None] if len(places) % 2 else [])]
    found = []
    for _ in range(min(most, len(circle) - 1)):
        half = len(circle) // 2
        meetings = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in meetings if one is not None and other is not None])
        circle[1:] = [circle[-1], *circle[1:-1]]
    return found


def _import(
    answers: HostAnswers, paths: Mapping[Pair, Probed], cwd: str, environ: Mapping[str, str]
) -> tuple[list[int], dict[str, float]]:
    """Have all hosts import torch, if they can reach each other and have the same one.

    Returns the hosts, and the backends that there are then, with the seconds that each may take.
    """
    members = answers.present
    versions = {answers.facts[place]["software"].torch for place in members if "software" in answers.facts[place]}
    known = all("software" in answers.facts[place] for place in members)
    if not members or not known or len(versions) != 1 or versions == {""}:
        return [], {}
    if any(not path.address for path in paths.values()):
        return [], {}
    gpus = all("gpus" in answers.facts[place] and answers.facts[place]["gpus"].gpus for place in members)
    backends = {backend: REDUCE_SECONDS[backend] for backend in (("gloo", "nccl") if gpus else ("gloo",))}
    places = places_of(members, paths)
    if len(places) < len(members):
        return [], {}
    for rank, place in enumerate(members):
        request = {"rank": rank, "size": len(members), "address": places[members[0]][0], "backends": backends}
        answers.ask(
            place, "import", IMPORT_SECONDS, **request, interface=places[place][1], cwd=cwd, environ=dict(environ)
        )
    return members, backends


def _reduce(
    answers: HostAnswers, members: Sequence[int], backends: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, str]]:
    """One all_reduce with each backend over these hosts. Returns how long it took, or why there was none."""
    if late := [place for place in members if "import" not in answers.facts[place]]:
        why = {answers.problems[place].pop("import", "the connection ended") for place in late}
        names = listed([answers.facts[place]["identity"].hostname for place in late])
        return {}, {"gloo": f"{names}, import torch: {' and '.join(sorted(why))}"}
    reduced: dict[str, float] = {}
    for backend, seconds in backends.items():
        for place in members:
            answers.ask(place, "all_reduce", seconds, port=answers.facts[members[0]]["import"].port)
        answers.wait("all_reduce")
        found = [answers.facts[place].pop("all_reduce", None) for place in members]
        problems = [
            one.failed if one else answers.problems[place].pop("all_reduce", "") or "the connection ended"
            for place, one in zip(members, found, strict=True)
        ]
        if problem := next(filter(None, problems), ""):
            return reduced, {backend: problem}
        reduced[backend] = max(one.seconds for one in found if one)
    return reduced, {}


def _form_world(
    answers: HostAnswers, paths: Mapping[Pair, Probed], cwd: str, environ: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, str]]:
    """One allreduce in an MPI world of all hosts, if all can reach each other and have the same MPI.

    Returns how long it took, or why there was none.
    """
    answers.wait("mpi")
    members = answers.present
    found = [answers.facts[place].get("mpi") for place in members]
    if (
        not members
        or len({one and one.library for one in found}) != 1
        or any(not path.address for path in paths.values())
    ):
        return {}, {}
    if not all(one and one.library and not one.problem for one in found):
        return {}, {}
    places = places_of(members, paths)
    if len(places) < len(members):
        return {}, {}
    nodes = []
    for rank, place in enumerate(members):
        address, interface = places[place] if len(members) > 1 else ("", "")
        seat = MpiSeat(rank, len(members), 0, 1, f"{rank}-{address}" if address else "")
        rank_plan = RankPlan(rank, 0, (), mpi_environ(seat))
        nodes.append(NodePlan(rank, seat.host, cwd, {}, (rank_plan,), {}, interface=interface))
    answers.members = members
    answers.worlds = MpiWorlds(nodes, f"launchpad-{os.urandom(8).hex()}-doctor")
    for node, place in zip(nodes, members, strict=True):
        request = {"world": list(answers.worlds.begin(node.index)), "seat": dict(node.ranks[0].environ)}
        answers.ask(place, "world", REDUCE_SECONDS["mpi"], **request, cwd=cwd, environ=dict(environ))
    answers.wait("world")
    results = [answers.facts[place].get("world") for place in members]
    gave_up = [answers.problems[place].pop("world", "the connection ended") for place in members]
    # Those that wait for one that has failed give up later.
    problems = [one.failed for one in results if one and one.failed]
    problems += [why for why, one in zip(gave_up, results, strict=True) if one is None]
    if problems:
        return {}, {"mpi": problems[0]}
    return {"mpi": max(one.seconds for one in results if one)}, {}


def places_of(members: Sequence[int], paths: Mapping[Pair, Probed]) -> dict[int, tuple[str, str]]:
    """Each host's own address and interface where they meet: the first host's path to the others, and theirs to it."""
    first = members[0]
    own = [(paths[pair].source, paths[pair].interface) for pair in paths if pair[0] == first]
    # Where the first host has two networks, the one by which most of the others come.
    reached = Counter(paths[pair].address for pair in paths if pair[1] == first)
    address = max(reached, key=lambda one: reached[one], default="127.0.0.1")
    interface = next((name for source, name in own if source == address), own[0][1] if own else "lo")
    found = {first: (address, interface)}
    for place in members[1:]:  # among very many hosts, one that is not a neighbour of the first has not called it
        path = paths.get((place, first)) or next((path for pair, path in paths.items() if pair[0] == place), None)
        if path:
            found[place] = path.source, path.interface
    return found
