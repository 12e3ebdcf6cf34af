"""Says why a rank is slow, where what its processes and its host went through makes that clear. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from launchpad.protocol.events import Hindrances

# What explains a third of the loss, and takes the rank twice as long as the others, is clear enough.
_OF_THE_LOSS = 1 / 3
_LEAST = 0.05
_TWICE = 2.0

_FAULTS = 20.0  # per second
_FAULT_SECONDS = 0.005  # what one takes, on a slow disk
_SWAPPED = 50.0  # pages per second
_RETRANSMITTED = 10.0  # segments per second
_SLOW_CLOCK = 0.8  # of the others'
_MORE_CPU = 1.3
_FOREIGN_LOAD = 0.3  # cores


class _Rates(NamedTuple):
    """What a rank went through, per second; 0 if unknown. And its cores' clock."""

    cpu: float
    queued: float
    blocked: float
    faults: float
    throttled: float
    mhz: float
    gpu_throttled: float


def reason(rank: int, taken: Mapping[int, tuple[Hindrances, Hindrances]], lost: float) -> str:
    """Why this rank is slow; "" if that is not clear.

    `taken`: the figures of each node, earlier and later ones. `lost`: the share of their time that the others waited.
    """
    rates: dict[int, _Rates] = {}
    hosts: dict[int, dict[str, float]] = {}
    own_node = -1
    for node, (before, after) in taken.items():
        seconds = (after.time - before.time) / 1e9
        if seconds <= 0:
            continue
        earlier = {row[0]: row for row in before.ranks}
        for row in after.ranks:
            number = row[0]
            if number in earlier:
                rates[number] = _rates(earlier[number], row, seconds)
                own_node = node if number == rank else own_node
        hosts[node] = {
            **{name: _rate(before.host.get(name, -1), value, seconds) for name, value in after.host.items()},
            "cores": after.host.get("cores", -1),
        }
    if rank not in rates or len(rates) < 2:
        return ""
    own = rates.pop(rank)
    usual = _Rates(*map(_median, zip(*rates.values(), strict=True)))
    its_ranks = {row[0] for row in taken[own_node][1].ranks}
    foreign = hosts[own_node].get("busy", 0.0) - own.cpu - sum(rates[one].cpu for one in its_ranks & rates.keys())
    others = [host for node, host in hosts.items() if node != own_node]
    # Ranks of a host share its cores, unless they are bound.
    away = [one.mhz for number, one in rates.items() if number not in its_ranks and one.mhz > 0]
    usual = usual._replace(mhz=_median(away or [one.mhz for one in rates.values()]))
    return _reason(own, usual, hosts[own_node], others, foreign, max(_LEAST, lost * _OF_THE_LOSS))


def _reason(
    own: _Rates,
    usual: _Rates,
    host: Mapping[str, float],
    others: Iterable[Mapping[str, float]],
    foreign: float,
    enough: float,
) -> str:
    def clear(what: float, of_the_others: float) -> bool:
        return what >= max(enough, _TWICE * of_the_others)

    cores = host["cores"]
    if clear(own.throttled, usual.throttled):
        return f"its cgroup has used up its CPU quota {_percent(own.throttled)} of the time"
    if own.gpu_throttled > 0 and not usual.gpu_throttled > 0:
        return "its GPU is throttled, because of heat or power"
    if own.faults >= max(_FAULTS, _TWICE * usual.faults, enough / _FAULT_SECONDS):
        where = "swap" if host.get("swapped", 0.0) >= _SWAPPED else "a disk"
        return f"its memory has to be read from {where}, {own.faults:.0f} page faults per second"
    if clear(own.blocked, usual.blocked):
        return f"it waits for a disk {_percent(own.blocked)} of the time"
    if cores > 0 and host.get("stolen", 0.0) / cores >= enough:
        return f"the hypervisor takes {host['stolen']:.1f} of its host's {cores:.0f} cores"
    if clear(own.queued, usual.queued):
        load = f"; other programs use {foreign:.1f} of its host's {cores:.0f} cores" if foreign >= _FOREIGN_LOAD else ""
        return f"its threads wait for a core {_percent(own.queued)} of the time{load}"
    if 0 < own.mhz <= _SLOW_CLOCK * usual.mhz:
        return f"the cores on which it may run are clocked at {own.mhz:.0f} MHz, those of the others at {usual.mhz:.0f}"
    resent = [other.get("retransmitted", 0.0) for other in others]
    if resent and host.get("retransmitted", 0.0) >= max(_RETRANSMITTED, _TWICE * _median(resent)):
        return f"its host retransmits {host['retransmitted']:.0f} TCP segments per second"
    if own.cpu - usual.cpu >= max(0.1, enough) and own.cpu >= _MORE_CPU * usual.cpu:
        return f"it computes more: it uses {own.cpu:.2f} cores, the others {usual.cpu:.2f}"
    return ""


def _rates(before: Sequence[float], after: Sequence[float], seconds: float) -> _Rates:
    rates = [_rate(old, new, seconds) for old, new in zip(before[1:-2], after[1:-2], strict=True)]
    return _Rates._make([*rates, after[-2], min(before[-1], after[-1])])


def _rate(old: float, new: float, seconds: float) -> float:
    return max(0.0, new - old) / seconds if min(old, new) >= 0 else 0.0


def _percent(share: float) -> str:
    return f"{min(share, 1.0):.0%}"


def _median(values: Iterable[float]) -> float:
    known = sorted(values)
    return known[len(known) // 2]
