"""Frameworks find the ranks that launchpad has started: JAX, TensorFlow, and those that read torchrun's variables."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.hosts import Hosts
from tests.support.sshd import needs_sshd

pytestmark = pytest.mark.usefixtures("from_image")

ROOT = Path(__file__).parents[3]
SMOKE = ROOT / "configs" / "frameworks.toml"

# A package with JAX's interface for environments that it can be in. The first class that is present is asked.
CLUSTERS = """
class ClusterEnv:
    _cluster_types = []
    def __init_subclass__(cls):
        cls._cluster_types.append(cls)
"""
SLURM = """
import os
from jax._src.clusters import ClusterEnv
class SlurmCluster(ClusterEnv):
    is_env_present = classmethod(lambda cls: "SLURM_JOB_ID" in os.environ)
"""
INITIALIZE = """
from jax._src import clusters
def initialize(**options):
    env = next((env for env in clusters.ClusterEnv._cluster_types if env.is_env_present()), None)
    if env is None:
        return "found nothing"
    address = env.get_coordinator_address(timeout_secs=5, **options)
    return env.__name__, address, env.get_process_count(), env.get_process_id(), env.get_local_process_id()
"""
ASK = """
import os, sys
{}
print(distributed.initialize() == (
    "LaunchpadCluster", os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"], *map(int, sys.argv[1:]),
    int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]) if os.environ["LOCAL_WORLD_SIZE"] != "1" else None,
))
"""


@pytest.fixture
def jax(launchpad: Launchpad) -> None:
    """A package of this name in the working folder, and a script that uses it."""
    package = launchpad.folder / "jax"
    (package / "_src" / "clusters").mkdir(parents=True)
    for path, text in {
        "__init__.py": "",
        "distributed.py": INITIALIZE,
        "_src/__init__.py": "",
        "_src/clusters/__init__.py": "from .cluster import ClusterEnv\nfrom .slurm import SlurmCluster\n",
        "_src/clusters/cluster.py": CLUSTERS,
        "_src/clusters/slurm.py": SLURM,
    }.items():
        (package / path).write_text(text)
    (launchpad.folder / "ask.py").write_text(ASK.format("from jax import distributed"))


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize(
    "way", [["--start-method", "exec"], ["--preload", "jax.distributed"], ["--preload", "json"]], ids=" ".join
)
def test_jax_is_told_of_the_job(launchpad: Launchpad, way: list[str]) -> None:
    """Before other launchers: this one may have been started in a job of Slurm's."""
    launchpad.environ["SLURM_JOB_ID"] = "1"
    done = launchpad.run("run", "-n", 2, *way, "--nnodes", 1, "ask.py", 2)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, ["[0] True", "[1] True"], "")


@pytest.mark.usefixtures("jax")
def test_a_rank_that_is_alone_has_all_gpus_of_its_host(launchpad: Launchpad) -> None:
    assert launchpad.run("run", "ask.py", 1).stdout == "[0] True\n"


@pytest.mark.usefixtures("jax")
def test_jax_gets_the_port_that_it_was_told_to_use(launchpad: Launchpad) -> None:
    ask = "from jax import distributed; print(distributed.initialize(override_coordinator_port='7'))"
    (launchpad.folder / "port.py").write_text(ask)
    assert launchpad.run("run", "port.py").stdout == "[0] ('LaunchpadCluster', '127.0.0.1:7', 1, 0, None)\n"


@pytest.mark.usefixtures("jax")
def test_without_hooks_jax_finds_what_it_finds_under_python(launchpad: Launchpad) -> None:
    (launchpad.folder / "bare.py").write_text("from jax import distributed; print(distributed.initialize())")
    assert launchpad.run("run", "--no-hooks", "bare.py").stdout == "[0] found nothing\n"


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize("source", ["", "class ClusterEnv: pass", "class ClusterEnv:\n    _cluster_types = None"])
def test_another_jax_is_left_alone(launchpad: Launchpad, source: str) -> None:
    (launchpad.folder / "jax" / "_src" / "clusters" / "__init__.py").write_text(source)
    (launchpad.folder / "jax" / "_src" / "later.py").write_text("")
    (launchpad.folder / "imports.py").write_text("import jax.distributed, jax._src.later; print('imported')")
    done = launchpad.run("run", "imports.py")
    assert (done.stdout, done.stderr) == ("[0] imported\n", "")


