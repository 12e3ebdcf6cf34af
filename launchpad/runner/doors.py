"""Which options of `launchpad run` the other ways to start a job don't take, and why; they take all the others.

The options have their names in Python: the longest, with underscores.
"""

from __future__ import annotations

from collections.abc import Mapping

# Why a parameter is not taken by launchpad.run; by launchpad.ranks, besides.
_BY_COMMAND = "the ranks call a function of this process, in its interpreter"
_ON_TERMINAL = "it is for the command's console; what ranks print goes to sys.stdout"
_ONE_EACH = "it is for a launchpad on each node"
NOT_FOR_RUN: Mapping[str, str] = {
    **dict.fromkeys(("module", "no_python", "run_path", "python", "start_method", "no_hooks", "preload"), _BY_COMMAND),
    **dict.fromkeys(("use_env", "config", "job", "check", "dry_run", "json", "detach", "enter"), _BY_COMMAND),
    **dict.fromkeys(("redirects", "tee", "local_ranks_filter", "log_line_prefix_template"), _ON_TERMINAL),
    **dict.fromkeys(("duplicate_stdout_filters", "duplicate_stderr_filters", "events", "fold"), _ON_TERMINAL),
    **dict.fromkeys(("quiet", "verbose", "no_advice", "report_bindings", "print_completion", "help"), _ON_TERMINAL),
    **dict.fromkeys(("node_rank", "master_addr", "master_port", "standalone", "rdzv_backend"), _ONE_EACH),
    **dict.fromkeys(("rdzv_endpoint", "rdzv_id", "rdzv_conf", "rdzv_secret_file", "local_addr"), _ONE_EACH),
    **dict.fromkeys(("signals_to_handle", "stop_before"), "signals and batch systems concern the whole process"),
    **dict.fromkeys(("numa_binding",), "write bind"),
    **dict.fromkeys(("monitor_interval", "event_log_handler", "logs_specs"), "it has no effect"),
    **dict.fromkeys(("add_to_reports",), "it is for the jobs of a file"),
}
_AGAIN = "ranks that stay hold what the last calls have left, and are not started again by themselves"
NOT_FOR_RANKS: Mapping[str, str] = {
    **NOT_FOR_RUN,
    **dict.fromkeys(("max_restarts", "restart", "progress", "spares", "nnodes", "inject"), _AGAIN),
    "stall_timeout": "between calls the ranks only wait; each call has a timeout of its own",
    **dict.fromkeys(("input_rank", "debug"), "calls are made from a prompt, which has the terminal"),
}

# Why a job file can't set it.
_WHICH_JOB = "it says which job of which file runs"
_NO_JOB = "it asks for something other than to run the job"
NOT_IN_FILES: Mapping[str, str] = {
    **dict.fromkeys(("config", "job"), _WHICH_JOB),
    **dict.fromkeys(("dry_run", "json", "print_completion", "help"), _NO_JOB),
    "detach": "whether you wait for the job is up to you, each time",
    "add_to_reports": "launchpad itself gives it, to the later jobs of a file",
}

# Why a node that joins a job led elsewhere has no say in it. Its own command line counts for its ranks, as torchrun's.
_JOB = "it concerns the whole job"
_WATCH = "the first node watches over the job"
_REPORT = "the first node writes it"
_SETS_UP = "the first node sets up the others"
NOT_ON_JOINED_NODES: Mapping[str, str] = {
    **dict.fromkeys(("backend", "mpi", "tf_config", "input_rank", "debug", "report_bindings"), _JOB),
    **dict.fromkeys(("shutdown_timeout", "stop_signal", "timeout", "stop_before"), _JOB),
    **dict.fromkeys(("max_restarts", "restart", "progress", "stall_timeout", "inject"), _WATCH),
    **dict.fromkeys(("sample", "heartbeat_timeout", "no_advice", "health", "health_timeout"), _WATCH),
    **dict.fromkeys(("junit", "report", "events", "notify", "add_to_reports"), _REPORT),
    **dict.fromkeys(("hosts", "machinefile", "include", "exclude", "spares", "sync", "sync_env", "enter"), _SETS_UP),
    **dict.fromkeys(("ssh", "ssh_config", "accept_new_host_keys", "keep_running"), _SETS_UP),
}
