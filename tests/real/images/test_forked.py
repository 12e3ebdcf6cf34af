"""A forked rank can't tell: each program runs forked from a forkserver and executed, and prints the same."""

from __future__ import annotations

import py_compile
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.needs import needs_torch

HERE = "import os, sys\n"

# Each prints what a program can find out about itself; what differs from run to run is not printed.
PROGRAMS = {
    "main": HERE + "m = sys.modules['__main__']\n"
    "print(__name__, __file__, __package__, __spec__, __doc__, type(__loader__).__name__, __loader__.name, __builtins__)\n"
    "print(sorted(vars(m)), vars(m) is globals())\n",
    "argv": HERE + "print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable)\n",
    "sibling": HERE + "import beside\nprint(beside.__file__, beside.value)\n",
    "environ": HERE + "import subprocess\n"
    "own = {k: v for k, v in os.environ.items() if k.startswith(('RANK', 'WORLD', 'PYTHON', 'OMP', 'LC_', 'TMP'))}\n"
    "print(own, subprocess.run(['sh', '-c', 'echo $RANK $OMP_NUM_THREADS $WORLD_SIZE'], capture_output=True).stdout)\n",
    "process": HERE + "import resource, signal\n"
    "print(os.getcwd(), os.umask(0o22), os.getpgrp() == os.getpid() == os.getsid(0))\n"
    "print([resource.getrlimit(n) for n in range(16)], os.sched_getaffinity(0), os.nice(0))\n"
    "print({s: signal.getsignal(s) for s in signal.valid_signals()}, signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
    "print([fd for fd in range(200) if os.path.exists(f'/proc/self/fd/{fd}')])\n"
    "status = open('/proc/self/status').read().splitlines()\n"
    "print([s for s in status if s.startswith(('Name', 'SigIgn', 'SigCgt', 'SigBlk', 'Threads', 'NoNewPrivs'))])\n",
    "shown": HERE + "print(open('/proc/self/cmdline', 'rb').read().split(b'\\0'))\n"
    "shown = open('/proc/self/environ', 'rb').read().split(b'\\0')\n"
    "print(b'RANK=' + os.environb[b'RANK'] in shown, os.readlink('/proc/self/exe'))\n"
    "import subprocess\nprint(subprocess.run(['ps', '-o', 'args=', str(os.getpid())], capture_output=True).stdout)\n",
    "streams": HERE + "for s in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__):\n"
    "    print(s.name, s.mode, s.encoding, s.errors, s.newlines, s.line_buffering, s.write_through, s.isatty())\n"
    "    print(s.seekable(), s.buffer, s.closed, s.fileno())\n"
    "print(sys.stdin is sys.__stdin__, repr(sys.stdin.read()))\n",
    "pickled": HERE + "import pickle\ndef f(x): return x + 1\nclass C:\n    pass\n"
    "print(pickle.loads(pickle.dumps(f))(1), f.__module__, C.__qualname__, pickle.dumps(f))\n",
    "spawned": HERE + "import multiprocessing as mp\ndef f(x): return x * 2, __name__, sys.argv\n"
    "if __name__ == '__main__':\n"
    "    for method in ('spawn', 'forkserver', 'fork'):\n"
    "        with mp.get_context(method).Pool(2) as pool:\n"
    "            print(method, pool.map(f, [1, 2]))\n"
    "            pool.close(); pool.join()\n",
    "spawned_returns": HERE + "import multiprocessing as mp\nclass C:\n    value = 3\ndef f(x): return C()\n"
    "if __name__ == '__main__':\n"
    "    print(sys.modules['__mp_main__'] is sys.modules['__main__'])\n"
    "    with mp.get_context('spawn').Pool(1) as pool:\n"
    "        print([type(one) is C and one.value for one in pool.map_async(f, [1]).get(30)])\n"
    "        pool.close(); pool.join()\n",
    "random": "import random, os\nprint(len({random.random() for _ in range(3)}))\n",
    "forks": "import os\npid = os.fork()\nif pid == 0:\n    print('child')\nelse:\n    os.waitpid(pid, 0); print('parent')\n",
    "executes": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])\n",
    "future": "from __future__ import annotations\ndef f(x: Unknown): pass\nprint(f.__annotations__)\n",
    "annotated": "x: int = 1\nprint(__annotations__)\n",
    "faulthandler": "import faulthandler, sys\nprint(faulthandler.is_enabled())\n",
    "logs": "import logging\nlogging.warning('w')\nlogging.basicConfig()\nlogging.getLogger('a').error('e')\n",
    "warns": "import warnings\nwarnings.warn('careful')\n",
    "gc": "import gc\nprint(gc.isenabled(), gc.get_threshold())\n",
    "inspects": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getmodule(f).__name__)\n",
    "c_stdio": "import ctypes\nctypes.CDLL(None).printf(b'from C\\n')\n",
    "asyncio_": "import asyncio\nasync def f():\n    await asyncio.sleep(0); print('done')\nasyncio.run(f())\n",
    "tempfiles": "import tempfile, os\nd = tempfile.TemporaryDirectory()\nprint(os.path.isdir(d.name))\n",
}

