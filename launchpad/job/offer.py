"""What a node offers when it joins a job: its place, and what its ranks run if its own command line says so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from launchpad.job.hosts import ACCELERATORS, Nproc
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.spec import JobSpec, Target

# What each node's own command line says about its ranks, as with torchrun.
_OWN = ("python", "cwd", "environ", "role", "virtual_local_rank", "torch", "hooks", "bind")

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

# Those that JSON has as lists.
_BY_HAND = ("max_restarts", "progress", "debug")

# The values of those that the command line doesn't have.
_NOT_GIVEN = (None, "", 0, RestartLimit(), "judged", ())


@dataclass(frozen=True)
class NodeOffer:
    """A node that asks to join."""

    name: str  # its host name
    python: str  # the interpreter that its launchpad, and so its agent, runs in
    nnodes: str = ""  # the size of the job that it expects; "": it doesn't say (`launchpad join`)
    node_rank: int | None = None  # the place that it must have
    order: int | None = None  # its place among those that must have none, as far as there is a choice
    slots: Nproc | None = None  # how many ranks it takes (`launchpad join`)
    spec: JobSpec | None = None  # what its ranks run; None: what the head's run
    failed: str = ""  # why it can't take part

    def as_json(self) -> dict[str, Any]:
        """The offer for the wire."""
        made = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        made["spec"] = None if self.spec is None else _spec_as_json(self.spec)
        return made

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> NodeOffer:
        """The offer from the wire. Raises ValueError, TypeError or KeyError if it is none."""
        texts = {name: _of(str, found[name]) for name in ("name", "python", "nnodes", "failed")}
        numbers = {name: _of(int, found[name], None) for name in ("node_rank", "order")}
        slots = _count(found["slots"]) if found["slots"] is not None else None
        spec = None if found["spec"] is None else _spec_from_json(found["spec"])
        return cls(slots=slots, spec=spec, **texts, **numbers)

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
    kind, name, args = found["target"]
    if kind not in ("script", "module", "program", "function"):
        raise ValueError(f"no kind of target: {kind!r}")
    plain = {name: found[name] for name in _OF_THE_JOB.values() if name not in _BY_HAND}
    return JobSpec(
        target=Target(kind, _of(str, name), tuple(_of(str, arg) for arg in args)),
        nproc=_count(found["nproc"]),
        preload=tuple(_of(str, module) for module in found["preload"]),
        environ={_of(str, variable): _of(str, value) for variable, value in found["environ"].items()},
        **{name: found[name] for name in _OWN if name != "environ"},
        **{name: value for name, value in plain.items() if name not in Limits._fields},
        debug=None if found["debug"] is None else (_of(int, found["debug"][0]), _of(int, found["debug"][1])),
        limits=Limits(
            **{name: value for name, value in plain.items() if name in Limits._fields},
            max_restarts=RestartLimit(*found["max_restarts"]),
            progress=tuple(_of(str, pattern) for pattern in found["progress"]),
        ),
    )


def _count(value: Any) -> Any:
    if value not in ("auto", "cpu", "gpu", *ACCELERATORS) and not 0 < _of(int, value) < 1 << 20:
        raise ValueError(f"{value!r} is not a number of ranks")
    return value


def _of(kind: type, value: Any, *others: Any) -> Any:
    if type(value) is not kind and value not in others:
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _shown(value: Any) -> str:
    if type(value) is tuple:
        return ", ".join(map(str, value)) or "not given"
    return f"{value:g}" if isinstance(value, float) else str(value) if value not in (None, "") else "not given"
