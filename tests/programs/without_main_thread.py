"""Rank 0's main thread exits, and another one works on; rank 1 then exits with 5."""
import ctypes
import os
import signal
import sys
import threading
import time

SYS_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]  # it ends one thread, as pthread_exit does


def work():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    open("alone", "w").close()
    match sys.argv[1]:
        case "waits":
            signal.sigwait([signal.SIGUSR1])
        case "exits":
            sys.stdin.read()
            os._exit(0)
        case "is killed":
            sys.stdin.read()
            os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("RANK") != "1":
    threading.Thread(target=work).start()
    ctypes.CDLL(None).syscall(ctypes.c_long(SYS_EXIT), 0)
while not os.path.exists("alone"):
    time.sleep(0.01)
sys.exit(5)