# These end in different ways.
ENDS = {
    "atexit": HERE + "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')\n"
    "atexit.register(lambda: 1 / 0)\nprint('end')\n",
    "atexit_after_error": HERE + "import atexit\natexit.register(print, 'left')\nraise OSError(2, 'gone')\n",
    "thread_at_exit": HERE + "import threading\ndone = threading.Event()\n"
    "def late():\n    done.wait(); threading.main_thread().join(); print('late')\n"
    "threading.Thread(target=late).start()\nprint('main ends')\ndone.set()\n",
    "daemon_thread": HERE + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "print(threading.active_count(), threading.main_thread() is threading.current_thread())\n",
    "thread_raises": HERE + "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='worker')\n"
    "t.start(); t.join(); print('on')\n",
    "unflushed": HERE + "f = open('unflushed.' + sys.argv[1], 'w')\nf.write('all of it')\ndef g():\n    return f\n",
    "unflushed_in_module": HERE + "import json\ndel sys.modules['json']\nimport json, keeps\n"
    "keeps.keep('kept.' + sys.argv[1])\ndel sys.modules['json']\nimport json\n",
    "del_": HERE + "class D:\n    def __init__(self, name): self.name = name\n"
    "    def __del__(self): print('del', self.name, sys is not None, __name__)\n"
    "a = D('a')\nb = [D('b')]\nb.append(b)\ndef f(x=D('c')): return a\n_under = D('under')\n",
    "del_after_error": HERE + "class D:\n    def __del__(self): print('del')\ndef f():\n    d = D()\n    1 / 0\nf()\n",
    "exit_none": "import sys; sys.exit()",
    "exit_0": "import sys; sys.exit(0)",
    "exit_7": "import sys; sys.exit(7)",
    "exit_256": "import sys; sys.exit(256)",
    "exit_minus_1": "import sys; sys.exit(-1)",
    "exit_true": "import sys; sys.exit(True)",
    "exit_huge": "import sys; sys.exit(2 ** 70)",
    "exit_text": "import sys; sys.exit('that is why')",
    "exit_text_closed": "import sys; sys.stderr.close(); sys.exit('that is why')",
    "exit_text_none": "import sys; sys.stderr = None; sys.exit('that is why')",
    "exit_object": "import sys; sys.exit([1, 2])",
    "exit_in_thread": "import sys, threading\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()\n",
    "exit_builtin": "print('x'); exit(4)",
    "os_exit": "import os; print('x', flush=True); os._exit(5)",
    "raise_system_exit": "raise SystemExit(6)",
    "abort": "import os; os.abort()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not here')",
    "closed_stdout": "import sys\nprint('x')\nsys.stdout.close()\n",
    "raises": "def f():\n    raise ValueError('bad')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError('k') from e\n",
    "raises_group": "raise ExceptionGroup('g', [ValueError(1), TypeError('t')])",
    "raises_own": "class E(Exception):\n    def __str__(self): return 'own text'\nraise E\n",
    "recursion": "def f(): return f()\ntry:\n    f()\nexcept RecursionError as e:\n    print(e)\n",
    "syntax": "print('never')\ndef f(:\n",
    "bytes_source": "# -*- coding: latin-1 -*-\nprint('caf\\u00e9')\n",
    "excepthook": "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t, v, tb.tb_lineno)\n1 / 0\n",
    "excepthook_raises": "import sys\ndef hook(t, v, tb):\n    raise OSError('in hook')\nsys.excepthook = hook\n1 / 0\n",
    # A step of clearing up that blocks gives other threads a turn, if they may still have one.
    "daemon_thread_computes": "import sys, threading\nf = open('unflushed', 'w')\nf.write('all of it')\n"
    "def work():\n    while True: pass\nsys.keep = sys.modules[__name__]\n"
    "threading.Thread(target=work, daemon=True).start()\n",
    "daemon_thread_uses_modules": HERE + "import threading, time, beside\nclass D:\n"
    "    def __del__(self, sleep=time.sleep): sleep(0.1); print('del')\nd = D()\nsys.keep = sys.modules[__name__]\n"
    "def work():\n    while True: time.sleep(beside.value / 10000)\n"
    "threading.Thread(target=work, daemon=True).start()\nprint('end')\n",
}

