"""Which world this launchpad's ranks belong to: torchrun's --nnodes, --node-rank, --master-* and --rdzv-* resolved."""

from __future__ import annotations

from dataclasses import dataclass

from launchpad.errors import UsageError

# torchrun's port for a world of several nodes (static rendezvous).
DEFAULT_PORT = 29500
# torchrun's join timeout, in seconds, where --rdzv-conf gives none.
JOIN_SECONDS = 600.0


@dataclass(frozen=True)
class World:
    """Where rank 0 is, and which part of the world is ours."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: a free one
    run_id: str = ""  # "": one is made up
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
) -> World:
    """What torchrun would make of these. Raises UsageError for what we can't honour, with what to use instead."""
    conf = _parse_conf(rdzv_conf)
    if standalone:
        return World()
    nodes = _parse_nnodes(nnodes)
    run_id = "" if rdzv_id == "none" else rdzv_id
    if rdzv_endpoint and not (master_addr or master_port):
        host, port = _parse_endpoint(rdzv_endpoint)
        master_addr, master_port = host, port
    if nodes == 1:
        if node_rank:
            raise UsageError(f"--node-rank {node_rank}: with one node the only node rank is 0; give --nnodes")
        return World(1, 0, _bare(master_addr or "127.0.0.1"), master_port or 0, run_id)
    if rdzv_backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {rdzv_backend} is not supported over several nodes; leave it out, and give each node "
            "--node-rank, --master-addr and --master-port"
        )
    if node_rank is None:
        raise UsageError(
            f"--nnodes {nodes}: which node is this? Give each its --node-rank (0 to {nodes - 1}): nodes are not "
            "numbered by arrival, as c10d does"
        )
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank}: with --nnodes {nodes} node ranks go from 0 to {nodes - 1}")
    if not master_addr:
        raise UsageError(f"--nnodes {nodes}: give --master-addr, the address of node rank 0 that all nodes reach")
    seconds = float(conf.get("join_timeout", conf.get("timeout", JOIN_SECONDS)))
    return World(nodes, node_rank, _bare(master_addr), master_port or DEFAULT_PORT, run_id or "none", seconds)


def _parse_nnodes(text: str) -> int:
    least, _, most = text.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and int(least) > 0):
        raise UsageError(f"--nnodes {text}: give the number of nodes, like 2")
    if most and int(most) != int(least):
        raise UsageError(f"--nnodes {text}: a world that grows and shrinks is not supported; give one number of nodes")
    return int(least)


def _parse_endpoint(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text, None
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"--rdzv-endpoint {text}: write HOST:PORT, an IPv6 address as [::1]:PORT")
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
            raise UsageError(f"--rdzv-conf {text}: {name} is a number of seconds") from None
    return found


def _bare(address: str) -> str:
    """[::1] without its brackets."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address
