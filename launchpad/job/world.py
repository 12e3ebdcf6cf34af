"""The world that this launchpad's ranks belong to, from torchrun's --nnodes, --node-rank, --master-* and --rdzv-*."""

from __future__ import annotations

from dataclasses import dataclass

from launchpad.errors import UsageError

# torchrun's port for static rendezvous over several nodes.
DEFAULT_PORT = 29500
# torchrun's default join timeout, in seconds.
JOIN_SECONDS = 600.0


@dataclass(frozen=True)
class WorldSpec:
    """Where rank 0 is, and which node of the world this is."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: a free one
    run_id: str = ""  # "": one is generated
    join_seconds: float = JOIN_SECONDS


def resolve_world(
    *,
    nnodes: str,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    standalone: bool,
    rdzv_backend: str,
    rdzv_endpoint: str,
    rdzv_id: str,
    rdzv_conf: str,
) -> WorldSpec:
    """Interpret these as torchrun does. Raises UsageError for what is not supported, with what to use instead."""
    conf = _parse_conf(rdzv_conf)
    if standalone:
        return WorldSpec()
    nodes = _parse_nnodes(nnodes)
    run_id = "" if rdzv_id == "none" else rdzv_id
    if rdzv_endpoint and not (master_addr or master_port):
        host, port = _parse_endpoint(rdzv_endpoint)
        master_addr, master_port = host, port
    if nodes == 1:
        if node_rank:
            raise UsageError(f"--node-rank {node_rank}: with one node the only node rank is 0; give --nnodes")
        return WorldSpec(1, 0, _bare(master_addr or "127.0.0.1"), master_port or 0, run_id)
    if rdzv_backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {rdzv_backend} is not supported for several nodes; leave it out, and give each node "
            "--node-rank, --master-addr and --master-port"
        )
    if node_rank is None:
        raise UsageError(
            f"--nnodes {nodes}: which node is this? Give each its --node-rank (0 to {nodes - 1}): unlike c10d, "
            "launchpad does not number nodes by arrival"
        )
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank}: with --nnodes {nodes} it must be from 0 to {nodes - 1}")
    if not master_addr:
        raise UsageError(f"--nnodes {nodes}: give --master-addr, an address of node rank 0 that all nodes can reach")
    seconds = float(conf.get("join_timeout", conf.get("timeout", JOIN_SECONDS)))
    return WorldSpec(nodes, node_rank, _bare(master_addr), master_port or DEFAULT_PORT, run_id or "none", seconds)


def _parse_nnodes(text: str) -> int:
    least, _, most = text.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and int(least) > 0):
        raise UsageError(f"--nnodes {text}: give the number of nodes, like 2")
    if most and int(most) != int(least):
        raise UsageError(f"--nnodes {text}: a varying number of nodes is not supported; give a single number")
    return int(least)


def _parse_endpoint(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text, None
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"--rdzv-endpoint {text}: write HOST:PORT, or [::1]:PORT for an IPv6 address")
    return host, int(port) or None


def _parse_conf(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--rdzv-conf {text}: {part!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    for name in ("timeout", "join_timeout"):
        try:
            float(found.get(name, "0"))
        except ValueError:
            raise UsageError(f"--rdzv-conf {text}: {name} must be a number of seconds") from None
    return found


def _bare(address: str) -> str:
    """An IPv6 address without its brackets."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address
