"""Three fault galleries: programs that go wrong, and the verdict an expert would give on each.

programs/gallery.py has faults of each kind, programs/gallery2.py what other people's programs showed, and
programs/gallery3.py waits for children, locks, files and tasks. test_gallery.py checks launchpad's verdicts against the
first and a few of the others; bench/gallery.py scores launchpad and torchrun side by side on all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SIZE = 4
CULPRIT = SIZE - 2
ALL = tuple(range(SIZE))
OTHERS = tuple(rank for rank in ALL if rank != CULPRIT)


class Case(NamedTuple):
    """One program and its verdict."""

    name: str
    cause: str = ""  # a pattern that the text of the verdict matches; "": nothing is wrong
    ranks: tuple[int, ...] = (CULPRIT,)  # any of them may be named as the first to fail
    options: tuple[str, ...] = ()
    backend: str = "gloo"
    program: str = "gallery.py"
    needs: str = ""  # a module or a command; without it the case is left out

    @property
    def healthy(self) -> bool:
        return not self.cause


STALL = ("--stall-timeout", "3")
"""For programs that hang."""

OTHER = r"rank 2 waits in broadcast(.|\n)*rank 2 has entered broadcast(.|\n)* have entered all_reduce"
MISSING = r"rank 2 waits in recv(.|\n)*rank 2 has not entered collective 2, all_reduce"
LATE = r"rank 2 held up the others(.|\n)*in forever at "

CASES = [
    # exceptions
    Case("before_init", r"KeyError: 'learning_rate'"),
    Case("after_init", r"ValueError: the loss is not finite"),
    Case("in_backward", r"ArithmeticError: a gradient is not finite"),
    Case("in_forward", r"RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied"),
    Case("worker", r"IndexError: image 5 is broken"),
    # torch itself reports sometimes this, and sometimes only that the connection to its worker is gone.
    Case(
        "worker_killed",
        r"its child process \d+ was killed by SIGKILL|DataLoader worker .* is killed by signal: Killed",
    ),
    Case("in_thread", r"FileNotFoundError: shard-17.tar"),
    Case(
        "chained",
        r"RuntimeError: the checkpoint can't be read(.|\n)*KeyError: 'step'",
    ),
    Case("grouped", r"two shards failed(.|\n)*OSError: shard 1(.|\n)*ValueError: shard 2"),
    Case("recursion", r"RecursionError"),
    Case("long_message", r"ValueError: xxxx"),
    Case("assertion", r"AssertionError"),
    Case("full_disk", r"OSError: .*No space left on device"),
    Case("closed_stdout", r"ValueError: I/O operation on closed file"),
    Case("no_memory", r"MemoryError"),
    Case("import_error", r"ModuleNotFoundError: No module named 'a_module_that_is_on_the_other_nodes_only'"),
    Case("spawned_child", r"RuntimeError: the tokenizer ended with 6"),
    Case("subprocess_failed", r"CalledProcessError: .*'false'"),
    Case("tear_down", r"OSError: the last checkpoint was not written"),
    Case("interrupted", r"KeyboardInterrupt"),
    Case("two_at_once", r"ValueError: rank \d by itself", (CULPRIT, CULPRIT + 1)),
    Case("all_alike", r"ValueError: every rank says this", ALL),
    Case("retried", r"ValueError: the loss is not finite"),
    # silent exits
    Case("exit_code", r"exit code 3"),
    Case("exit_message", r"config.yaml: no such key: lr"),
    Case("os_exit", r"exit code 5"),
    Case("in_atexit", r"exit code 4, after its program had finished"),
    Case("aborts_at_exit", r"killed by SIGABRT .*after its program had finished"),
    Case("segfault", r"SIGSEGV(.|\n)*segfault"),
    Case("abort", r"SIGABRT(.|\n)*abort"),
    Case("killed", r"SIGKILL"),
    Case("leaves_early", rf"rank {CULPRIT} .*(left|ended|exit)"),
    # MPI
    Case("after_init", r"ValueError: the loss is not finite", backend="mpi"),
    Case("os_exit", r"exit code 5", backend="mpi"),
    Case("segfault", r"SIGSEGV", backend="mpi"),
    # hangs
    Case("other_operation", OTHER, options=STALL),
    Case("other_shape", r"1048576|collective mismatch", ALL, STALL),
    Case("missing", MISSING, options=STALL),
    Case("lock", r"lock", options=STALL),
    Case("endless_loop", r"endless_loop", options=("--timeout", "15")),  # torch may have to be imported
    Case("late", LATE),
    Case("missing", MISSING, options=STALL, backend="mpi"),
    # nothing is wrong
    *(Case(name, options=STALL) for name in ("slow", "quiet", "early", "caught", "thread_only", "atexit_raises")),
]

ABORTED = r"(?s)ValueError: bad batch in shard 7 .*failed because of it: "
HANDLED = r"(?s)\A(?!.*(KeyError|reset)).*"
INSIDE = r"ValueError: the inner cause, in "
NOTHING_LOST = r"(?s)\A(?!.*(lost|another rank)).*"


def _more(name: str, cause: str = "", ranks: tuple[int, ...] = (CULPRIT,), needs: str = "") -> Case:
    return Case(name, cause, ranks, () if cause else STALL, program="gallery2.py", needs=needs)


MORE = [
    # the loss of another rank in the program's own words
    *(_more(f"wrapped_{how}", ABORTED) for how in ("from_none", "from", "plainly", "exit", "later")),
    _more("slow_handler", ABORTED),
    _more("overcome", ABORTED),
    # words that only look like a lost rank
    _more("ssh_words", NOTHING_LOST + r"exit code 255.*closed by remote host"),
    _more("database", r"OperationalError: connection to server"),
    _more("port_taken", r"the port \d+ is taken \(by pid \d+, \w+"),
    _more("port_taken_file", r"the port \d+ is taken \(by pid \d+, \w+"),
    _more("unknown_host", NOTHING_LOST + r"nosuchhost-7 has no address", ALL),
    # exceptions that the program handled
    _more("handled_exit", HANDLED + r"exit code 3.*no more disk quota"),
    _more("handled_os_exit", HANDLED + r"exit code 3.*no more disk quota"),
    _more("handled_signal", HANDLED + r"killed by SIGKILL"),
    _more("handled_other", HANDLED + r"OSError: the shard is gone"),
    _more("handled_reset", r"exit code 9(.|\n)*out of quota"),
    # what the program logged, captured, forwarded or left to a thread
    _more("logged_exit", r"(?s)exit code 1 .*ValueError: bad batch in shard 7.*failed because of it: "),
    _more("finally_collective", r"SystemExit: no more data; then RuntimeError"),
    _more("prefetch_thread", r"thread 'prefetch' died, .*OSError: shard 10: checksum mismatch"),
    _more("own_timeout", LATE),
    _more("other_size", r"waited elsewhere than the others"),
    _more("captured", r"ValueError: bad shard, in the command that it ran"),
    _more("forwarded", r"(?s)ValueError: document 17 is empty .*in tokenize"),
    # a launcher inside the rank
    _more("torchrun_inside", INSIDE + r"rank 1 of the torchrun"),
    _more("torchrun_instead", INSIDE + r"rank 1 of the torchrun"),
    _more("accelerate_inside", INSIDE + r"the command that it ran", needs="accelerate"),
    _more("mpirun_inside", r"ValueError: the inner cause", needs="mpirun"),
    _more("launchpad_inside", INSIDE + r"rank 1 of the launchpad"),
    _more("pytest_inside", INSIDE + r".*test_inner.py::test_it"),
    _more("bash_inside", r"ValueError: the inner cause"),
    _more("command_inside", INSIDE + r"the command that it ran"),
    # nothing is wrong
    *(_more(name) for name in ("slow_socket", "slow_http", "slow_child", "slow_pipe", "downloads_for_all", "writes")),
    *(_more(name) for name in ("sleeps_alone", "child_sleeps", "child_computes", "thread_computes", "pool", "loader")),
    *(_more(name) for name in ("retries", "other_port", "leaves_with_0", "failing_child", "destroyed_late", "alarm")),
]

STUCK = r"in stuck at [^:]*:\d+: time\.sleep\(1000\)"
WAITS = r"(?s)rank 2 waits for "
OTHER_THREAD = rf"; thread '[\w-]+' is {STUCK}"
VOCABULARY = r"returned non-zero exit status 4\.(?s:.*)vocab\.json: no such file"


def _third(name: str, cause: str = "", needs: str = "") -> Case:
    return Case(name, cause, options=STALL, program="gallery3.py", needs=needs)


THIRD = [
    # children
    _third("command", WAITS + r"its child `sleep 1000` \(pid \d+\), which is asleep"),
    _third("shell_tree", WAITS + r"its child `sh -c .*which waits for `sh -c .*which waits for `sleep 1000`"),
    _third("output", WAITS + r"the output of its child `sleep 1000` \(pid \d+\), which is asleep"),
    _third("waits_for_input", WAITS + r"its child `cat` \(pid \d+\), which waits for data from a pipe"),
    _third("stopped", WAITS + r"its child `sleep 1000` \(pid \d+\), which is stopped by a signal"),
    _third("forked", WAITS + rf"its child process \(pid \d+\), which is {STUCK}"),
    *(
        _third(f"process{how}", WAITS + rf"its child process 'encoder' \(pid \d+\), which is {STUCK}")
        for how in ("", "_spawn", "_forkserver")
    ),
    _third("torch_spawn", WAITS + rf"the processes that it spawned; process \d+ is {STUCK}"),
    *(_third(f"pool{how}", WAITS + rf"its pool; process \d+ is {STUCK}") for how in ("", "_spawn", "_imap")),
    _third("pool_lost", WAITS + r"its pool; its worker \d+ was killed by SIGKILL"),
    *(_third(f"executor{how}", WAITS + rf"its process pool; process \d+ is {STUCK}") for how in ("", "_spawn")),
    _third("executor_broken", r"its child process \d+ was killed by SIGKILL: .*BrokenProcessPool"),
    _third("thread_pool", WAITS + r"its pool of threads; thread 'ThreadPoolExecutor-0_\d' is " + STUCK),
    _third("loky", WAITS + r"its process pool; process \d+ (is in|is asleep|sleeps)", needs="joblib"),
    _third("joblib_threads", WAITS + rf"a future; thread '[^']*' is {STUCK}", needs="joblib"),
    _third("queue_of_child", WAITS + rf"an item in a multiprocessing\.Queue; process \d+ is {STUCK}"),
    _third("pipe_of_child", WAITS + rf"a message over a multiprocessing\.Connection; process \d+ is {STUCK}"),
    _third("lock_of_child", WAITS + rf"a multiprocessing\.Lock; process \d+ is {STUCK}"),
    # DataLoaders
    *(
        _third(f"loader{how}", WAITS + rf"its DataLoader worker 1 \(pid \d+\), which is {STUCK}")
        for how in ("", "_spawn", "_forkserver")
    ),
    _third(
        "loader_inherits_lock",
        WAITS + r"its DataLoader worker 1 \(pid \d+\), which is in read_cache at [^:]*:\d+: with CACHE:",
    ),
    _third("loader_killed", r"was killed by SIGKILL|DataLoader worker .* is killed by signal: Killed"),
    # locks
    _third("lock", WAITS + rf"a threading\.Lock; thread 'writer' is {STUCK}"),
    _third("rlock", WAITS + rf"a threading\.RLock that thread 'writer' has, which is {STUCK}"),
    _third("semaphore", WAITS + rf"a threading\.Semaphore{OTHER_THREAD}"),
    _third("lock_itself", WAITS + r"a threading\.Lock; no other thread .*it may have the lock itself"),
    _third(
        "crossed_locks", WAITS + r"a threading\.RLock that thread 'writer' has, which is in other at .*: with first:"
    ),
    _third("condition", WAITS + r"a threading\.Condition; no other thread is in the program's code"),
    _third("event", WAITS + rf"a threading\.Event{OTHER_THREAD}"),
    _third("queue_empty", WAITS + rf"an item in a queue\.Queue; thread 'producer' is {STUCK}"),
    _third("queue_full", WAITS + rf"room in a queue\.Queue; thread 'consumer' is {STUCK}"),
    _third("join_thread", WAITS + rf"its thread 'writer', which is {STUCK}"),
    _third("checkpoint_writer", WAITS + r"its thread 'writer', which is in save at [^:]*:\d+ .*fifo\.write_bytes"),
    # files
    *(
        _third(f"{how}_of_rank", WAITS + r"the lock on \S*shared\.lock, which rank 0 \(pid \d+\) has")
        for how in ("flock", "lockf")
    ),
    _third("flock_of_other", WAITS + r"the lock on \S*other\.lock, which rank 2's process \d+ has"),
    _third("package_filelock", WAITS + r"the file lock \S*hub\.lock, which rank 0 \(pid \d+\) has", needs="filelock"),
    _third("sqlite", WAITS + r"\S*index\.db, which it has open and rank 0 \(pid \d+\) has locked"),
    _third("stale_baton", WAITS + r"the lock file \S*/lock to be removed"),
    _third("file_store", r"(?s)rank 2 (is|waits) in .*\.get\(.the key of rank 9.\)"),
    _third("fifo", r"rank 2 is in fifo at .*read_bytes\(\)"),
    _third("stopped_server", WAITS + r"data from rank 0's process \d+, which is stopped by a signal"),
    _third("silent_server", r"rank 2 is in silent_server at .*line\.recv\(1\)"),
    # gRPC
    _third("grpc_handler", WAITS + rf"gRPC's /Index/Find at 127\.0\.0\.1:\d+{OTHER_THREAD}", needs="grpc"),
    _third("grpc_stream", WAITS + rf"gRPC's /Index/Follow at 127\.0\.0\.1:\d+{OTHER_THREAD}", needs="grpc"),
    _third("grpc_failed", NOTHING_LOST + r".*Exception calling application: shard-3 is in no index", needs="grpc"),
    _third("grpc_deadline", NOTHING_LOST + r".*Deadline Exceeded", needs="grpc"),
    _third("grpc_gone", NOTHING_LOST + r".*Connection refused", needs="grpc"),
    # tasks
    _third("tasks", WAITS + r"its task .*gathers.* task fetch-3, which is in fetch at .*: await gate\.wait\(\)"),
    _third(
        "crossed_tasks", WAITS + r"its task .*which awaits task copy-\d, which is in takes at .*: async with other:"
    ),
    _third("queue_of_tasks", WAITS + r"its task Task-1 \(drains\), which is in drains at .*: await items\.join\(\)"),
    _third("waited_tasks", WAITS + r"its task .*which awaits task upload, which is in fetch at .*: await gate\.wait"),
    _third(
        "command_of_task",
        WAITS + r"its task Task-1 \(runs\), which is in runs at .*; its child `sleep 1000` \(pid \d+\) is asleep",
    ),
    # commands that fail
    *(_third(f"command_failed{how}", VOCABULARY) for how in ("", "_inside", "_to_file")),
    # nothing is wrong
    *(_third(f"slow_{what}") for what in ("process", "spawned", "pool", "executor", "threads", "loader", "join")),
    *(_third(f"slow_{what}") for what in ("lock", "queue", "tasks", "tree")),
    *(_third(name) for name in ("turns", "database_turns", "ended_child", "unreaped_child", "caught_command")),
    *(_third(name) for name in ("replaced_workers", "writer_thread")),
    _third("slow_grpc", needs="grpc"),
]

QUICK = (
    "wrapped_later",
    "overcome",
    "port_taken_file",
    "handled_os_exit",
    "launchpad_inside",
    "slow_socket",
    "sleeps_alone",
    "loader_inherits_lock",
    "crossed_tasks",
    "slow_lock",
)
"""Those of MORE and THIRD that the tests run: the others are tested by events and by numbers."""


def score(case: Case, verdict: dict[str, Any]) -> tuple[bool, bool]:
    """Whether verdict.json names the right rank and the right cause."""
    text = "\n".join(verdict["text"])
    named: Sequence[int] = verdict["early"] or [verdict["rank"]]
    return any(rank in case.ranks for rank in named), re.search(case.cause, text) is not None