# The same for torch, and in how many ranks.
TORCH_PROGRAMS = {
    "group": (
        2,
        HERE + "import numpy, torch, torch.distributed as dist\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "print(torch.manual_seed(3).initial_seed(), torch.rand(2))\n"
        "numpy.random.seed(1); print(numpy.random.rand())\n"
        "print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized())\n"
        "print(torch.get_num_threads(), torch.get_num_interop_threads(), os.environ['OMP_NUM_THREADS'])\n"
        "torch.set_num_threads(2); x = torch.ones(400, 400); print((x @ x).sum(), torch.get_num_threads())\n"
        "dist.init_process_group('gloo')\n"
        "for round in range(2):\n    x = torch.ones(2) * (dist.get_rank() + 1); dist.all_reduce(x); print(x)\n"
        "    box = [None] * 2; dist.all_gather_object(box, dist.get_rank()); print(box)\n"
        "dist.barrier(); dist.destroy_process_group()\n"
        "@record\ndef main():\n    raise ValueError('seen')\nmain()\n",
    ),
    "loader": (
        1,
        "import torch, torch.utils.data as d\n"
        "def main():\n"
        "    for method in ('fork', 'spawn', 'forkserver'):\n"
        "        data = d.TensorDataset(torch.arange(8))\n"
        "        loader = d.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method)\n"
        "        print(method, [batch[0].tolist() for batch in loader])\n"
        "if __name__ == '__main__': main()\n",
    ),
    "ddp": (
        2,
        # Gloo's thread outlives the group of a DDP. Where it drops its last work, which has Python objects, while an
        # interpreter before 3.14 finalizes, plain Python ends in std::terminate (torch 2.13); a forked rank does not.
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))\n"
        "net(torch.ones(4, 3) * (dist.get_rank() + 1)).sum().backward()\n"
        "print([p.grad.tolist() for p in net.parameters()])\ndist.destroy_process_group()\n",
    ),
    "never_destroyed": (
        2,
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x); print(x, flush=True)\n",
    ),
    # A rank alone was the forkserver before, and serves the store itself: at one address, and not in its children.
    "alone": (
        1,
        "import os, subprocess, torch, torch.distributed as dist\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "for round in range(2):\n    dist.init_process_group('gloo')\n    x = torch.ones(1); dist.all_reduce(x)\n"
        "    print(x.item()); dist.destroy_process_group()\n"
        "listens = [line.split() for line in open('/proc/net/tcp') if f':{port:04X} ' in line and ' 0A ' in line]\n"
        "def open_in(process):\n    words = ['ls', '-l', f'/proc/{process}/fd']\n"
        "    return subprocess.run(words, close_fds=False, capture_output=True, text=True).stdout\n"
        "for address, socket in ((row[1], f'socket:[{row[9]}]') for row in listens):\n"
        "    print(address[:8], socket in open_in(os.getpid()), socket in open_in('self'))\n",
    ),
    "compiled": (
        1,
        "import torch\nf = torch.compile(lambda x: torch.sin(x) + 1)\nprint(f(torch.ones(3)))\n",
    ),
}

# What they show, where it isn't compared with executed ranks.
SHOWN = {
    "loader": [f"[0] {way} [[0, 1], [2, 3], [4, 5], [6, 7]]" for way in ("fork", "forkserver", "spawn")],
    "ddp": [f"[{rank}] [[[6.0, 6.0, 6.0], [6.0, 6.0, 6.0]], [4.0, 4.0]]" for rank in range(2)],
    "never_destroyed": [f"[{rank}] tensor([2.])" for rank in range(2)],
    "alone": ["[0] 0100007F True False", "[0] 1.0", "[0] 1.0"],
    "compiled": ["[0] tensor([1.8415, 1.8415, 1.8415])"],
}

