"""Stores values in files: large buffers out of band, written without a copy and mapped when read.

Layout of a value: total size, size of the pickle, number of buffers, size of each (64 bits, little-endian); then the
pickle (protocol 5, PEP 574); then the buffers, each aligned to 64 bytes. The total size is written last: until then
there is no value.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Iterator
    from typing import Any

_WORD = 8
_ALIGNED = 64

# Smaller buffers stay in the pickle, because a buffer in use keeps the whole file mapped.
_LEAST_PART = 16 << 10

# Limits on the search for the part of a value that can't be pickled.
_DEEPEST = 12
_WIDEST = 200

_CODE = type((lambda: None).__code__)

# If the agent was sent to its node, this has cloudpickle and launchpad's collectives (transport/ssh/bundle.py).
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_SENT = os.path.join(_ROOT, "for_ranks")


def import_beside(name: str, *, first: bool) -> Any:
    """Import a module that may be next to this package; with `first`, prefer that to an installed one."""
    beside = _SENT if os.path.isdir(_SENT) else _ROOT
    place = 0 if first and beside == _SENT else len(sys.path)
    sys.path.insert(place, beside)
    try:
        __import__(name)
    finally:
        sys.path.remove(beside)
    return sys.modules[name]


class _MainGlobals:
    """Stands for the globals of `__main__`: those of the process that unpickles it."""

    def __reduce__(self) -> Any:
        return vars, (_MainModule(),)


class _MainModule:
    def __reduce__(self) -> Any:
        import importlib

        return importlib.import_module, ("__main__",)


_class: Any = None


def _pickler(file: Any, keep: Callable[[pickle.PickleBuffer], bool], *, in_main: bool = False) -> Any:
    global _class
    _class = _class or _pickler_class()
    pickler = _class(file, protocol=5, buffer_callback=keep)
    if in_main:  # otherwise each call of dump gives the functions in it new globals
        pickler.globals_ref[id(vars(sys.modules["__main__"]))] = _MainGlobals()
    return pickler


def _pickler_class() -> Any:
    # Both sides need the same version of cloudpickle, so it is sent to each node.
    cloudpickle = import_beside("cloudpickle", first=True)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined]
        def reducer_override(self, value: Any) -> Any:
            torch = sys.modules.get("torch")
            if type(value) is _Elements:
                return value.reduce(torch)
            if type(value) is getattr(torch, "Tensor", _Elements):
                return _reduce_tensor(torch, value)
            if type(value) is _CODE:
                # From 3.1.3 on, cloudpickle leaves out the name of the file, in which tracebacks find the source.
                make, parts = self.dispatch_table[_CODE](value)
                return make, tuple(value.co_filename if _is_no_file(part) else part for part in parts)
            return super().reducer_override(value)

    return Pickler


def _is_no_file(part: object) -> bool:
    return type(part) is str and part == "<dynamic-code>"


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    """Reduce a tensor to its buffer. torch's own way goes through a file in memory, and copies three times.

    The tensor comes back on the CPU, contiguous, and shares no memory with other tensors.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta" or vars(tensor):
        return NotImplemented
    if tensor.requires_grad:
        import operator

        return operator.methodcaller("requires_grad_"), (tensor.detach(),)
    elements = _Elements(tensor.resolve_conj().resolve_neg().cpu().contiguous())
    return torch.reshape, (elements, tuple(tensor.shape))


