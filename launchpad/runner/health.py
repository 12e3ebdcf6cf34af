"""Has the nodes check themselves before the first attempt (--health), and decides whether it can go on without some."""

from __future__ import annotations

from collections.abc import Sequence

from launchpad.console.message import say_on_stderr
from launchpad.console.terminal import HowFar, status_line, waiting
from launchpad.errors import NodeError, failed_hosts
from launchpad.head.bringup import BringUp
from launchpad.head.health import Unwell, check_request, examine
from launchpad.job.health import HealthCheck
from launchpad.job.hosts import some_of
from launchpad.job.membership import Membership
from launchpad.job.spec import JobSpec


def leave_out(
    bringup: BringUp,
    health: HealthCheck,
    specs: Sequence[JobSpec],
    folders: Sequence[str],
    membership: Membership | None,
    *,
    quiet: bool,
) -> dict[int, Unwell]:
    """The nodes that are not healthy, and why. Raises NodeError if too few are left.

    `specs`, `folders`: of each node's ranks.
    """
    count = len(specs)

    def name(node: int) -> str:
        return bringup.nodes.name(node) or bringup.ready[node].hostname

    def look() -> HowFar:
        left = [name(node) for node in bringup.awaited]
        hosts = "the health of 1 host" if count == 1 else f"the health of {count} hosts"
        return HowFar(waiting(f"checking {hosts}", left), count - len(left), count)

    requests = {
        node: check_request(health, folder, spec.environ)
        for node, (spec, folder) in enumerate(zip(specs, folders, strict=True))
    }
    with status_line(look, quiet=quiet):
        unwell, missing = examine(bringup, requests)
    if missing and not quiet:
        where = f"on {some_of([name(node) for node in missing])}" if count > 1 else "here"
        say_on_stderr(f"--health {health.text}: there is no such command {where}, which counts as healthy")
    if unwell and count - len(unwell) < (membership.least if membership is not None else count):
        why = {name(node): str(one) for node, one in unwell.items()}
        remedy = "" if membership is not None else "with --spares or --nnodes MIN:MAX a job can do without some hosts"
        raise NodeError(failed_hosts(why, count, remedy if count > 1 else ""))
    return unwell
