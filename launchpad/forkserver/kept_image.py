"""The kept image: a forkserver that has imported what ranks need, and forks guard, agent and forkserver of a job.

It also forks single programs, for `launchpad doctor`.

The keeper (keeper.py) starts it, and asks it for a job over the socket that is descriptor 3. The request names the
descriptors that come with it ("fds"): the caller's connection, the agent's two ends of the link, the caller's standard
error, its working folder, its standard input if a rank gets that, and a socket over which the guard can be asked for
further agents. Guard and agent import nothing either: their code is loaded too, after the imports, and taken out of the
job's forkservers again.
"""

from __future__ import annotations

import os
import sys

from ..image.seen import Seen

TYPE_CHECKING = False  # typing is not loaded yet
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any, NoReturn

    from ..agent.ranks.forkserver_client import KeptFork

_LINK = 3

# What was loaded before the imports, only to watch them.
_NOT_IN_RANKS = (Seen.__module__, Seen.__module__.rpartition(".")[0])

_held: list[object] = []  # modules that are not in ranks


def keep(link: socket.socket, names: list[str], preload: Callable[[list[str]], str], *, stays: bool) -> socket.socket:
    """Import, and fork for each request. Returns only in a job's forkserver, with the link to its agent.

    `stays`: there will be so many forks that it pays to prepare for them, which takes half as long as importing torch.
    """
    from ..rank import own_process

    own_process.die_with_parent(os.getppid())  # an import may never return, to find that the keeper has ended
    imports = Imports(lambda: preload(names))
    from ..agent import loop
    from ..image import facts, fit, huge_pages

    del loop, facts, fit  # they were only to be loaded
    request, fds = serve(link, imports, huge_pages.use if stays else lambda: None)
    try:
        _JobFork(request, dict(zip(request["fds"], fds, strict=True)), link, imports).run()
    except _InForkserver as reached:
        return reached.link


class Imports:
    """What an image has imported, and what that depends on."""

    def __init__(self, do: Callable[[], str]) -> None:
        """`do`: imports; returns why the image can't be kept, or ""."""
        at_start = [path for module in list(sys.modules.values()) if isinstance(path := _file_of(module), str)]
        seen = Seen()
        seen.begin()
        try:
            self.why_not = do()
        finally:
            seen.end()
        names = set(sys.modules)
        from ..image import loaded, place

        ours = os.path.join(place.PACKAGE, "")
        started_with = [path for path in at_start if not path.startswith(ours)]
        self.reads = sorted(seen.variables | loaded.read_at_start(started_with))
        met = seen.modules | {name.partition(".")[0] for name in names}
        self.asked = sorted(met - {"__main__", *sys.builtin_module_names})
        self.found = loaded.regular({name: sys.modules[name] for name in names if name in sys.modules})


def serve(link: socket.socket, imports: Imports, when_loaded: Callable[[], None]) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request of the keeper; returns only in a fork, with its request and descriptors.

    `when_loaded` is called when everything is loaded.
    """
    import gc
    import importlib
    import select

    from ..image import channel, loaded

    if imports.why_not:
        channel.send(link, {"off": imports.why_not})
        os._exit(0)
    found = {"reads": imports.reads, "files": loaded.files()}
    importlib.invalidate_caches()
    gc.collect()
    gc.freeze()
    when_loaded()
    channel.send(link, {"kept": found})
    del found
    jobs: dict[int, int] = {}  # the processes that were forked, by their pidfds
    waiting = select.poll()
    waiting.register(link, select.POLLIN)
    while True:
        for fd, _ in waiting.poll():
            if fd != link.fileno():
                waiting.unregister(fd)
                os.close(fd)
                pid = jobs.pop(fd)
                os.waitpid(pid, 0)
                channel.send(link, {"gone": pid})
                continue
            asked = channel.receive(link)
            if asked is None:  # the keeper has ended
                os._exit(0)
            request, fds = asked
            try:
                pid = os.fork()
            except OSError as error:
                channel.send(link, {"cold": f"its fork failed ({error.strerror})", "number": request["number"]})
                channel.close(fds)
                continue
            if pid == 0:
                return request, fds
            jobs[forked := os.pidfd_open(pid)] = pid
            waiting.register(forked, select.POLLIN)
            channel.close(fds)


def _file_of(module: object) -> object:
    return getattr(module, "__file__", None)


class Fork:
    """The fork for one request."""

    def __init__(self, request: dict[str, Any], fds: dict[str, int], link: socket.socket) -> None:
        self.request = request
        self.fds = fds
        self.link = link

    def take_over(self) -> dict[str, str]:
        """Become what a child of the caller would be; if that can't be, say so and exit."""
        from ..image import facts

        request = self.request
        try:
            files = request["files"] and (request["files"][0], request["files"][1])
            wanted = facts.facts_of(
                *request["caller"], personality=request["personality"], blocked=request["blocked"], files=files
            )
            why_not = facts.take_over(wanted, descends=request["imported"] is not None)
            os.fchdir(self.fds["folder"])
        except OSError as error:
            why_not = f"what a child of this run would be can't be seen ({error.strerror})"
        if why_not:
            self.say({"cold": why_not})
            os._exit(0)
        return wanted

    def say(self, message: dict[str, Any]) -> None:
        """Tell the keeper."""
        from ..image import channel

        try:
            channel.send(self.link, {**message, "number": self.request["number"]})
        except OSError:  # the keeper has ended
            pass


