"""The keeper: the process behind `launchpad warm`. It starts images, chooses one for each run, and ends them.

One loop: callers (image/place.py), images, what these print, and the time. A caller is greeted with {"cores"}, then
asks for "run", "head", "warm", "status" or "stop". It stays connected for as long as its job lasts. An agent whose
image turned out not to fit tells what was lacking ("lack").

A job whose worlds start from one image has a keeper of its own (image/job_image.py), with one caller.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import linux
from ..agent.host import processes, resources
from ..agent.ranks import rank
from ..agent.ranks.forkserver_client import MAIN, PRINTED_BYTES, bring_launchpad
from ..image import WITH_OPTIMIZERS, channel, facts, fit, loaded, place, pressure

# Images with imports, and as many without.
MOST_IMAGES = 3

# How often memory and our socket are looked at.
LOOK_SECONDS = 10.0

# What a caller asks for first comes at once, or takes the caller longer than it takes to look at files.
SOON_SECONDS = 0.001

_LINK = 3


class Keeper:
    """All state of the loop."""

    def __init__(self) -> None:
        self._path = ""  # where callers find us
        self._socket = loaded.mark(self._path)[:2]
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._images: list[_Kept] = []
        self._callers: dict[int, _Caller] = {}
        self._settings: dict[str, Any] = {}
        self._idle_since = time.monotonic()
        self._last_cold = ""
        self._head: _Kept | None = None  # that of the launcher's head
        self._why_no_head = ""  # for the last run
        self._failed_head: tuple[fit.ColdStart, str] | None = None  # one that could not be made, and why
        self._to_look = False  # at the files of images, once nothing else is to be done: the caller is not ready either
        self._over = ""  # why the keeper ends

    def listen(self, listener: socket.socket, path: str) -> None:
        """Serve whoever comes."""
        self._path = path
        self._socket = loaded.mark(path)[:2]
        self._watch(listener.fileno(), lambda: self.serve(listener.accept()[0]))

    def run(self) -> None:
        """Serve until there is a reason to end."""
        wakeup = processes.wakeup_on_exit()
        self._watch(wakeup, lambda: os.read(wakeup, 4096))
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda signum, _: self._end(f"signal {signum}"))
        while not self._over:
            ready = self._poll.poll(self._patience())
            for fd, _ in ready:
                if fd in self._handlers:
                    self._handlers[fd]()
            if not ready and self._to_look:
                self._look_at_files()
            processes.reap()
            self._look()
        for image in self._all():
            image.kill()
        if self._path and loaded.mark(self._path)[:2] == self._socket:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
                os.rmdir(os.path.dirname(self._path))

    def _end(self, why: str) -> None:
        self._over = self._over or why

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None):
            self._poll.unregister(fd)

    # Time.

    @property
    def _busy(self) -> bool:
        return any(image.jobs or image.awaited for image in self._all())

    def _idle_ends(self) -> float:
        return self._idle_since + float(self._settings.get("seconds", LOOK_SECONDS))

    def _patience(self) -> float:
        if self._to_look:
            return SOON_SECONDS
        left = LOOK_SECONDS if self._busy else self._idle_ends() - time.monotonic()
        return max(0.0, min(LOOK_SECONDS, left))

    def _look_at_files(self) -> None:
        """Find out whether files have changed that the images have loaded."""
        self._to_look = False
        for image in self._images:
            image.look()

    def _look(self) -> None:
        """End what time, memory or somebody who removed our socket says must end."""
        if self._busy:
            self._idle_since = time.monotonic()
        elif time.monotonic() >= self._idle_ends():
            self._end("idle")
        if loaded.mark(self._path)[:2] != self._socket:
            self._end("its socket was removed")
        if self._path and (why := pressure.found()):  # the worlds of one job would take more without its image
            self._end(why)

    # Callers.

    def serve(self, connection: socket.socket) -> None:
        """Serve this caller."""
        if channel.peer(connection)[1] != os.geteuid():
            connection.close()
            return
        caller = _Caller(connection)
        self._callers[connection.fileno()] = caller
        self._watch(connection.fileno(), lambda: self._hear(caller))
        caller.say({"cores": resources.usable_cores()})
        self._to_look = True

    def _hear(self, caller: _Caller) -> None:
        fds: list[int] = []
        try:
            asked = channel.receive(caller.connection)
            if asked is None:
                self._leave(caller)
                return
            request, fds = asked
            for kind, answer in (
                ("run", self._run),
                ("head", self._run_head),
                ("lack", self._lack),
                ("warm", self._warm),
                ("status", self._status),
                ("stop", self._stop),
            ):
                if kind in request:
                    answer(caller, request[kind], fds)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            caller.say({"cold": f"it was asked wrongly ({type(error).__name__}: {error})"})
        finally:
            channel.close(fds)

    def _leave(self, caller: _Caller) -> None:
        self._unwatch(caller.connection.fileno())
        self._callers.pop(caller.connection.fileno(), None)
        caller.connection.close()
        for image in self._images:
            if caller in image.awaited:
                image.awaited.remove(caller)
        if caller.lacked is not None:
            lacked, caller.lacked = caller.lacked, None
            self._start_image(lacked)
        if caller.lacked_head is not None:
            self._start_head(caller.lacked_head)
        if not self._path:
            self._end("its only caller has left")

    def _stop(self, caller: _Caller, _: object, __: list[int]) -> None:
        self._end("it was told to")
        caller.say({"stopped": True})

    def _status(self, caller: _Caller, _: object, __: list[int]) -> None:
        now = time.monotonic()
        left = None if self._busy else round(self._idle_ends() - now)
        images = [image.described(now) for image in self._images]
        head = {**self._head.described(now), "last_cold": self._why_no_head} if self._head else None
        failed = self._failed_head[1] if self._failed_head and not head else ""
        found = {"last_cold": self._last_cold, "images": images, "head": head, "head_failed": failed}
        caller.say({"pid": os.getpid(), "idle_ends": left, **found})

    def _warm(self, caller: _Caller, settings: dict[str, Any], _: list[int]) -> None:
        """Keep images by these settings from now on; answer when the first is ready."""
        if self._settings and any(settings[name] != self._settings[name] for name in ("python", "preload", "extra")):
            for image in list(self._images):
                self._drop(image)
        self._settings = settings
        self._idle_since = time.monotonic()
        self._failed_head = None
        if settings["head"]:
            self._start_head(self._wanted_head(caller, settings["head"] | {"thread": settings["thread"]}))
        wanted = self._wanted(caller, settings)
        if why := fit.cannot(wanted):
            caller.say({"off": why})
            return
        for image in self._images:
            image.look()
        fitting = next((one for one in self._images if one.image and not one.why_not(wanted)), None)
        if fitting is not None:
            caller.say({"ready": True})
            return
        made = self._start_image(wanted) or next((one for one in self._images if one.is_for(wanted)), None)
        if made is None:
            caller.say({"off": self._last_cold})
        else:
            made.awaited.append(caller)
        if settings["preload"] and self._path:  # for programs without torch
            self._start_image(self._wanted(caller, {**settings, "preload": []}))

    def _wanted(self, caller: _Caller, request: dict[str, Any]) -> fit.ColdStart:
        affinity, stack = facts.cpus_and_stack(*_thread_of(caller, request))
        environ = {**request["ranks"]}
        if self._settings.get("brings") and "torch" in request["preload"]:
            bring_launchpad(environ)
        return fit.ColdStart(
            python=place.interpreter(request["python"]),
            preload=tuple(request["preload"]),
            environ=environ,
            affinity=affinity,
            stack=stack,
        )

    def _wanted_head(self, caller: _Caller, request: dict[str, Any]) -> fit.ColdStart:
        # Ours are for a run, not for an image: one of them is a secret.
        environ = {name: value for name, value in request["environ"].items() if not name.startswith("LAUNCHPAD_")}
        return self._wanted(caller, {**request, "ranks": environ, "preload": ()})

    def _run_head(self, caller: _Caller, request: dict[str, Any], fds: list[int]) -> None:
        head, terms = self._head, self._settings.get("head")
        why = "there is none"
        if terms:
            wanted = self._wanted_head(caller, request)
            never = next((name for name in terms["never"] if request["environ"].get(name)), "")
            cannot = f"{never} is set" if never else fit.cannot(wanted)
            if not cannot and head is not None:
                head.look()
                why = head.why_not(wanted)
            if why and not cannot:
                if self._failed_head and self._failed_head[0] == wanted:
                    why = self._failed_head[1]
                else:
                    caller.lacked_head = wanted
            why = cannot or why
        self._why_no_head = why
        if why or head is None:
            caller.say({"cold": why})
        else:
            self._fork(head, caller, request, fds)

    def _run(self, caller: _Caller, request: dict[str, Any], fds: list[int]) -> None:
        wanted = self._wanted(caller, request)
        why = fit.cannot(wanted)
        if not why:
            if self._to_look:
                self._look_at_files()
            same = [one for one in self._images if bool(one.preload) == bool(wanted.preload)]
            reasons: list[tuple[bool, int, str]] = []
            for image in sorted(same, key=lambda one: (-len(one.preload), -one.used)):
                reason = image.why_not(wanted)
                if not reason:
                    if not set(wanted.preload) <= set(image.preload) and not request["program"]:
                        caller.lacked = wanted
                    self._fork(image, caller, request, fds)
                    return
                far = image.image is None or bool(fit.misfit(image.image, wanted))
                reasons.append((far, len(reasons), reason))
            why = min(reasons)[2] if reasons else "there is none yet"
            if self._would_help(wanted) and not request["program"]:
                caller.lacked = wanted
        if request["program"]:  # it is no run
            caller.say({"cold": why})
        else:
            self._say_cold(caller, why)

    def _lack(self, caller: _Caller, request: dict[str, Any], _: list[int]) -> None:
        self._last_cold = request["why"]
        wanted = self._wanted(caller, request)
        if self._would_help(wanted):
            caller.lacked = wanted

    def _say_cold(self, caller: _Caller, why: str, *, head: bool = False) -> None:
        if head:
            self._why_no_head = why
        else:
            self._last_cold = why
        caller.say({"cold": why})

    def _would_help(self, wanted: fit.ColdStart) -> bool:
        """Whether an image like those that the user asked for, but made for this run, could be used."""
        settings = self._settings
        named = set(self._named(wanted))
        return (
            wanted.python == settings["python"]
            and set(wanted.preload) <= {*named, WITH_OPTIMIZERS}
            and named - set(wanted.preload) <= set(settings["extra"])
            and wanted.stack == str(resource.getrlimit(resource.RLIMIT_STACK))
        )

    def _named(self, wanted: fit.ColdStart) -> Sequence[str]:
        """Of what the user asked for, what an image for such a run would import: not torch where that doesn't."""
        extra: list[str] = self._settings["extra"]
        if not wanted.preload:
            return ()
        return extra if set(wanted.preload) <= set(extra) else self._settings["preload"]

    def _fork(self, image: _Kept, caller: _Caller, request: dict[str, Any], fds: list[int]) -> None:
        image.asked += 1
        image.waiting[image.asked] = caller
        message = {
            **request,
            "number": image.asked,
            "caller": _thread_of(caller, request),
            "image": image.terms,
            "imported": None if self._path else image.imported,
            "printed": [text.decode("utf-8", "surrogateescape") for text in image.printed],
        }
        try:
            channel.send(image.link, message, [caller.connection.fileno(), *fds])
        except OSError:
            self._lose(image, "it was ended")

    # Images.

    def _all(self) -> list[_Kept]:
        return self._images if self._head is None else [*self._images, self._head]

    def _start_head(self, wanted: fit.ColdStart) -> None:
        """Start the kept head for these variables in place of the one that there is."""
        if self._head is not None:
            self._head.look()
            if not self._head.stale and (self._head.is_for(wanted) or not self._head.why_not(wanted)):
                return
            self._drop(self._head)
        terms = self._settings["head"]
        try:
            self._head = _Kept(wanted, (), {name: terms[name] for name in ("rehearse", "main")})
        except OSError as error:
            self._why_no_head = f"it can't be started ({error.strerror})"
            return
        self._watch_image(self._head)

    def _start_image(self, wanted: fit.ColdStart) -> _Kept | None:
        """Start one in place of those that are stale or, if there are enough, of the one that was used least."""
        preload = tuple(self._named(wanted))
        if WITH_OPTIMIZERS in wanted.preload and WITH_OPTIMIZERS not in preload:
            preload += (WITH_OPTIMIZERS,)
        wanted = wanted._replace(preload=preload)
        same = [one for one in self._images if bool(one.preload) == bool(preload)]
        for image in [one for one in same if one.stale and not one.awaited]:
            self._drop(image)
            same.remove(image)
        if any(one.preload == preload and (one.is_for(wanted) or not one.why_not(wanted)) for one in same):
            return None
        if len(same) >= MOST_IMAGES:
            self._drop(min(same, key=lambda one: (one.uses, one.used)))
        try:
            request = {"keep": list(preload), "stays": bool(self._path)}
            image = _Kept(wanted, tuple(self._settings["extra"]) if preload else (), request)
        except OSError as error:
            self._last_cold = f"it can't be started ({error.strerror})"
            return None
        self._images.append(image)
        self._watch_image(image)
        return image

    def _watch_image(self, image: _Kept) -> None:
        self._watch(image.link.fileno(), lambda: self._hear_image(image))
        for which, fd in enumerate(image.streams):
            self._watch(fd, lambda which=which, fd=fd: self._on_printed(image, which, fd))  # type: ignore[misc]

    def _on_printed(self, image: _Kept, which: int, fd: int) -> None:
        if not image.read(which, fd):
            self._unwatch(fd)

    def _hear_image(self, image: _Kept) -> None:
        try:
            said = channel.receive(image.link)
        except (OSError, ValueError):
            said = None
        if said is None:
            self._lose(image, "it was killed" if image.image else f"it ended while it imported{image.last_words()}")
            return
        match said[0]:
            case {"off": why}:
                self._lose(image, why)
            case {"kept": found}:
                why = image.complete(found)
                if why:
                    self._lose(image, why)
                for caller in image.awaited:
                    caller.say({"ready": True})
                image.awaited.clear()
                self._idle_since = time.monotonic()
            case {"job": pid, "number": number}:
                del image.waiting[number]
                image.jobs.add(pid)
                image.uses += 1
                image.used = time.monotonic()
                if image is not self._head:
                    self._last_cold = ""
            case {"cold": why, "number": number}:
                self._say_cold(image.waiting.pop(number), why, head=image is self._head)
            case {"gone": pid}:
                image.jobs.discard(pid)
                self._idle_since = time.monotonic()

    def _drop(self, image: _Kept, why: str = "it was ended") -> None:
        """End an image. Jobs that it has forked go on."""
        is_head = image is self._head
        if is_head:
            self._head = None
        elif image in self._images:
            self._images.remove(image)
        else:
            return
        for fd in (image.link.fileno(), *image.streams):
            self._unwatch(fd)
        for caller in image.waiting.values():
            self._say_cold(caller, why, head=is_head)
        for caller in image.awaited:
            caller.say({"off": why})
            self._end(why)
        if image.image is None and not is_head:
            self._last_cold = why
        image.kill()

    def _lose(self, image: _Kept, why: str) -> None:
        """It has ended by itself, or can't be used. If it was the last one, there is nothing to keep."""
        if image is self._head and image.image is None:
            self._failed_head = (image.wanted, why)
        self._drop(image, why)
        if not self._images:
            self._end(why)


