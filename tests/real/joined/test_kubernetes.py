"""configs/kubernetes: a JobSet that its API accepts, and whose pods form one world."""

from __future__ import annotations

import signal
import subprocess
from pathlib import PurePosixPath

import pytest

from launchpad.cli.run import command
from launchpad.errors import NodeError
from launchpad.head.machine import GRACE_AFTER_REQUEST, KILL_SECONDS
from launchpad.job.outcome import NODE_LOST
from launchpad.job.world import parse_nnodes
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.joined import leads
from tests.support.kubernetes import Pod, pods_of, read_manifest, value_of, with_values
from tests.support.ports import free_port

pytestmark = pytest.mark.usefixtures("from_image")


@pytest.fixture(scope="module")
def pods() -> list[Pod]:
    return pods_of(read_manifest())


def test_the_api_takes_it_and_knows_every_field() -> None:
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet  # here, as that takes a second

    manifest = read_manifest()
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    parsed = JobsetV1alpha2JobSet.from_dict(manifest)
    assert parsed is not None
    assert parsed.to_dict() == manifest  # a field that the API doesn't have is dropped


def test_all_pods_run_the_same_line(pods: list[Pod]) -> None:
    argv = pods[0].argv
    assert all(pod.argv == argv for pod in pods)
    assert argv[:2] == ["launchpad", "run"]
    assert argv[-1] == "train.py"
    least, most = parse_nnodes(value_of(argv, "--nnodes"))
    assert least < most == len(pods)
    assert [pod.environ["JOB_COMPLETION_INDEX"] for pod in pods] == ["0", "1", "2", "3"]
    assert len({pod.hostname for pod in pods}) == len(pods)


def test_they_meet_at_the_first_of_them(pods: list[Pod]) -> None:
    assert value_of(pods[0].argv, "--rdzv-endpoint") == f"{pods[0].address}:29400"
    network = read_manifest()["spec"]["network"]
    assert network["enableDNSHostnames"]
    assert network["publishNotReadyAddresses"]


def test_the_secret_is_a_file_of_a_mounted_secret(pods: list[Pod]) -> None:
    path = PurePosixPath(value_of(pods[0].argv, "--rdzv-secret-file"))
    assert pods[0].secrets == {str(path.parent): "train-secret"}
    assert path.name == "secret"  # the key that the comment says to make


def test_a_pod_is_replaced_unless_the_job_has_failed() -> None:
    spec = read_manifest()["spec"]
    (group,) = spec["replicatedJobs"]
    job = group["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert job["backoffLimit"] > 0
    assert spec["failurePolicy"]["maxRestarts"] == 0
    *_, rule = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    lost = {NodeError.exit_code, NODE_LOST, 128 + signal.SIGKILL, 128 + signal.SIGTERM}
    assert set(rule["onExitCodes"]["values"]) == lost
    inside = job["template"]["spec"]
    assert inside["restartPolicy"] == "Never"
    assert inside["terminationGracePeriodSeconds"] >= GRACE_AFTER_REQUEST + KILL_SECONDS


def test_fewer_pods_can_be_read(pods: list[Pod]) -> None:
    two = pods_of(read_manifest(), 2)
    assert two == pods[:2]
    assert with_values(["a", "--b", "c", "d"], {"--b": "x"}) == ["a", "--b", "x", "d"]


def test_the_line_is_one_that_launchpad_takes(pods: list[Pod]) -> None:
    command.make_context("run", pods[0].argv[2:])


class Pods:
    """Three of them, as processes of one machine, with two ranks each."""

    def __init__(self, launchpad: Launchpad, script: str, nnodes: str) -> None:
        self._launchpad = launchpad
        (launchpad.folder / "train.py").write_text(script)
        secret = launchpad.folder / "secret"
        secret.write_text("00112233445566778899aabbccddeeff\n")
        secret.chmod(0o600)
        self._pods = pods_of(read_manifest(), 3)
        self.port = free_port()
        self._values = {
            "--nnodes": nnodes,
            "--nproc-per-node": "2",
            "--rdzv-endpoint": f"127.0.0.1:{self.port}",
            "--rdzv-secret-file": str(secret),
        }
        self.started = [self.start(number) for number in range(3)]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Start one of them, or the one that replaces it."""
        pod = self._pods[number]
        environ = {**self._launchpad.environ, **pod.environ}
        return self._launchpad.start(*with_values(pod.argv, self._values)[1:], env=environ)

    def end(self) -> list[bytes]:
        """Wait until all have ended well. Returns the last line that each rank has printed."""
        outputs = [process.communicate(timeout=DEADLINE) for process in self.started]
        assert [process.returncode for process in self.started] == [0, 0, 0], outputs
        return [line.split(b"] ")[1] for output, _ in outputs for line in output.splitlines()[-2:]]


WHERE = """\
import os
names = "RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
print(*(os.environ[name] for name in names.split()), flush=True)
"""
STAYS = """
import time
open(f"{os.environ['RANK']}-{time.time_ns()}", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
"""
ALL = [f"{rank} 6 {rank // 2} 3".encode() for rank in range(6)]


def test_the_pods_form_one_world(launchpad: Launchpad) -> None:
    assert sorted(Pods(launchpad, WHERE, "3").end()) == ALL


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["lost", "evicted"])
def test_a_pod_that_is_lost_or_evicted_is_replaced_also_the_first_one(launchpad: Launchpad, signum: int) -> None:
    pods = Pods(launchpad, WHERE + STAYS, "2:3")

    def begun(count: int) -> None:
        wait_until(lambda: len(list(launchpad.folder.glob("[0-9]*-*"))) >= count, f"{count} starts of ranks")

    begun(6)
    first = next(number for number, pod in enumerate(pods.started) if leads(pod, pods.port))
    for number, ranks in ((first, 6), ((first + 1) % 3, 16)):
        pods.started[number].send_signal(signum)
        pods.started[number].communicate(timeout=DEADLINE)
        assert pods.started[number].returncode in (-signal.SIGKILL, 128 + signal.SIGTERM), "no other pod is recreated"
        begun(ranks + 4)
        pods.started[number] = pods.start(number)
        begun(ranks + 4 + 6)
    (launchpad.folder / "go").touch()
    assert sorted(pods.end()) == ALL
