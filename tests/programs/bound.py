"""Print where this rank may run, the memory that it prefers, the same of a child, and OMP_NUM_THREADS, as JSON."""
import ctypes, json, os, subprocess, sys
from launchpad.protocol.cpulist import written
from launchpad.rank.affinity import _CALLS


def where():
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    number = ctypes.c_long(_CALLS[os.uname().machine][0])
    ctypes.CDLL(None).syscall(number, ctypes.byref(mode), ctypes.byref(nodes), ctypes.c_ulong(1024), None, 0)
    preferred = [bit for bit in range(1024) if nodes[bit // 64] >> bit % 64 & 1]
    return [written(os.sched_getaffinity(0)), written(preferred), mode.value]


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        print(json.dumps(where()))
        sys.exit()
    child = subprocess.run([sys.executable, __file__, "child"], stdout=subprocess.PIPE, check=True).stdout
    started = "executed" if "_launchpad.rank.become" not in sys.modules else "forked"
    shown = {"where": where(), "child": json.loads(child), "threads": os.environ["OMP_NUM_THREADS"], "started": started}
    print(json.dumps(shown), flush=True)
    if "once" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        sys.exit(7)
