"""`launchpad.run` with several functions: their results by role, and what goes wrong."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

import launchpad as lp
from launchpad import Role
from tests.support.needs import needs_torch


def serve() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/die":
                os._exit(7)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(os.environ["TORCHELASTIC_RESTART_COUNT"].encode())

        def log_message(self, *_: object) -> None:
            pass

    HTTPServer(("127.0.0.1", int(os.environ["LAUNCHPAD_PORT_HTTP"])), Handler).serve_forever()


def ask(path: str = "/") -> str:
    place = os.environ["LAUNCHPAD_SERVE_HTTP"]
    return urllib.request.urlopen(f"http://{place}{path}", timeout=30).read().decode()  # type: ignore[no-any-return]


def service(**more: Any) -> Role:
    return Role(serve, backend=None, service=True, ports=["http"], ready="http:/", **more)


def client(fn: Callable[..., Any], *args: Any, **more: Any) -> Role:
    return Role(fn, *args, backend=None, after="serve", **more)


def test_results_are_by_role(capsys: pytest.CaptureFixture[str]) -> None:
    def step(factor: int) -> tuple[int, str]:
        print("steps")
        return factor * int(os.environ["RANK"]), ask()

    found = lp.run({"serve": service(), "train": client(step, 10, nproc=3)})
    assert found == {"train": ((0, "0"), (10, "0"), (20, "0"))}
    assert isinstance(found["train"], lp.Results)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == ["[train 0] steps", "[train 1] steps", "[train 2] steps"]


def test_a_replica_that_starts_again_returns_what_it_returns_then() -> None:
    def group() -> tuple[str, str]:
        own = os.environ
        if own["REPLICA_GROUP_ID"] == "1" and own["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(7)
        return own["REPLICA_GROUP_ID"], own["TORCHELASTIC_RESTART_COUNT"]

    found = lp.run({"train": Role(group, backend=None, nproc=2, replicas=2, max_restarts=1)})
    assert found == {"train": [(("0", "0"), ("0", "0")), (("1", "1"), ("1", "1"))]}


def test_a_client_that_meets_a_service_while_it_starts_again() -> None:
    def step() -> str:
        try:
            ask("/die")
        except OSError:
            pass
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                return ask()
            except OSError:
                time.sleep(0.01)
        raise AssertionError

    assert lp.run({"serve": service(max_restarts=1), "train": client(step)}) == {"train": ("1",)}


@needs_torch
def test_worlds_have_their_own_groups() -> None:
    def total() -> int:
        import torch
        import torch.distributed as dist

        ones = torch.ones(1)
        dist.all_reduce(ones)
        return int(ones)

    assert lp.run({"a": Role(total, nproc=2), "b": Role(total)}) == {"a": (2, 2), "b": (1,)}


def test_the_exception_of_the_rank_that_failed_first() -> None:
    def step() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("no such layer")
        time.sleep(60)

    with pytest.raises(ValueError, match="no such layer") as caught:
        lp.run({"serve": service(), "train": client(step, nproc=2)})
    assert str(caught.value.__cause__).strip().startswith("train rank 1:\n")


def test_a_service_that_returns_has_failed() -> None:
    with pytest.raises(lp.RankError, match="serve rank 0 failed first: is a service, and exited with code 0"):
        lp.run({"serve": Role(int, backend=None, service=True), "train": client(time.sleep, 60)}, timeout=50)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({}, "launchpad.run needs at least one role"),
        ({"a.b": Role(int)}, "'a.b': a role's name has letters"),
        ({"a": int}, "launchpad.run: a: give launchpad.Role"),
        ({"a": Role(int, after="b")}, "launchpad.run.a, after: there is no role 'b', only a"),
        ({"a": Role(int, service=True)}, "all roles are services"),
        ({"a": Role(int, replicas=2)}, "launchpad.run: nproc can't be given beside roles"),
    ],
)
def test_what_makes_no_sense(roles: dict[str, Role], said: str) -> None:
    with pytest.raises(lp.UsageError, match=said):
        lp.run(roles, **({"nproc": 2} if "nproc" in said else {}))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nproc": 0}, "Role: nproc=0: give a number from 1 on"),
        ({"max_restarts": -1}, "Role: max_restarts=-1"),
        ({"gpus": "all"}, "Role: gpus='all'"),
        ({"ready": "tcp:http"}, "Role: ready: 'tcp:http' needs a port"),
        ({"backend": "smoke"}, "backend='smoke'"),
        ({"ready_timeout": 0}, "timeout=0"),
    ],
)
def test_what_a_role_does_not_take(given: dict[str, Any], said: str) -> None:
    with pytest.raises(lp.UsageError, match=said):
        Role(int, **given)


def test_what_a_job_of_roles_does_not_take() -> None:
    with pytest.raises(lp.UsageError, match="--spares can't be combined with roles; leave it out"):
        lp.run({"a": Role(int)}, hosts="localhost", spares=1)
    with pytest.raises(lp.UsageError, match="--tf-config can't be combined with roles"):
        lp.run({"a": Role(int)}, tf_config=True)
