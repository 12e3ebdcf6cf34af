"""Finds which MPI a program uses, and the libpmix that belongs to it, without running it."""

import functools
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence

from .elf import Elf, expanded, read_elf
from .named import NamedTuple

OPEN_MPI, MPICH, INTEL = "openmpi", "mpich", "intel"
ABIS = {OPEN_MPI: OPEN_MPI, MPICH: MPICH, INTEL: MPICH}  # as MPI4PY_MPIABI names them
NO_MPI4PY = "mpi4py is not installed"
NAMES = {OPEN_MPI: "Open MPI", MPICH: "MPICH", INTEL: "Intel MPI"}

# The names of an MPI library, as mpi4py looks for it (mpi4py/_mpiabi.py) and as programs are linked with it.
_LOADED = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
_LINKED = r"libmpi(ch)?\.so(\.\d+)*"
_OF_MPI = r"libmpi\w*\.so(\.\d+)*"  # Fortran's too
_PMIX = r"libpmix\.so\.\d+"

# Every program needs these, and they need no MPI.
_SYSTEM = r"(libc|libm|libdl|librt|libpthread|libutil|libstdc\+\+|libgcc_s|ld-linux.*)\.so.*"

_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")


class Mpi(NamedTuple):
    """The MPI that a program uses."""

    library: str  # "openmpi", "mpich" or "intel"; "" if it is not known
    path: str  # its libmpi; "" if that is not known
    why: str  # as a clause: "a.out is linked with /usr/lib/libmpi.so.40"


class Search:
    """Where the dynamic linker looks for libraries, with these variables."""

    def __init__(self, environ: Mapping[str, str], cache: str = "/etc/ld.so.cache") -> None:
        self._folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        self._cache = cache

    def find(self, name: str, rpath: Sequence[str] = (), runpath: Sequence[str] = ()) -> str:
        """The path of a library, or ""."""
        if "/" in name:
            return name if os.path.isfile(name) else ""
        for folder in (*rpath, *self._folders, *runpath):
            if os.path.isfile(os.path.join(folder, name)):
                return os.path.join(folder, name)
        cached = _cached(self._cache).get(name)
        places = [cached] if cached else [os.path.join(folder, name) for folder in _FOLDERS]
        return next((place for place in places if os.path.isfile(place)), "")

    def needed(self, path: str, wanted: str) -> str:
        """The first library of a wanted name that a file needs, directly or not; ""."""
        return next((found for name, found in self.libraries(path) if re.fullmatch(wanted, name)), "")

    def libraries(self, path: str) -> Iterator[tuple[str, str]]:
        """The names and paths of the libraries that a file needs, directly or not, those of the system aside."""
        seen = {path}
        queue: list[tuple[str, list[str]]] = [(path, [])]
        while queue:
            at, inherited = queue.pop(0)
            elf = read_elf(at)
            if elf is None:
                continue
            runpath = expanded(elf.runpath, at)
            rpath = [] if runpath else [*expanded(elf.rpath, at), *inherited]
            for name in elf.needed:
                found = "" if re.fullmatch(_SYSTEM, name) else self.find(name, rpath, runpath)
                if found and found not in seen:
                    seen.add(found)
                    queue.append((found, rpath))
                    yield name, found


@functools.cache
def _cached(path: str) -> dict[str, str]:
    """The libraries in ld.so's cache (sysdeps/generic/dl-cache.h of glibc), by name."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return {}
    start = data.find(b"glibc-ld.so.cache1.1")
    if start < 0 or len(data) < start + 48:
        return {}
    (count,) = struct.unpack_from("<I", data, start + 20)
    found: dict[str, str] = {}
    for at in range(start + 48, min(start + 48 + 24 * count, len(data) - 23), 24):
        _, key, value = struct.unpack_from("<iII", data, at)
        name, place = (os.fsdecode(data[start + one : data.find(b"\0", start + one)]) for one in (key, value))
        found.setdefault(name, place)
    return found


def which(argv: Sequence[str], environ: Mapping[str, str], cwd: str) -> Mpi:
    """The MPI that a command will use. It may stand behind another one: numactl -l ./solve."""
    for word in argv:
        program = executable(word, environ, cwd)
        if python := _python_of(program, environ, cwd):
            return of_python(python, environ)
        path = Search(environ).needed(program, _LINKED)
        elf = read_elf(path) if path else None
        if elf is not None:
            return Mpi(_library(elf), path, f"{word} is linked with {path}")
    return Mpi("", "", f"{argv[0]} is not linked with MPI")


def is_linked(name: str, environ: Mapping[str, str], cwd: str) -> bool:
    """Whether a command is an MPI program itself: linked with the library, not only with one that is."""
    elf = read_elf(executable(name, environ, cwd))
    return elf is not None and any(re.fullmatch(_OF_MPI, one) for one in elf.needed)


def installed(library: str, argv: Sequence[str], environ: Mapping[str, str], cwd: str) -> str:
    """The libmpi of this kind that is installed with the Python of a command, or ""."""
    pythons = (_python_of(executable(word, environ, cwd), environ, cwd) for word in argv)
    python = next(filter(None, pythons), "")
    for prefix in _prefixes(python, environ) if python else ():
        for name in _LOADED:
            path = os.path.join(prefix, "lib", name)
            elf = read_elf(path)
            if elf is not None and _library(elf) == library:
                return path
    return ""


def _python_of(program: str, environ: Mapping[str, str], cwd: str) -> str:
    """The Python that runs this program, which may be one itself; "" if none does."""
    words = [program] if os.path.isfile(program) else []
    if script := _interpreter(program):
        words = script[1:] if os.path.basename(script[0]) == "env" and len(script) > 1 else script
    if words and re.fullmatch(r"(python|pypy)[0-9.]*", os.path.basename(words[0])):
        return executable(words[0], environ, cwd)
    return ""


def executable(name: str, environ: Mapping[str, str], cwd: str) -> str:
    """The path of a command."""
    if "/" in name:
        return os.path.join(cwd, name)
    for folder in environ.get("PATH", os.defpath).split(":"):
        path = os.path.join(cwd, folder, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return name


def _interpreter(path: str) -> list[str]:
    """What the first line of a script says."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return []
    return os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []


