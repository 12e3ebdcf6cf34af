"""The nodes of a batch allocation, as PBS, Torque, LSF, SGE, OAR and Flux list them for the job. Pure.

Slurm's are in slurm.py.

    FLUX_JOB_ID        a job of Flux: what `flux job info ID R` prints (JSON); a slot is a core
    FLUX_URI           all that flux batch and flux alloc set: what `flux kvs get resource.R` prints
    PBS_NODEFILE       a file with a line per slot (mpiprocs= of PBS, ppn= of Torque)
    LSB_DJOB_HOSTFILE  LSF: a file with a line per slot
    LSB_MCPU_HOSTS     LSF: `host slots host slots …`
    PE_HOSTFILE        SGE: a file with a line per host and queue, `host slots queue processors`
    OAR_NODEFILE       a file with a line per core

The first node is the one that runs the job's script. Flux is looked for first: it may run inside an allocation of
another scheduler, whose variables are then set too.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from launchpad.errors import UsageError
from launchpad.job.hosts import MOST_SLOTS, Host, hosts_of_slots
from launchpad.named import NamedTuple

# Greater than 1 if launchpad itself was started several times, by mpirun or flux run: each would take all nodes.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE")

# More than any cluster has: a range with a digit too many would take all memory.
MOST_NODES = 1_000_000

INSTEAD = "name the hosts with --hosts; --hosts localhost is this machine alone"

_GROUP = re.compile(r"\[([^][]*)\]")
_COMMA = re.compile(r",(?![^[]*\])")  # not in brackets
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")

Listed = tuple[str, int, str]  # a host, its slots, and where that is written


class Source(NamedTuple):
    """Where a scheduler lists the nodes: in a file, in a command's output, or in the variable itself."""

    scheduler: str
    variable: str
    file: str = ""
    command: tuple[str, ...] = ()
    text: str = ""

    @property
    def where(self) -> str:
        """What messages call it."""
        return self.file or " ".join(self.command) or self.variable


