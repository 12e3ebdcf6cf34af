"""PMIx without any MPI: which MPI a program uses, and what agent and head do for worlds of Open MPI."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launchpad import mpi_library
from launchpad.agent.mpi import libpmix, pmix_worlds, shm
from launchpad.agent.mpi.node_worlds import NodeWorlds, has_fabric
from launchpad.agent.mpi.open_mpi_settings import interfaces, without_absent
from launchpad.agent.mpi.pmix_helper import Helper
from launchpad.agent.outbox import Outbox
from launchpad.agent.part import AgentHub
from launchpad.agent.parts import Parts
from launchpad.agent.poll import Poll
from launchpad.agent.ranks.input import Input
from launchpad.agent.ranks.starter import Starter
from launchpad.agent.ranks.store import Store
from launchpad.head.pmix import PmixExchange
from launchpad.protocol.commands import MpiWorld, PmixFetch, PmixReply
from launchpad.protocol.events import NoMpi, PmixFetched, PmixRequest, RankExited

# Which MPI.

SYMBOLS = {"openmpi": "ompi_mpi_comm_self", "intel": "I_MPI_Check_image_status", "mpich": "MPI_Init"}


def elf(
    path: Path, needed: Sequence[str] = (), *, rpath: str = "", runpath: str = "", symbols: Sequence[str] = ()
) -> Path:
    """Write a file with a dynamic section that needs these libraries, and no code."""
    strings = b"\0"
    entries = []
    for tag, text in [*((1, name) for name in needed), (15, rpath), (29, runpath), (0, "\0".join(symbols))]:
        if text:
            entries += [(tag, len(strings))] if tag else []
            strings += text.encode() + b"\0"
    base = 64 + 2 * 56
    entries += [(5, base), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    size = base + len(strings) + len(dynamic)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 1)
    at = base + len(strings)
    section = struct.pack("<IIQQQQQQ", 2, 4, at, at, at, len(dynamic), len(dynamic), 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + load + section + strings + dynamic)
    path.chmod(0o755)
    return path


def libmpi(folder: Path, kind: str) -> Path:
    return elf(folder / ("libmpi.so.40" if kind == "openmpi" else "libmpi.so.12"), symbols=[SYMBOLS[kind]])


@pytest.mark.parametrize("kind", SYMBOLS)
def test_a_program_uses_what_it_is_linked_with(tmp_path: Path, kind: str) -> None:
    library = libmpi(tmp_path / "lib", kind)
    elf(tmp_path / "lib" / "libsolve.so", [library.name, "libc.so.6"])
    program = elf(tmp_path / "bin" / "solve", ["libsolve.so"], rpath="$ORIGIN/../lib")
    found = mpi_library.which(["./solve"], {}, str(program.parent))
    assert (found.library, Path(found.path).samefile(library)) == (kind, True)
    assert found.why == f"./solve is linked with {found.path}"


def test_a_program_behind_another_one(tmp_path: Path) -> None:
    library = libmpi(tmp_path / "lib", "openmpi")
    bound = elf(tmp_path / "numactl", ["libc.so.6"])
    program = elf(tmp_path / "solve", [library.name], rpath=str(library.parent))
    found = mpi_library.which([str(bound), "-l", str(program)], {}, "/")
    assert (found.library, found.why) == ("openmpi", f"{program} is linked with {library}")


def test_a_program_of_mpi_is_linked_with_it_itself(tmp_path: Path) -> None:
    elf(tmp_path / "libuses.so", ["libmpi.so.40"])
    for needed, expected in ((["libmpi.so.12"], True), (["libmpi_mpifh.so.40"], True), (["libuses.so"], False)):
        elf(tmp_path / "solve", [*needed, "libc.so.6"], rpath=str(tmp_path))
        assert mpi_library.is_linked("./solve", {}, str(tmp_path)) is expected
    assert not mpi_library.is_linked("./none", {}, str(tmp_path))


def test_the_linkers_order(tmp_path: Path) -> None:
    """RPATH, LD_LIBRARY_PATH, RUNPATH; and RUNPATH is not for the libraries of libraries."""
    for name in ("one", "two"):
        libmpi(tmp_path / name, "openmpi")
    variables = {"LD_LIBRARY_PATH": str(tmp_path / "two")}
    for where, expected in (("rpath", "one"), ("runpath", "two")):
        program = elf(tmp_path / where, ["libmpi.so.40"], **{where: str(tmp_path / "one")})
        found = mpi_library.which([str(program)], variables, "/")
        assert Path(found.path).parent.name == expected
    elf(tmp_path / "one" / "libinner.so", ["libmpi.so.99"])
    elf(tmp_path / "one" / "libmpi.so.99", symbols=["MPI_Init"])
    program = elf(tmp_path / "outer", ["libinner.so"], runpath=str(tmp_path / "one"))
    assert mpi_library.which([str(program)], {}, "/").library == ""


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 90, b"#!/bin/sh\n", b"#!"])
def test_any_other_file_tells_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    found = mpi_library.which([str(tmp_path / "file")], {}, "/")
    assert (found.library, found.why) == ("", f"{tmp_path}/file is not linked with MPI")
    assert mpi_library.which(["/no/such/file"], {}, "/").library == ""


def environment(folder: Path, modules: Sequence[str]) -> Path:
    """A virtual environment with an mpi4py of these modules, which are for Open MPI or MPICH. Returns its Python."""
    (folder / "pyvenv.cfg").parent.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
    for name in modules:
        needed = "libmpi.so.12" if "mpich" in name else "libmpi.so.40"
        elf(folder / "lib" / "python3.11" / "site-packages" / "mpi4py" / f"MPI{name}.cpython-311.so", [needed])
    (folder / "bin").mkdir()
    return elf(folder / "bin" / "python3")


def test_what_mpi4py_will_load(tmp_path: Path) -> None:
    python = str(environment(tmp_path / "env", [".mpich", ".openmpi"]))
    (tmp_path / "env" / "lib" / "libmpi.so").write_text(
        "INPUT(libmpi.so.40)"
    )  # a linker's script, which can't be loaded
    own = libmpi(tmp_path / "env" / "lib", "openmpi")
    other = libmpi(tmp_path / "other", "mpich")

    def found(**variables: str) -> tuple[str, str, str]:
        return mpi_library.which([python, "-u", "solve.py"], variables, "/")

    assert found() == ("openmpi", str(own), f"mpi4py will load {own}")
    for value in (str(other), str(other.parent)):
        assert found(MPI4PY_LIBMPI=value) == ("mpich", str(other), f"MPI4PY_LIBMPI is {value}")
    assert found(MPI4PY_MPIABI="MPICH", LD_LIBRARY_PATH=str(other.parent)) == (
        *("mpich", str(other)),
        "MPI4PY_MPIABI is MPICH",
    )
    script = tmp_path / "script"
    script.write_text(f"#!{python}\n")
    assert mpi_library.which([str(script)], {}, "/").library == "openmpi"


def test_an_mpi4py_that_was_built_for_one_mpi(tmp_path: Path) -> None:
    python = str(environment(tmp_path / "env", [""]))
    library = libmpi(tmp_path / "lib", "openmpi")
    variables = {"LD_LIBRARY_PATH": str(library.parent), "MPI4PY_MPIABI": "mpich"}
    assert mpi_library.which([python], variables, "/") == ("openmpi", str(library), f"mpi4py is linked with {library}")
    assert mpi_library.which([python], {}, "/").library in ("", "openmpi")  # the system's, if there is one


def test_an_mpi4py_of_another_python_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    elf(tmp_path / ".local" / "lib" / "python3.9" / "site-packages" / "mpi4py" / "MPI.cpython-39.so", ["libmpi.so.40"])
    (tmp_path / "bin").mkdir()
    python = elf(tmp_path / "bin" / "python3.11")
    elf(tmp_path / "lib" / "python3.11" / "site-packages" / "mpi4py" / "MPI.cpython-311.so", ["libmpi.so.12"])
    libmpi(tmp_path / "libs", "openmpi")
    mpich = libmpi(tmp_path / "libs", "mpich")
    variables = {"LD_LIBRARY_PATH": str(mpich.parent)}
    assert mpi_library.which([str(python)], variables, "/").library == "mpich"
    users = tmp_path / ".local" / "lib" / "python3.11" / "site-packages" / "mpi4py" / "MPI.cpython-311.so"
    elf(users, ["libmpi.so.40"])
    assert mpi_library.which([str(python)], variables, "/").library == "openmpi"
    assert mpi_library.which([str(python)], {**variables, "PYTHONNOUSERSITE": "1"}, "/").library == "mpich"


def test_the_mpi_of_a_kind_that_is_installed_with_a_python(tmp_path: Path) -> None:
    python = str(environment(tmp_path / "env", [".mpich", ".openmpi"]))
    paths = {kind: libmpi(tmp_path / "env" / "lib", kind) for kind in ("mpich", "openmpi")}
    for kind, path in paths.items():
        assert mpi_library.installed(kind, [python, "-u", "solve.py"], {}, "/") == str(path)
    assert mpi_library.installed("intel", [python], {}, "/") == ""
    assert mpi_library.installed("mpich", ["sh", "-c", "exit"], {}, "/") == ""


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An installation of Open MPI, with an empty file of parameters."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "openmpi-mca-params.conf").touch()
    components = tmp_path / "lib" / "openmpi"
    components.mkdir(parents=True)
    for name in ("mca_mtl_psm.so", "mca_mtl_psm2.so"):
        (components / name).touch()
    return tmp_path


def test_the_users_choice_of_interfaces(prefix: Path) -> None:
    libmpi = str(prefix / "lib" / "libmpi.so.40")
    home = {"HOME": str(prefix / "home")}
    ours = {"OMPI_MCA_btl_tcp_if_include": "eth0"}
    assert interfaces(libmpi, home, "eth0") == ours
    assert interfaces(libmpi, {"OMPI_MCA_btl_tcp_if_exclude": "lo"}, "eth0") == {}
    file = prefix / "home" / ".openmpi" / "mca-params.conf"
    file.parent.mkdir(parents=True)
    file.write_text("# btl_tcp_if_include = eth1\nbtl = tcp,self\n")
    assert interfaces(libmpi, home, "eth0") == ours
    file.write_text("btl = tcp,self\nbtl_tcp_if_exclude = lo,docker0\n")
    assert interfaces(libmpi, home, "eth0") == {}


@pytest.mark.parametrize(("state", "connected"), [("4: ACTIVE\n", True), ("1: DOWN\n", False), (None, False)])
def test_a_fast_network(tmp_path: Path, state: str | None, connected: bool) -> None:
    if state:
        (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
        (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text(state)
    assert has_fabric(str(tmp_path)) == connected


ABSENT = [
    ("", [], "^psm,psm2"),
    ("mtl = ^ofi", [], "^ofi,psm,psm2"),
    ("mtl=^psm2", [], "^psm2,psm"),
    ("mtl = psm2", [], None),  # the user insists, and should see Open MPI refuse
    ("", ["hfi1_0"], "^psm"),
    ("", ["ipath", "hfi1_0"], None),
]


@pytest.mark.parametrize(("text", "devices", "value"), ABSENT)
def test_adapters_that_are_not_there(prefix: Path, text: str, devices: list[str], value: str | None) -> None:
    libmpi = str(prefix / "lib" / "libmpi.so.40")
    (prefix / "etc" / "openmpi-mca-params.conf").write_text(f"{text}\n")
    (prefix / "dev").mkdir()
    for device in devices:
        (prefix / "dev" / device).touch()
    found = without_absent(libmpi, {}, str(prefix))
    assert found == ({} if value is None else {"OMPI_MCA_mtl": value})
    assert without_absent(libmpi, {"OMPI_MCA_mtl": "^ofi"}, str(prefix)) == {}


def test_a_build_without_components_for_such_adapters(tmp_path: Path) -> None:
    assert without_absent(str(tmp_path / "lib" / "libmpi.so.40"), {}, str(tmp_path)) == {}


def test_where_there_is_no_mpi4py(tmp_path: Path) -> None:
    assert mpi_library.which([str(environment(tmp_path / "env", []))], {}, "/") == ("", "", "mpi4py is not installed")


def test_odd_files_where_mpi4py_is_looked_for(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", [])
    (tmp_path / "env" / "pyvenv.cfg").write_bytes(b"home = /opt/\xff\n")
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    (site / "a.pth").mkdir(parents=True)
    (site / "b.pth").symlink_to("nowhere")
    (site / "c.pth").write_text("../more\n")
    elf(site.parent / "more" / "mpi4py" / "MPI.cpython-311.so", ["libmpi.so.40"])
    (tmp_path / "env" / "lib" / "python3.12").mkdir()
    (tmp_path / "env" / "lib" / "python3.12" / "site-packages").touch()
    library = libmpi(tmp_path / "lib", "openmpi")
    variables = {"LD_LIBRARY_PATH": str(library.parent)}
    assert mpi_library.which([str(python)], variables, "/").why == f"mpi4py is linked with {library}"
    (site / "c.pth").unlink()
    assert mpi_library.which([str(python)], variables, "/").why == "mpi4py is not installed"


def test_the_libpmix_of_an_open_mpi(tmp_path: Path) -> None:
    inner = elf(tmp_path / "needed" / "lib" / "openmpi" / "libpmix.so.2")
    linked = elf(tmp_path / "needed" / "lib" / "libmpi.so.40", ["libpmix.so.2"], runpath="$ORIGIN/openmpi")
    assert Path(mpi_library.libpmix(str(linked), {})).samefile(inner)
    library = libmpi(tmp_path / "beside", "openmpi")
    beside = elf(library.parent / "libpmix.so.2")
    assert Path(mpi_library.libpmix(str(library), {})).samefile(beside)


def test_a_damaged_cache_of_the_linker(tmp_path: Path) -> None:
    for content in (b"", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + b"\xff" * 100):
        (tmp_path / "cache").write_bytes(content)
        mpi_library._cached.cache_clear()
        assert mpi_library.Search({}, str(tmp_path / "cache")).find("libnothing.so.7") == ""
    mpi_library._cached.cache_clear()


# The agent's part.


class Server:
    """Stands in for PmixServer."""

    pid = 0

    def __init__(self, *given: Any) -> None:
        self.hear: Callable[[tuple[Any, ...]], None] = given[5]
        self.sent: list[tuple[Any, ...]] = []

    def send(self, *message: Any) -> None:
        self.sent.append(message)


class Said(Outbox):
    """Keeps the events, with their times removed."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def say(self, event: Any) -> None:
        self.events.append(event._replace(time=0))