@needs_sshd
@pytest.mark.usefixtures("jax")
def test_jax_over_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1:2,n2:1", "ask.py", 3)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[n1 0] True", "[n1 1] True", "[n2 2] True"])


# TensorFlow.

LISTENS = """
import json, os, socket, sys, time
cluster, task = json.loads(os.environ["TF_CONFIG"]).values()
host, _, port = cluster["worker"][task["index"]].rpartition(":")
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
listener.bind(("", int(port)))
listener.listen()
right = cluster["worker"][(task["index"] + 1) % len(cluster["worker"])]
deadline = time.monotonic() + 30
while (out := socket.socket()).connect_ex((right.rpartition(":")[0], int(right.rpartition(":")[2]))):
    assert time.monotonic() < deadline
out.sendall(os.environ["RANK"].encode())
came, _ = listener.accept()
print(task["type"], "hears", came.recv(1).decode(), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] < sys.argv[1]:
    sys.exit(1)
"""
RIGHT = {"[0] worker hears 2", "[1] worker hears 0", "[2] worker hears 1"}


def test_each_worker_of_tensorflow_has_a_port(launchpad: Launchpad) -> None:
    """It is free for a program that listens there as TensorFlow does, and after a restart again."""
    (launchpad.folder / "listens.py").write_text(LISTENS)
    done = launchpad.run("run", "-n", 3, "--tf-config", "--max-restarts", 1, "--restart", "always", "listens.py", 1)
    assert done.returncode == 0, done.stderr
    assert {line for line in done.stdout.splitlines() if "hears" in line} == RIGHT


@needs_sshd
def test_workers_of_tensorflow_over_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "listens.py").write_text(LISTENS)
    done = hosts.run(launchpad, "-H", "n2:1,n1:2", "--tf-config", "listens.py", 0)
    assert done.returncode == 0, done.stderr
    assert {line.partition(" ")[2] for line in done.stdout.splitlines()} == {line[1:] for line in RIGHT}


def test_the_plan_shows_the_workers(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--tf-config", "--dry-run", "--json", "true")
    ranks = json.loads(done.stdout)["nodes"][0]["ranks"]
    configs = [json.loads(rank["environ"]["TF_CONFIG"]) for rank in ranks]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": index} for index in range(2)]
    assert len(set(configs[0]["cluster"]["worker"])) == 2
    assert configs[0]["cluster"] == configs[1]["cluster"]


def test_two_who_set_tf_config_are_refused(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--tf-config", "--env", "TF_CONFIG={}", "true")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "leave one of them out" in done.stderr


# The real ones, where they are installed.

JOBS = tomllib.loads(SMOKE.read_text())["jobs"]
MODULES = {"fabric": "lightning", "dask": "dask_mpi", "mpi-futures": "mpi4py"}
SAID = {
    "jax": ["process 0 of 2: the sum is 3", "process 1 of 2: the sum is 3"],
    "tensorflow": ["worker 0 of 2: the sum is 3", "worker 1 of 2: the sum is 3"],
    "accelerate": ["ranks [0, 1] have trained"],
    "transformers": ["2 ranks have done 2 steps"],
    "trl": ["2 ranks have done 2 steps"],
    "lightning": ["2 ranks have done 2 steps in a TorchElasticEnvironment"],
    "fabric": ["the sum over 2 ranks in a TorchElasticEnvironment is 3"],
    "ignite": ["the mean over 2 ranks is 1.5"],
    "deepspeed": ["the sum over 2 ranks is 3"],
    "hydra": ["rank 0 of 2: lr 0.1", "rank 1 of 2: lr 0.1"],
    "dask": ["the sum of the squares is 14"],
    "mpi-futures": ["the squares are 0 1 4 9"],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                find_spec(MODULES.get(name, name)) is None, reason=f"the framework is not installed: {name}"
            ),
        )
        for name in JOBS
    ],
)
def test_a_framework_starts_as_under_its_own_launcher(launchpad: Launchpad, name: str) -> None:
    done = launchpad.run("run", "--config", SMOKE, "--job", name, cwd=ROOT, timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert [line for line in SAID[name] if line not in said] == []
