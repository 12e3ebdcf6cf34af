"""What hosts are given for roles, with --sync and --sync-env: each folder and each environment once a host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launchpad.job.role_places import RoleNode
from launchpad.job.spec import RoleSpec
from launchpad.runner.options import HostOptions
from launchpad.runner.spec import supplies_for

if TYPE_CHECKING:
    from launchpad.head.bringup import BringUp
    from launchpad.transport import Link


class RoleSupplies:
    """Those of one job. Environments are looked through while the hosts are being reached."""

    def __init__(self, options: HostOptions, roles: Sequence[RoleSpec], closing: ExitStack) -> None:
        """Raises UsageError if something can't be copied."""
        by_folder = {role.spec.cwd: role.spec for role in roles}
        by_python = {role.spec.python: role.spec for role in roles}
        files, environments = options._replace(sync_env=False), options._replace(sync=False)
        self._environments = {name: supplies_for(environments, spec, closing) for name, spec in by_python.items()}
        self._folders = {name: supplies_for(files, spec, closing) for name, spec in by_folder.items()}

    def give(
        self, bringup: BringUp, nodes: Sequence[RoleNode], links: Sequence[Link], *, quiet: bool
    ) -> list[RoleNode]:
        """Give it to the nodes on other machines. Returns the nodes with what they have then. Raises NodeError."""
        from launchpad.runner.connect import give

        found = list(nodes)
        far = [node for node, link in enumerate(links) if link.remote]
        for folder, supplies in self._folders.items():
            of_host = _by_host(nodes, [node for node in far if nodes[node].role.spec.cwd == folder])
            given = give(bringup, [first for first, *_ in of_host], folder, supplies, quiet=quiet).folders
            for same in (same for same in of_host if same[0] in given):
                for node in same:
                    found[node] = found[node]._replace(cwd=given[same[0]])
        for python, supplies in self._environments.items():
            of_host = _by_host(nodes, [node for node in far if nodes[node].role.spec.python == python])
            given = give(bringup, [first for first, *_ in of_host], "", supplies, quiet=quiet).pythons
            for same in (same for same in of_host if same[0] in given):
                for node in same:
                    found[node] = found[node]._replace(python=given[same[0]])
        return found


def _by_host(nodes: Sequence[RoleNode], numbers: Sequence[int]) -> list[list[int]]:
    """These nodes, with those on the same host together."""
    found: dict[str, list[int]] = {}
    for node in numbers:
        host = nodes[node].share.host
        found.setdefault(host.name if host else "", []).append(node)
    return list(found.values())
