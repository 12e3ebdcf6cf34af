"""The options of `launchpad run`: our own, torchrun's, and those that mpirun users type out of habit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from launchpad.cli.options import (
    FOLD,
    GroupedOption,
    local_ranks,
    positive_seconds,
    rank_and_port,
    rank_count_or_gpus,
    restart_limit,
    seconds,
    signal_names,
    stop_signal,
)
from launchpad.cli.shells import SHELLS


def _print_completion(ctx: click.Context, shell: str | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        from launchpad.cli.completion import script

        click.echo(script(shell), nl=False)
        ctx.exit()


Declare = Callable[..., Callable[[Any], Any]]


def _group(heading: str, **common: Any) -> Declare:
    return partial(click.option, cls=GroupedOption, group=heading, **common)


_many = _group("How many ranks")
_what = _group("What the ranks run")
_start = _group("How the ranks start")
_env = _group("The ranks' environment")
_bind = _group("The ranks' CPUs")
_output = _group("The ranks' output")
_end = _group("When the job ends")
_debug = _group("Debugging")
_before = _group("Before running")
_file = _group("From a file")
_world = _group("Several nodes, with launchpad started on each", pet=True)
_no_meaning = _group("Accepted for torchrun compatibility, no effect", pet=True)
_habit = _group("Accepted for mpirun compatibility, no effect", is_flag=True, expose_value=False)
_hosts = _group("Several hosts, started from here")

_OPTIONS = (
    _many(
        *("-n", "-np", "--nproc", "--nproc-per-node", "nproc"),
        type=rank_count_or_gpus,
        metavar="N|auto|cpu|gpu",
        pet=True,
        help="Ranks on this machine, or on each host. auto: one per GPU, else per usable core. gpu:1,3: one per GPU of "
        "--gpus 1,3. Default: 1; with --gpus one per GPU; in a batch allocation the node's slots.",
    ),
    _many(
        "--gpus",
        default="",
        metavar="G,G,…|N|free[:N]",
        help="The NVIDIA GPUs that the ranks see, leased while the job runs: those with these numbers or UUIDs, N that "
        "no job has leased, or those (N of those) that nobody uses. On each host. See launchpad gpus.",
    ),
    _what("-m", "--module", is_flag=True, pet=True, help="TARGET is a Python module, as with python -m."),
    _what("--no-python", is_flag=True, pet=True, help="TARGET is a program, whatever its name."),
    _what("--run-path", is_flag=True, pet=True, help="TARGET is a Python script, whatever its name."),
    _what(
        "--python",
        metavar="PATH",
        help="Interpreter for the ranks. Default: PYTHON_EXEC, else the active environment's, else launchpad's.",
    ),
    _start(
        "--start-method",
        type=click.Choice(["fork", "exec", "forkserver", "spawn"]),
        metavar="fork|exec",
        pet=True,
        help="fork (default): if TARGET imports torch, import it once and fork the ranks from there. exec: start each "
        "rank as a new process. torchrun's names forkserver and spawn mean the same.",
    ),
    _start(
        "--preload",
        metavar="MODULE,…",
        help="Modules to import before forking, in addition to torch. '' disables forking.",
    ),
    _start(
        "--no-hooks",
        is_flag=True,
        help="Run each rank exactly as `python -u TARGET` would, with none of launchpad's code in it. The verdict then "
        "has only exit codes and the last lines of stderr; stacks show little.",
    ),
    _start(
        "--backend",
        type=click.Choice(["gloo", "nccl", "mpi"]),
        metavar="gloo|nccl|mpi",
        help="The process group of a function (file.py:NAME). Default: nccl if each rank has a GPU, else gloo. For a "
        "script, the default of launchpad.collectives. With mpi, the ranks of any TARGET form one MPI_COMM_WORLD.",
    ),
    _start(
        "--mpi",
        type=click.Choice(["mpich", "openmpi", "intel"]),
        metavar="mpich|openmpi|intel",
        help="The MPI that the ranks of --backend mpi use. Default: what mpi4py or the program's libraries say.",
    ),
    _what("--wdir", "-wdir", metavar="DIR", help="Working folder of the ranks. Default: the current one."),
    _env(
        *("-x", "--env", "env"),
        multiple=True,
        metavar="VAR[=VALUE]",
        help="Set a variable, or (VAR alone) pass on its value here; 'HF_*' passes on all that match. Repeatable.",
    ),
    _env("--env-file", multiple=True, metavar="FILE", help="Set variables from a file, one per line. Repeatable."),
    _bind(
        "--bind",
        type=click.Choice(["numa", "core", "socket", "exclusive", "core-complex", "none"]),
        metavar="numa|core|socket|exclusive|core-complex|none",
        help="Which CPUs a rank may run on: those of a NUMA node (its GPU's; without GPUs, ranks are spread over the "
        "nodes), one core, a socket, an equal share of the node's cores, the cores that share a cache; with the memory "
        "next to them. Default: none (no binding).",
    ),
    _bind(
        "--numa-binding",
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        metavar="node|socket|exclusive|core-complex",
        pet=True,
        help="torchrun's name for --bind; node is numa.",
    ),
    _bind("--report-bindings", is_flag=True, help="Say which CPUs and memory each rank is bound to."),
    _env("--role", default="default", metavar="NAME", pet=True, help="Value of ROLE_NAME. Default: default."),
    _env("--virtual-local-rank", is_flag=True, pet=True, help="Each rank sees only its own GPU, and LOCAL_RANK 0."),
    _env("--tf-config", is_flag=True, help="Set TF_CONFIG for TensorFlow: each rank is a worker with its own port."),
    _output("--log-dir", metavar="DIR", pet=True, help="Also save each rank's output to files in DIR."),
    _output(
        *("-r", "--redirects"),
        default="0",
        metavar="MAP",
        pet=True,
        help="Write to files only. 1: stdout, 2: stderr, 3: both; or per local rank: 0:3,1:2.",
    ),
    _output(
        *("-t", "--tee"),
        default="0",
        metavar="MAP",
        pet=True,
        help="Write to files and the console; same syntax as --redirects.",
    ),
    _output(
        "--log-line-prefix-template",
        default="",
        metavar="TEMPLATE",
        pet=True,
        help="What stands before each line instead of [RANK], like '${hostname}:${rank}: '. Also ${local_rank}, "
        "${role_name}.",
    ),
    _output("--local-ranks-filter", type=local_ranks, metavar="R,R,…", pet=True, help="Show only these local ranks."),
    _output(
        "--duplicate-stdout-filters",
        default="",
        metavar="TEXT,…",
        pet=True,
        help="Copy lines that contain one of these to filtered_stdout.log.",
    ),
    _output("--duplicate-stderr-filters", default="", metavar="TEXT,…", pet=True, help="The same for stderr."),
    _output(
        "--fold",
        **FOLD,
        help="Show lines that several ranks write within 50 ms as one: [0-3,7] epoch 3. numbers: also if only numbers "
        "differ. Default: equal on a terminal from 4 ranks on, else never.",
    ),
    _output("--junit", metavar="FILE", help="Write a JUnit report with one case per rank."),
    _output("--report", metavar="FILE", help="Write an HTML page about the job at its end. See launchpad report."),
    _output("--events", metavar="FILE|-", help="Write all events as JSON lines, the ranks' output included."),
    _output(
        "--detach",
        is_flag=True,
        help="Print the job's id and exit when the ranks are about to start; the job goes on. See launchpad attach.",
    ),
    _output(
        "--sample",
        type=seconds,
        default="10",
        metavar="SECONDS",
        help="How often to record what each rank uses: CPU, memory, GPU. Default: 10; 0: never.",
    ),
    _output("--add-to-reports", type=float, hidden=True),  # for the second and later jobs of a file
    _output("-q", "--quiet", is_flag=True, help="Suppress launchpad's own messages, except the verdict."),
    _output(
        "--no-advice",
        is_flag=True,
        help="Don't report for which rank the others waited, nor where the ranks of a quiet job are.",
    ),
    _output("-v", "--verbose", is_flag=True, help="Say why no kept image was used (launchpad warm)."),
    _end(
        *("--grace", "--shutdown-timeout", "grace"),
        type=seconds,
        metavar="SECONDS",
        pet=True,
        help="Time between the first signal and the next. Default: 5 after a failure, 30 if the job is stopped by you "
        "or by a time limit.",
    ),
    _end(
        "--stop-signal",
        type=stop_signal,
        metavar="SIGNAL",
        help="What the ranks get first when you stop the job or its time is up (--timeout, --stop-before); then TERM, "
        "then KILL. Default: the signal that launchpad got, else TERM.",
    ),
    _end("--timeout", type=seconds, metavar="SECONDS", help="End the job after this time, with exit code 124."),
    _end(
        "--notify",
        metavar="'COMMAND'",
        help="Run this with sh at the end, with the verdict in LAUNCHPAD_EXIT_CODE, LAUNCHPAD_VERDICT …",
    ),
    _end(
        "--stop-before",
        type=seconds,
        metavar="SECONDS",
        help="Stop the job, as TERM does, this long before the allocation of Slurm, PBS, LSF or Flux ends.",
    ),
    _end(
        "--stall-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="If no rank writes or makes progress for this long, show where each one is and exit with 124.",
    ),
    _end(
        "--inject",
        default="",
        metavar="FAULT,…",
        help="Inject faults to test how the job recovers; not for production: kill:3@20s (rank 3, after 20 s; also "
        "stop, term), kill:host=b@1m (also stop, cut), random:1/60s[:SEED] (some rank, once a minute on average).",
    ),
    _end(
        "--max-restarts",
        type=restart_limit,
        default="0",
        metavar="N[/TIME]",
        pet=True,
        help="Restart all ranks when one fails, at most N times. 10/1h: at most 10 times in any hour.",
    ),
    _end(
        "--restart",
        type=click.Choice(["judged", "always"]),
        default="judged",
        metavar="judged|always",
        help="judged (default): don't restart if that can't help: after the same failure twice without progress, or an "
        "import error, a syntax error or wrong arguments at the start. always: restart after any failure.",
    ),
    _end(
        "--progress",
        multiple=True,
        metavar="GLOB",
        help="Files that the ranks write as they make progress, like 'ckpt/*': if there is a new one, a failure is "
        "worth a restart. Repeatable. Default: a job that ran for 10 minutes has made progress.",
    ),
    _end(
        "--signals-to-handle",
        type=signal_names,
        default="",
        metavar="SIG,…",
        pet=True,
        help="Signals to forward in addition to INT, TERM, HUP, USR1 and USR2.",
    ),
    _debug(
        "--input-rank",
        type=click.IntRange(0),
        default=0,
        metavar="R",
        help="The rank that reads your standard input, and has the terminal: breakpoint() works there. Default: 0.",
    ),
    _debug(
        "--debug",
        type=rank_and_port,
        metavar="R[:PORT]",
        help="Rank R waits for a debugger (VS Code, or another client of debugpy) before it begins. Attach at that "
        "port of this machine's loopback address; nobody else can. Default: a free port.",
    ),
    _file("--config", metavar="FILE", help="Read options and TARGET from a job file (TOML)."),
    _file("--job", metavar="NAME", help="Run only this job of the file. Default: all, one after the other."),
    _before(
        "--check",
        is_flag=True,
        help="Check the hosts first, and start nothing if a job can't run there. See launchpad doctor.",
    ),
    _before(
        "--health",
        default="",
        metavar="'COMMAND'",
        help="Run this on each node before every attempt, without a shell; doctor: what launchpad doctor sees of it "
        "quickly. A node where it doesn't exit with 0 is left out, and without enough others nothing is started (3).",
    ),
    _before(
        "--health-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="How long that may take; then the node is not healthy. Default: 60.",
    ),
    _before(
        "--print-completion",
        type=click.Choice(SHELLS),
        metavar="|".join(SHELLS),
        expose_value=False,
        is_eager=True,
        callback=lambda ctx, _, shell: _print_completion(ctx, shell),
        help="Do what `launchpad completion` does, and exit.",
    ),
    _before("--dry-run", is_flag=True, help="Print what would be run, and exit."),
    _before("--json", "as_json", is_flag=True, help="With --dry-run: print it as JSON."),
    _hosts(
        *("-H", "--host", "--hosts", "-host", "-hosts", "hosts"),
        metavar="HOST[:N],…",
        help="Run N ranks on each host, over SSH unless it is localhost. Also USER@HOST, [::1]:N. Default: the nodes "
        "of the Slurm, PBS, LSF, SGE, OAR or Flux allocation that this is in, else this machine.",
    ),
    _hosts(
        *("--hostfile", "-hostfile", "--machinefile", "-machinefile", "hostfile"),
        metavar="FILE",
        help="Read the hosts from a file, one per line: HOST slots=N or HOST:N.",
    ),
    _hosts("--include", default="", metavar="HOST,…", help="Use only these of the hosts; * and ? are wildcards."),
    _hosts("--exclude", default="", metavar="HOST,…", help="Leave these hosts out; * and ? are wildcards."),
    _hosts(
        "--sync",
        is_flag=True,
        help="Copy the working folder to each host and run there. In a git repository, ignored files are left out.",
    ),
    _hosts(
        "--sync-env",
        is_flag=True,
        help="Give each host the environment of the ranks' Python: its packages, and the interpreter if it is uv's or "
        "conda's. Other hosts need a Python of the same version.",
    ),
    _hosts(
        "--enter",
        default="",
        metavar="'COMMAND…'",
        help="Run the ranks inside what this command enters, on each host: 'docker exec -i train', 'apptainer exec "
        "a.sif'. Without hosts: here.",
    ),
    _hosts(
        "--ssh",
        type=click.Choice(["paramiko", "openssh"]),
        metavar="paramiko|openssh",
        help="How to connect: built in, or with the ssh program. Default: with ssh where a host needs it.",
    ),
    _hosts("--ssh-config", metavar="FILE", help="Use this instead of ~/.ssh/config and /etc/ssh/ssh_config."),
    _hosts(
        "--accept-new-host-keys",
        is_flag=True,
        help="Trust and remember the key of a host never seen before. A changed key is still refused.",
    ),
    _hosts(
        "--heartbeat-timeout",
        type=seconds,
        default="10",
        show_default=True,
        metavar="SECONDS",
        help="A host that is silent for this long counts as lost (0: never). That ends the job unless it can go on.",
    ),
    _hosts(
        "--keep-running",
        type=seconds,
        default="0",
        metavar="TIME",
        help="Ranks go on for so long while their host has no contact with launchpad, which reconnects by itself; if "
        "launchpad is killed, launchpad resume takes over.",
    ),
    _hosts(
        "--spares",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Of the hosts, keep the last N ready to take the place of lost ones. Doesn't count as a restart.",
    ),
    _world(
        "--nnodes",
        default="1",
        metavar="N|MIN:MAX",
        help="Number of nodes. With MIN:MAX, nodes may be lost and join while the job runs.",
    ),
    _world("--node-rank", type=int, metavar="R", help="Rank of this node, from 0. Not needed with c10d."),
    _world("--master-addr", metavar="HOST", help="The address of node rank 0, for static."),
    _world(
        "--master-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Port of torch's store. Default: a free port; 29500 with static and several nodes.",
    ),
    _world("--standalone", is_flag=True, help="One node and a free port: the default outside an allocation."),
    _world(
        "--rdzv-backend",
        default="static",
        metavar="NAME",
        help="c10d: the same line on every node, in any order. static: each node has its --node-rank.",
    ),
    _world(
        "--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT][,…]",
        help="Where the nodes meet: one of them, which leads the job. Default port: 29400. More: where to look, too.",
    ),
    _world(
        "--rdzv-id", default="none", metavar="ID", help="Job id. Without a secret, it is what nodes must know to join."
    ),
    _world(
        "--rdzv-secret-file",
        metavar="FILE",
        help="Nodes must know what is in this file, or in LAUNCHPAD_SECRET, to join. Default: the job id.",
    ),
    _world(
        "--rdzv-conf",
        default="",
        metavar="K=V,…",
        help="join_timeout: seconds to wait for the other nodes (600). is_host: whether this node leads the job. "
        "last_call_timeout and on_join: see `launchpad help restarts`.",
    ),
    _no_meaning("--use-env", is_flag=True, expose_value=False, help="Ranks find LOCAL_RANK in their variables anyway."),
    _no_meaning("--local-addr", expose_value=False, metavar="HOST", help="Addresses are found automatically."),
    _no_meaning("--monitor-interval", expose_value=False, metavar="SECONDS", help="Exits are noticed at once."),
    _no_meaning("--event-log-handler", expose_value=False, metavar="NAME", help="Torch plug-ins are not supported."),
    _no_meaning("--logs-specs", expose_value=False, metavar="NAME", help="Torch plug-ins are not supported."),
    _habit("--oversubscribe", "-oversubscribe", help="Oversubscription is always allowed."),
    _habit("--allow-run-as-root", help="Running as root is always allowed."),
    _habit("--tag-output", "-tag-output", help="Lines are always tagged."),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the options, in the order of --help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
