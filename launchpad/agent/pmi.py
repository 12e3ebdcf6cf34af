"""PMI-1, the line protocol by which MPICH and Intel MPI meet: bytes of one rank in, answers and actions out.

Pure. `src/pmi/maint/pmi-1.2.txt` of MPICH is the protocol; where it leaves something open this does as Hydra's
`proxy/pmip_pmi.c`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# As Hydra says them (PMI_MAXKVSLEN …); a rank asks before it puts anything.
MAXES = "kvsname_max=256 keylen_max=64 vallen_max=1024"

# Of Hydra's buffer (HYD_TMPBUF_SIZE): what is longer, and has not ended, is no line.
LONGEST_LINE = 64 << 10

# What a spawn may say in all: command lines.
LONGEST_SPAWN = 4 << 20

# What a rank has said last when it is through MPI_Finalize.
_LAST = ("barrier_in", "finalize")


class Reply(NamedTuple):
    """A line for the rank."""

    line: str


class Enter(NamedTuple):
    """The rank is at a barrier: of these MPI ranks; none: of all; None: of those on its node."""

    group: str  # the barrier's name, with its tag
    members: list[int] | None


class Ask(NamedTuple):
    """Only the head can answer this."""

    lines: list[str]


class Fail(NamedTuple):
    """The rank ends its world."""

    code: int
    reason: str


Action = Reply | Enter | Ask | Fail


class Keys:
    """A world's keys, as far as they are known on this node."""

    def __init__(self, name: str, size: int, known: dict[str, str]) -> None:
        self.name = name  # also of its shared memory
        self.size = size
        self.known = known
        self.new: dict[str, str] = {}  # put here since they were last told to the other nodes

    def put(self, key: str, value: str) -> None:
        """A rank here has put this."""
        self.known[key] = self.new[key] = value