def world(number: int, ranks: list[int], first: int) -> MpiWorld:
    programs, hosts, parent = [0] * 2, ["a", "b"], [0, 0] if number else []
    return MpiWorld(number, f"job-{number}", 2, first, ranks, programs, hosts, [1, 1], "", parent, {}, "", "")


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> pmix_worlds.PmixWorlds:
    """A node that has rank 1 of world 0."""
    monkeypatch.setattr(pmix_worlds, "PmixServer", Server)
    made = pmix_worlds.PmixWorlds(Poll(), Said(), "", {}, "", "b", lambda _: None)
    made.add(world(0, [1], 1))
    return made


def heard(worlds: pmix_worlds.PmixWorlds, *message: Any) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """What a node says to the head so far, and to its server, after this message from the server."""
    server, said = worlds._server, worlds._outbox
    assert isinstance(server, Server)
    assert isinstance(said, Said)
    if message:
        server.hear(message)
    return said.events, server.sent


def test_a_request_that_names_a_world_of_which_the_node_has_not_been_told(worlds: pmix_worlds.PmixWorlds) -> None:
    asks = request(4, "worlds", [(0, 1)])
    assert heard(worlds, "modex", 4, ("job-1", 0))[0] == [asks]
    ((to, reply),) = exchange().on(1, request(4, "worlds", [(0, 2)]))
    assert (to, reply) == (1, PmixReply(4, 0, None))
    worlds.add(world(1, [], 0))
    worlds.reply(PmixReply(4, 0, None))
    assert heard(worlds)[0] == [asks, request(4, "modex", [(1, 0)])]
    worlds.reply(PmixReply(4, 0, "eA=="))
    assert heard(worlds)[1][-1] == ("answer", 4, 0, b"x")
    worlds.reply(PmixReply(5, 0, {"data": ["eA==", "eQ=="]}))
    assert heard(worlds)[1][-1] == ("answer", 5, 0, b"xy")
    worlds.reply(PmixReply(6, 0, {"data": ["eA==", ""], "group": 3}))
    assert heard(worlds)[1][-1] == ("answer", 6, 0, (3, b"x"))


