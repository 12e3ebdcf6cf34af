"""What the pods of a JobSet run, read from its YAML: so that tests can check it, and run it without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MANIFEST = Path(__file__).parents[2] / "configs" / "kubernetes" / "jobset.yaml"


class Pod(NamedTuple):
    """One pod, with one container."""

    hostname: str
    address: str  # that the other pods find it at
    argv: list[str]
    environ: dict[str, str]  # what the manifest, Kubernetes and the Job controller set
    secrets: dict[str, str]  # by path: the name of the Secret whose keys are files there


def read_manifest(path: Path = MANIFEST) -> dict[str, Any]:
    """The JobSet in the file."""
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    return manifest


def pods_of(manifest: Mapping[str, Any], count: int | None = None) -> list[Pod]:
    """The pods of the JobSet; `count`: so many per job, instead of its completions."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    subdomain = spec["network"].get("subdomain", name)
    pods = []
    for group in spec["replicatedJobs"]:
        job = group["template"]["spec"]
        inside = job["template"]["spec"]
        (container,) = inside["containers"]
        for replica in range(group["replicas"]):
            for index in range(count or job["completions"]):
                hostname = f"{name}-{group['name']}-{replica}-{index}"
                environ = {one["name"]: one["value"] for one in container.get("env", ())}
                environ |= {"HOSTNAME": hostname, "JOB_COMPLETION_INDEX": str(index)}
                argv = [*container.get("command", ()), *container.get("args", ())]
                pods.append(Pod(hostname, f"{hostname}.{subdomain}", argv, environ, _secrets(inside, container)))
    return pods


def _secrets(inside: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, str]:
    volumes = {one["name"]: one["secret"]["secretName"] for one in inside["volumes"] if "secret" in one}
    return {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"] if one["name"] in volumes}


def value_of(argv: list[str], option: str) -> str:
    """The value that follows an option."""
    return argv[argv.index(option) + 1]


def with_values(argv: list[str], values: Mapping[str, str]) -> list[str]:
    """The command line with other values for these options."""
    return [values.get(before, word) for before, word in zip(["", *argv[:-1]], argv, strict=True)]
