"""libpmix by ctypes: the layouts and calls of its server that we use, the same in PMIx 3, 4 and 5."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_int, c_size_t, c_uint16, c_uint32, c_void_p
from typing import Any

SUCCESS = 0
NOT_SUPPORTED = -47
DONE = -157  # PMIX_OPERATION_SUCCEEDED, from an upcall: the callback will not be called

BOOL, STRING, SIZE, UINT16, UINT32, PROC, INFO, ARRAY, RANK = 1, 3, 4, 13, 14, 22, 24, 39, 40
BYTES, COMPRESSED = 27, 42

# The sizes of the plain types that can be published.
_PLAIN = {
    1: 1,
    2: 1,
    4: 8,
    6: 4,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 1,
    13: 2,
    14: 4,
    15: 8,
    16: 4,
    17: 8,
    20: 4,
    40: 4,
}

FIRST_READ = 1  # PMIX_PERSIST_FIRST_READ
CONSTRUCT = 0  # PMIX_GROUP_CONSTRUCT


class Proc(ctypes.Structure):
    """pmix_proc_t."""

    _fields_ = (("nspace", c_char * 256), ("rank", c_uint32))


class Bytes(ctypes.Structure):
    """pmix_byte_object_t."""

    _fields_ = (("bytes", c_void_p), ("size", c_size_t))


class Array(ctypes.Structure):
    """pmix_data_array_t."""

    _fields_ = (("type", c_uint16), ("size", c_size_t), ("array", c_void_p))


class Envar(ctypes.Structure):
    """pmix_envar_t."""

    _fields_ = (("name", c_char_p), ("value", c_char_p), ("separator", c_char))


class Data(ctypes.Union):
    """What a pmix_value_t holds."""

    _fields_ = (
        ("flag", ctypes.c_bool),
        ("string", c_char_p),
        ("integer", c_int),
        ("uint16", c_uint16),
        ("uint32", c_uint32),
        ("size", c_size_t),
        ("uint8", ctypes.c_uint8),
        ("pointer", c_void_p),
        ("bytes", Bytes),
        ("envar", Envar),
    )


class Value(ctypes.Structure):
    """pmix_value_t."""

    _fields_ = (("type", c_uint16), ("data", Data))


class Info(ctypes.Structure):
    """pmix_info_t."""

    _fields_ = (("key", c_char * 512), ("flags", c_uint32), ("value", Value))


class Pdata(ctypes.Structure):
    """pmix_pdata_t."""

    _fields_ = (("proc", Proc), ("key", c_char * 512), ("value", Value))


class App(ctypes.Structure):
    """pmix_app_t."""

    _fields_ = (
        ("cmd", c_char_p),
        ("argv", POINTER(c_char_p)),
        ("env", POINTER(c_char_p)),
        ("cwd", c_char_p),
        ("maxprocs", c_int),
        ("info", POINTER(Info)),
        ("ninfo", c_size_t),
    )


# A key, the type of its value, and the value.
Entry = tuple[str, int, Any]

# Callbacks into libpmix.
OP = CFUNCTYPE(None, c_int, c_void_p)
RELEASE = CFUNCTYPE(None, c_void_p)
MODEX = CFUNCTYPE(None, c_int, c_void_p, c_size_t, c_void_p, RELEASE, c_void_p)
LOOKUP = CFUNCTYPE(None, c_int, POINTER(Pdata), c_size_t, c_void_p)
SPAWN = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
INFOS = CFUNCTYPE(None, c_int, POINTER(Info), c_size_t, c_void_p, RELEASE, c_void_p)

# Callbacks from it.
FETCHED = CFUNCTYPE(None, c_int, c_void_p, c_size_t, c_void_p)

_malloc = ctypes.CDLL(None).malloc
_malloc.restype, _malloc.argtypes = c_void_p, (c_size_t,)

_PROC, _INFO = POINTER(Proc), POINTER(Info)
_KEYS = POINTER(c_char_p)

# The members of pmix_server_module_t, in order, with the arguments of those that we implement.
_UPCALLS: dict[str, tuple[Any, ...] | None] = {
    "client_connected": (_PROC, c_void_p, c_void_p, c_void_p),
    "client_finalized": (_PROC, c_void_p, c_void_p, c_void_p),
    "abort": (_PROC, c_void_p, c_int, c_char_p, _PROC, c_size_t, c_void_p, c_void_p),
    "fence_nb": (_PROC, c_size_t, _INFO, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p),
    "direct_modex": (_PROC, _INFO, c_size_t, c_void_p, c_void_p),
    "publish": (_PROC, _INFO, c_size_t, c_void_p, c_void_p),
    "lookup": (_PROC, _KEYS, _INFO, c_size_t, c_void_p, c_void_p),
    "unpublish": (_PROC, _KEYS, _INFO, c_size_t, c_void_p, c_void_p),
    "spawn": (_PROC, _INFO, c_size_t, POINTER(App), c_size_t, c_void_p, c_void_p),
    "connect": (_PROC, c_size_t, _INFO, c_size_t, c_void_p, c_void_p),
    "disconnect": (_PROC, c_size_t, _INFO, c_size_t, c_void_p, c_void_p),
    **dict.fromkeys(("register_events", "deregister_events", "listener", "notify_event", "query")),
    **dict.fromkeys(("tool_connected", "log", "allocate", "job_control", "monitor", "get_credential")),
    **dict.fromkeys(("validate_credential", "iof_pull", "push_stdin")),
    "group": (c_int, c_char_p, _PROC, c_size_t, _INFO, c_size_t, c_void_p, c_void_p),
    "fabric": None,
    "client_connected2": (_PROC, c_void_p, _INFO, c_size_t, c_void_p, c_void_p),
    **dict.fromkeys(f"later{number}" for number in range(16)),  # what newer versions have added
}


class Module(ctypes.Structure):
    """pmix_server_module_t."""

    _fields_ = tuple(
        (name, c_void_p if arguments is None else CFUNCTYPE(c_int, *arguments)) for name, arguments in _UPCALLS.items()
    )


def module(upcalls: object) -> Module:
    """The module whose functions are the methods of these names. Keep it as long as the library is in use."""
    made = Module()
    for name, arguments in _UPCALLS.items():
        if arguments is not None:
            setattr(made, name, CFUNCTYPE(c_int, *arguments)(getattr(upcalls, name)))
    return made


def infos(entries: Sequence[Entry]) -> Any:
    """An array of pmix_info_t. It keeps what it points to alive."""
    made: Any = (Info * len(entries))()
    made.kept = []
    for info, (key, kind, value) in zip(made, entries, strict=True):
        info.key = key.encode()
        info.value.type = kind
        data = info.value.data
        if kind == STRING:
            data.string = value.encode()
        elif kind == BOOL:
            data.flag = value
        elif kind == UINT16:
            data.uint16 = value
        elif kind in (UINT32, RANK):
            data.uint32 = value
        elif kind == SIZE:
            data.size = value
        elif kind == BYTES:  # libpmix frees what it is given for a group
            data.bytes = Bytes(_malloc(len(value)), len(value))
            ctypes.memmove(data.bytes.bytes, value, len(value))
        elif kind == PROC:
            made.kept.append(value)
            data.pointer = ctypes.addressof(value)
        elif kind == ARRAY:  # of ranks, or of entries
            of_procs = isinstance(value[0], Proc)
            inner = (Proc * len(value))(*value) if of_procs else infos(value)
            array = Array(PROC if of_procs else INFO, len(value), ctypes.addressof(inner))
            made.kept += (inner, array)
            data.pointer = ctypes.addressof(array)
    return made


def proc(namespace: str, rank: int) -> Proc:
    """The pmix_proc_t of a rank."""
    return Proc(namespace.encode(), rank)


def copied(value: Value) -> tuple[int, Any] | None:
    """A value's type and what it holds, of the types that can be published; None for any other."""
    data = value.data
    match value.type:
        case 3:
            return STRING, data.string or b""
        case 27 | 42:
            return value.type, ctypes.string_at(data.bytes.bytes, data.bytes.size)
    size = _PLAIN.get(value.type)
    return None if size is None else (value.type, bytes(data)[:size])


def fill(value: Value, kind: int, held: bytes) -> None:
    """The reverse of `copied`. The value keeps what it points to alive."""
    value.type = kind
    if kind == STRING:
        value.data.string = held
    elif kind in (BYTES, COMPRESSED):
        value.data.bytes = Bytes(ctypes.cast(ctypes.c_char_p(held), c_void_p), len(held))
    else:
        ctypes.memmove(ctypes.addressof(value.data), held, len(held))