class _InForkserver(BaseException):
    """This process has become a forkserver, and leaves the code of guard and agent."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link  # to its agent


class _JobFork(Fork):
    """The fork for one job, which becomes its guard, and forks agents, each of which forks its forkserver."""

    def __init__(self, request: dict[str, Any], fds: dict[str, int], link: socket.socket, imports: Imports) -> None:
        super().__init__(request, fds, link)
        self._imports = imports
        self._wanted: dict[str, str] = {}  # what a child of the caller would be

    def run(self) -> NoReturn:
        """Raises _InForkserver in each forkserver."""
        from ..agent import guard, wards
        from ..rank import own_process

        request = self.request
        self._wanted = self.take_over()
        self._say_yes()
        for number, name in enumerate(("commands", "events", "stderr")):
            os.dup2(self.fds[name], number)
        set_environ(request["environ"])
        os.setsid()
        own_process.show_as([os.fsencode(word) for word in request["shown"]], dict(os.environb))
        stdin, asked = self.fds.get("stdin"), self.fds.get("asked")
        self.link.detach()
        if request["program"]:
            _run(*request["program"])
        shared = guard.prepare(stdin, asked)
        agent = os.fork()
        if agent:
            guard.watch(agent, stdin, shared, asked, self._begin_forkserver)
        if asked is not None:
            os.close(asked)
        wards.run_agent(stdin, shared, self._begin_forkserver())

    def _begin_forkserver(self) -> KeptFork | None:
        """Fork it from this agent."""
        import socket

        from ..agent.ranks.forkserver_client import KeptFork
        from ..image import facts, fit
        from ..rank import exit, own_process

        request = self.request
        if not request["forks"]:
            return None
        agent = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = os.fork()
        if server == 0:
            own_process.die_with_parent(agent)
            os.setsid()
            facts.take_signals(self._wanted)
            ours.detach()
            link = _only(theirs)
            # Held, as freeing them would write to many pages, of which each rank then has copies.
            _held.extend(map(sys.modules.pop, [*_NOT_IN_RANKS, *exit.imported_since()]))
            raise _InForkserver(link)
        theirs.close()
        image, imported = request["image"], request["imported"]
        described = fit.Image(**{**image, "reads": frozenset(image["reads"])})
        printed = [text.encode("utf-8", "surrogateescape") for text in request["printed"]]
        return KeptFork(
            *(server, ours, described, self._imports.asked, self._imports.found, (printed[0], printed[1])),
            imported=imported and (imported[0], imported[1]),
        )

    def _say_yes(self) -> None:
        import socket

        from ..image import channel

        with socket.socket(fileno=self.fds["caller"]) as caller:
            try:
                channel.send(caller, {"guard": os.getpid()}, [os.pidfd_open(os.getpid())])
            except OSError:  # it has gone
                os._exit(0)
        self.say({"job": os.getpid()})


def _run(code: str, *arguments: str) -> NoReturn:
    """Run a program like python -c, and end without tearing down what was imported."""
    from ..agent.host import processes

    processes.close_inherited(keep=())
    sys.argv[:] = ["-c", *arguments]
    try:
        exec(code, {"__name__": "__main__"})  # noqa: S102
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _only(link: socket.socket) -> socket.socket:
    """Make this the only open descriptor beside the standard streams, with the number of a forkserver's link."""
    import socket

    null, writer = os.pipe()
    os.close(writer)
    out = os.open(os.devnull, os.O_WRONLY)
    for fd, number in ((null, 0), (out, 1), (out, 2), (link.detach(), _LINK)):
        os.dup2(fd, number, inheritable=number < _LINK)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _LINK:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of the listing itself
                pass
    return socket.socket(fileno=_LINK)


def set_environ(environ: dict[str, str]) -> None:
    """Have these variables, and no others."""
    os.environ.clear()
    os.environ.update(environ)


def begin(request: dict[str, Any]) -> str:
    """In a job's forkserver: be as if it had been started for the job. Returns why that can't be, or ""."""
    from ..rank import own_process, program

    set_environ(request["environ"])
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        return f"{request['cwd']}: {error.strerror}"
    words = request["argv"]
    sys.argv[:] = words[2:]
    sys.executable = os.path.abspath(words[0])
    spawn = sys.modules.get("multiprocessing.spawn")
    if spawn is not None:
        spawn.set_executable(sys.executable)
    own_process.show_as([os.fsencode(word) for word in words], dict(os.environb))
    program.put_first_on_path(words[3:], request["calls"])
    logging = sys.modules.get("logging")
    if logging is not None:  # records tell the time since the start
        import time

        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # type: ignore[attr-defined]
    del sys.modules[__name__]
    return ""
