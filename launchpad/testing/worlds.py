"""Says why tests can't form MPI worlds here."""

from __future__ import annotations

import os
import sys

from launchpad import mpi_library


def why_not() -> str:
    """As a clause; "" if they can, as far as one can see."""
    found = mpi_library.of_python(sys.executable, os.environ)
    if found.library != mpi_library.OPEN_MPI:
        return ""
    return (
        f"tests form worlds of MPICH and Intel MPI only, but here mpi4py uses Open MPI: {found.why}; "
        "pip install mpich, or name another library in MPI4PY_LIBMPI"
    )