def test_a_request_that_names_no_world_fails(worlds: pmix_worlds.PmixWorlds) -> None:
    assert heard(worlds, "connect", 5, [("job-0", 1), ("other", 0)])[0] == [request(5, "worlds", [(0, 1)])]
    worlds.reply(PmixReply(5, 0, None))
    assert heard(worlds)[1][-1] == ("answer", 5, -27, None)


def test_the_answer_to_a_failed_request_has_no_data() -> None:
    given: list[Any] = []
    helper = Helper.__new__(Helper)
    helper._loaned, helper._loans, helper._given_back = {}, 0, libpmix.RELEASE(lambda _: None)
    asked: list[Callable[..., None]] = []
    helper._ask = lambda answer, *_: asked.append(answer) or 0  # type: ignore[method-assign, func-returns-value]
    modex = libpmix.MODEX(lambda status, _, size, *__: given.append((status, size)))
    lookup = libpmix.LOOKUP(lambda status, _, count, __: given.append((status, count)))
    spawned = libpmix.SPAWN(lambda status, name, _: given.append((status, name)))
    one = [libpmix.proc("job-0", 0)]
    helper.direct_modex(one, None, 0, address(modex), 0)
    helper.lookup(one, None, None, 0, address(lookup), 0)
    helper.spawn(one, None, 0, [], 0, address(spawned), 0)
    for answer in asked:
        answer(-27, None)
    assert given == [(-27, 0), (-27, 0), (-27, b"")]