class _Caller:
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lacked: fit.ColdStart | None = None  # what would have been used, if there had been one
        self.lacked_head: fit.ColdStart | None = None  # the same of the head

    def say(self, message: dict[str, Any]) -> None:
        """Answer, if it still listens."""
        with contextlib.suppress(OSError):
            channel.send(self.connection, message)


def _thread_of(caller: _Caller, request: dict[str, Any]) -> tuple[int, int]:
    """The calling process and its thread, as it is seen here. Raises ProcessLookupError."""
    pid, _ = channel.peer(caller.connection)
    if not pid:
        raise ProcessLookupError(3, "it is in another PID namespace")
    return pid, int(request["thread"])


class _Kept:
    """An image's process, and what is known of it."""

    def __init__(self, wanted: fit.ColdStart, extra: tuple[str, ...], request: dict[str, Any]) -> None:
        """Start it. `request`: what forkserver/forking.py is to do. Raises OSError."""
        self.wanted = wanted
        self.preload = wanted.preload
        self._extra = extra
        self.image: fit.Image | None = None  # until it has imported
        self.stale = ""
        self.printed = [b"", b""]
        self.jobs: set[int] = set()  # guards that it has forked
        self.asked = 0  # for how many forks
        self.waiting: dict[int, _Caller] = {}  # for a fork, by its number: the forks answer in any order
        self.awaited: list[_Caller] = []  # for the imports
        self.made = self.used = time.monotonic()
        # When it had imported all (time.monotonic_ns()), and how many seconds that took
        self.imported: tuple[int, float] | None = None
        self.uses = 0
        self._files: dict[str, loaded.Mark] = {}
        self.link, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null, writer = os.pipe()
        os.close(writer)
        outlets = rank.open_outlets([])
        self.streams = (outlets.stdout, outlets.stderr)
        ends = (null, outlets.rank_stdout, outlets.rank_stderr, far_end.fileno())
        before = os.sched_getaffinity(0)
        try:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, facts.cpus(wanted.affinity))
            self._pid = os.posix_spawn(
                wanted.python,
                [wanted.python, "-u", MAIN, "kept-image"],
                wanted.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(ends)],
                setsigmask=(),
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        except OSError:
            channel.close([self.link.detach(), *self.streams])
            raise
        finally:
            os.sched_setaffinity(0, before)
            channel.close([null, outlets.rank_stdout, outlets.rank_stderr, far_end.detach()])
        channel.send(self.link, request)

    def is_for(self, wanted: fit.ColdStart) -> bool:
        """Whether it is being made for this."""
        mine = self.wanted
        return (mine.python, mine.environ, mine.preload) == (wanted.python, wanted.environ, wanted.preload)

    def read(self, which: int, fd: int) -> bool:
        """Keep what the imports print; False at the end."""
        data = linux.read_now(fd, 1 << 16)
        if data is None:
            return True
        if self.image is None:
            self.printed[which] = (self.printed[which] + data)[: PRINTED_BYTES + 1]
        return bool(data)

    def last_words(self) -> str:
        """What it said last, for a message."""
        lines = (self.printed[1] or self.printed[0]).decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def complete(self, found: dict[str, Any]) -> str:
        """It has imported all. Returns why it can't be used, or ""."""
        for which, fd in enumerate(self.streams):
            self.read(which, fd)
        if any(len(text) > PRINTED_BYTES for text in self.printed):
            return "the imports print too much"
        self.imported = time.monotonic_ns(), time.monotonic() - self.made
        self._files = found["files"]
        wanted = self.wanted
        reads = frozenset(found["reads"])
        self.image = fit.Image(
            wanted.python, self.preload, self._extra, wanted.environ, wanted.affinity, wanted.stack, reads
        )
        return ""

    @property
    def terms(self) -> dict[str, Any]:
        """The image as JSON."""
        assert self.image is not None
        return {**self.image._asdict(), "reads": sorted(self.image.reads)}

    def look(self) -> None:
        """Find out whether files have changed that it has loaded."""
        self.stale = self.stale or loaded.changed(self._files)

    def why_not(self, wanted: fit.ColdStart) -> str:
        """Why it can't stand in for this cold start; "" if it can."""
        if self.image is None:
            return "it is still importing"
        if self.stale:
            return f"{self.stale} has changed"
        return fit.misfit(self.image, wanted)

    def described(self, now: float) -> dict[str, Any]:
        """For `launchpad warm --status`."""
        return {
            "pid": self._pid,
            "python": self.wanted.python,
            "preload": list(self.preload),
            "threads": self.wanted.environ.get("OMP_NUM_THREADS", ""),
            "state": "importing" if self.image is None else f"{self.stale} has changed" if self.stale else "ready",
            "age": round(now - self.made, 1),
            "memory": pressure.memory_of(self._pid),
            "uses": self.uses,
            "jobs": len(self.jobs),
        }

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            channel.close([self.link.detach(), *self.streams])


def main() -> None:
    """Be the keeper. Descriptor 1 gets one line: "ready", or why that can't be."""
    try:
        listener = channel.listen(dict(os.environ))
    except OSError as error:
        text = error.strerror or str(error)
        os.write(1, f"{error.filename or place.path(os.environ)}: {text}\n".encode(errors="replace"))
        sys.exit(1)
    keeper = Keeper()
    keeper.listen(listener, place.path(os.environ))
    os.write(1, b"ready\n")
    _stand_apart(listener)
    keeper.run()


def serve_one() -> None:
    """Be the keeper of one job: its head is at the other end of descriptor 0."""
    caller = socket.socket(fileno=os.dup(0))
    processes.close_inherited(keep=(caller.fileno(),))
    _stand_apart(caller)
    processes.become_subreaper()
    keeper = Keeper()
    keeper.serve(caller)
    keeper.run()
    # The first process of a container may not reap: what the image has forked is left to us.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _stand_apart(kept: socket.socket) -> None:
    """Hold on to nothing but this socket."""
    os.set_inheritable(kept.fileno(), False)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(_LINK + 1):  # an image's own descriptors must not have these numbers here
        if number != kept.fileno():
            os.dup2(null, number)