class Talk:
    """What one rank says, from its first byte on."""

    def __init__(self, keys: Keys, program: int = 0) -> None:
        """`program`: its MPI_APPNUM."""
        self._keys = keys
        self._program = program
        self._buffer = b""
        self._spawn: list[str] = []  # lines of one that is not complete
        self._in_spawn = False
        self._initialized = False  # and not finalized
        self._last = ""  # command
        self._barriers = 0  # of the whole world

    @property
    def has_spoken(self) -> bool:
        """Whether anything of MPI was there."""
        return bool(self._last)

    def is_inside(self, others: Iterable[Talk]) -> bool:
        """Whether it is between MPI_Init and MPI_Finalize; `others` are those of its world.

        MPICH says finalize in a C atexit handler (MPIR_pmi_finalize_on_exit of src/util/mpir_pmi.c): who leaves by
        _exit does not say it. What it says in MPI_Finalize itself is a barrier. There are some in MPI_Init, too, and
        after them only one rank of a node goes on to ask for keys.
        """
        if not self._initialized:
            return False
        return not all(one._last in _LAST and one._barriers == self._barriers for one in (self, *others))

    def feed(self, data: bytes) -> Iterator[Action]:
        """What to do about these bytes, which may end anywhere."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if len(line) <= LONGEST_LINE:
                yield from self._line(line.decode(errors="replace").rstrip("\r"))
            else:
                yield _too_long()
        if len(self._buffer) > LONGEST_LINE:
            self._buffer = b""
            yield _too_long()

    def _line(self, line: str) -> Iterator[Action]:
        if self._in_spawn or line == "mcmd=spawn":
            yield from self._spawning(line)
            return
        said = parse(line)
        command = said.get("cmd", "")
        self._last = command
        match command:
            case "init":
                yield self._init(said)
            case "get_maxes":
                yield Reply(f"cmd=maxes rc=0 {MAXES}")
            case "get_appnum":
                yield Reply(f"cmd=appnum rc=0 appnum={self._program}")
            case "get_my_kvsname":
                yield Reply(f"cmd=my_kvsname rc=0 kvsname={self._keys.name}")
            case "get_universe_size":
                yield Reply(f"cmd=universe_size rc=0 size={self._keys.size}")
            case "put":
                yield self._put(said)
            case "get":
                value = self._keys.known.get(said.get("key", ""))
                yield Reply("cmd=get_result rc=1 msg=key_not_found" if value is None else _found(value))
            case "barrier_in":
                self._barriers += said.get("group", "WORLD").startswith("WORLD")
                yield self._barrier(said.get("group", "WORLD"))
            case "publish_name" | "lookup_name" | "unpublish_name":
                yield Ask([line])
            case "finalize":
                self._initialized = False
                yield Reply("cmd=finalize_ack rc=0")
            case "abort":
                yield _abort(said)
            case _:
                yield Fail(1, f"said what is not PMI-1: {line:.80}")

    def _init(self, said: dict[str, str]) -> Reply:
        if said.get("pmi_version") != "1":
            return Reply("cmd=response_to_init rc=-1 pmi_version=1 pmi_subversion=2 msg=only_PMI-1_is_spoken")
        self._initialized = True
        # 1.2 has barriers of some ranks only, which MPICH uses if it is told so (PMII_init of src/pmi/src/pmi_v1.c).
        return Reply("cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2")

    def _put(self, said: dict[str, str]) -> Reply:
        key, value = said.get("key", ""), said.get("value", "")
        if key.startswith("PMI_"):
            return Reply("cmd=put_result rc=1 msg=Keys_with_PMI__prefix_are_reserved")
        if not key or len(key) > 64 or len(value) > 1024:
            return Reply("cmd=put_result rc=1 msg=key_or_value_too_long")
        self._keys.put(key, value)
        return Reply("cmd=put_result rc=0")

    def _barrier(self, group: str) -> Action:
        names = group.partition(":")[0]
        if names == "WORLD":
            return Enter(group, [])
        if names == "NODE":
            return Enter(group, None)
        members = names.split(",")
        if not all(member.isdecimal() and int(member) < self._keys.size for member in members):
            return Fail(1, f"is at a barrier of ranks that there are not: {group:.80}")
        return Enter(group, sorted(map(int, set(members))))

    def _spawning(self, line: str) -> Iterator[Action]:
        """`mcmd=spawn`, a line for each attribute, `endcmd`; for MPI_Comm_spawn_multiple so often as totspawns says."""
        self._spawn.append(line)
        self._in_spawn = line != "endcmd"
        if sum(map(len, self._spawn)) > LONGEST_SPAWN:
            self._spawn, self._in_spawn = [], False
            yield _too_long()
        elif not self._in_spawn and self._spawn.count("endcmd") >= _number(self._spawn, "totspawns"):
            lines, self._spawn = self._spawn, []
            yield Ask(lines)


def parse(line: str) -> dict[str, str]:
    """`cmd=NAME key=value …`; a word without = belongs to the value before it (abort's message)."""
    found: dict[str, str] = {}
    last = ""
    for word in line.split(" "):
        name, equals, value = word.partition("=")
        if equals:
            last = name
            found[name] = value
        elif last and word:
            found[last] += " " + word
    return found


def barrier_out(group: str) -> str:
    """The answer to all who were at a barrier."""
    tag = group.partition(":")[2]
    return f"cmd=barrier_out rc=0{f' tag={tag}' if tag else ''}"


def _found(value: str) -> str:
    return f"cmd=get_result rc=0 value={value}"


def _abort(said: dict[str, str]) -> Fail:
    text = said.get("exitcode", "1")
    code = int(text) if text.lstrip("-").isdecimal() else 1
    message = said.get("message", "").strip()
    if message == "abort":  # MPICH has shown its own words on stderr
        message = ""
    # An aborted job has not succeeded, whatever it was aborted with.
    return Fail(code & 0xFF or 1, f"called MPI_Abort({code})" + (f": {message}" if message else ""))


def _too_long() -> Fail:
    return Fail(1, f"said a line of more than {LONGEST_LINE} bytes on its PMI connection")


def _number(lines: list[str], name: str) -> int:
    values = [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]
    return int(values[0]) if values and values[0].isdecimal() else 1
