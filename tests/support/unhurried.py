"""How Hypothesis is to run: a busy machine is not a failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
