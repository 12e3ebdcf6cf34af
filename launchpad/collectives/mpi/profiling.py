"""Shows operations in torch.profiler as torch's own backends do: mpi:all_reduce, with the sizes of the rank's input."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

# They are torch's own, and unnamed in its documentation: without them, the profiler shows no operations of ours.
_autograd: Any = getattr(torch._C, "_autograd", None)
_enter = getattr(_autograd, "_record_function_with_args_enter", None)
_exit = getattr(_autograd, "_record_function_with_args_exit", None)

# Where torch's name for an operation is not the first word of ours.
_NAMES = {"recv from any rank": "recvAnySource"}


def begin(what: str, buffers: object) -> object:
    """An operation begins; `buffers`: the memory that MPI reads or writes, first what it reads. Returns its event."""
    if _enter is None or _exit is None:
        return None
    first = buffers[0] if isinstance(buffers, tuple) else buffers
    tensors = [first] if isinstance(first, Tensor) else []
    return _enter(f"mpi:{_NAMES.get(what, what.split()[0])}", *tensors)


def end(event: object) -> None:
    """It has ended. torch takes it for asynchronous if that is in another thread than its beginning."""
    assert _exit is not None
    thread = threading.Thread(target=_exit, args=(event,))
    thread.start()
    thread.join()
