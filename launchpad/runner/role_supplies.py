"""What hosts are given for roles, with --sync and --sync-env: each folder and each environment once a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
            given = give(bringup, list(of_host), folder, supplies, quiet=quiet).folders
            for node, path in _of_all(of_host, given):
                found[node] = found[node]._replace(cwd=path)
        for python, supplies in self._environments.items():
            of_host = _by_host(nodes, [node for node in far if nodes[node].role.spec.python == python])
            given = give(bringup, list(of_host), "", supplies, quiet=quiet).pythons
            for node, path in _of_all(of_host, given):
                found[node] = found[node]._replace(python=path)
        return found


def _by_host(nodes: Sequence[RoleNode], numbers: Sequence[int]) -> dict[int, list[int]]:
    """These nodes: all that are on one host, by the first of them. It is one host only for the same user and port."""
    found: dict[tuple[str, str, int] | None, list[int]] = {}
    for node in numbers:
        host = nodes[node].share.host
        found.setdefault(host and (host.name, host.user, host.port), []).append(node)
    return {same[0]: same for same in found.values()}


def _of_all(of_host: Mapping[int, Sequence[int]], given: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """What all nodes have, if the first on each host was given this."""
    for first, path in given.items():
        for node in of_host[first]:
            yield node, path
