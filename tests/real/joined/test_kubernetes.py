"""configs/kubernetes: a JobSet that its API accepts, and whose pods form one world."""

from __future__ import annotations

import subprocess
from pathlib import PurePosixPath

import pytest

from launchpad.cli.run import command
from launchpad.head.machine import GRACE_AFTER_REQUEST, KILL_SECONDS
from tests.support.command import DEADLINE, Launchpad
from tests.support.kubernetes import Pod, pods_of, read_manifest, value_of, with_values
from tests.support.sshd import free_port


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
    assert len(pods) == int(value_of(argv, "--nnodes"))
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


def test_pods_live_and_die_together() -> None:
    spec = read_manifest()["spec"]
    (group,) = spec["replicatedJobs"]
    job = group["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert job["backoffLimit"] == 0
    assert spec["failurePolicy"]["maxRestarts"] > 0
    inside = job["template"]["spec"]
    assert inside["restartPolicy"] == "Never"
    assert inside["terminationGracePeriodSeconds"] >= GRACE_AFTER_REQUEST + KILL_SECONDS


def test_fewer_pods_can_be_read(pods: list[Pod]) -> None:
    two = pods_of(read_manifest(), 2)
    assert two == pods[:2]
    assert with_values(["a", "--b", "c", "d"], {"--b": "x"}) == ["a", "--b", "x", "d"]


def test_the_line_is_one_that_launchpad_takes(pods: list[Pod]) -> None:
    command.make_context("run", pods[0].argv[2:])


def test_the_pods_form_one_world(launchpad: Launchpad) -> None:
    """Here they are processes of one machine, with two ranks each."""
    (launchpad.folder / "train.py").write_text(
        "import os\nprint(*(os.environ[name] for name in 'RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE'.split()))\n"
    )
    secret = launchpad.folder / "secret"
    secret.write_text("00112233445566778899aabbccddeeff\n")
    secret.chmod(0o600)
    values = {
        "--nnodes": "3",
        "--nproc-per-node": "2",
        "--rdzv-endpoint": f"127.0.0.1:{free_port()}",
        "--rdzv-secret-file": str(secret),
    }
    started: list[subprocess.Popen[bytes]] = []
    for pod in pods_of(read_manifest(), 3):
        environ = {**launchpad.environ, **pod.environ}
        started.append(launchpad.start(*with_values(pod.argv, values)[1:], env=environ))
    outputs = [process.communicate(timeout=DEADLINE) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], outputs
    lines = [line.split(b"] ")[1] for output, _ in outputs for line in output.splitlines()]
    assert sorted(lines) == [f"{rank} 6 {rank // 2} 3".encode() for rank in range(6)]