# Those that show what is inherited.
OF_THE_PROCESS = ("main", "argv", "environ", "process", "shown", "streams", "faulthandler", "gc")

# How ranks are started.
FORK = ("--preload", "multiprocessing")
IMAGE = ("--verbose",)  # says why no image was used
EXEC = ("--start-method", "exec")


@pytest.fixture
def command(launchpad: Launchpad, keeper: Launchpad) -> Launchpad:
    """The command, in a folder with modules that programs import; with IMAGE it uses a kept image."""
    launchpad.use_images(keeper)
    (launchpad.folder / "beside.py").write_text("value = 5\n")
    (launchpad.folder / "keeps.py").write_text(
        "files = []\ndef keep(name):\n    files.append(open(name, 'w')); files[0].write('kept')\n"
    )
    return launchpad


def environ(command: Launchpad, way: tuple[object, ...]) -> dict[str, str]:
    """For a run of this kind: others don't find the images."""
    where = command.environ["XDG_RUNTIME_DIR"] if way == IMAGE else str(command.folder)
    return {**command.environ, "XDG_RUNTIME_DIR": where}


def run(command: Launchpad, way: tuple[object, ...], *words: object) -> subprocess.CompletedProcess[str]:
    """A run of this kind, in which its ranks were started so."""
    done = command.run("run", *way, *words, env=environ(command, way), timeout=2 * DEADLINE)
    assert "so each imports everything itself" not in done.stderr
    assert "no kept image was used" not in done.stderr or STARTS_COLD & {*words}
    return done


def seen(command: Launchpad, way: tuple[object, ...], *words: object) -> tuple[int, list[str], list[str]]:
    """What a rank shows; its own lines only, without what differs from process to process."""
    done = run(command, way, "-n", 1, *words)

    def own(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if not line.startswith("launchpad:")]
        return [re.sub(r"0x[0-9a-f]+|LAUNCHPAD_\w+|\d{6,}", "N", line) for line in lines]

    return done.returncode, own(done.stdout), own(done.stderr)


STARTS_COLD = {"-x", "program.pyz", "--run-path"}  # words of a command line that no image is for


