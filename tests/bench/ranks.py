"""What a call of ranks that stay costs, beside multiprocessing's Pool.map and ipyparallel's direct view.

    python tests/bench/ranks.py [--ranks 4] [--calls 1000] [--rounds 5]

Each calls the same function on as many processes, which do nothing else. The peers take turns, in rounds, so that what
else the machine does hits all of them. ipyparallel is left out unless it is installed (pip install ipyparallel).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator

import launchpad

Call = Callable[[object], object]


def nothing(x: object) -> object:
    return x


@contextlib.contextmanager
def of_launchpad(count: int, backend: str | None) -> Iterator[Call]:
    with launchpad.ranks(count, backend=backend) as ranks:
        yield lambda x: ranks.run(nothing, x)


@contextlib.contextmanager
def of_pool(count: int) -> Iterator[Call]:
    with multiprocessing.get_context("forkserver").Pool(count) as pool:
        yield lambda x: pool.map(nothing, [x] * count, chunksize=1)


@contextlib.contextmanager
def of_ipyparallel(count: int) -> Iterator[Call]:
    import ipyparallel

    with ipyparallel.Cluster(n=count, log_level=logging.ERROR) as client:
        view = client[:]
        view.block = True
        yield lambda x: view.apply_sync(nothing, x)


def measure(call: Call, calls: int, x: object) -> list[float]:
    """Milliseconds of each call."""
    found = []
    for _ in range(calls):
        before = time.perf_counter()
        call(x)
        found.append((time.perf_counter() - before) * 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a call, in ms.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    payloads: dict[str, object] = {"one number": 1}
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        payloads["an array of 8 MiB, both ways"] = numpy.zeros(1 << 20)
    with contextlib.ExitStack() as stack:
        peers: dict[str, Call] = {
            "launchpad.ranks": stack.enter_context(of_launchpad(options.ranks, None)),
            "Pool.map": stack.enter_context(of_pool(options.ranks)),
        }
        if importlib.util.find_spec("torch") is not None:
            peers["launchpad.ranks, gloo"] = stack.enter_context(of_launchpad(options.ranks, "gloo"))
        if importlib.util.find_spec("ipyparallel") is not None:
            peers["ipyparallel"] = stack.enter_context(of_ipyparallel(options.ranks))
        else:
            print("ipyparallel is not installed: pip install ipyparallel")
        print(f"{options.ranks} processes, {os.cpu_count()} cores")
        for what, x in payloads.items():
            calls = options.calls if what == "one number" else max(10, options.calls // 20)
            times: dict[str, list[float]] = {name: [] for name in peers}
            for call in peers.values():
                measure(call, 10, x)
            for _ in range(options.rounds):
                for name, call in peers.items():
                    times[name] += measure(call, calls // options.rounds, x)
            print(f"\n{what:<32} {'p50 ms':>9} {'p95 ms':>9}")
            for name, found in times.items():
                found.sort()
                print(f"{name:<32} {found[len(found) // 2]:9.3f} {found[len(found) * 95 // 100]:9.3f}")


if __name__ == "__main__":
    main()
