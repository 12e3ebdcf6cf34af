"""Says of an exception about other hosts that a variable has it use an interface which leads to none of them."""

from __future__ import annotations

import os
import socket

# The word by which an exception shows whose it is.
_LIBRARIES = {"GLOO_SOCKET_IFNAME": "gloo", "NCCL_SOCKET_IFNAME": "nccl", "TP_SOCKET_IFNAME": "tensorpipe"}


def explain(error: BaseException) -> str:
    """`GLOO_SOCKET_IFNAME=lo is set, and no other host can be reached over that`; "" if nothing is wrong with them."""
    alone = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    if alone or os.environ.get("MASTER_ADDR", "").startswith(("127.", "::1", "localhost")):
        return ""
    text = str(error).lower()
    outward = [name for _, name in socket.if_nameindex() if name != "lo"]
    for variable, library in _LIBRARIES.items():
        value = os.environ.get(variable, "")
        if library not in text or not value or value.startswith("^"):
            continue
        names = tuple(value.removeprefix("=").split(","))
        if not any(one.startswith(names) for one in outward):
            return f"{variable}={value} is set, and no other host can be reached over that"
    return ""
