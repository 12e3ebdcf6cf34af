"""A checkup as JSON: all findings, and the facts behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.doctor.seen import Examination, Finding


def as_json(seen: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `launchpad doctor --json` prints."""
    names = [host.shown for host in seen.hosts]
    return {
        "hosts": [
            {
                "name": host.shown,
                "failure": host.failure,
                "clock": host.skew,
                "facts": {subject: _fields(one) for subject, one in host.facts.items()},
                "problems": host.problems,
            }
            for host in seen.hosts
        ],
        "paths": [
            {
                "from": names[start],
                "to": names[to],
                **{name: value for name, value in path._asdict().items() if name != "peer"},
                "rate": seen.rates.get((start, to)),
            }
            for (start, to), path in sorted(seen.paths.items())
        ],
        "all_reduce": {"seconds": seen.reduced, "failed": seen.not_reduced},
        "findings": [{**one._asdict(), "hosts": [names[place] for place in one.hosts]} for one in findings],
        "seconds": round(seen.seconds, 3),
    }


def _fields(value: Any) -> Any:
    """Named tuples as objects."""
    if hasattr(value, "_asdict"):
        return {name: _fields(one) for name, one in value._asdict().items()}
    if isinstance(value, list):
        return [_fields(one) for one in value]
    return value
