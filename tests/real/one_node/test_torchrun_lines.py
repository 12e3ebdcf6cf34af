"""Command lines as people write them for torchrun, in READMEs and Slurm scripts, with only the first word replaced.

The program, ports and values are ours. Those for several nodes are run by as many launchpads on this machine.
"""

# ruff: noqa: E501 - a command line is one line

from __future__ import annotations

import os
import re
import shlex
import sys

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.ports import free_port

pytestmark = pytest.mark.usefixtures("from_image")

PROGRAM = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"

# {port}: where the nodes meet; {node}: the number of the node, as $SLURM_NODEID is; {nodes}: their number.
ONE_NODE = (
    "--nproc_per_node=2 train.py --batch 8 --lr 3e-4",
    "--nproc-per-node 2 -m package.train --config conf.yaml",
    "--standalone --nnodes=1 --nproc_per_node=2 train.py",
    "--standalone --nnodes=1 --nproc-per-node=2 -m package.train run --epochs 2",
    "--nnodes 1 --nproc_per_node 2 --master_port {port} main.py --cfg a.yaml --tag full[base]_v2",
    "--nnodes=1 --nproc_per_node=2 --rdzv_id=7 --rdzv_backend=c10d --rdzv_endpoint=localhost:{port} bin/train.py",
    "--nnodes 1 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint localhost --rdzv_id 54321 --role trainer main.py",
    "--nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint=localhost:0 --local-ranks-filter 0,1 --role rank --tee 3 -m "
    "package.train",
    "--nnode 1 --nproc_per_node 2 --rdzv_id {port} --rdzv_backend c10d --rdzv_endpoint localhost:{port} ./tool/main.py",
    "--nproc_per_node=2 --master_addr=127.0.0.1 --master_port={port} train.py --deepspeed conf.json",
    "--nnodes=1 --node_rank=0 --nproc_per_node=2 --master_addr=localhost --master_port={port} ./main.py",
    "--nproc_per_node 2 --nnodes 1 --no_python sh -c 'python train.py'",
    "--nproc_per_node=2 --max_restarts=0 --log-dir logs --redirects 3 --tee 3 train.py",
)
SEVERAL_NODES = (
    "--nnodes {nodes} --nproc_per_node 1 --rdzv_id 42 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port} -m package.train",
    "--nnodes {nodes} --nproc_per_node 2 --rdzv_id $RANDOM_ID --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port} train.py",
    "--nproc_per_node=2 --nnodes={nodes} --node_rank={node} --rdzv_endpoint=127.0.0.1:{port} --rdzv_backend=c10d train.py",
    "--nnodes={nodes} --node_rank={node} --nproc_per_node=1 --master_addr=127.0.0.1 --master_port={port} train.py",
    "--nproc_per_node 1 --nnodes {nodes} --master_addr 127.0.0.1 --node_rank {node} --master_port {port} train.py --tp 4",
    "--nnodes={nodes} --nproc_per_node=2 --rdzv_endpoint=127.0.0.1:{port} train.py",
    "--nnodes={nodes} --nproc-per-node=1 --node-rank={node} --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=job_7 "
    "--log-dir=out --tee=3 --redirects=3 --local-ranks-filter=0 train.py",
    "--nnodes={nodes} --nproc-per-node=1 --rdzv-id=job-01 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} -m "
    "package.train train --output out",
    "--nnodes {nodes} --nproc_per_node 1 --node_rank {node} --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port} --rdzv_id 8 "
    "--no-python sh wrapper.sh --data a",
    "--nnodes {nodes} --nproc_per_node 1 --max_restarts 0 --rdzv_backend c10d --rdzv_id 9 --rdzv_endpoint 127.0.0.1:{port} "
    "--redirects 3 --tee 3 train.py",
    "--nproc_per_node=1 --nnodes={nodes} --rdzv_conf=join_timeout=60,last_call_timeout=5 --rdzv_id=3 --rdzv_backend=c10d "
    "--rdzv_endpoint=127.0.0.1:{port} train.py",
)


@pytest.fixture
def written(launchpad: Launchpad) -> Launchpad:
    """The programs that the lines name, and on PATH the interpreter, by the name that they use."""
    for path in ("train.py", "main.py", "bin/train.py", "tool/main.py", "package/train.py", "package/__init__.py"):
        (launchpad.folder / path).parent.mkdir(exist_ok=True)
        (launchpad.folder / path).write_text(PROGRAM if "__init__" not in path else "")
    (launchpad.folder / "wrapper.sh").write_text("exec python train.py\n")
    folder = launchpad.folder.parent / "bin"
    folder.mkdir()
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    launchpad.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    return launchpad


def ranks(launchpad: Launchpad, line: str, nodes: int) -> list[str]:
    """What the ranks of all nodes printed, after all launchpads have succeeded."""
    port = free_port()
    jobs = []
    for node in range(nodes):
        words = shlex.split(line.format(port=port, node=node, nodes=nodes).replace("$RANDOM_ID", "31415"))
        jobs.append(launchpad.start("run", *words))
    printed = []
    for job in jobs:
        out, err = (text.decode() for text in job.communicate(timeout=DEADLINE))
        assert job.returncode == 0, err
        printed += re.findall(r"rank \d+ of \d+$", out, re.M)
    return sorted(printed)


@pytest.mark.parametrize("line", ONE_NODE)
def test_on_one_node(written: Launchpad, line: str) -> None:
    assert ranks(written, line, 1) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("line", SEVERAL_NODES)
def test_on_several_nodes(written: Launchpad, line: str) -> None:
    size = 2 * int(re.findall(r"nproc.per.node[ =](\d)", line)[0])
    shown = ranks(written, line, 2)
    assert set(shown) <= {f"rank {rank} of {size}" for rank in range(size)}
    assert len(shown) == size
