"""Which network interfaces the user has gloo, NCCL, UCX and MPI use, by variables; which of them a host lacks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES"),
    *("FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"),
)
# They take those of a list that are there.
_ANY_OF = ("NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")


def lacking(environ: Mapping[str, str], interfaces: Iterable[str]) -> dict[str, list[str]]:
    """By variable, the interfaces that it names, and needs, and that are not among these."""
    has = list(interfaces)
    found = {}
    for name in _VARIABLES:
        value = environ.get(name, "")
        if value.startswith("^"):  # all but these
            continue
        wanted = [one for one in value.removeprefix("=").split(",") if one]
        begins = name.startswith("NCCL") and not value.startswith("=")
        missing = [one for one in wanted if not _is_there(one, has, begins=begins)]
        if missing and not (name in _ANY_OF and len(missing) < len(wanted)):
            found[name] = missing
    return found


def _is_there(name: str, interfaces: Iterable[str], *, begins: bool) -> bool:
    """Whether a host has the interface, or one that begins so; of all, subnets, and devices (mlx5_0:1), it has some."""
    if name == "all" or ":" in name or "/" in name:
        return True
    return any(one.startswith(name) if begins else one == name for one in interfaces)


def misleading(environ: Mapping[str, str], hosts: Mapping[str, Iterable[str]]) -> list[str]:
    """A sentence for each variable that names an interface by which the other hosts can't be reached.

    `hosts`: by name, the interfaces of each that lead to other machines.
    """
    by_variable: dict[str, list[str]] = {}
    for host, interfaces in hosts.items():
        for variable in lacking(environ, interfaces):
            by_variable.setdefault(variable, []).append(host)
    return [
        f"{variable}={environ[variable]} is set, but from {', '.join(names)} no other host can be reached over that: "
        f"unset {variable}, and launchpad chooses the interface"
        for variable, names in by_variable.items()
    ]
