"""Leave processes behind that survive their parent in every way: same group, own session, double fork, deaf to TERM; all hold stdout."""
import os, signal, subprocess, sys, time
def spawn(*flags):
    code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN); print('stray up', flush=True); time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session="session" in flags)
spawn()
spawn("session")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        spawn("session")
        time.sleep(600)
    os._exit(0)
os.wait()
print("leaving", flush=True)
if "wait" in sys.argv:
    time.sleep(600)
