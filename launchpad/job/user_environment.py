"""Environment variables that the user gives the ranks: `--env VAR[=VALUE]`, `--env 'VAR*'`, and files of such lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from launchpad.errors import UsageError

_PATTERN = "[A-Za-z0-9_*?]+"
_NAME = "[A-Za-z_][A-Za-z0-9_]*"


# Forwarded to other machines by default: settings of communication libraries, and Python's. Variables that name paths
# or devices of this machine (PATH, CUDA_VISIBLE_DEVICES …) are not, nor what mpirun has set for its own ranks.
FORWARDED = (
    *("NCCL_*", "GLOO_*", "TP_*", "UCX_*", "FI_*", "TORCH_*", "PYTORCH_*", "OMP_*", "MKL_*", "KMP_*"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHON*"),
    *("OMPI_MCA_*", "PMIX_MCA_*", "MPICH_*", "MPIR_*", "I_MPI_*", "MPI4PY_*"),
)
_NOT_FORWARDED = ("PYTHONHOME", "I_MPI_ROOT", "MPI4PY_LIBMPI", "OMPI_MCA_orte_*", "OMPI_MCA_ess*")


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are forwarded to other machines by default."""

    taken, left = _one_of(FORWARDED), _one_of(_NOT_FORWARDED)
    return {name: value for name, value in environ.items() if taken(name) and not left(name)}


def _one_of(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is one of these, or begins with what stands before the * of one."""
    names = frozenset(patterns)
    starts = tuple([pattern[:-1] for pattern in patterns if pattern.endswith("*")])
    return lambda name: name.startswith(starts) or name in names


def parse_option(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse `VAR=VALUE`, `VAR` to pass on its value here, or `VAR*` to pass on several. Raises UsageError."""
    name, given, _ = text.partition("=")
    if not given and re.fullmatch(_PATTERN, name) and not re.fullmatch(_NAME, name):
        from fnmatch import fnmatchcase

        found = {one: value for one, value in environ.items() if fnmatchcase(one, name)}
        if not found:
            raise UsageError(f"--env {name}: no variable that is set here matches; correct the pattern or leave it out")
        return found
    return dict([_parse(text, environ, f"--env {name}" if re.fullmatch(_NAME, name) else "--env")])


def parse_file(text: str, path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse a file of VAR=VALUE and VAR lines, blank lines and # comments.

    A leading `export` and quotes around a value are dropped. Raises UsageError that names the file and the line.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip().removeprefix("export ").lstrip()
        if not line or line.startswith("#"):
            continue
        name, value = _parse(line, environ, f"{path}, line {number}")
        if "=" in line:  # a value that is passed on stays as it is
            value = value.strip()
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
        found[name] = value
    return found


def _parse(text: str, environ: Mapping[str, str], where: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    name = name.rstrip()
    if not re.fullmatch(_NAME, name):
        # The text may be a secret pasted in the wrong place, so the message doesn't repeat it.
        raise UsageError(f"{where}: the part before '=' is not a variable name; write VAR=VALUE")
    if "\0" in value:
        raise UsageError(f"{where}: the value of {name} contains a NUL byte, which no environment variable can hold")
    if given:
        return name, value
    if name not in environ:
        raise UsageError(f"{where}: {name} is not set here, so it can't be passed on; set it, or write {name}=VALUE")
    return name, environ[name]
