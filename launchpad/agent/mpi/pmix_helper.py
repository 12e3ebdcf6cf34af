"""The PMIx server of a node, in a process of its own: libpmix serves the ranks of Open MPI, and asks the agent.

libpmix has threads, and the agent must not. The upcalls come in libpmix' own thread: each sends the agent a message and
returns; the main thread waits for the agent's answers and passes them on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ... import mpi_library
from ..host import processes
from . import libpmix
from .frames import framed, unframed
from .libpmix import ARRAY, BOOL, BYTES, DONE, PROC, RANK, SIZE, STRING, SUCCESS, UINT16, UINT32, Entry, proc

# libpmix takes milliseconds to start. After so many seconds it is stuck, and the helper dies of SIGALRM.
START_SECONDS = 60


def run(link: socket.socket, library: str, environ: Mapping[str, str], folder: str, host: str, parent: int) -> NoReturn:
    """Be the helper, in a child of the agent.

    `library`: the path of libpmix; `environ`: the ranks' environment; `host`: this node's name.
    """
    code = 1
    try:
        _detach(link, parent)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(START_SECONDS)
        _adopt(environ)
        Helper(link, _load(library, environ), folder, host).serve()
        code = 0
    except BaseException as error:
        try:
            link.sendall(framed(("failed", " ".join(str(error).split()) or type(error).__name__)))
        except OSError:
            pass
    finally:
        os._exit(code)


def _detach(link: socket.socket, parent: int) -> None:
    """Keep nothing of the agent but standard error and our link to it."""
    processes.die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    processes.close_inherited(keep=(link.fileno(),))


def _adopt(environ: Mapping[str, str]) -> None:
    """Have the user's settings of PMIx, but nothing of a launcher around us."""
    for name in [name for name in os.environ if name.startswith(("PMIX_", "PRTE_", "OMPI_"))]:
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if name.startswith("PMIX_")})


def _load(library: str, environ: Mapping[str, str]) -> ctypes.CDLL:
    """Load libpmix. The linker heeds the LD_LIBRARY_PATH that we were started with, not that of the ranks."""
    if environ.get("LD_LIBRARY_PATH") != os.environ.get("LD_LIBRARY_PATH"):
        for _, path in reversed(list(mpi_library.Search(environ).libraries(library))):
            with suppress(OSError):
                ctypes.CDLL(path)
    return ctypes.CDLL(library)