def of_python(python: str, environ: Mapping[str, str]) -> Mpi:
    """The MPI that mpi4py will load."""
    prefixes = list(_prefixes(python, environ))
    folder = _mpi4py(python, prefixes, environ)
    if not folder:
        return Mpi("", "", NO_MPI4PY)
    search = Search(environ)
    modules = sorted(name for name in _listed(folder) if re.fullmatch(r"MPI\..*\.so", name))
    built = [name for name in modules if not re.match(r"MPI\.(openmpi|mpich|mpiabi|impi)\.", name)]
    if built:  # for one MPI
        path = search.needed(os.path.join(folder, built[0]), _LINKED)
        return _named(path, f"mpi4py is linked with {path}") if path else Mpi("", "", "mpi4py's MPI library is missing")
    wanted = re.sub("[ _-]", "", environ.get("MPI4PY_MPIABI", "")).lower()
    if wanted:
        library = {"openmpi": OPEN_MPI, "mpich": MPICH, "impi": MPICH}.get(wanted, "")
        path = next(
            (search.needed(os.path.join(folder, name), _LINKED) for name in modules if f".{wanted}." in name), ""
        )
        return Mpi(library, path, f"MPI4PY_MPIABI is {environ['MPI4PY_MPIABI']}")
    listed = environ.get("MPI4PY_LIBMPI", "")
    places = listed.split(":") if listed else [*(f"{prefix}/lib" for prefix in prefixes if prefix != "/usr"), ""]
    for place in places:
        names = [os.path.join(place, name) for name in _LOADED] if not place or os.path.isdir(place) else [place]
        for name in names:
            path = search.find(name)
            if path and read_elf(path):  # else it is a linker script
                return _named(path, "MPI4PY_LIBMPI is " + listed if listed else f"mpi4py will load {path}")
    return Mpi("", "", "mpi4py finds no MPI library")


def _library(elf: Elf) -> str:
    """Which MPI a libmpi is."""
    if b"ompi_mpi_comm_self" in elf.names:
        return OPEN_MPI
    return INTEL if b"I_MPI_Check_image_status" in elf.names else MPICH


def _named(path: str, why: str) -> Mpi:
    elf = read_elf(path)
    return Mpi(_library(elf) if elf else "", path, why)


def _prefixes(python: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Where an interpreter and its packages are installed: its virtual environment, the user's folder, its own."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    base = os.path.dirname(os.path.dirname(os.path.realpath(python)))
    try:
        with open(os.path.join(own, "pyvenv.cfg"), errors="replace") as file:
            yield own
            if "include-system-site-packages = true" not in file.read():
                return
    except OSError:
        pass
    if not environ.get("PYTHONNOUSERSITE"):
        yield os.path.expanduser("~/.local")
    yield base


def _mpi4py(python: str, prefixes: Sequence[str], environ: Mapping[str, str]) -> str:
    """The folder of mpi4py. Of other Pythons of the same prefixes, nothing counts."""
    import glob

    name = os.path.basename(os.path.realpath(python))
    version = name if re.fullmatch(r"python3\.\d+t?", name) else "python3*"
    for folder in environ.get("PYTHONPATH", "").split(":"):
        if folder and os.path.isdir(os.path.join(folder, "mpi4py")):
            return os.path.join(folder, "mpi4py")
    for prefix in prefixes:
        patterns = [f"{prefix}/lib*/{version}/site-packages", f"{prefix}/lib/python3/dist-packages"]
        if prefix == "/usr":  # Debian's
            patterns.insert(0, f"/usr/local/lib/{version}/dist-packages")
        for pattern in patterns:
            for site in sorted(glob.glob(pattern)):
                for folder in (site, *_added(site)):
                    if os.path.isdir(os.path.join(folder, "mpi4py")):
                        return os.path.join(folder, "mpi4py")
    return ""


def _added(site: str) -> Iterator[str]:
    """The folders that a folder of packages adds to the path (*.pth of site)."""
    for name in sorted(_listed(site)):
        if name.endswith(".pth"):
            try:
                with open(os.path.join(site, name), errors="replace") as file:
                    lines = file.readlines()
            except OSError:
                continue
            yield from (os.path.join(site, line.strip()) for line in lines if not line.startswith(("import", "#")))


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def open_mpi(environ: Mapping[str, str], cwd: str) -> str:
    """The libmpi of an Open MPI where the dynamic linker finds one, or next to its tools; or ""."""
    tool = os.path.realpath(executable("ompi_info", environ, cwd))
    return Search(environ).find("libmpi.so.40", runpath=[os.path.join(os.path.dirname(os.path.dirname(tool)), "lib")])


def libpmix(libmpi: str, environ: Mapping[str, str]) -> str:
    """The libpmix of an Open MPI, or ""; `libmpi` may be unknown ("")."""
    search = Search(environ)
    found = search.needed(libmpi, _PMIX) if libmpi else ""
    folder = os.path.dirname(os.path.realpath(libmpi)) if libmpi else ""
    beside = [os.path.join(folder, *words) for words in ((), ("openmpi",), ("pmix", "lib"))] if folder else []
    return found or search.find("libpmix.so.2", beside)