def test_an_interrupt_that_came_before_the_program_shows_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("print('never')\n")
    code = (
        "import _signal, functools, os, sys\nfrom launchpad.rank import exit, program\nexit.remember()\n"
        "_signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])\nos.kill(os.getpid(), _signal.SIGINT)\n"
        "heed = functools.partial(_signal.pthread_sigmask, _signal.SIG_SETMASK, [])\n"
        "program.run([sys.executable, '-u', 'p.py'], '', heed)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "KeyboardInterrupt\n")


JOINS = """\
import queue, sys, threading

class Writer:
    def __init__(self):
        self.lines = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.lines.get, daemon=True)
        self.thread.start()

    def __del__(self):
        self.lines.put(None)
        self.thread.join()
        print("joined")

writer = Writer()
if "late" in sys.argv:
    sys.keep = sys.modules[__name__]  # cleared last
raise ValueError("bad")
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_destructor_that_joins_a_daemon_thread(command: Launchpad, when: str) -> None:
    """Where plain Python 3.13 hangs."""
    (command.folder / "joins.py").write_text(JOINS)
    code, out, err = seen(command, FORK, "joins.py", when)
    assert (code, out, err[-1]) == (1, ["[0] joined"], "[0] ValueError: bad")


@pytest.mark.parametrize("name", [*PROGRAMS, *ENDS])
def test_a_forked_rank_is_like_an_executed_one(command: Launchpad, name: str) -> None:
    del command.environ["OMP_NUM_THREADS"]  # launchpad sets it
    script = command.folder / f"p_{name}.py"  # a module of the library may have the name
    script.write_text((PROGRAMS | ENDS)[name], encoding="latin-1" if name == "bytes_source" else "utf-8")
    executed = seen(command, EXEC, script.name, "an argument")
    if name == "shown":  # an executed rank's command line has our entry in it
        executed[1][:] = [re.sub(r"[^ ]*executed\.py'?,? ", "", line) for line in executed[1]]
    if name == "exit_huge":  # Python 3.13 finds its own error of the conversion only when it waits for threads
        executed[2][:] = []
    # Whichever process it was forked from, a rank begins and ends in the same code; what it can tell of the process
    # itself is compared with both.
    ways = (FORK, IMAGE) if name in OF_THE_PROCESS else ((FORK, IMAGE)[[*PROGRAMS, *ENDS].index(name) % 2],)
    for way in ways:
        assert seen(command, way, script.name, "an argument") == executed


@pytest.mark.parametrize("way", [FORK, IMAGE, EXEC], ids=["fork", "image", "exec"])
def test_an_exit_with_what_only_equals_zero(command: Launchpad, way: tuple[str, ...]) -> None:
    (command.folder / "zero.py").write_text("import sys; sys.exit(0.0)")
    assert seen(command, way, "zero.py") == (1, [], ["[0] 0.0"])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.last_exc is new in Python 3.12")
@pytest.mark.parametrize("way", [FORK, IMAGE, EXEC], ids=["fork", "image", "exec"])
def test_an_excepthook_finds_the_last_exception(command: Launchpad, way: tuple[str, ...]) -> None:
    (command.folder / "last.py").write_text(
        "import sys\nsys.excepthook = lambda *_: print(repr(sys.last_exc), sys.last_exc is sys.last_value)\n1 / 0\n"
    )
    assert seen(command, way, "last.py") == (1, ["[0] ZeroDivisionError('division by zero') True"], [])


@pytest.mark.parametrize("way", [FORK, IMAGE, EXEC], ids=["fork", "image", "exec"])
def test_a_compiled_script(command: Launchpad, way: tuple[str, ...]) -> None:
    folder = command.folder
    (folder / "whole.py").write_text("import sys\nprint(__name__, __file__, sys.argv, type(__loader__).__name__)\n")
    py_compile.compile(str(folder / "whole.py"), str(folder / "whole.pyc"))
    plain = subprocess.run([sys.executable, "whole.pyc", "x"], cwd=folder, capture_output=True, text=True, check=True)
    assert seen(command, way, "whole.pyc", "x") == (0, [f"[0] {plain.stdout.strip()}"], [])
    (folder / "half.pyc").write_bytes(b"half")
    code, _, errors = seen(command, way, "half.pyc")
    assert (code, errors[0]) == (1, "[0] RuntimeError: Bad magic number in .pyc file")


@pytest.mark.parametrize("way", [FORK, IMAGE], ids=["fork", "image"])
def test_unflushed_files_are_whole(command: Launchpad, way: tuple[str, ...]) -> None:
    for name in ("unflushed", "unflushed_in_module"):
        (command.folder / f"{name}.py").write_text(ENDS[name])
        assert run(command, way, f"{name}.py", name).returncode == 0
    assert (command.folder / "unflushed.unflushed").read_text() == "all of it"
    assert (command.folder / "kept.unflushed_in_module").read_text() == "kept"


@pytest.mark.parametrize("way", [FORK, IMAGE], ids=["fork", "image"])
def test_mpi_is_finalized(command: Launchpad, way: tuple[str, ...]) -> None:
    """mpi4py does it in a C function that a forked rank's exit does not reach: the exit has to. A stand-in for it."""
    (command.folder / "mpi4py").mkdir()
    (command.folder / "mpi4py" / "__init__.py").touch()
    (command.folder / "mpi4py" / "MPI.py").write_text(
        "def Is_initialized(): return True\ndef Is_finalized(): return False\ndef Finalize(): print('finalized')\n"
    )
    (command.folder / "m.py").write_text("from mpi4py import MPI\nprint('main')\n")
    done = run(command, way, "m.py")
    assert (done.returncode, done.stdout) == (0, "[0] main\n[0] finalized\n")


@pytest.mark.parametrize("variable", ["PYTHONFAULTHANDLER=1", "PYTHONSAFEPATH=1", "PYTHONUTF8=1", "PYTHONHASHSEED=5"])
def test_pythons_variables_are_heard(command: Launchpad, variable: str) -> None:
    (command.folder / "v.py").write_text(
        "import os, sys, faulthandler\nprint(sys.flags, sys.path, faulthandler.is_enabled(), 'PYTHONHASHSEED' in os.environ and hash('a'), sys.stdout.encoding)"
    )
    words = ("-x", variable, "v.py")
    executed = seen(command, EXEC, *words)
    for way in (FORK, IMAGE):
        assert seen(command, way, *words)[:2] == executed[:2]


@pytest.mark.parametrize("kind", ["module", "package", "folder", "archive", "other name", "link", "missing module"])
def test_every_kind_of_target(command: Launchpad, kind: str) -> None:
    source = (
        "import sys\nprint(__name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path)\n1 / 0\n"
    )
    package = command.folder / "package"
    package.mkdir()
    for file in (
        command.folder / "single.py",
        package / "__main__.py",
        package / "part.py",
        command.folder / "odd.txt",
    ):
        file.write_text(source)
    (package / "__init__.py").write_text("print('package comes in')\n")
    (command.folder / "link.py").symlink_to(package / "part.py")
    with zipfile.ZipFile(command.folder / "program.pyz", "w") as archive:
        archive.writestr("__main__.py", source)
    words = {
        "module": ["-m", "package.part"],
        "package": ["-m", "package"],
        "folder": ["package"],
        "archive": ["program.pyz"],
        "other name": ["--run-path", "odd.txt"],
        "link": ["link.py"],
        "missing module": ["-m", "package.none"],
    }[kind]
    executed = seen(command, EXEC, *words, "--own")
    for way in (FORK, IMAGE):
        assert seen(command, way, *words, "--own") == executed


def test_a_stdout_that_cannot_say_whether_it_is_closed(command: Launchpad) -> None:
    (command.folder / "tee.py").write_text(
        "import sys\nclass Tee:\n    write = sys.stdout.write\n    flush = sys.stdout.flush\n"
        "sys.stdout = Tee()\nprint('here')\n"
    )
    for way in (FORK, IMAGE, EXEC):
        code, out, err = seen(command, way, "tee.py")
        assert (code, err) == (0, [])
        assert out[-1].endswith("here")


def test_pytest_runs_forked(command: Launchpad) -> None:
    (command.folder / "test_it.py").write_text(
        "import os\ndef test_rank(capfd): assert os.environ['RANK'] == '0'; os.system('echo x')\n"
    )
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    for way in (FORK, IMAGE, EXEC):
        code, out, _ = seen(command, way, *words)
        assert code == 0
        assert "1 passed" in out[-1]


@pytest.mark.parametrize("way", [FORK, IMAGE], ids=["fork", "image"])
def test_a_rank_is_found_by_its_scripts_name(command: Launchpad, way: tuple[str, ...]) -> None:
    script = command.folder / "findable_script.py"
    script.write_text("print('up', flush=True)\nimport signal\nsignal.pause()\n")
    process = command.start("run", "-n", 2, *way, script, "word", env=environ(command, way))
    for _ in range(2):
        assert b"up" in process.stdout.readline()
    found = subprocess.run(
        ["pgrep", "-f", f"^{sys.executable} -u {script} word"], capture_output=True, text=True, check=True
    )
    assert len(found.stdout.split()) == 2
    process.terminate()
    assert process.wait(timeout=60) == 143


@needs_torch
@pytest.mark.parametrize("name", TORCH_PROGRAMS)
def test_torch_in_a_forked_rank(command: Launchpad, name: str) -> None:
    if name == "compiled" and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    size, program = TORCH_PROGRAMS[name]
    (command.folder / f"{name}.py").write_text(program)
    shown = []
    # The "group" in all ways; what the others add does not depend on which process has forked them.
    for way in ((), IMAGE, EXEC) if name == "group" else (IMAGE,):
        done = run(command, way, "-n", size, f"{name}.py")
        lines = [re.sub(r"0x[0-9a-f]+", "N", line) for line in done.stdout.splitlines()]
        shown.append((done.returncode, sorted(lines)))
        assert done.returncode == (1 if name == "group" else 0), done.stderr
        assert ("ValueError: seen" in done.stderr) == (name == "group"), done.stderr
    assert all(one == shown[0] for one in shown)
    assert shown[0][1] == SHOWN.get(name, shown[0][1] or "something")


@needs_torch
@pytest.mark.parametrize("way", [(), IMAGE], ids=["fork", "image"])
def test_random_state_differs_between_ranks(command: Launchpad, way: tuple[str, ...]) -> None:
    (command.folder / "r.py").write_text(
        "import torch, numpy, random\nprint(numpy.random.rand(), random.random(), torch.initial_seed())\n"
    )
    done = run(command, way, "-n", 3, "r.py")
    values = [word for line in done.stdout.splitlines() for word in line.split()[1:]]
    assert len(set(values)) == 9
