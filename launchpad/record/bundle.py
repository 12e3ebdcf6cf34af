"""Bundles: a job's record in one file, with secrets masked. They are read like the records in the job store."""

from __future__ import annotations

import json
import os
import re
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launchpad.errors import UsageError
from launchpad.job.masking import TextMask
from launchpad.record import files, job_store, replay

ENDINGS = (".tar.gz", ".tgz")

# The parts of a record (record/journal.py). The console of a detached job is left out: it repeats the output.
_PARTS = re.compile(
    r"(events|samples)\.jsonl|(job|verdict)\.json|stacks_\d+\.txt|"
    r"attempt_\d+/(filtered_std(out|err)\.log|\d+/(std(out|err)(\.\d+)?\.log|error\.json))"
)

# What a bundle may hold when it is unpacked. A record on this machine has at most so many bytes, too.
MOST_BYTES = job_store.MOST_BYTES
MOST_PARTS = 100_000

# A line that never ends is masked in pieces of this size, in bytes.
_LONGEST_LINE = 1 << 20


def copy(folder: str, to: str, mask: TextMask) -> None:
    """Copy the record in `folder` into the new folder `to`, masked. Raises OSError.

    Lengths in the output stay as they are, so that events.jsonl still says where each piece is.
    """
    os.mkdir(to, 0o700)
    for part in sorted(_parts(folder)):
        target = os.path.join(to, part)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        masked = _masked_json if part.endswith((".json", ".jsonl")) else _masked_text
        with files.open_file(folder, part) as source, open(target, "xb") as copied:
            while line := source.readline(_LONGEST_LINE):
                copied.write(masked(line, mask))


def _parts(folder: str) -> Iterator[str]:
    """The paths of its regular files that belong to the record, within `folder`."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in names:
            path = os.path.join(place, name)
            part = os.path.relpath(path, folder)
            if _PARTS.fullmatch(part) and stat.S_ISREG(os.lstat(path).st_mode):
                yield part


def _masked_text(line: bytes, mask: TextMask) -> bytes:
    return mask(line.decode("latin-1")).encode("latin-1")


def _masked_json(line: bytes, mask: TextMask) -> bytes:
    try:
        return json.dumps(_masked_value(json.loads(line), mask)).encode() + b"\n"
    except (ValueError, RecursionError):  # part of a longer text, or cut off
        return _masked_text(line, mask)


def _masked_value(value: Any, mask: TextMask) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list):
        return [_masked_value(one, mask) for one in value]
    if isinstance(value, dict):
        return {name: _masked_value(one, mask) for name, one in value.items()}
    return value


def write(folder: str, path: str) -> None:
    """Pack `folder` into the file at `path`, which is private, and whole as soon as it is there. Raises OSError."""
    made, partial = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), prefix=".launchpad-bundle-")
    try:
        with os.fdopen(made, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
            archive.add(folder, os.path.basename(folder), filter=_anonymous)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


@contextmanager
def opened(job: str | None, environ: Mapping[str, str]) -> Iterator[str]:
    """The folder of a recorded job, or of a bundle, which is unpacked until the end of the block. Raises UsageError."""
    if job is None or not job.endswith(ENDINGS):
        yield replay.find_job(job, environ)
        return
    with tempfile.TemporaryDirectory(prefix="launchpad-bundle-") as scratch:
        yield _unpack(job, scratch)


def shown(job: str | None, folder: str) -> str:
    """Where the record is, for people: the bundle, or the folder that `opened` gave."""
    return job if job is not None and job.endswith(ENDINGS) else os.path.realpath(folder)


def _unpack(path: str, into: str) -> str:
    """Unpack the parts of a record, and nothing else, into a folder below `into`. Returns that folder."""
    try:
        with tarfile.open(path, "r|gz") as archive:
            name = _extract(archive, path, into)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or 'not a bundle'}; {_WANTED}") from None
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: not a whole bundle ({error}); {_WANTED}") from None
    if not name:
        raise UsageError(f"{path}: no record of a job is in it; {_WANTED}")
    return os.path.join(into, name)


_WANTED = "name a file that `launchpad bundle` wrote"


def _extract(archive: tarfile.TarFile, path: str, into: str) -> str:
    """Returns the name of the job's folder; empty if there is none."""
    name, size, parts = "", 0, 0
    for entry in archive:
        size, parts = size + entry.size, parts + 1
        if size > MOST_BYTES or parts > MOST_PARTS:
            raise UsageError(f"{path}: it holds more than {MOST_BYTES >> 30} GiB or {MOST_PARTS} files; {_WANTED}")
        first, _, part = entry.name.partition("/")
        source = archive.extractfile(entry) if entry.isreg() and _PARTS.fullmatch(part) else None
        if source is None or not re.fullmatch(r"\w[\w.-]*", first) or name not in ("", first):
            continue
        target = os.path.join(into, first, part)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        with open(target, "xb") as file:
            while block := source.read(_LONGEST_LINE):
                file.write(block)
        name = first
    return name if name and os.path.exists(os.path.join(into, name, job_store.EVENTS)) else ""