def test_a_group() -> None:
    """What libpmix is told: a number, the members, and what they have put, in memory that it frees."""
    given: list[Any] = []
    helper = Helper.__new__(Helper)
    helper._loaned, helper._loans = {}, 0
    helper._given_back = libpmix.RELEASE(helper._on_given_back)
    asked: list[Any] = []
    helper._ask = lambda *words: asked.append(words) or 0  # type: ignore[method-assign, func-returns-value]

    def take(status: int, infos: Any, count: int, _: int, give_back: Any, loan: int) -> None:
        number, members, put = infos[:count]
        listed = ctypes.cast(members.value.data.pointer, ctypes.POINTER(libpmix.Array))[0]
        procs = ctypes.cast(listed.array, ctypes.POINTER(libpmix.Proc))[: listed.size]
        held = put.value.data.bytes
        data = ctypes.string_at(held.bytes, held.size)
        ctypes.CDLL(None).free(ctypes.c_void_p(held.bytes))
        given.append((status, number.value.data.size, [(one.nspace, one.rank) for one in procs], data))
        give_back(loan)

    call = libpmix.INFOS(take)
    members = (libpmix.Proc * 2)(libpmix.proc("job-0", 0), libpmix.proc("job-0", 3))
    numbered = [("pmix.grp.actxid", libpmix.BOOL, True), ("pmix.grp.endpt", libpmix.BYTES, b"mine")]
    asks = libpmix.infos(numbered)
    assert helper.group(libpmix.CONSTRUCT, b"name", members, 2, asks, 2, address(call), 0) == libpmix.SUCCESS
    ((answer, *words),) = asked
    assert words == ["group", [("job-0", 0), ("job-0", 3)], "name", b"mine"]
    answer(0, (7, b"mine and yours"))
    assert given == [(0, 7, [(b"job-0", 0), (b"job-0", 3)], b"mine and yours")]
    assert not helper._loaned
    assert helper.group(libpmix.CONSTRUCT + 1, b"name", members, 2, None, 0, address(call), 0) == libpmix.DONE
    assert helper.group(libpmix.CONSTRUCT, b"name", members, 2, None, 0, address(call), 0) == libpmix.DONE
    assert len(asked) == 1


