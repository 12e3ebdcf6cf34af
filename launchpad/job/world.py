"""Where the ranks meet, and the nodes: from torchrun's --nnodes, --node-rank, --master-* and --rdzv-*."""

from collections.abc import Mapping

from launchpad.errors import UsageError
from launchpad.named import NamedTuple

# torchrun's ports for several nodes: where static's nodes meet, and c10d's.
STATIC_PORT = 29500
C10D_PORT = 29400
# torchrun's default join timeout, in seconds.
JOIN_SECONDS = 600.0
# Its default last call, in seconds: how long it waits for more nodes once there are enough.
LAST_CALL_SECONDS = 30.0

_YES = {"1": True, "true": True, "yes": True, "t": True, "y": True}
_NO = {"0": False, "false": False, "no": False, "f": False, "n": False}


def place(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Meeting(NamedTuple):
    """Where the launchpads of a job's nodes meet, each of which was started on its own."""

    host: str
    port: int
    nnodes: int  # at most
    node_rank: int | None = None  # None: by arrival
    static: bool = False  # each has the node rank that it was given
    is_head: bool | None = None  # whether this one leads the job; None: if `host` is this machine
    join_seconds: float = JOIN_SECONDS
    elsewhere: tuple[tuple[str, int], ...] = ()  # other hosts and ports to try, all of the same machine
    others: tuple[tuple[str, int], ...] = ()  # of other machines, from which the job may be led by now
    least: int = 0  # how many nodes are enough
    last_call_seconds: float = 0.0  # how long to wait for more once enough are there
    waits: bool = False  # a node that joins later waits for the next restart

    @property
    def size(self) -> str:
        """How many nodes it takes, as --nnodes says it."""
        return f"{self.least}:{self.nnodes}" if 0 < self.least < self.nnodes else str(self.nnodes)

    @property
    def place(self) -> str:
        """HOST:PORT."""
        return place(self.host, self.port)


class WorldSpec(NamedTuple):
    """Where torch's store is, and how launchpads that were started on each node find each other."""

    master_addr: str = "127.0.0.1"  # "": an address of the first node that all others reach
    master_port: int = 0  # 0: a free one
    run_id: str = ""  # "": one is generated
    meeting: Meeting | None = None  # None: this launchpad starts all ranks


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
    conf = parse_conf(rdzv_conf)
    if standalone:
        return WorldSpec()
    least, nodes = parse_nnodes(nnodes)
    run_id = "" if rdzv_id == "none" else rdzv_id
    static = rdzv_backend == "static"
    others: tuple[tuple[str, int], ...] = ()
    if rdzv_endpoint:
        (host, port), *more = (parse_endpoint(part, "--rdzv-endpoint") for part in rdzv_endpoint.split(","))
        others = tuple((other, at or port or C10D_PORT) for other, at in more)
        if others and static:
            raise UsageError(f"--rdzv-endpoint {rdzv_endpoint}: with --rdzv-backend static, give one place")
    else:
        host, port = _bare(master_addr or ""), master_port
    if nodes == 1:
        if node_rank:
            raise UsageError(f"--node-rank {node_rank}: with one node the only node rank is 0; give --nnodes")
        return WorldSpec(host or "127.0.0.1", port or 0, run_id)
    _check_meeting(rdzv_backend, nnodes, host, node_rank)
    is_head = _flag(conf, "is_host", rdzv_conf)
    if static and is_head is None and node_rank is not None:
        is_head = node_rank == 0
    meeting = Meeting(
        host,
        port or (STATIC_PORT if static else C10D_PORT),
        nodes,
        node_rank,
        static,
        is_head,
        join_seconds(conf),
        least=least,
        last_call_seconds=float(conf.get("last_call_timeout", LAST_CALL_SECONDS)),
        waits=_on_join(conf, rdzv_conf) == "wait",
        others=others,
    )
    if static:
        return WorldSpec(host, meeting.port, run_id, meeting)
    return WorldSpec("", 0, run_id, meeting)


def _check_meeting(rdzv_backend: str, nnodes: str, host: str, node_rank: int | None) -> None:
    """Raise UsageError if several nodes can't meet so."""
    least, nodes = parse_nnodes(nnodes)
    if rdzv_backend == "static" and least != nodes:
        raise UsageError(
            f"--nnodes {nnodes}: with a varying number of nodes, they meet by --rdzv-backend c10d --rdzv-endpoint "
            f"HOST:{C10D_PORT}, where HOST is one of them"
        )
    if rdzv_backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {rdzv_backend} is not supported: no such server is needed; write --rdzv-backend c10d "
            f"--rdzv-endpoint HOST:{C10D_PORT}, where HOST is one of the nodes"
        )
    if not host:
        raise UsageError(
            f"--nnodes {nodes}: where do the nodes meet? Give --rdzv-endpoint HOST:PORT, the same on each, where HOST "
            "is one of them"
        )
    if rdzv_backend == "static" and node_rank is not None and not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank}: with --nnodes {nodes} it must be from 0 to {nodes - 1}")


def parse_nnodes(text: str) -> tuple[int, int]:
    """The least and the most nodes of --nnodes, as torchrun reads it. Raises UsageError."""
    least, _, most = text.partition(":")
    if not (len(text) < 20 and least.isdecimal() and (most or least).isdecimal() and int(least) > 0):
        raise UsageError(f"--nnodes {text}: give the number of nodes, like 2, or the least and the most, like 2:4")
    if most and int(most) < int(least):
        raise UsageError(f"--nnodes {text}: the least number of nodes is more than the most; write {most}:{least}")
    return int(least), int(most or least)


def parse_endpoint(text: str, option: str) -> tuple[str, int | None]:
    """HOST or HOST:PORT, without the brackets of an IPv6 address. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if (text and not colon) or text.endswith("]"):
        return _bare(text), None
    bare_ipv6 = ":" in host and not host.startswith("[")
    if not host or bare_ipv6 or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise UsageError(f"{option} {text}: write HOST:PORT, or [::1]:PORT for an IPv6 address")
    return _bare(host), int(port) or None


def parse_conf(text: str) -> dict[str, str]:
    """torchrun's --rdzv-conf: NAME=VALUE,…, within quotes if a shell has left them there. Raises UsageError."""
    found: dict[str, str] = {}
    for part in filter(None, text.strip("'\"").split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--rdzv-conf {text}: {part!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    for name in ("timeout", "join_timeout", "last_call_timeout"):
        try:
            seconds = float(found.get(name, "0"))
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e9:
            raise UsageError(f"--rdzv-conf {text}: {name} must be a number of seconds")
    return found


def join_seconds(conf: Mapping[str, str]) -> float:
    """How long to wait for the other nodes, by what --rdzv-conf says."""
    return float(conf.get("join_timeout", conf.get("timeout", JOIN_SECONDS)))


def _on_join(conf: Mapping[str, str], text: str) -> str:
    """What happens when a node joins the running job."""
    value = conf.get("on_join", "restart")
    if value not in ("restart", "wait"):
        raise UsageError(
            f"--rdzv-conf {text}: on_join must be restart (all ranks start again with the node that joined) or wait "
            "(it takes part from the next restart on)"
        )
    return value


def _flag(conf: dict[str, str], name: str, text: str) -> bool | None:
    value = conf.get(name)
    if value is None:
        return None
    found = {**_YES, **_NO}.get(value.lower())
    if found is None:
        raise UsageError(f"--rdzv-conf {text}: {name} must be true or false")
    return found


def _bare(address: str) -> str:
    """An IPv6 address without its brackets."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address
