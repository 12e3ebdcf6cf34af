"""When this rank has entered its last collectives, by torch's flight recorder: for the timeline of the job's report."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# How many are told.
KEPT = 300


def entered(now: int) -> list[list[Any]]:
    """[group, number, what, ns from then to `now`, ns that it took or 0] each; `now` is of the monotonic clock."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump: Callable[..., bytes] | None = getattr(module, "_dump_fr_trace", None)
    if dump is None:
        return []
    import pickle
    import time

    since = time.time_ns() - time.monotonic_ns() + now
    entries = pickle.loads(dump(True, False, False)).get("entries") or ()
    return [
        [
            str(one["process_group"][0]),
            int(one["collective_seq_id"]),
            str(one["profiling_name"].partition(":")[2] or one["profiling_name"]),
            since - int(one["time_created_ns"]),
            int(one.get("duration_ms", 0) * 1e6),
        ]
        for one in [one for one in entries if not one["is_p2p"]][-KEPT:]
    ]
