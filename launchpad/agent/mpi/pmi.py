"""PMI-1, the line protocol with which MPICH and Intel MPI bootstrap: a rank's bytes in, answers and actions out.

Pure. The protocol is in MPICH's `src/pmi/maint/pmi-1.2.txt`; where that is silent, this follows Hydra's
`proxy/pmip_pmi.c`.
"""

from collections.abc import Iterable, Iterator

from ...named import NamedTuple

# Hydra's limits (PMI_MAXKVSLEN …). A rank asks for them before it puts anything.
MAXES = "kvsname_max=256 keylen_max=64 vallen_max=1024"

# The size of Hydra's buffer (HYD_TMPBUF_SIZE). Anything longer isn't a line.
LONGEST_LINE = 64 << 10

# The total size of a spawn request, which contains command lines.
LONGEST_SPAWN = 4 << 20

# How many keys a world may have. MPICH puts a few for each rank, and some for each communicator with a port.
MOST_KEYS = 4096
KEYS_PER_RANK = 64

# The last command of a rank that has passed MPI_Finalize.
_LAST = ("barrier_in", "finalize")


class Reply(NamedTuple):
    """Answer the rank with this line."""

    line: str


class Enter(NamedTuple):
    """The rank enters a barrier."""

    group: str  # the barrier's name, with its tag
    members: list[int] | None  # the MPI ranks in it; []: all; None: those on this node


class Ask(NamedTuple):
    """A request that only the head can answer."""

    lines: list[str]


class Fail(NamedTuple):
    """The rank aborts its world."""

    code: int
    reason: str


Action = Reply | Enter | Ask | Fail


class Keys:
    """The keys of a world that are known on this node."""

    def __init__(self, name: str, size: int, known: dict[str, str]) -> None:
        self.name = name  # the shared memory's name derives from it too
        self.size = size
        self.known = known
        self.new: dict[str, str] = {}  # put here since they were last sent to the other nodes

    def has_room(self, key: str) -> bool:
        """Whether this key can be stored too."""
        return key in self.known or len(self.known) < MOST_KEYS + KEYS_PER_RANK * self.size

    def put(self, key: str, value: str) -> None:
        """Store a key from a rank on this node."""
        self.known[key] = self.new[key] = value


