"""job/allocation: the nodes of a batch allocation, in what PBS, Torque, LSF, SGE, OAR and Flux write."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.errors import UsageError
from launchpad.job.allocation import INSTEAD, Source, expand_hostlist, find_source, parse_nodes
from launchpad.job.hosts import ALLOCATION_VARIABLES, choose_hosts, slots_of
from launchpad.runner.allocation import run_command, with_allocation
from launchpad.runner.options import HostOptions, NodeOptions, ReportOptions, RunOptions
from tests.support.hostfiles import message
from tests.support.unhurried import UNHURRIED

# What each scheduler has in the environment of a job, and in the file or the answer that this leads to; then the nodes.

# qsub -l select=2:ncpus=4:mpiprocs=4 (PBS Professional): full names, a line per MPI process.
PBS = (
    {
        "PBS_NODEFILE": "/var/spool/pbs/aux/1841.pbs01",
        "PBS_JOBID": "1841.pbs01",
        "PBS_O_HOST": "login1.cluster.local",
        "NCPUS": "4",
    },
    "x1004c0s1b0n0.cluster.local\n" * 4 + "x1004c0s1b0n1.cluster.local\n" * 4,
    "PBS",
    {"x1004c0s1b0n0.cluster.local": 4, "x1004c0s1b0n1.cluster.local": 4},
)
# qsub -l nodes=1:ppn=2+2:ppn=1 (Torque), with the nodes interleaved as after -W x=nmatchpolicy.
TORQUE = (
    {"PBS_NODEFILE": "/var/spool/torque/aux//77.head", "PBS_NUM_NODES": "3", "PBS_NUM_PPN": "2"},
    "node07\nnode02\nnode07\nnode11\n",
    "PBS",
    {"node07": 2, "node02": 1, "node11": 1},
)
# bsub -n 6 -R "span[ptile=4]" (LSF 10).
LSF = (
    {
        "LSB_DJOB_HOSTFILE": "/home/ann/.lsbatch/1718880915.4242.hostfile",
        "LSB_MCPU_HOSTS": "c09b3 4 c09b4 2 ",
        "LSB_HOSTS": "c09b3 c09b3 c09b3 c09b3 c09b4 c09b4",
        "LSB_DJOB_NUMPROC": "6",
    },
    "c09b3\nc09b3\nc09b3\nc09b3\nc09b4\nc09b4\n",
    "LSF",
    {"c09b3": 4, "c09b4": 2},
)
# bsub -n 1: LSF has no host file for it.
LSF_SERIAL = ({"LSB_MCPU_HOSTS": "c09b3 1 ", "LSB_HOSTS": "c09b3"}, "c09b3 1 ", "LSF", {"c09b3": 1})
# Summit: the first node is the one that runs the script; it has one slot.
LSF_LAUNCH_NODE = (
    {"LSB_MCPU_HOSTS": "batch5 1 h22n07 42 h22n08 42 "},
    "batch5 1 h22n07 42 h22n08 42 ",
    "LSF",
    {"batch5": 1, "h22n07": 42, "h22n08": 42},
)
# qsub -pe mpi 36 (Grid Engine): a host with two queues has two lines.
SGE = (
    {"PE_HOSTFILE": "/opt/sge/default/spool/compute-0-1/active_jobs/1234.1/pe_hostfile", "NSLOTS": "36", "NHOSTS": "2"},
    "compute-0-1.local 16 all.q@compute-0-1.local UNDEFINED\n"
    "compute-0-3.local 16 all.q@compute-0-3.local <NULL>\n"
    "compute-0-1.local 4 short.q@compute-0-1.local 0,0:0,1\n",
    "SGE",
    {"compute-0-1.local": 20, "compute-0-3.local": 16},
)
# oarsub -l nodes=2 (Grid'5000).
OAR = (
    {"OAR_NODEFILE": "/var/lib/oar/1523418", "OAR_NODE_FILE": "/var/lib/oar/1523418", "OAR_JOB_ID": "1523418"},
    "grisou-12.nancy.grid5000.fr\ngrisou-12.nancy.grid5000.fr\ngrisou-4.nancy.grid5000.fr\ngrisou-4.nancy.grid5000.fr\n",
    "OAR",
    {"grisou-12.nancy.grid5000.fr": 2, "grisou-4.nancy.grid5000.fr": 2},
)
# flux run -N3, for a script with one task; the second node has fewer cores, and R_lite is not in the order of ranks.
FLUX = (
    {"FLUX_JOB_ID": "ƒ2oLkTLb", "FLUX_URI": "local:///run/flux/local", "FLUX_JOB_SIZE": "1", "PMI_SIZE": "1"},
    '{"version": 1, "execution": {"R_lite": [{"rank": "10,12", "children": {"core": "0-7", "gpu": "0-1"}}, '
    '{"rank": "11", "children": {"core": "0-3,6"}}], "starttime": 1747009489.0, "expiration": 4900609487.0, '
    '"nodelist": ["fluke[10-12]"], "properties": {"pdebug": "10-12"}}}\n',
    "Flux",
    {"fluke10": 8, "fluke11": 5, "fluke12": 8},
)
# flux batch -N4, in an allocation of LSF.
FLUX_BATCH = (
    {"FLUX_URI": "local:///tmp/flux-ptC8HX/local-0", "LSB_MCPU_HOSTS": "batch5 1 h22n07 42"},
    '{"version": 1, "execution": {"R_lite": [{"rank": "0-3", "children": {"core": "0"}}], "starttime": 0.0, '
    '"expiration": 0.0, "nodelist": ["basic-node-[1-3]", "other"]}}',
    "Flux",
    {"basic-node-1": 1, "basic-node-2": 1, "basic-node-3": 1, "other": 1},
)
REAL = {
    "PBS": PBS,
    "Torque": TORQUE,
    "LSF": LSF,
    "LSF, serial": LSF_SERIAL,
    "LSF, launch node": LSF_LAUNCH_NODE,
    "SGE": SGE,
    "OAR": OAR,
    "Flux": FLUX,
    "Flux in LSF": FLUX_BATCH,
}


@pytest.mark.parametrize("case", REAL)
def test_nodes_as_schedulers_list_them(case: str) -> None:
    environ, text, scheduler, expected = REAL[case]
    source = find_source(environ)
    assert source is not None
    assert source.scheduler == scheduler
    nodes = parse_nodes(source, text)
    assert {node.name: node.mentions for node in nodes} == expected
    assert [node.name for node in nodes] == list(expected)
    assert slots_of(nodes, None) == tuple(expected.values())
    assert set(slots_of(nodes, 64)) == {64}  # --nproc may ask for more than the slots
    first = next(iter(expected))
    assert choose_hosts(nodes, first[:-1] + "?", "")[0].name == first


def test_where_a_scheduler_lists_the_nodes() -> None:
    def where(environ: dict[str, str]) -> object:
        source = find_source(environ)
        assert source is not None
        return source.file or source.command or source.text

    assert where(PBS[0]) == "/var/spool/pbs/aux/1841.pbs01"
    assert where(LSF[0]) == "/home/ann/.lsbatch/1718880915.4242.hostfile"
    assert where(LSF_SERIAL[0]) == "c09b3 1 "
    assert where(FLUX[0]) == ("flux", "job", "info", "ƒ2oLkTLb", "R")
    assert where(FLUX_BATCH[0]) == ("flux", "kvs", "get", "resource.R")


@pytest.mark.parametrize("name", sorted(ALLOCATION_VARIABLES - {"SLURM_JOB_ID"}))  # that one is in test_slurm.py
def test_a_variable_that_makes_us_look_is_one_that_is_read(name: str) -> None:
    source = find_source({name: "x"})
    assert source is not None
    assert source.variable == name
    assert find_source({name: ""}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"},
        {"PBS_NODEFILE": "/x", "TORCHELASTIC_RUN_ID": "none"},  # in a rank
        {"PBS_NODEFILE": "/x", "OMPI_COMM_WORLD_SIZE": "4"},  # under mpirun
        {"PBS_NODEFILE": "/x", "PMI_SIZE": "2"},
        {"FLUX_JOB_ID": "ƒ2", "FLUX_JOB_SIZE": "4"},  # flux run -n 4 launchpad
    ],
)
def test_no_allocation_or_not_ours_alone(environ: dict[str, str]) -> None:
    assert find_source(environ) is None


FILE = Source("PBS", "PBS_NODEFILE", "/aux/7")
QUEUES = Source("SGE", "PE_HOSTFILE", "/pe")
PAIRS = Source("LSF", "LSB_MCPU_HOSTS", text="…")
RESOURCES = Source("Flux", "FLUX_URI", command=("flux", "kvs", "get", "resource.R"))
NAME = "is not a host name; use letters, digits, '.', '_' and '-' only"
SLOTS = "is not a number of slots from 1 to 999999"
NOT_R = "flux kvs get resource.R: its answer is not a resource set (R) with nodes and cores"


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (FILE, "", f"/aux/7 lists no nodes of this PBS allocation; {INSTEAD}"),
        (FILE, " \n\n", f"/aux/7 lists no nodes of this PBS allocation; {INSTEAD}"),
        (FILE, "a\n\na b c\n", f"/aux/7, line 3: PBS writes one host per line, and this has 3 words; {INSTEAD}"),
        (FILE, "a\n\0\n", f"/aux/7, line 2: '\\x00' {NAME}"),
        (FILE, "a\n\ufffd\ufffd", f"/aux/7, line 2: '\ufffd\ufffd' {NAME}"),
        (FILE, "a:4", f"/aux/7, line 1: 'a:4' {NAME}"),
        (FILE, "ann@a", f"/aux/7, line 1: 'ann@a' {NAME}"),
        (FILE, "-oProxyCommand=id", "/aux/7, line 1: ssh would take '-oProxyCommand=id' for an option"),
        (FILE, "$(id)", f"/aux/7, line 1: '$(id)' {NAME}"),
        (
            QUEUES,
            "a 4 q\nb\n",
            f"/pe, line 2: SGE writes a host, its slots and its queue, and this is one word; {INSTEAD}",
        ),
        (QUEUES, "a four q", f"/pe, line 1: 'four' {SLOTS}"),
        (QUEUES, "a 0 q", f"/pe, line 1: '0' {SLOTS}"),
        (QUEUES, "a -1 q", f"/pe, line 1: '-1' {SLOTS}"),
        (QUEUES, "a 1000000 q", f"/pe, line 1: '1000000' {SLOTS}"),
        (PAIRS, "a 4 b", "LSB_MCPU_HOSTS: LSF writes hosts and their slots by turns, and the last has no number"),
        (PAIRS, "4 a", f"LSB_MCPU_HOSTS: 'a' {SLOTS}"),
        (PAIRS, " ", f"LSB_MCPU_HOSTS lists no nodes of this LSF allocation; {INSTEAD}"),
        (RESOURCES, "", NOT_R),
        (RESOURCES, "[]", NOT_R),
        (RESOURCES, '{"execution": null}', NOT_R),
        (RESOURCES, '{"execution": {"R_lite": [{"rank": "0"}], "nodelist": ["a"]}}', NOT_R),
        (RESOURCES, '{"execution": {"R_lite": [{"rank": 0, "children": {"core": "0"}}], "nodelist": ["a"]}}', NOT_R),
        (RESOURCES, '{"execution": {"R_lite": [{"rank": "0", "children": {"core": "0"}}]}}', NOT_R),
        (
            RESOURCES,
            '{"execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0"}}], "nodelist": ["a"]}}',
            "flux kvs get resource.R: its answer has 1 names for 2 nodes",
        ),
        (
            RESOURCES,
            '{"execution": {"R_lite": [{"rank": "1-0", "children": {"core": "0"}}], "nodelist": ["a"]}}',
            "flux kvs get resource.R: '1-0' in '1-0' is not a number or a range like 1-4",
        ),
        (
            RESOURCES,
            '{"execution": {"R_lite": [], "nodelist": []}}',
            "flux kvs get resource.R lists no nodes of this Flux allocation",
        ),
    ],
)
def test_an_error_names_the_wrong_part(source: Source, text: str, expected: str) -> None:
    assert message(parse_nodes, source, text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("n1", "n1"),
        ("foox,fooy,fooz", "foox fooy fooz"),
        ("[1-3,5-6]", "1 2 3 5 6"),
        ("foo[1-5]", "foo1 foo2 foo3 foo4 foo5"),
        ("foo[0-2]-eth2", "foo0-eth2 foo1-eth2 foo2-eth2"),
        ("foo[1,1,2,1]", "foo1 foo1 foo2 foo1"),
        ("[00-2]", "00 01 02"),
        ("h[1-3,7]", "h1 h2 h3 h7"),
        # Slurm
        ("cn[265,297-299]", "cn265 cn297 cn298 cn299"),
        (
            "node[001-003,7].cluster.local",
            "node001.cluster.local node002.cluster.local node003.cluster.local node7.cluster.local",
        ),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a[09-11],b,c[1,3]", "a09 a10 a11 b c1 c3"),
        ("rack[0-1]n[1,3],login", "rack0n1 rack0n3 rack1n1 rack1n3 login"),
        (" a , b[1, 2] ", "a b1 b2"),
    ],
)
def test_a_host_list(text: str, expected: str) -> None:
    assert expand_hostlist(text, "SLURM_JOB_NODELIST") == expected.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n[1-3", "SLURM_JOB_NODELIST: a bracket of 'n[1-3' is not closed or not opened"),
        ("a,n1-3]", "SLURM_JOB_NODELIST: a bracket of "),
        ("n[[1-3]]", "SLURM_JOB_NODELIST: a bracket of 'n[[1-3]]' is not closed or not opened"),
        ("n[]", "SLURM_JOB_NODELIST: '' in 'n[]' is not a number or a range like 1-4"),
        ("n[1,]", "SLURM_JOB_NODELIST: '' in 'n[1,]' is not"),
        ("n[a-c]", "SLURM_JOB_NODELIST: 'a-c' in 'n[a-c]' is not"),
        ("n[3-1]", "SLURM_JOB_NODELIST: '3-1' in 'n[3-1]' is not"),
        ("n[٣]", "SLURM_JOB_NODELIST: '٣' in 'n[٣]' is not"),
        ("n[1-99999999999]", "SLURM_JOB_NODELIST: 'n[1-99999999999]' stands for more than 1000000 hosts"),
        ("n[1-9999]m[1-9999]", "SLURM_JOB_NODELIST: 'n[1-9999]m[1-9999]' stands for more than 1000000 hosts"),
    ],
)
def test_what_is_wrong_with_a_host_list(text: str, expected: str) -> None:
    assert message(expand_hostlist, text, "SLURM_JOB_NODELIST").startswith(expected)


def told(act: Callable[..., object], *args: object) -> str:
    """What a UsageError says, or that there was none."""
    try:
        act(*args)
    except UsageError as error:
        return str(error)
    return "fine"


@UNHURRIED
@given(st.text("n1290-,[] .", max_size=30))
def test_any_text_is_a_host_list_or_an_error(text: str) -> None:
    assert told(expand_hostlist, text, "X").startswith(("fine", "X: "))


@UNHURRIED
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=50), st.integers(1, 5))
def test_what_was_put_in_brackets_comes_out(numbers: list[int], width: int) -> None:
    names = [str(number).zfill(width) for number in numbers]
    assert expand_hostlist(f"n[{','.join(names)}].x", "X") == [f"n{name}.x" for name in names]


@UNHURRIED
@given(st.sampled_from([FILE, QUEUES, PAIRS, RESOURCES]), st.text(max_size=40))
def test_any_text_is_a_list_of_nodes_or_an_error(source: Source, text: str) -> None:
    said = told(parse_nodes, source, text)
    assert said == "fine" or said.startswith(source.where)


# Which jobs use it, and what they say.


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(hosts=HostOptions(hosts="localhost")),
        RunOptions(hosts=HostOptions(hostfile="hosts.txt")),
        RunOptions(nodes=NodeOptions(nnodes="2")),
        RunOptions(nodes=NodeOptions(node_rank=0)),
        RunOptions(nodes=NodeOptions(standalone=True)),
    ],
)
def test_options_that_say_where_to_run_come_first(options: RunOptions) -> None:
    assert with_allocation(options, {"PBS_NODEFILE": "/no/such/file"}) is options


FIVE = {"LSB_MCPU_HOSTS": "a 4 b 4 c 2 d 4 e 4"}
TWENTY = {"LSB_MCPU_HOSTS": " ".join(f"n{number:02} 8" for number in range(1, 21))}


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        (RunOptions(), FIVE, "using the 5 nodes of this LSF allocation: a:4, b:4, c:2, d:4, e:4"),
        (RunOptions(nproc=6), FIVE, "using the 5 nodes of this LSF allocation: a:6, b:6, c:6, d:6, e:6"),
        (RunOptions(nproc="gpu"), FIVE, "using the 5 nodes of this LSF allocation: a, b, c, d, e"),
        (
            RunOptions(hosts=HostOptions(include="[bc]", exclude="b")),
            FIVE,
            "using 1 of the 5 nodes of this LSF allocation: c:2",
        ),
        (RunOptions(), {"LSB_MCPU_HOSTS": "a 1 "}, "using the node of this LSF allocation: a:1"),
        (
            RunOptions(),
            TWENTY,
            "using the 20 nodes of this LSF allocation: n01:8, n02:8, n03:8, n04:8, n05:8, n06:8, n07:8, …, n20:8",
        ),
    ],
)
def test_one_line_says_what_is_used(
    options: RunOptions, environ: dict[str, str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    used = with_allocation(options, environ)
    assert used.hosts.given
    assert used == options._replace(hosts=options.hosts._replace(allocation=used.hosts.allocation))
    assert capfd.readouterr() == ("", f"launchpad: {expected}\n")
    with_allocation(options._replace(reports=ReportOptions(quiet=True)), environ)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit('warning\\nno such job')", "no such job"),
        ("sys.exit(3)", "exit code 3"),
        ("os.execvp('sleep', ['sleep', '600'])", "no answer after 0.5 s"),
    ],
)
def test_a_command_that_fails_or_hangs(code: str, expected: str) -> None:
    command = [sys.executable, "-c", f"import os, sys; {code}"]
    assert message(run_command, command, 0.5 if "sleep" in code else 60.0).endswith(f": {expected}; {INSTEAD}")


def test_a_command_that_is_not_there() -> None:
    assert message(run_command, ["no-such-flux", "x"], 1.0) == f"no-such-flux x: No such file or directory; {INSTEAD}"
