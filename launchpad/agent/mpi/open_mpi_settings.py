"""What the user has set for Open MPI: variables, and its files of parameters."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ... import linux

# The user's and the system's file (mca_base_param_files).
_FILES = ("~/.openmpi/mca-params.conf", "/etc/openmpi/openmpi-mca-params.conf")

_INTERFACES = ("btl_tcp_if_include", "btl_tcp_if_exclude")  # together they are an error
_CHOICE = re.compile(rf"^\s*({'|'.join(_INTERFACES)})\s*=", re.MULTILINE)


def choose_interfaces(environ: Mapping[str, str]) -> bool:
    """Whether they say which network interfaces to use."""
    if any(f"OMPI_MCA_{name}" in environ for name in _INTERFACES):
        return True
    return any(_CHOICE.search(linux.text_of(os.path.expanduser(path))) for path in _FILES)
