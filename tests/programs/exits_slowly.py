"""Rank 0 exits with 7 and closes its connection, but can't be reaped before it has been asked to stop."""
import ctypes
import os
import signal
import socket
import sys
import time

from launchpad import linux

PTRACE_SEIZE = 0x4206  # linux/ptrace.h
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h; Ubuntu's kernels ask for it

if os.environ["RANK"] == "0":
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, *(ctypes.c_ulong(0),) * 3)
    ours, theirs = os.pipe()
    if not os.fork():  # to whoever traces a process its exit is told first; SIGTERM ends us, and with us the trace
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        linux.ptrace(PTRACE_SEIZE, os.getppid())
        os.close(theirs)
        signal.pause()
    os.close(theirs)
    os.read(ours, 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("new"), listener.listen(), os.rename("new", "service")
        connection, _ = listener.accept()
        connection.recv(1)
        os._exit(7)
while not os.path.exists("service"):
    time.sleep(0.01)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("service")
    while True:
        connection.sendall(bytes(1000))