class Helper:
    """libpmix' server, and the link to the agent."""

    def __init__(self, link: socket.socket, library: ctypes.CDLL, folder: str, host: str) -> None:
        self._link = link
        self._folder = folder
        self._host = host
        self._sending = threading.Lock()
        self._waiting: dict[int, Callable[..., None]] = {}  # who waits in libpmix, by the number of the request
        self._requests = 0
        self._loaned: dict[int, Any] = {}  # what libpmix reads until it gives it back
        self._loans = 0
        self._pmix = library
        self._module = libpmix.module(self)
        self._fetched = libpmix.FETCHED(self._on_fetched)
        self._given_back = libpmix.RELEASE(self._on_given_back)
        info = libpmix.infos(
            [
                ("pmix.srvr.tmpdir", STRING, folder),
                ("pmix.sys.tmpdir", STRING, folder),
                ("pmix.hname", STRING, host),
                ("pmix.srv.nspace", STRING, f"launchpad-{host}-{os.getpid()}"),
                ("pmix.srv.rank", RANK, 0),
                ("pmix.srvr.share", BOOL, True),  # the node's hardware, which each rank would otherwise look at itself
            ]
        )
        self._check(self._pmix.PMIx_server_init(ctypes.byref(self._module), info, ctypes.c_size_t(len(info))), "init")

    def _check(self, status: int, what: str) -> None:
        if status not in (SUCCESS, DONE):
            self._pmix.PMIx_Error_string.restype = ctypes.c_char_p
            raise OSError(f"PMIx_server_{what}: {self._pmix.PMIx_Error_string(status).decode()}")

    def _say(self, *message: Any) -> None:
        with self._sending:
            self._link.sendall(framed(message))

    def _ask(self, answer: Callable[..., None], *message: Any) -> int:
        """Send a request of libpmix; `answer` is called with what the agent answers."""
        self._requests += 1
        self._waiting[self._requests] = answer
        self._say(message[0], self._requests, *message[1:])
        return SUCCESS

    def serve(self) -> None:
        """Do what the agent says, until it closes the link."""
        buffer = bytearray()
        while data := self._link.recv(1 << 16):
            buffer += data
            for message in unframed(buffer):
                match message:
                    case ("world", world):
                        self._register(world)
                    case ("fetch", number, namespace, rank):
                        self._fetch(number, namespace, rank)
                    case ("answer", number, status, found):
                        self._waiting.pop(number)(status, found)

    # Worlds.

    def _register(self, world: dict[str, Any]) -> None:
        """Tell libpmix about a world, and the agent the variables with which its ranks find the server."""
        name = world["name"].encode()
        os.makedirs(os.path.join(self._folder, world["name"]), exist_ok=True)
        info = libpmix.infos(list(self._facts(world)))
        local = world["local"]
        status = self._pmix.PMIx_server_register_nspace(name, len(local), info, ctypes.c_size_t(len(info)), None, None)
        self._check(status, "register_nspace")
        environs = []
        for rank in local:
            one = proc(world["name"], rank)
            status = self._pmix.PMIx_server_register_client(
                ctypes.byref(one), os.getuid(), os.getgid(), None, None, None
            )
            self._check(status, "register_client")
            environs.append(self._environ(one))
        signal.alarm(0)
        self._say("ready", world["number"], environs)

    def _environ(self, one: libpmix.Proc) -> dict[str, str]:
        found = ctypes.POINTER(ctypes.c_char_p)()
        self._check(self._pmix.PMIx_server_setup_fork(ctypes.byref(one), ctypes.byref(found)), "setup_fork")
        lines = [os.fsdecode(line) for line in _until_null(found)]
        return dict(line.partition("=")[::2] for line in lines)

    def _facts(self, world: dict[str, Any]) -> Iterator[Entry]:
        hosts, ranks_of = world["hosts"], world["ranks"]  # the nodes' names, and the ranks on each
        programs = world["programs"]
        size = sum(map(len, ranks_of))
        local: list[int] = world["local"]
        yield "pmix.nmap", STRING, self._regex("PMIx_generate_regex", ",".join(hosts))
        lists = [",".join(map(str, ranks)) for ranks in ranks_of]
        yield "pmix.pmap", STRING, self._regex("PMIx_generate_ppn", ";".join(lists))
        for key in ("univ.size", "job.size", "max.size"):
            yield f"pmix.{key}", UINT32, size
        yield "pmix.job.napps", UINT32, len(set(programs))
        yield "pmix.num.nodes", UINT32, len(hosts)
        yield "pmix.jobid", STRING, world["name"]
        yield "pmix.tmpdir", STRING, self._folder
        yield "pmix.nsdir", STRING, os.path.join(self._folder, world["name"])
        yield "pmix.tdir.rmclean", BOOL, True
        if world["parent"]:
            yield "pmix.spawned", BOOL, True
            yield "pmix.parent", PROC, proc(*world["parent"])
        if local:
            yield "pmix.local.size", UINT32, len(local)
            yield "pmix.node.size", UINT32, len(local)
            yield "pmix.lpeers", STRING, ",".join(map(str, local))
            yield "pmix.lldr", RANK, local[0]
        for number in sorted(set(programs)):
            first = programs.index(number)
            app: list[Entry] = [
                ("pmix.appnum", UINT32, number),
                ("pmix.app.size", UINT32, programs.count(number)),
                ("pmix.aldr", RANK, first),
            ]
            yield "pmix.app.arr", ARRAY, app
        for node, ranks in enumerate(ranks_of):
            for place, rank in enumerate(ranks):
                own: list[Entry] = [
                    ("pmix.rank", RANK, rank),
                    ("pmix.appnum", UINT32, programs[rank]),
                    ("pmix.apprank", RANK, rank - programs.index(programs[rank])),
                    ("pmix.grank", RANK, rank),
                    ("pmix.lrank", UINT16, place),
                    ("pmix.nrank", UINT16, place),
                    ("pmix.nodeid", UINT32, node),
                    ("pmix.hname", STRING, hosts[node]),
                    ("pmix.reinc", UINT32, 0),
                ]
                if rank in local:
                    own.append(("pmix.pdir", STRING, os.path.join(self._folder, world["name"], str(rank))))
                yield "pmix.pdata", ARRAY, own

    def _regex(self, function: str, text: str) -> str:
        found = ctypes.c_char_p()
        self._check(self._pmix[function](text.encode(), ctypes.byref(found)), function)
        made = (found.value or b"").decode()
        return f"raw:{text}" if made == "blob:" else made  # compressed, it isn't a string

    # Data of a rank for another node.

    def _fetch(self, number: int, namespace: str, rank: int) -> None:
        one = proc(namespace, rank)
        status = self._pmix.PMIx_server_dmodex_request(ctypes.byref(one), self._fetched, ctypes.c_void_p(number))
        if status != SUCCESS:
            self._say("fetched", number, status, b"")

    def _on_fetched(self, status: int, data: int | None, size: int, number: int | None) -> None:
        self._say("fetched", number or 0, status, ctypes.string_at(data, size) if data else b"")

    def _on_given_back(self, number: int | None) -> None:
        self._loaned.pop(number or 0, None)

    # What libpmix asks. The names are those of its module's members.

    def client_connected(self, one: Any, _object: Any, _call: int, _arg: int) -> int:
        """A rank has called MPI_Init, and libpmix is of PMIx 3, which has no callback here."""
        self._say("connected", *_named(one[0]))
        return SUCCESS

    def client_connected2(self, one: Any, _object: Any, _info: Any, _n: int, _call: int, _arg: int) -> int:
        """A rank has called MPI_Init."""
        self._say("connected", *_named(one[0]))
        return DONE

    def client_finalized(self, one: Any, _object: Any, _call: int, _arg: int) -> int:
        """A rank has called MPI_Finalize."""
        self._say("finalized", *_named(one[0]))
        return DONE

    def abort(
        self, one: Any, _object: Any, status: int, text: bytes, _procs: Any, _n: int, _call: int, _arg: int
    ) -> int:
        """A rank has called MPI_Abort."""
        self._say("abort", *_named(one[0]), status, (text or b"").decode(errors="replace"))
        return DONE

    def fence_nb(
        self, procs: Any, count: int, _info: Any, _n: int, data: int | None, size: int, call: int, arg: int
    ) -> int:
        """All ranks here that take part have reached a fence; `data`: what they share with those on other nodes."""
        given = ctypes.string_at(data, size) if data else b""
        return self._ask(self._modex(call, arg), "fence", [_named(procs[at]) for at in range(count)], given)

    def direct_modex(self, one: Any, _info: Any, _n: int, call: int, arg: int) -> int:
        """A rank wants the data of one on another node."""
        return self._ask(self._modex(call, arg), "modex", _named(one[0]))

    def _modex(self, call: int, arg: int) -> Callable[..., None]:
        def answer(status: int, found: bytes | None) -> None:
            found = found or b""
            loan = ctypes.create_string_buffer(found, len(found))
            address = ctypes.addressof(loan) if found else None
            libpmix.MODEX(call)(status, address, len(found), arg, self._given_back, self._lend(loan))

        return answer

    def _lend(self, what: Any) -> int:
        """Keep this until libpmix gives it back by the number returned."""
        self._loans += 1
        self._loaned[self._loans] = what
        return self._loans

    def group(self, op: int, name: bytes, procs: Any, count: int, info: Any, n: int, call: int, arg: int) -> int:
        """All ranks here that take part want to be a group with others, as a communicator made from one is.

        As Open MPI's own launcher does, a group gets a number that no other has, and its members what each node's have
        put. A group ends without any word between nodes.
        """
        entries = {entry.key: entry.value.data for entry in _entries(info, n)}
        numbered = b"pmix.grp.actxid" in entries and entries[b"pmix.grp.actxid"].flag
        alone = b"pmix.grp.lcl" in entries and entries[b"pmix.grp.lcl"].flag
        if op != libpmix.CONSTRUCT or alone or not numbered:
            return DONE
        members = [_named(procs[at]) for at in range(count)]
        put = entries.get(b"pmix.grp.endpt")
        given = ctypes.string_at(put.bytes.bytes, put.bytes.size) if put else b""

        def answer(status: int, found: tuple[int, bytes] | None) -> None:
            listed: list[Entry] = []
            if found:
                number, data = found
                listed = [("pmix.grp.ctxid", SIZE, number), ("pmix.grp.mbrs", ARRAY, [proc(*one) for one in members])]
                listed += [("pmix.grp.endpt", BYTES, data)] if data else []
            made = libpmix.infos(listed)
            libpmix.INFOS(call)(status, made, len(listed), arg, self._given_back, self._lend(made))

        return self._ask(answer, "group", members, name.decode(errors="replace"), given)

    def connect(self, procs: Any, count: int, _info: Any, _n: int, call: int, arg: int) -> int:
        """All ranks here that take part want to connect with others."""
        return self._ask(_op(call, arg), "connect", [_named(procs[at]) for at in range(count)])

    def disconnect(self, procs: Any, count: int, _info: Any, _n: int, call: int, arg: int) -> int:
        """All ranks here that take part want to leave those that they had connected with."""
        return self._ask(_op(call, arg), "disconnect", [_named(procs[at]) for at in range(count)])

    def publish(self, one: Any, info: Any, count: int, call: int, arg: int) -> int:
        """A rank publishes values by their keys."""
        once, values = False, []
        for entry in _entries(info, count):
            key = entry.key.decode()
            if key == "pmix.persist":
                once = entry.value.data.uint8 == libpmix.FIRST_READ
            elif not key.startswith("pmix."):
                copy = libpmix.copied(entry.value)
                if copy is None:
                    return libpmix.NOT_SUPPORTED
                values.append((key, *copy))
        return self._ask(_op(call, arg), "publish", _named(one[0]), once, values)

    def lookup(self, one: Any, keys: Any, info: Any, count: int, call: int, arg: int) -> int:
        """A rank wants published values, and waits for them if it says so."""
        waits = any(entry.key == b"pmix.wait" for entry in _entries(info, count))

        def answer(status: int, found: Sequence[tuple[str, int, str, int, bytes]] | None) -> None:
            found = found or ()
            values = (libpmix.Pdata * len(found))()
            for place, (namespace, rank, key, kind, data) in zip(values, found, strict=True):
                place.proc = proc(namespace, rank)
                place.key = key.encode()
                libpmix.fill(place.value, kind, data)
            libpmix.LOOKUP(call)(status, values, len(found), arg)

        return self._ask(answer, "lookup", _named(one[0]), waits, [key.decode() for key in _until_null(keys)])

    def unpublish(self, one: Any, keys: Any, _info: Any, _n: int, call: int, arg: int) -> int:
        """A rank takes back what it has published."""
        return self._ask(_op(call, arg), "unpublish", _named(one[0]), [key.decode() for key in _until_null(keys)])

    def spawn(self, one: Any, _info: Any, _n: int, apps: Any, napps: int, call: int, arg: int) -> int:
        """A rank has called MPI_Comm_spawn."""

        def answer(status: int, namespace: str | None) -> None:
            libpmix.SPAWN(call)(status, (namespace or "").encode(), arg)

        return self._ask(answer, "spawn", _named(one[0]), [_program(app) for app in apps[:napps]])


def _named(one: libpmix.Proc) -> tuple[str, int]:
    return one.nspace.decode(), one.rank


def _op(call: int, arg: int) -> Callable[..., None]:
    return lambda status, _: libpmix.OP(call)(status, arg)


def _until_null(strings: Any) -> Iterator[bytes]:
    at = 0
    while strings and strings[at] is not None:
        yield strings[at]
        at += 1


def _entries(info: Any, count: int) -> list[libpmix.Info]:
    """The entries of an array that may be NULL if it is empty."""
    return info[:count] if count else []


def _program(app: libpmix.App) -> dict[str, Any]:
    """One program of a spawn."""
    info = {
        entry.key.decode(): entry.value.data.string or b""
        for entry in _entries(app.info, app.ninfo)
        if entry.value.type == STRING
    }
    return {
        "argv": [os.fsdecode(app.cmd or b""), *[os.fsdecode(word) for word in _until_null(app.argv)][1:]],
        "environ": [os.fsdecode(line) for line in _until_null(app.env)],
        "count": app.maxprocs,
        "cwd": os.fsdecode(info.get("pmix.wdir", app.cwd or b"")),
    }