class _Elements:
    """The elements of a contiguous tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def reduce(self, torch: Any) -> Any:
        import ctypes
        import functools
        import pickle

        tensor = self.tensor
        size = tensor.numel() * tensor.element_size()
        if not size:
            return functools.partial(torch.empty, 0, dtype=tensor.dtype), ()
        memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
        return functools.partial(torch.frombuffer, dtype=tensor.dtype), (pickle.PickleBuffer(memory),)


def dump(value: Any, fd: int, *, in_main: bool = False) -> None:
    """Append the value to the file. Raises whatever pickling it raises, and OSError.

    `in_main`: functions of `__main__` will have the globals of the `__main__` in which they are unpickled.
    """
    import io

    parts: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if view.nbytes < _LEAST_PART:
            return True
        parts.append(view)
        return False

    stream = io.BytesIO()
    pickler = _pickler(stream, keep, in_main=in_main)  # its memo keeps the buffers alive
    pickler.dump(value)
    words = [0, stream.tell(), len(parts), *(part.nbytes for part in parts)]
    start = os.lseek(fd, 0, os.SEEK_END)
    at = start + _WORD * len(words)
    _write(fd, memoryview(b"".join(word.to_bytes(_WORD, "little") for word in words)), start)
    for view in (stream.getbuffer(), *parts):
        at = start + _padded(at - start)
        _write(fd, view, at)
        at += view.nbytes
    _write(fd, memoryview((at - start).to_bytes(_WORD, "little")), start)
    del pickler


# A file of at least this many bytes is mapped.
_MAPPED = 1 << 20


def _padded(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _write(fd: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(fd, view, at)
        view = view[written:]
        at += written


def map_file(fd: int, *, shared: bool) -> memoryview:
    """Map the file for reading and writing; unless `shared`, writes don't reach the file. A small one is read instead.

    A map keeps a descriptor, and a program may keep many small results.
    """
    import mmap

    size = os.fstat(fd).st_size
    if 0 < size < _MAPPED:
        memory = mmap.mmap(-1, size)  # aligned like a map
        os.preadv(fd, [memory], 0)
        return memoryview(memory)
    return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY) if size else b"")


def load(view: memoryview, unpickle: Callable[..., Any] | None = None) -> Any:
    """The value at the start of the bytes, and the bytes after it. Raises EOFError if it is incomplete.

    `unpickle`: instead of pickle.loads.
    """
    import pickle

    words = (int.from_bytes(view[at : at + _WORD], "little") for at in range(0, len(view), _WORD))
    size, stream, count = next(words, 0), next(words, 0), next(words, 0)
    if not 0 < size <= len(view):
        raise EOFError("the value in the file is incomplete")
    sizes = [stream, *(next(words) for _ in range(count))]
    pieces = []
    at = _WORD * (3 + count)
    for one in sizes:
        at = _padded(at)
        pieces.append(view[at : at + one])
        at += one
    return (unpickle or pickle.loads)(pieces[0], buffers=pieces[1:]), view[size:]


def why_not(value: Any, name: str) -> str:
    """Which part of a value can't be pickled, and why, as text that starts with the value's `name`."""
    import types

    for _ in range(_DEEPEST):
        found = next(((part, words) for part, words in _parts(value, name, types) if _refusal(part)), None)
        if found is None:
            break
        value, name = found
    return f"{name} (a {type(value).__name__}) can't be pickled: {_refusal(value) or 'it is changed by being pickled'}"


def _refusal(value: Any) -> str:
    import io

    try:
        _pickler(io.BytesIO(), lambda _: False).dump(value)
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _parts(value: Any, name: str, types: Any) -> Iterator[tuple[Any, str]]:
    """The parts of a value, with a description of each."""
    from itertools import islice

    if isinstance(value, dict):
        yield from ((one, f"{name}[{key!r:.60}]") for key, one in islice(value.items(), _WIDEST))
        yield from ((key, f"a key of {name}") for key in islice(value, _WIDEST))
    elif isinstance(value, list | tuple):
        yield from ((one, f"{name}[{place}]") for place, one in enumerate(islice(value, _WIDEST)))
    elif isinstance(value, set | frozenset):
        yield from ((one, f"an element of {name}") for one in islice(value, _WIDEST))
    elif isinstance(value, types.FunctionType):
        import inspect

        try:
            used = inspect.getclosurevars(value)
        except ValueError:  # an empty cell
            return
        variables = {**used.globals, **used.nonlocals}
        yield from ((one, f"{variable}, which {name} uses,") for variable, one in variables.items())
        yield from ((one, f"a default value of {name}") for one in value.__defaults__ or ())
    elif isinstance(value, types.MethodType):
        yield value.__self__, f"the object that {name} is a method of"
    elif type(value).__name__ == "partial":
        yield value.func, f"the function of {name}"
        yield from ((one, f"an argument of {name}") for one in (*value.args, *value.keywords.values()))
    elif not isinstance(value, type | types.ModuleType):
        held = getattr(value, "__dict__", {})
        yield from ((one, f"{name}.{attribute}") for attribute, one in islice(held.items(), _WIDEST))