def address(callback: Any) -> int:
    return ctypes.cast(callback, ctypes.c_void_p).value or 0


@pytest.mark.parametrize("upcall", ["client_connected", "client_connected2"])  # of PMIx 3, and of later ones
def test_a_rank_that_calls_mpi_init(upcall: str) -> None:
    said: list[Any] = []
    helper = Helper.__new__(Helper)
    helper._say = lambda *message: said.append(message)  # type: ignore[method-assign]
    module = libpmix.module(helper)
    more = (None, 0) if upcall.endswith("2") else ()
    one = ctypes.byref(libpmix.proc("job-0", 3))
    assert getattr(module, upcall)(one, None, *more, None, None) in (libpmix.SUCCESS, libpmix.DONE)
    assert said == [("connected", "job-0", 3)]


@pytest.mark.parametrize("what", ["folder", "libpmix"])
def test_why_open_mpi_is_not_served_is_said_at_once(tmp_path: Path, what: str) -> None:
    """A folder that is there already is another user's, who has seen the name of the job's folder."""
    library = libmpi(tmp_path / "lib", "openmpi")
    program = elf(tmp_path / "solve", [library.name], rpath=str(library.parent))
    if what == "folder":
        elf(library, ["libpmix.so.2"], runpath="$ORIGIN", symbols=[SYMBOLS["openmpi"]])
        elf(tmp_path / "lib" / "libpmix.so.2")
    said, folder = Said(), tmp_path / f"launchpad-{os.getpid()}"
    taken = Path(shm.open_mpis(str(folder)))
    taken.mkdir()
    try:
        worlds = NodeWorlds(Poll(), said, str(folder))
        worlds.add(world(0, [0, 1], 0))
        worlds.serve({"LD_LIBRARY_PATH": "/nowhere"}, [str(program)], "/")
    finally:
        taken.rmdir()
    assert worlds.pmix is None
    (why,) = [event.why for event in said.events if isinstance(event, NoMpi)]
    if what == "folder":
        assert why == "the PMIx server for Open MPI can't be started: File exists"
    elif why != f"the libpmix.so.2 of {library} was not found":  # the system's is there
        assert "can't be started" in why


