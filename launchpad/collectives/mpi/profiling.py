"""Shows operations in torch.profiler as torch's own backends do: mpi:all_reduce, with the sizes of the rank's input."""

from __future__ import annotations

import threading

from torch import Tensor
from torch._C import _autograd

# Where torch's name for an operation is not the first word of ours.
_NAMES = {"recv from any rank": "recvAnySource"}


def begin(what: str, buffers: object) -> object:
    """An operation begins; `buffers`: the memory that MPI reads or writes, first what it reads. Returns its event."""
    first = buffers[0] if isinstance(buffers, tuple) else buffers
    tensors = [first] if isinstance(first, Tensor) else []
    return _autograd._record_function_with_args_enter(f"mpi:{_NAMES.get(what, what.split()[0])}", *tensors)


def end(event: object) -> None:
    """It has ended. torch takes it for asynchronous if that is in another thread than its beginning."""
    thread = threading.Thread(target=_autograd._record_function_with_args_exit, args=(event,))
    thread.start()
    thread.join()