def find_source(environ: Mapping[str, str]) -> Source | None:
    """Where the nodes are listed, if this process is in an allocation and free to use all of it."""
    if is_one_of_several(environ) or "TORCHELASTIC_RUN_ID" in environ:  # a rank's launchpads stay where it is
        return None
    if job := environ.get("FLUX_JOB_ID"):
        return Source("Flux", "FLUX_JOB_ID", command=("flux", "job", "info", job, "R"))
    if environ.get("FLUX_URI"):
        return Source("Flux", "FLUX_URI", command=("flux", "kvs", "get", "resource.R"))
    if path := environ.get("PBS_NODEFILE"):
        return Source("PBS", "PBS_NODEFILE", path)
    if path := environ.get("LSB_DJOB_HOSTFILE"):
        return Source("LSF", "LSB_DJOB_HOSTFILE", path)
    if text := environ.get("LSB_MCPU_HOSTS"):
        return Source("LSF", "LSB_MCPU_HOSTS", text=text)
    if path := environ.get("PE_HOSTFILE"):
        return Source("SGE", "PE_HOSTFILE", path)
    if path := environ.get("OAR_NODEFILE"):
        return Source("OAR", "OAR_NODEFILE", path)
    return None


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether launchpad itself is one of several tasks of mpirun or flux run."""
    return any(environ.get(name, "").strip() not in ("", "0", "1") for name in _SIZES)


def parse_nodes(source: Source, text: str) -> tuple[Host, ...]:
    """The nodes in what was read from the source, each with its slots as mentions. Raises UsageError."""
    listed: Iterable[Listed]
    match source.variable:
        case "FLUX_JOB_ID" | "FLUX_URI":
            listed = _parse_resources(text, source.where)
        case "LSB_MCPU_HOSTS":
            listed = _parse_pairs(text, source.where)
        case "PE_HOSTFILE":
            listed = _parse_columns(text, source.where)
        case _:
            listed = _parse_lines(text, source)
    hosts = hosts_of_slots(listed)
    if not hosts:
        raise UsageError(f"{source.where} lists no nodes of this {source.scheduler} allocation; {INSTEAD}")
    return hosts


def expand_hostlist(text: str, where: str) -> list[str]:
    """The hosts of a list as Flux and Slurm write it: `n[08-10,7]-ib,login` → n08-ib, n09-ib, n10-ib, n7-ib, login.

    The first number of a range says how many digits there are. Raises UsageError; `where` is for its message.
    """
    hosts: list[str] = []
    for word in filter(None, (part.strip() for part in _COMMA.split(text))):
        parts = _GROUP.split(word)  # by turns: what is outside of brackets, and what is inside
        if any(bracket in part for part in parts for bracket in "[]"):
            raise UsageError(f"{where}: a bracket of {word!r} is not closed or not opened; {INSTEAD}")
        choices = [_expand(part, word, where) if place % 2 else [part] for place, part in enumerate(parts)]
        _check_size(len(hosts) + math.prod(map(len, choices)), word, where)
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expand(ranges: str, word: str, where: str) -> list[str]:
    """`08-10,7` → 08, 09, 10, 7."""
    found: list[str] = []
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise UsageError(f"{where}: {one!r} in {word!r} is not a number or a range like 1-4; {INSTEAD}")
        _check_size(len(found) + last - first + 1, word, where)
        found += (str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return found


def _check_size(count: int, word: str, where: str) -> None:
    if count > MOST_NODES:
        raise UsageError(f"{where}: {word!r} stands for more than {MOST_NODES} hosts; {INSTEAD}")


def _parse_lines(text: str, source: Source) -> Iterator[Listed]:
    for where, words in _words(text, source.where):
        if len(words) > 1:
            raise UsageError(
                f"{where}: {source.scheduler} writes one host per line, and this has {len(words)} words; {INSTEAD}"
            )
        yield words[0], 1, where


def _parse_columns(text: str, path: str) -> Iterator[Listed]:
    for where, words in _words(text, path):
        if len(words) < 2:
            raise UsageError(f"{where}: SGE writes a host, its slots and its queue, and this is one word; {INSTEAD}")
        yield words[0], _slots(words[1], where), where


def _parse_pairs(text: str, where: str) -> Iterator[Listed]:
    words = text.split()
    if len(words) % 2:
        raise UsageError(f"{where}: LSF writes hosts and their slots by turns, and the last has no number; {INSTEAD}")
    for name, slots in zip(words[::2], words[1::2], strict=True):
        yield name, _slots(slots, where), where


def _words(text: str, path: str) -> Iterator[tuple[str, list[str]]]:
    """Where each line is that isn't blank, and its words."""
    for number, line in enumerate(text.split("\n"), start=1):
        if words := line.split():
            yield f"{path}, line {number}", words


def _slots(text: str, where: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_SLOTS)) else 0
    if not 0 < number <= MOST_SLOTS:
        raise UsageError(f"{where}: {text[:60]!r} is not a number of slots from 1 to {MOST_SLOTS}; {INSTEAD}")
    return number


def _parse_resources(text: str, where: str) -> list[Listed]:
    """Parse a resource set of Flux.

    {"execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0-3"}}], "nodelist": ["n[1-2]"]}}
    """
    try:
        execution = json.loads(text)["execution"]
        cores = {
            int(rank): len(_expand(entry["children"]["core"], entry["children"]["core"], where))
            for entry in execution["R_lite"]
            for rank in _expand(entry["rank"], entry["rank"], where)
        }
        names = [name for part in execution["nodelist"] for name in expand_hostlist(part, where)]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise UsageError(f"{where}: its answer is not a resource set (R) with nodes and cores; {INSTEAD}") from None
    if len(names) != len(cores):
        raise UsageError(f"{where}: its answer has {len(names)} names for {len(cores)} nodes; {INSTEAD}")
    # Names are in the order of the ranks, whatever the order of R_lite.
    return [(name, cores[rank], where) for name, rank in zip(names, sorted(cores), strict=True)]
