"""Decides whether an image may stand in for the cold start that a run would make. Pure: numbers, names and marks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from . import WITH_OPTIMIZERS
from .seen import ALL

# What the interpreter and the C library read while a process starts, by beginning or as a whole.
_INTERPRETER = re.compile(
    r"PYTHON\w*|LD_\w+|LC_\w+|LANG|LANGUAGE|LOCPATH|NLSPATH|GCONV_PATH|CHARSET|TZ|TZDIR|HOME|MALLOC_\w+|GLIBC_TUNABLES"
    r"|RES_OPTIONS|LOCALDOMAIN|HOSTALIASES|OPENSSL_\w+|SSL_\w+|CRYPTOGRAPHY_\w+"
)
# What torch and the libraries in it, or MPI, read when they are loaded.
_LIBRARIES = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|VECLIB|NUMEXPR|ATEN|TORCH\w*|PYTORCH|DNNL|ONEDNN|CUDA|CUBLAS\w*|CUDNN|NVIDIA|NCCL"
    r"|GLOO|HIP|ROCR|HSA|ROCM|MIOPEN|AMD|ZE|SYCL|ONEAPI|XPU|TBB|NPY|NUMPY|KINETO|OMPI|OPAL|PMIX|PRTE|UCX|FI|I_MPI|MPICH|MPIR"
    r"|MV2|PSM2|JEMALLOC|MIMALLOC|TCMALLOC)_?\w*"
)
# Ours, for the launcher: no import of a rank reads them.
_OURS = re.compile(r"LAUNCHPAD_\w+")


class ColdStart(NamedTuple):
    """What a run asks for."""

    python: str  # the ranks' interpreter
    preload: tuple[str, ...]  # what its forkserver would import
    environ: Mapping[str, str]  # of the forkserver
    affinity: str  # the CPUs of the caller, as a mask
    stack: str  # its limit of the stack, from which the C library takes the size of threads' stacks


class Image(NamedTuple):
    """A kept image."""

    python: str
    preload: tuple[str, ...]
    extra: tuple[str, ...]  # of these, what the user named with `launchpad warm --preload`
    environ: Mapping[str, str]
    affinity: str
    stack: str
    reads: frozenset[str]  # variables that its imports were seen to read


def may_be_read(name: str) -> bool:
    """Whether imports are known to read such a variable, or the start of a process."""
    return bool(_INTERPRETER.fullmatch(name) or _LIBRARIES.fullmatch(name))


def variables(image: Image, names: Iterable[str]) -> list[str]:
    """Of these names, the variables that the image's start and imports may have read."""
    if ALL in image.reads:
        return sorted(name for name in names if not _OURS.fullmatch(name))
    return sorted(
        name
        for name in names
        if name in image.reads
        or _INTERPRETER.fullmatch(name)
        or (image.preload and _LIBRARIES.fullmatch(name) and not _OURS.fullmatch(name))
    )


def misfit(image: Image, wanted: ColdStart) -> str:
    """Why another image is needed for this run, in words that follow "a kept image was not used: "; "" if none is."""
    if image.python != wanted.python:
        return f"it was made with {image.python}, and the ranks run {wanted.python}"
    missing = [name for name in wanted.preload if name not in image.preload]
    if missing and missing != [WITH_OPTIMIZERS]:  # without that, the ranks are only slower
        return f"it has not imported {', '.join(missing)}"
    more = [name for name in image.preload if name not in wanted.preload and name not in image.extra]
    if more or (not wanted.preload and image.preload):
        return f"it has imported {', '.join(more or image.preload)}, which this program does not"
    for name in variables(image, image.environ.keys() | wanted.environ.keys()):
        if image.environ.get(name) != wanted.environ.get(name):
            return f"{name} differs, which imports read"
    if image.preload and image.affinity != wanted.affinity:
        return "the CPU affinity differs, which imports read"
    if image.stack != wanted.stack:
        return "the stack limit differs, which is read when a process starts"
    return ""


def cannot(wanted: ColdStart) -> str:
    """Why no image can stand in for this run; "" if one can."""
    for part in wanted.environ.get("PYTHONPATH", "").split(os.pathsep):
        if wanted.environ.get("PYTHONPATH") and not os.path.isabs(part):
            return "PYTHONPATH has a relative folder"
    return ""
