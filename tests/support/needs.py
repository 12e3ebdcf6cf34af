"""What tests may need that is not installed everywhere."""

from __future__ import annotations

import importlib.metadata
import subprocess
from importlib.util import find_spec

import pytest

from launchpad import linux

PTRACE_SEIZE = 0x4206  # linux/ptrace.h


def _has_mpich() -> bool:
    try:
        importlib.metadata.version("mpich")
    except importlib.metadata.PackageNotFoundError:
        return False
    return find_spec("mpi4py") is not None


def _may_trace() -> bool:
    """Whether ptrace is permitted here, for children at least."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        try:
            linux.ptrace(PTRACE_SEIZE, child.pid)
        except OSError:
            return False
        return True


# Found without importing them: that would take seconds.
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
needs_mpich = pytest.mark.skipif(not _has_mpich(), reason="mpich and mpi4py are not installed")
needs_ptrace = pytest.mark.skipif(not _may_trace(), reason="ptrace is not permitted here")