def test_a_signal_ends_spawned_ranks_that_wait_for_the_server(tmp_path: Path, worlds: pmix_worlds.PmixWorlds) -> None:
    said = Said()
    hub = AgentHub(Poll(), said, str(tmp_path))
    starter = Starter(hub, Parts(hub), Store(hub), Input(hub, None), (64, 64), lambda _: None)
    hub.mpi = NodeWorlds(Poll(), said, str(tmp_path))
    hub.mpi.pmix = worlds
    hub.mpi.add(world(1, [2, 3], 0))
    starter.start_more([{"rank": 2}, {"rank": 3}])
    starter.signal(signal.SIGCONT)
    assert said.events == []
    for _ in range(2):
        starter.signal(signal.SIGTERM, stops=True)
        assert said.events == [RankExited(0, rank, -signal.SIGTERM, 0, False) for rank in (2, 3)]
    heard(worlds, "ready", 1, [{}, {}])
    assert len(said.events) == 2


# The head's part.


def exchange() -> PmixExchange:
    """A world of ranks 0 and 1 on node 0, and rank 2 on node 1."""
    made = PmixExchange()
    made.add([0, 0, 1])
    return made


def request(number: int, verb: str, members: list[list[int]], *given: Any) -> PmixRequest:
    return PmixRequest(0, number, verb, members, list(given))


def test_a_fence_ends_when_all_its_nodes_are_in_and_brings_what_they_gave() -> None:
    made = exchange()
    assert made.on(1, request(7, "fence", [[0, -1]], "Yg==")) == []
    assert made.waits_for(0)
    assert not made.waits_for(1)
    found = {"data": ["Yg==", "YQ=="]}
    assert made.on(0, request(3, "fence", [[0, -1]], "YQ==")) == [
        (1, PmixReply(7, 0, found)),
        (0, PmixReply(3, 0, found)),
    ]
    assert made.on(1, request(8, "fence", [[0, -1]], "Yg==")) == []
    assert not made.waits_for(0)  # it has passed MPI_Init


