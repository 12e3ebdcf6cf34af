"""Collects what a multi-node job needs to know about this node: interpreter, torch, folder, identity, addresses."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ... import linux
from ...protocol.commands import Probe, Start
from ...protocol.events import NodeFacts
from ...protocol.printable import printable
from ..part import AgentHub, AgentPart
from ..ranks.forkserver_client import bring_launchpad

# Interfaces of containers and virtual machines, which rarely lead to other machines.
_VIRTUAL = ("docker", "br-", "veth", "virbr", "lxc", "lxd", "cni", "flannel", "cali", "podman")

# Prints the versions of Python, torch and launchpad (empty for none) that a rank would import, without importing them,
# and whether it finds the module in its argument: below a package that has no file, or decides itself where its modules
# are, any.
_VERSIONS = """
import importlib.util, os, re, sys
from importlib.machinery import PathFinder
def has(name):
    whole, *parts = name.split(".")
    spec = importlib.util.find_spec(whole)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            break
        whole += "." + part
        try:
            if re.search("__path__|sys.modules|meta_path", open(spec.origin, errors="replace").read()):
                return True
            spec = PathFinder.find_spec(whole, spec.submodule_search_locations)
        except (OSError, TypeError, KeyError):
            return True
    return spec is not None
print(*sys.version_info[:3], sep=".")
for name, file in (("torch", "version.py"), ("launchpad", "_version.py")):
    spec = importlib.util.find_spec(name)
    path = os.path.join(os.path.dirname(spec.origin), file) if spec and spec.origin else os.devnull
    found = re.search("__version__ = [^0-9]*([^'\\"]*)", open(path).read())
    print(found[1] if found else "")
print(not sys.argv[1] or has(sys.argv[1]))
"""


Versions = tuple[str, str, str, bool]  # of Python, torch and launchpad, and whether there is the module


class HostProbe(AgentPart):
    """Answers the head's Probe, and brings launchpad to ranks that would not find it."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._brings_launchpad = False
        self._asked: tuple[Any, ...] = ()  # of the ranks' interpreter, and its answer
        self._answer: Versions | None = None

    def on(self, command: Probe) -> None:
        """Report the facts."""
        facts = probe(command, self._versions)
        # If the interpreter was not asked, it may have one of its own.
        self._brings_launchpad = self._answer is not None and not self._answer[2]
        self._hub.outbox.say(facts)

    def _versions(self, *asked: Any) -> Versions | None:
        """Start the interpreter, unless it is a head that asks the same as the one before it, which was lost."""
        if asked != self._asked or self._answer is None:
            self._asked, self._answer = asked, versions(*asked)
        return self._answer

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """Let ranks import the launchpad that was sent with the agent."""
        if self._brings_launchpad and start.hooks:
            bring_launchpad(environ)


def versions(command: Probe, cwd: str, module: str) -> Versions | None:
    """The versions of Python, torch and launchpad, from the ranks' interpreter, and whether it finds the module.

    None if it prints none.
    """
    import subprocess

    argv = [command.python or sys.executable, "-c", _VERSIONS, module]
    environ = _environ(command)
    try:
        output = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
            cwd=cwd,
            env=environ,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = output.decode(errors="replace").splitlines()[-4:]  # a wrapper may print something before
    version, torch, launchpad, there, *_ = [*map(printable, lines), "", "", "", ""]
    return (version, torch, launchpad, there == "True") if version else None


def probe(command: Probe, ask: Callable[[Probe, str, str], Versions | None] = versions) -> NodeFacts:
    """Answer the head's Probe. `ask` the interpreter, as `versions` does."""
    problems = [text for text in (_folder_problem(command.cwd),) if text]
    cwd = command.cwd if not problems else "/"
    version, torch, launchpad = ".".join(map(str, sys.version_info[:3])), "", ""
    kind, name = command.needs or ("", "")
    module = name if kind == "module" and not problems else ""
    if module.partition(".")[0] == "launchpad":  # it is brought with the agent
        module = ""
    if (command.torch or command.python or module) and (answer := ask(command, cwd, module)) is not None:
        version, torch, launchpad, there = answer
        if module and not there:
            problems.append(f"no such module: {module} for {command.python or sys.executable}")
    if not problems and (text := _program_problem(kind, name, command)):
        problems.append(text)
    return NodeFacts(
        time=time.monotonic_ns(),
        python=command.python or sys.executable,
        version=version,
        torch=torch if command.torch else "",
        launchpad=launchpad if command.torch else "",
        problems=problems,
        machine=machine(),
        addresses=addresses(),
    )


def _environ(command: Probe) -> dict[str, str]:
    """The ranks' variables."""
    return {name: value for name, value in {**os.environ, **command.environ}.items() if name}


def _folder_problem(cwd: str) -> str:
    try:
        os.listdir(os.path.join(cwd, ""))
    except PermissionError:
        return "" if os.access(cwd, os.X_OK) else f"no such folder: no permission to enter the folder {cwd}"
    except NotADirectoryError:
        return f"no such folder: {cwd} is not a folder"
    except OSError:
        return f"no such folder: there is no folder {cwd}"
    return ""


def _program_problem(kind: str, name: str, command: Probe) -> str:
    """Why there is nothing to run under this name; "" if there is."""
    path = os.path.join(command.cwd, name)
    if kind == "file":
        return "" if os.path.exists(path) else f"no such file: {path}"
    if kind != "program":
        return ""
    if "/" in name:
        return "" if os.access(path, os.X_OK) else f"no such program: {path} is not there, or not executable"
    import shutil

    beside = os.path.dirname(command.python or sys.executable)  # where --sync-env puts the environment's programs
    found = shutil.which(name, path=os.pathsep.join([_environ(command).get("PATH", os.defpath), beside]))
    return "" if found else f"no such program: {name} is not on PATH"


def machine() -> str:
    """The kernel's boot id and the process's namespaces; "" if /proc doesn't show all of them.

    Loopback addresses other than 127.0.0.1 count as separate machines: a user who names 127.0.0.2 and 127.0.0.3 as
    hosts wants several nodes on one machine.
    """
    try:
        parts = [linux.boot_id(), *map(linux.namespace, ("net", "pid", "mnt"))]
    except OSError:
        return ""
    server = _ssh_address()
    if server.startswith("127.") and server != "127.0.0.1":
        parts.append(server)
    return " ".join(parts)


def _ssh_address() -> str:
    """The address that the head's ssh connected to; "" without ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def addresses() -> list[tuple[str, str]]:
    """This machine's addresses with their interfaces: the one that ssh connected to first, loopback last."""
    found = _ipv4() + _ipv6()
    server = _ssh_address()
    return sorted(found, key=lambda one: (linux.is_loopback(one[0]), one[0] != server, one[1].startswith(_VIRTUAL)))


def _ipv4() -> list[tuple[str, str]]:
    found = linux.ipv4_addresses()
    server = _ssh_address()
    if server.startswith("127.") and server not in [address for address, _ in found]:
        found += [(server, interface) for address, interface in found if address == "127.0.0.1"]
    return found


def _ipv6() -> list[tuple[str, str]]:
    return [one for one in linux.ipv6_addresses() if "%" not in one[0]]
