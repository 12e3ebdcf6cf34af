"""Prints, as JSON, what a program can find of others in its process: modules, hooks, handlers, threads, descriptors …

Its arguments are modules to import before it looks.
"""
import sys
modules, stack, frame = sorted(sys.modules), [], sys._getframe()
while frame:
    stack.append(frame.f_code.co_filename)
    frame = frame.f_back
import atexit, gc, os
callbacks, frozen = atexit._ncallbacks(), gc.get_freeze_count()
for name in sys.argv[1:]:
    __import__(name)
import ctypes, faulthandler, json, resource, signal, threading, warnings


def named(thing):
    if not hasattr(thing, "__qualname__"):  # an instance, or one of signal.Handlers
        return f"{named(type(thing))} {getattr(thing, 'name', '')}".rstrip()
    return f"{thing.__module__}.{thing.__qualname__}"


def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]
    except OSError:  # the listing's own
        return None


class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


alternate, libc = Stack(), ctypes.CDLL(None)
libc.sigaltstack(None, ctypes.byref(alternate))
status = dict(map(str.strip, line.split(":", 1)) for line in open("/proc/self/status"))
# 32 and 33 are the C library's, which leaves them ignored in what it starts by posix_spawn, as we start the agent.
masks = {name: int(status[name], 16) & ~(3 << 31) for name in ("SigCgt", "SigIgn", "SigBlk")}
patched = {}
if "torch.distributed.rendezvous" in sys.modules:
    c10d, rendezvous = (sys.modules[f"torch.distributed.{name}"] for name in ("distributed_c10d", "rendezvous"))
    patched = {name: named(getattr(c10d, name)) for name in ("_check_valid_timeout", "_new_process_group_helper")}
    patched["_create_c10d_store"] = named(rendezvous._create_c10d_store)
print(json.dumps({
    "modules": modules,
    "stack": stack,
    "atexit": callbacks,
    "frozen": frozen > 0,
    "gc": [gc.isenabled(), gc.get_threshold(), list(map(named, gc.callbacks))],
    "meta_path": list(map(named, sys.meta_path)),
    "path_hooks": list(map(named, sys.path_hooks)),
    "path": sys.path,
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "flags": repr(sys.flags),
    "executable": [sys.executable, sys.prefix, sys.exec_prefix],
    "hooks": [named(getattr(sys, name)) for name in ("excepthook", "displayhook", "breakpointhook", "unraisablehook")],
    "traced": [sys.gettrace(), sys.getprofile()],
    "thread_hook": [named(threading.excepthook), threading.excepthook is threading.__excepthook__],
    "main": {name: repr(value) for name, value in vars(sys.modules["__main__"]).items() if name[:2] == "__" and name != "__builtins__"},
    "streams": [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "handlers": {int(signum): named(signal.getsignal(signum)) for signum in signal.valid_signals()},
    "masks": {name: [n for n in range(1, 65) if mask >> (n - 1) & 1] for name, mask in masks.items()},
    "alternate_stack": not alternate.flags & 2,
    "faulthandler": faulthandler.is_enabled(),
    "threads": [int(status["Threads"]), [thread.name for thread in threading.enumerate()]],
    "descriptors": {fd: link(fd) for fd in sorted(map(int, os.listdir("/proc/self/fd"))) if link(fd)},
    "environ": dict(os.environ),
    "shown": open("/proc/self/cmdline").read().split("\0"),
    "name": status["Name"],
    "process": [os.getcwd(), os.umask(0o77), [resource.getrlimit(n) for n in range(16)], sorted(os.sched_getaffinity(0))],
    "session": os.getsid(0) == os.getpgrp() == os.getpid(),
    "warnings": list(map(repr, warnings.filters)),
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
    "patched": patched,
}))