class PmiConnection:
    """What one rank says, and is told."""

    def __init__(self, keys: Keys, program: int = 0) -> None:
        """`program`: its MPI_APPNUM."""
        self._keys = keys
        self._program = program
        self._buffer = b""
        self._spawn: list[str] = []  # the lines of an incomplete spawn
        self._spawn_size = 0  # their bytes
        self._programs = 0  # those that are complete
        self._in_spawn = False
        self._failed = False
        self._initialized = False  # and not finalized
        self._last = ""  # its last command
        self._barriers = 0  # barriers of the whole world that it has entered

    @property
    def has_spoken(self) -> bool:
        """Whether the rank has sent any command."""
        return bool(self._last)

    def is_inside(self, others: "Iterable[PmiConnection]") -> bool:
        """Whether the rank is between MPI_Init and MPI_Finalize; `others` are the connections of its world.

        MPICH sends finalize in a C atexit handler (MPIR_pmi_finalize_on_exit of src/util/mpir_pmi.c), so a rank that
        leaves through _exit doesn't send it. In MPI_Finalize itself it sends only a barrier. MPI_Init has barriers too,
        but after those one rank per node goes on to ask for keys.
        """
        if not self._initialized:
            return False
        return not all(one._last in _LAST and one._barriers == self._barriers for one in (self, *others))

    def feed(self, data: bytes) -> Iterator[Action]:
        """The actions for these bytes, which may end in the middle of a line; none after its first Fail."""
        for action in () if self._failed else self._actions(data):
            yield action
            if isinstance(action, Fail):
                self._failed, self._buffer = True, b""
                return

    def _actions(self, data: bytes) -> Iterator[Action]:
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
            yield from self._spawn_line(line)
            return
        fields = parse(line)
        command = fields.get("cmd", "")
        self._last = command
        match command:
            case "init":
                yield self._init(fields)
            case "get_maxes":
                yield Reply(f"cmd=maxes rc=0 {MAXES}")
            case "get_appnum":
                yield Reply(f"cmd=appnum rc=0 appnum={self._program}")
            case "get_my_kvsname":
                yield Reply(f"cmd=my_kvsname rc=0 kvsname={self._keys.name}")
            case "get_universe_size":
                yield Reply(f"cmd=universe_size rc=0 size={self._keys.size}")
            case "put":
                yield self._put(fields)
            case "get":
                value = self._keys.known.get(fields.get("key", ""))
                yield Reply("cmd=get_result rc=1 msg=key_not_found" if value is None else _found(value))
            case "barrier_in":
                self._barriers += fields.get("group", "WORLD").startswith("WORLD")
                yield self._barrier(fields.get("group", "WORLD"))
            case "publish_name" | "lookup_name" | "unpublish_name":
                yield Ask([line])
            case "finalize":
                self._initialized = False
                yield Reply("cmd=finalize_ack rc=0")
            case "abort":
                yield _abort(fields)
            case _:
                yield Fail(1, f"sent an unknown PMI-1 command: {line:.80}")

    def _init(self, fields: dict[str, str]) -> Reply:
        if fields.get("pmi_version") != "1":
            return Reply("cmd=response_to_init rc=-1 pmi_version=1 pmi_subversion=2 msg=only_PMI-1_is_supported")
        self._initialized = True
        # 1.2 has barriers of a subset of ranks, which MPICH uses if we announce it (PMII_init of src/pmi/src/pmi_v1.c).
        return Reply("cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2")

    def _put(self, fields: dict[str, str]) -> Reply:
        key, value = fields.get("key", ""), fields.get("value", "")
        if key.startswith("PMI_"):
            return Reply("cmd=put_result rc=1 msg=Keys_with_PMI__prefix_are_reserved")
        if not key or len(key) > 64 or len(value) > 1024:
            return Reply("cmd=put_result rc=1 msg=key_or_value_too_long")
        if not self._keys.has_room(key):
            return Reply("cmd=put_result rc=1 msg=too_many_keys")
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
            return Fail(1, f"entered a barrier of ranks that don't exist: {group:.80}")
        return Enter(group, sorted(map(int, set(members))))

    def _spawn_line(self, line: str) -> Iterator[Action]:
        """`mcmd=spawn`, a line per attribute, `endcmd`; all of it totspawns times for MPI_Comm_spawn_multiple."""
        self._spawn.append(line)
        self._spawn_size += len(line) + 1
        self._in_spawn = line != "endcmd"
        self._programs += not self._in_spawn
        if self._spawn_size > LONGEST_SPAWN:
            self._end_spawn()
            yield _too_long()
        elif not self._in_spawn and self._programs >= _number(self._spawn, "totspawns"):
            yield Ask(self._end_spawn())

    def _end_spawn(self) -> list[str]:
        lines = self._spawn
        self._spawn, self._spawn_size, self._programs, self._in_spawn = [], 0, 0, False
        return lines


def parse(line: str) -> dict[str, str]:
    """Parse `cmd=NAME key=value …`; a word without = continues the previous value (abort's message)."""
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
    """The answer to the ranks at a barrier when it is complete."""
    tag = group.partition(":")[2]
    return f"cmd=barrier_out rc=0{f' tag={tag}' if tag else ''}"


def _found(value: str) -> str:
    return f"cmd=get_result rc=0 value={value}"


def _abort(fields: dict[str, str]) -> Fail:
    text = fields.get("exitcode", "1")
    code = int(text) if text.lstrip("-").isdecimal() else 1
    message = fields.get("message", "").strip()
    if message == "abort":  # MPICH has printed its own message on stderr
        message = ""
    # An aborted job has failed, even if it was aborted with code 0.
    return Fail(code & 0xFF or 1, f"called MPI_Abort({code})" + (f": {message}" if message else ""))


def _too_long() -> Fail:
    return Fail(1, f"sent a line of more than {LONGEST_LINE} bytes on its PMI connection")


def _number(lines: list[str], name: str) -> int:
    values = [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]
    return int(values[0]) if values and values[0].isdecimal() else 1