def test_fences_of_some_ranks_and_of_two_worlds() -> None:
    made = exchange()
    made.add([0])
    assert made.on(0, request(1, "connect", [[0, 2], [1, -1]])) == []
    assert made.on(0, request(2, "fence", [[0, 2], [0, 0]], "")) == []
    assert [to for to, _ in made.on(1, request(1, "connect", [[1, -1], [0, 2]]))] == [0, 1]
    assert [to for to, _ in made.on(1, request(2, "fence", [[0, 0], [0, 2]], ""))] == [0, 1]


def test_each_group_has_its_own_number() -> None:
    made = exchange()
    both = [[0, 1], [0, 2]]
    assert made.on(0, request(1, "group", both, "one", "YQ==")) == []
    assert made.on(0, request(2, "group", both, "two", "")) == []
    two = {"data": ["", "Yg=="], "group": 1}
    assert made.on(1, request(1, "group", both, "two", "Yg==")) == [
        (0, PmixReply(2, 0, two)),
        (1, PmixReply(1, 0, two)),
    ]
    assert made.on(1, request(2, "group", both, "one", ""))[0][1] == PmixReply(1, 0, {"data": ["YQ==", ""], "group": 2})


def test_data_of_a_rank_on_another_node() -> None:
    made = exchange()
    assert made.on(0, request(5, "modex", [(0, 2)])) == [(1, PmixFetch(1, 0, 2))]
    assert made.fetched(PmixFetched(0, 1, 0, "eA==")) == [(0, PmixReply(5, 0, "eA=="))]
    assert made.fetched(PmixFetched(0, 1, 0, "eA==")) == []


def test_published_values() -> None:
    made = exchange()
    assert made.on(1, request(1, "lookup", [(0, 2)], False, ["a"])) == [(1, PmixReply(1, -46, []))]
    assert made.on(1, request(2, "lookup", [(0, 2)], True, ["a"])) == []
    assert made.on(0, request(1, "publish", [[0, 1]], False, [["a", 3, "eA=="]])) == [
        (0, PmixReply(1, 0, None)),
        (1, PmixReply(2, 0, [[0, 1, "a", 3, "eA=="]])),
    ]
    assert made.on(0, request(2, "publish", [[0, 1]], True, [["a", 3, "eA=="]])) == [(0, PmixReply(2, -53, None))]
    made.on(0, request(3, "unpublish", [[0, 1]], ["a"]))
    made.on(0, request(4, "publish", [[0, 1]], True, [["a", 3, "eQ=="]]))  # to be read once
    for number, status in ((5, 0), (6, -46)):
        ((_, reply),) = made.on(0, request(number, "lookup", [[0, 0]], False, ["a"]))
        assert isinstance(reply, PmixReply)
        assert reply.status == status


@pytest.mark.parametrize(
    ("node", "members"),
    [
        (0, []),
        (0, [(1, 0)]),
        (0, [[0, 3]]),
        (0, [[0, -2]]),
        (0, [[0]]),
        (1, [[0, 0]]),
        (2, [[0, -1]]),
        (0, [[0, -1]] * 2),
    ],
)
def test_impossible_requests_are_recognised(node: int, members: list[list[int]]) -> None:
    made = exchange()
    assert not made.makes_sense(node, request(1, "publish", members, False, []))
    assert made.makes_sense(0, request(1, "publish", [[0, 0]], False, []))
    assert made.makes_sense(0, request(1, "modex", [(0, 2)]))


@pytest.mark.parametrize(
    ("verb", "given"),
    [("fence", []), ("group", ["name"]), ("publish", [True, [["a", "3", ""]]]), ("lookup", [0, ["a"]]), ("other", [])],
)
def test_malformed_requests(verb: str, given: list[Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(verb)):
        exchange().on(0, request(1, verb, [[0, 0]], *given))
