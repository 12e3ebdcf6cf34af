"""Settings of Open MPI that the ranks get, unless the user has made them: in a variable, or in a file of parameters."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ... import linux

_INTERFACES = ("btl_tcp_if_include", "btl_tcp_if_exclude")  # together they are an error

TRANSPORTS = "OMPI_MCA_mtl"

# Components for adapters of one kind, and the device without which they step aside (ompi/mca/mtl/psm*). By then their
# libraries have been loaded, each of which takes 0.1 s to time the processor's clock.
_ADAPTERS = {"psm": "/dev/ipath*", "psm2": "/dev/hfi1*"}


def interfaces(libmpi: str, environ: Mapping[str, str], interface: str) -> dict[str, str]:
    """Have the TCP transport use only this interface. `libmpi`: the path of the Open MPI that the ranks use."""
    if any(_value(libmpi, environ, name) is not None for name in _INTERFACES):
        return {}
    return {"OMPI_MCA_btl_tcp_if_include": interface}


def without_absent(libmpi: str, environ: Mapping[str, str], devices: str = "/") -> dict[str, str]:
    """Leave out the components whose adapters are not in this node. `devices`: the folder that has /dev."""
    absent = [
        name
        for name, device in _ADAPTERS.items()
        if _has_component(libmpi, f"mca_mtl_{name}.so") and not glob.glob(device.lstrip("/"), root_dir=devices)
    ]
    chosen = _value(libmpi, environ, "mtl") or ""
    if not absent or TRANSPORTS in environ or (chosen and not chosen.startswith("^")):
        return {}
    excluded = [name for name in chosen.removeprefix("^").split(",") if name]
    return {TRANSPORTS: "^" + ",".join(dict.fromkeys([*excluded, *absent]))}


def _has_component(libmpi: str, name: str) -> bool:
    folder = os.path.dirname(os.path.realpath(libmpi))
    places = ("openmpi*", "openmpi*/lib/openmpi*")  # the second is Debian's
    return any(glob.glob(f"{place}/{name}", root_dir=folder) for place in places)


def _value(libmpi: str, environ: Mapping[str, str], name: str) -> str | None:
    """A parameter as the user or the system's administrator has set it."""
    if f"OMPI_MCA_{name}" in environ:
        return environ[f"OMPI_MCA_{name}"]
    for path in _files(libmpi, environ):
        found = re.findall(rf"^[ \t]*{name}[ \t]*=[ \t]*(.*?)[ \t]*$", linux.text_of(path), re.MULTILINE)
        if found:
            return str(found[-1])
    return None


def _files(libmpi: str, environ: Mapping[str, str]) -> Iterator[str]:
    """The user's file of parameters, and that of this installation (mca_base_param_files)."""
    if "HOME" in environ:
        yield os.path.join(environ["HOME"], ".openmpi", "mca-params.conf")
    prefixes = [environ["OPAL_PREFIX"]] if environ.get("OPAL_PREFIX") else []
    prefixes += map(str, Path(os.path.realpath(libmpi)).parents)
    for prefix in prefixes:
        folder = glob.escape(os.path.join(prefix, "etc"))
        for pattern in ("openmpi-mca-params.conf", "openmpi*/openmpi-mca-params.conf"):
            found = glob.glob(os.path.join(folder, pattern))
            if found:
                yield found[0]
                return
