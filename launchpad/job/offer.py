"""What a node offers when it joins a job: its place, and what its ranks run if its own command line says so."""

from __future__ import annotations

import typing
from typing import Annotated, Any

from launchpad.errors import UsageError
from launchpad.job.gpus import parse_gpus
from launchpad.job.hosts import Nproc
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.spec import JobSpec
from launchpad.job.succession import Rosters
from launchpad.named import NamedTuple
from launchpad.protocol.events import Date, Shown
from launchpad.protocol.printable import printable
from launchpad.protocol.typed import typed

# What each node's own command line says about its ranks, as with torchrun.
_OWN = ("python", "cwd", "environ", "role", "virtual_local_rank", "torch", "hooks", "bind", "gpus")

# More on one node, or in one job, are a mistake.
MOST_RANKS = 1 << 20
MOST_RESTARTS = 1 << 20

# What concerns the whole job, and is the head's: the option, and its field.
_OF_THE_JOB = {
    "--backend": "backend",
    "--mpi": "mpi",
    "--tf-config": "tf_config",
    "--max-restarts": "max_restarts",
    "--restart": "restart",
    "--progress": "progress",
    "--timeout": "timeout",
    "--stall-timeout": "stall_timeout",
    "--grace": "grace",
    "--stop-signal": "stop_signal",
    "--input-rank": "input_rank",
    "--debug": "debug",
    "--report-bindings": "report_bindings",
}

# The values of those that the command line doesn't have.
_NOT_GIVEN = (None, "", 0, RestartLimit(), "judged", ())


class NodeOffer(NamedTuple):
    """A node that asks to join."""

    name: Shown  # its host name
    python: str  # the interpreter that its launchpad, and so its agent, runs in
    nnodes: str = ""  # the size of the job that it expects; "": it doesn't say (`launchpad join`)
    node_rank: int | None = None  # --node-rank: the place that it must have; with c10d, that it comes in order of
    order: int | None = None  # in place of a node rank: what its scheduler says
    slots: Nproc | None = None  # how many ranks it takes (`launchpad join`)
    spec: JobSpec | None = None  # what its ranks run; None: what the head's run
    failed: str = ""  # why it can't take part
    ends_at: Date | None = None  # when its batch allocation ends, in seconds since 1970
    key: str = ""  # its launcher's on the rosters
    roles: bool = False  # its command line has roles, for a head that has
    beside: Shown = ""  # the key of the first offer of this node, see JoinMore
    port: Annotated[int, range(1 << 16)] = 0  # of its launcher's door, at the address that it dials from; 0: none
    rosters: Rosters = ()  # of the head that it has lost, if it is coming from one
    lost: Date = 0.0  # when that was, in seconds since 1970

    def as_json(self) -> dict[str, Any]:
        """The offer for the wire."""
        made = self._asdict()
        made["rosters"] = list(self.rosters)
        made["spec"] = None if self.spec is None else _spec_as_json(self.spec)
        return made

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> NodeOffer:
        """The offer from the wire. Raises ValueError, TypeError or KeyError if it is none."""
        hints = typing.get_type_hints(cls, include_extras=True)
        spec = None if found["spec"] is None else _spec_from_json(found["spec"])
        values = {name: _declared(name, found[name], hint) for name, hint in hints.items() if name != "spec"}
        _check_count("slots", values["slots"])
        if not all(roster.peers and 0 <= roster.restarts < MOST_RESTARTS for roster in values["rosters"]):
            raise ValueError("rosters: one is of nobody, or of a job that has used up too many restarts")
        values["failed"] = printable(values["failed"])
        return cls(spec=spec, **values)

    def differences(self, head: JobSpec) -> list[str]:
        """What this node's command line says about the whole job, and the head's says otherwise."""
        if self.spec is None:
            return []
        values = {option: (_field(self.spec, name), _field(head, name)) for option, name in _OF_THE_JOB.items()}
        return [
            f"{option} {_shown(ours)} has no effect on this node: the head's is {_shown(theirs)}"
            for option, (ours, theirs) in values.items()
            if ours != theirs and ours not in _NOT_GIVEN
        ]


def _field(spec: JobSpec, name: str) -> Any:
    return getattr(spec.limits if name in Limits._fields else spec, name)


def _spec_as_json(spec: JobSpec) -> dict[str, Any]:
    of_job = {name: _field(spec, name) for name in _OF_THE_JOB.values()}
    own = {name: getattr(spec, name) for name in _OWN}
    target = [spec.target.kind, spec.target.name, list(spec.target.args)]
    own["environ"] = dict(spec.environ)
    return {"target": target, "nproc": spec.nproc, "preload": list(spec.preload), **own, **of_job}


def _spec_from_json(found: dict[str, Any]) -> JobSpec:
    if type(found) is not dict:
        raise TypeError("spec: not an object")
    spec = typing.get_type_hints(JobSpec, localns={"Faults": object, "HealthCheck": object})
    limits = typing.get_type_hints(Limits)
    names = ("target", "nproc", "preload", *_OWN, *_OF_THE_JOB.values())
    values = {name: _declared(name, found[name], spec.get(name) or limits[name]) for name in names}
    made = JobSpec(
        limits=Limits(**{name: value for name, value in values.items() if name in Limits._fields}),
        **{name: value for name, value in values.items() if name not in Limits._fields},
    )
    if made.target.kind not in ("script", "module", "program", "function"):
        raise ValueError(f"no kind of target: {made.target.kind!r}")
    _check_count("nproc", made.nproc)
    if made.gpus:
        try:
            parse_gpus(made.gpus)
        except UsageError:
            raise ValueError("gpus: no choice of GPUs") from None
    return made


def _check_count(name: str, value: Nproc | None) -> None:
    if type(value) is int and not 0 < value < MOST_RANKS:
        raise ValueError(f"{name}: {value} is not a number of ranks")


def _declared(name: str, value: Any, hint: Any) -> Any:
    """A field's value from the wire. Raises TypeError, with its name, if it is not of its type."""
    try:
        return typed(hint, value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _shown(value: Any) -> str:
    if type(value) is tuple:
        return ", ".join(map(str, value)) or "not given"
    return f"{value:g}" if isinstance(value, float) else str(value) if value not in (None, "") else "not given"
