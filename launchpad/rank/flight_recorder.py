"""Reads torch's flight recorders, which keep the last collectives of this rank's groups: gloo's, and NCCL's."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# Since torch 2.15, each backend that doesn't record by itself has a recorder of its own name.
_HOOKED = ("nccl", "nccl2", "nccl-lazy")


def dumps(collectives: bool, frames: bool, active: bool) -> Iterator[dict[str, Any]]:
    """What each recorder holds, as torch pickles it: `pg_status`, and with `collectives` the `entries`.

    `frames`: with their stacks; `active`: only those that have not completed. A torch without the recorders, or with
    others, has nothing.
    """
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    of_gloo = getattr(module, "_dump_fr_trace", None)
    if of_gloo is None:
        return
    import pickle

    yield pickle.loads(of_gloo(collectives, frames, active))
    if not _has_nccl():
        return
    of_nccl = getattr(module, "_dump_nccl_trace", None)
    if of_nccl is not None:
        yield pickle.loads(of_nccl(collectives, frames, active))
    for backend in _HOOKED:
        try:
            dumped = of_gloo(collectives, frames, active, backend)
        except TypeError:  # before torch 2.15
            return
        yield pickle.loads(dumped)


def entries(*, frames: bool = False, active: bool = False) -> Iterator[dict[str, Any]]:
    """The collectives and messages that the recorders hold."""
    for dumped in dumps(True, frames, active):
        yield from dumped.get("entries") or ()


def _has_nccl() -> bool:
    """Whether this process can have groups of NCCL: only where CUDA is in use."""
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())
