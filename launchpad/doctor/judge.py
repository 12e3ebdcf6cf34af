"""All that there is to say about a checkup: the findings, and in a few words what is well."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from launchpad.doctor.gpus import judge_gpus
from launchpad.doctor.hosts import judge_host
from launchpad.doctor.network import address_of, interface_of, judge_network
from launchpad.doctor.seen import Examination, Finding, Level, listed, size
from launchpad.doctor.software import judge_software, mpi_in_words, untested_torch


def judge(seen: Examination) -> list[Finding]:
    """What is wrong, the worst first, host by host."""
    found = list(_judge(seen))
    return sorted(found, key=lambda one: (one.level != "bad", len(one.hosts), one.hosts))


def _judge(seen: Examination) -> Iterator[Finding]:
    for place, host in enumerate(seen.hosts):
        if host.failure:
            yield Finding("bad", (place,), "reach", host.failure, "")
        else:
            yield from judge_host(place, host)
    yield from judge_network(seen)
    yield from judge_software(seen)
    yield from judge_gpus(seen)
    for backend, why in seen.not_reduced.items():
        text = f"an all_reduce with {backend} over the hosts failed: {why}"
        yield Finding("bad", tuple(seen.present), backend, text, f"launchpad bench --backend {backend} shows more")


def level_of(found: list[Finding]) -> Level:
    """The worst level of these."""
    levels = {one.level for one in found}
    return "bad" if "bad" in levels else "warn" if "warn" in levels else "ok"


def about_host(seen: Examination, place: int) -> str:
    """A host with which nothing is wrong, in a few words."""
    host = seen.hosts[place]
    words = []
    address = address_of(seen, place)
    if address:
        words.append(f"{address} ({interface_of(seen, place) or 'lo'})")
    facts: Any = host.facts
    if limits := facts.get("limits"):
        words.append(f"{limits.cores:g} core{'s' * (limits.cores != 1)}")
    if memory := facts.get("memory"):
        words.append(f"{size(memory.available)}")
    if gpus := facts.get("gpus"):
        words += [f"{len(gpus.gpus)} × {gpus.gpus[0].name}"] if gpus.gpus else []
    if software := facts.get("software"):
        words.append(f"Python {software.python}")
        untested = untested_torch(software.torch)
        words.append(f"torch {software.torch}" if software.torch else "no torch")
        words[-1] += f" ({untested})" if untested else ""
    if (mpi := facts.get("mpi")) and mpi.library and not mpi.problem:
        words.append(mpi_in_words(mpi))
    if (kept := facts.get("kept")) and kept.images:
        words.append("kept image")
    return ", ".join(words)


def about_pairs(seen: Examination) -> str:
    """The paths between the hosts, in a few words; "" if there are none."""
    good = [path for path in seen.paths.values() if path.address]
    if not good:
        return ""
    count = f"{len(good)} of {len(seen.paths)}" if len(good) < len(seen.paths) else f"all {len(good)}"
    times = sorted(path.latency for path in good)
    words = [f"{count} paths open", f"round trip {_span(times[0] * 1e6, times[-1] * 1e6)} µs"]
    rates = sorted(seen.rates.values())
    if rates:
        words.append(f"{size(median(rates))}/s at a time")
    return ", ".join(words)


def _span(low: float, high: float) -> str:
    return f"{low:.0f}" if high < 1.2 * low else f"{low:.0f} to {high:.0f}"


def about_reductions(seen: Examination) -> str:
    """The all_reduces that worked; "" if there are none."""
    return ", ".join(f"{backend} {seconds * 1e3:.2g} ms" for backend, seconds in seen.reduced.items())


def hidden(seen: Examination) -> str:
    """What could not be seen without root."""
    logs = [host.shown for host in seen.hosts if (gpus := host.facts.get("gpus")) and gpus.log_hidden]
    words = ["firewall rules (sudo nft list ruleset)", "sshd's MaxSessions (sudo sshd -T)"]
    if logs:
        words.append(f"the kernel's log of {listed(logs)} (sudo dmesg | grep Xid)")
    return f"not seen: {listed(words)}, which need root"
