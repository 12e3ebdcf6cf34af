"""Judges what the hosts see of each other: names, addresses, paths, loss, latency, packets, speed, clocks."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from statistics import median, median_high, median_low

from launchpad.doctor.interfaces import lacking
from launchpad.doctor.seen import Examination, Finding, Level, Pair, listed, size
from launchpad.job.succession import can_lead
from launchpad.protocol.health import LookUp, Probed

LOSSY, TOO_LOSSY = 0.01, 0.05
LATE_SECONDS = 5e-3
LATE_FACTOR, LATE_AT_LEAST = 10, 2e-3
SLOW_FACTOR, SLOW_AT_MOST = 4, 125e6  # bytes per second: nobody expects more of 1 Gbit/s
SKEW_SECONDS = 1.0


def judge_network(seen: Examination) -> Iterator[Finding]:
    """What is wrong between the hosts."""
    yield from _same_machine(seen)
    yield from _clocks(seen)
    yield from _wanted_interfaces(seen)
    if len(seen.present) > 1:
        yield from _names(seen)
        yield from _paths(seen)
        yield from _packets(seen)
        yield from _loss(seen)
        yield from _latency(seen)
        yield from _speed(seen)


def _same_machine(seen: Examination) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for place in seen.present:
        identity = seen.hosts[place].identity
        if identity and identity.machine:
            one = first.setdefault(identity.machine, place)
            if one != place:
                name = seen.hosts[one].shown
                text = f"it is the same machine as {name}; both their ranks would share its cores and GPUs"
                yield Finding("bad", (place,), "names", text, f"name it once: -H {name}:N")


def _clocks(seen: Examination) -> Iterator[Finding]:
    skews = {place: host.skew for place, host in enumerate(seen.hosts) if host.skew is not None}
    clocks = [*skews.values(), 0.0]  # the last is this machine's
    usual = min(median_low(clocks), median_high(clocks), key=abs)
    for place, skew in skews.items():
        off = skew - usual
        if abs(off) - seen.hosts[place].uncertain < SKEW_SECONDS:
            continue
        way = "ahead of" if off > 0 else "behind"
        whose = "the other hosts" if len(skews) > 1 else "this machine"
        text = f"its clock is {_time(abs(off))} {way} {whose}: times of files and certificates look wrong"
        yield Finding("warn", (place,), "clock", text, "sudo chronyc makestep, or sudo timedatectl set-ntp true")


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def _wanted_interfaces(seen: Examination) -> Iterator[Finding]:
    """What the user has set for gloo and the like is passed on to all hosts."""
    for place in seen.present:
        has = seen.hosts[place].network.interfaces
        for name, missing in (lacking(seen.environ, has) if has else {}).items():
            text = f"{name}={seen.environ[name]} is set, and it has no {listed(missing)}, but {listed(has)}"
            yield Finding("bad", (place,), "addresses", text, f"unset {name}; launchpad chooses the interface")


def _names(seen: Examination) -> Iterator[Finding]:
    own = {place: {inlet.address for inlet in seen.hosts[place].network.inlets} for place in seen.present}
    for place in seen.present:
        host = seen.hosts[place]
        found: LookUp | None = host.facts.get("lookup")
        if not found or not host.identity or len(found.addresses) != len(seen.present):
            continue
        means = dict(zip(seen.present, found.addresses, strict=True))
        address = address_of(seen, place) or "its address"
        name = host.identity.hostname
        meant = means.pop(place)
        line = f"echo '{address} {name}' | sudo tee -a /etc/hosts"
        if not meant:
            yield Finding("warn", (place,), "names", f"it does not know its own name, {name}: {_BY_NAME}", line)
        elif all(_is_loopback(one) for one in meant):
            text = f"its own name, {name}, means {listed(meant)}: {_BY_NAME}"
            yield Finding("warn", (place,), "names", text, f"{_correct(meant[0], address)} (in /etc/hosts)")
        elif not own[place] & set(meant):
            text = f"its own name, {name}, means {listed(meant)}, which is not its address: {_BY_NAME}"
            yield Finding("warn", (place,), "names", text, f"{_correct(meant[0], address)} (or correct the DNS)")
        for other, addresses in means.items():
            identity = seen.hosts[other].identity
            if addresses and identity and not own[other] & set(addresses) and not _is_own(name, identity.hostname):
                right = address_of(seen, other) or "its address"
                text = f"it takes {identity.hostname} for {listed(addresses)}, which is not {seen.hosts[other].shown}"
                remedy = f"{_correct(addresses[0], right)} (or correct the DNS)"
                yield Finding("warn", (place,), "names", text, remedy)


_BY_NAME = "torchrun and mpirun use names, and would fail; launchpad uses addresses"


def _is_own(name: str, other: str) -> bool:
    """Whether two hosts have one name, as containers of one image may."""
    return name == other


def _correct(wrong: str, right: str) -> str:
    pattern = wrong.replace(".", "\\.")
    return f"sudo sed -i 's/^{pattern}\\s/{right} /' /etc/hosts"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_of(seen: Examination, place: int) -> str:
    """The address at which the others reach the host; "" if they don't."""
    found = [path.address for (_, to), path in seen.paths.items() if to == place and path.address]
    return max(found, key=found.count) if found else ""


def interface_of(seen: Examination, place: int) -> str:
    """The host's interface that leads to the others."""
    found = [path.interface for (start, _), path in seen.paths.items() if start == place and path.address]
    return max(found, key=found.count) if found else ""


# Paths, and what is measured on them: what concerns all paths of a host is that host's.


def _paths(seen: Examination) -> Iterator[Finding]:
    cut = {pair for pair, path in seen.paths.items() if not path.address}
    for places, pairs, kind in by_host(seen, cut, seen.paths):
        why = _why([seen.paths[pair] for pair in pairs])
        match kind:
            case "all":
                text = f"no other host reaches it, and it reaches none: {why}"
            case "in":
                text = f"the other hosts can't reach it, though it reaches them: {why}"
            case "out":
                text = f"it can't reach the other hosts, though they reach it: {why}"
            case _:
                one, other = (seen.hosts[place].shown for place in places)
                both = (places[1], places[0]) in cut
                text = f"{one} and {other} can't reach each other" if both else f"{one} can't reach {other}"
                text += f": {why}"
                if not (0 in places or can_lead(len(seen.present), 0, 1)):
                    who = "neither can" if both else f"{other} can't"
                    text += f"; if {seen.hosts[0].shown} is lost, {who} lead a job that they have joined (c10d)"
        yield Finding("bad", places, "paths", text + _families(seen, pairs[0]), _opens(seen, pairs[0]))


def _why(paths: Iterable[Probed]) -> str:
    reasons = {address: why for path in paths for address, why in path.failed}
    if not reasons:
        return "there is no address to try"
    return listed([f"{why} at {address}" for address, why in reasons.items()], 3)


def _families(seen: Examination, pair: Pair) -> str:
    """Why two hosts can't meet whatever lies between them."""
    one, other = ({ipaddress.ip_address(found).version for found in _outward(seen, place)} for place in pair)
    if one & other or not (one and other):
        return ""
    names = (seen.hosts[place].shown for place in pair)
    has = [f"{name} has IPv{found.pop()} only" for name, found in zip(names, (one, other), strict=True)]
    return f" ({', '.join(has)})"


def _opens(seen: Examination, pair: Pair) -> str:
    """What lets the first of them reach the second."""
    sources = [path.source for (start, _), path in seen.paths.items() if start == pair[0] and path.source]
    of = sources[0] if sources else next(iter(_outward(seen, pair[0])), "")
    why = {reason for _, reason in seen.paths[pair].failed}
    if why & {"network is unreachable", "no route to host"}:
        return f"ip route get {next(iter(_outward(seen, pair[1])), 'ADDRESS')}, on {seen.hosts[pair[0]].shown}"
    name = seen.hosts[pair[1]].shown
    return f"let all ports in from {of or seen.hosts[pair[0]].shown} on {name}: sudo ufw allow from {of or 'ADDRESS'}"


def _outward(seen: Examination, place: int) -> list[str]:
    return [one.address for one in seen.hosts[place].network.inlets if not _is_loopback(one.address)]


def by_host(
    seen: Examination, wrong: set[Pair], measured: Collection[Pair]
) -> Iterator[tuple[tuple[int, ...], list[Pair], str]]:
    """Whom to name for these of the pairs that were measured: a host if all its paths in, out or both are among them.

    Yields who it is, which pairs, and "in", "out" or "all"; then each "pair" that is left.
    """
    left = set(wrong)
    ins = {place: {pair for pair in measured if pair[1] == place} for place in seen.present}
    outs = {place: {pair for pair in measured if pair[0] == place} for place in seen.present}
    # A host counts only with two others at least: of two hosts, it is the pair.
    suspects = [place for place in seen.present if len(ins[place]) > 1] if len(seen.present) > 2 else []
    kinds: tuple[tuple[str, Callable[[int], set[Pair]]], ...] = (
        ("all", lambda place: ins[place] | outs[place]),
        ("in", lambda place: ins[place]),
        ("out", lambda place: outs[place]),
    )
    for kind, of in kinds:
        for place in suspects:
            pairs = of(place)
            if pairs and pairs <= wrong and pairs & left:
                left -= pairs
                yield (place,), sorted(pairs), kind
    for pair in sorted(left):
        if pair in left:
            back = (pair[1], pair[0])
            left -= {pair, back}
            yield pair, [pair, *([back] if back in wrong else [])], "pair"


def _where(seen: Examination, places: tuple[int, ...], pairs: list[Pair], kind: str) -> str:
    """Which packets, as words that follow them."""
    if kind == "pair":
        one, other = (seen.hosts[place].shown for place in places)
        return f"between {one} and {other}" if len(pairs) > 1 else f"from {one} to {other}"
    return {"all": "to and from it", "in": "that the others send it", "out": "that it sends"}[kind]


def _packets(seen: Examination) -> Iterator[Finding]:
    mtus = _mtus(seen)
    for place in seen.present:
        usual = max(set(mtus.values()), key=list(mtus.values()).count) if mtus else -1
        mine = mtus.get(place, usual)
        if mine != usual:
            name = interface_of(seen, place)
            text = f"its {name} takes packets of {mine} bytes (MTU), those of the others {usual}"
            yield Finding("warn", (place,), "packets", text, f"sudo ip link set dev {name} mtu {usual}")
    for places, pairs, kind in by_host(seen, holes(seen), holes(seen, (0, 1))):
        path = seen.paths[pairs[0]]
        where = _where(seen, places, pairs, kind)
        text = f"packets of {path.packet} bytes {where} get lost, small ones don't (MTU); large transfers would hang"
        less = 1500 if path.packet > 1500 else 1400
        remedy = f"correct the MTU on the way, or sudo ip link set dev {path.interface} mtu {less} on all hosts"
        yield Finding("bad", places, "packets", text, remedy)


def holes(seen: Examination, passes: Collection[int] = (0,)) -> set[Pair]:
    """The paths on which large packets get lost, or `passes`. Where small ones do, too, it means nothing."""
    return {pair for pair, path in seen.paths.items() if path.passes in passes and path.answered >= 0.9 * path.sent > 0}


def _mtus(seen: Examination) -> dict[int, int]:
    """Of the interfaces that are used."""
    found = {}
    for place in seen.present:
        name = interface_of(seen, place)
        for inlet in seen.hosts[place].network.inlets:
            if inlet.interface == name and inlet.mtu > 0 and name != "lo":
                found[place] = inlet.mtu
    return found


def lost(seen: Examination) -> dict[Pair, tuple[int, int]]:
    """Of the datagrams from one host to another, answers included, how many got lost, and how many there were."""
    heard: dict[Pair, int] = {}
    for place in seen.present:
        found = seen.hosts[place].facts.get("heard")
        for sender, count in found.counts if found else ():
            heard[sender, place] = count
    result = {}
    for (start, to), path in seen.paths.items():
        back = seen.paths.get((to, start))
        if not (path.address and back and back.address):
            continue
        if not (heard.get((start, to)) and heard.get((to, start))):
            continue  # UDP is filtered, which is no loss
        there = path.sent - heard[start, to], path.sent
        answers = heard[to, start] - back.answered, heard[to, start]
        result[start, to] = max(0, there[0]) + max(0, answers[0]), there[1] + answers[1]
    return result


def _loss(seen: Examination) -> Iterator[Finding]:
    counts = lost(seen)
    for places, pairs, kind in by_host(seen, lossy(seen, counts), counts):
        gone, sent = (sum(counts[pair][at] for pair in pairs) for at in (0, 1))
        level: Level = "bad" if gone >= TOO_LOSSY * sent else "warn"
        where = _where(seen, places, pairs, kind)
        name = seen.paths[pairs[0]].interface
        text = f"{gone / sent:.0%} of the packets {where} get lost ({gone} of {sent})"
        yield Finding(
            level, places, "loss", text, f"ip -s link show dev {name}: errors there, or another cable or port"
        )


def lossy(seen: Examination, counts: Mapping[Pair, tuple[int, int]]) -> set[Pair]:
    """The paths on which packets get lost."""
    wrong = {pair for pair, (gone, sent) in counts.items() if gone > 1 and gone >= LOSSY * sent}
    for at in (0, 1):
        for place in seen.present:
            wrong |= _lossy([pair for pair in counts if pair[at] == place], counts)
    return wrong


def _lossy(pairs: list[Pair], counts: Mapping[Pair, tuple[int, int]]) -> set[Pair]:
    """All of these paths of one host, if a loss runs through them, even where it shows little on each."""
    gone, sent = (sum(counts[pair][at] for pair in pairs) for at in (0, 1))
    affected = [pair for pair in pairs if counts[pair][0]]
    runs_through = gone > 3 and gone >= LOSSY * sent and 3 * len(affected) >= 2 * len(pairs)
    return set(pairs) if runs_through else set()


def late(paths: Mapping[Pair, Probed]) -> set[Pair]:
    """The paths on which answers take long."""
    times = {pair: path.latency for pair, path in paths.items() if path.latency >= 0}
    usual = median(times.values()) if times else 0.0
    return {
        pair
        for pair, seconds in times.items()
        if seconds > LATE_SECONDS or (seconds > LATE_AT_LEAST and seconds > LATE_FACTOR * usual)
    }


def _latency(seen: Examination) -> Iterator[Finding]:
    explained = lossy(seen, lost(seen))
    times = {
        pair: path.latency
        for pair, path in seen.paths.items()
        if path.latency >= 0 and not explained & {pair, pair[::-1]}
    }
    wrong = late(seen.paths) & times.keys()
    for places, pairs, kind in by_host(seen, wrong, times):
        shortest = min(times[pair] for pair in pairs)
        rest = [seconds for pair, seconds in times.items() if pair not in wrong]
        others = f", elsewhere {_time(median(rest))}" if rest else ""
        where = _where(seen, places, pairs, kind) if kind == "pair" else "to and from it"
        text = f"a round trip {where} takes {_time(shortest)}{others}; every collective waits for that"
        address = seen.paths[pairs[0]].address
        yield Finding("warn", places, "latency", text, f"tracepath {address}; use hosts on the same network")


def slow(rates: Mapping[Pair, float], paths: Mapping[Pair, Probed]) -> set[Pair]:
    """The pairs between which data flows far slower than between the others."""
    usual = median(rates.values()) if rates else 0.0
    return {
        pair
        for pair, rate in rates.items()
        if rate < SLOW_AT_MOST and rate < usual / SLOW_FACTOR and paths[pair].latency < LATE_SECONDS
    }


def _speed(seen: Examination) -> Iterator[Finding]:
    explained = lossy(seen, lost(seen)) | holes(seen)
    measured = {pair for pair in seen.rates if not explained & {pair, pair[::-1]}}
    wrong = slow(seen.rates, seen.paths) & measured
    named: set[int] = set()
    for places, pairs, kind in by_host(seen, wrong, measured):
        if kind == "pair" and named & set(places):  # its acknowledgements wait behind what it sends
            continue
        named.update(places if kind != "pair" else ())
        best = max(seen.rates[pair] for pair in pairs)
        others = median([rate for pair, rate in seen.rates.items() if pair not in wrong])
        where = _where(seen, places, pairs, kind)
        text = f"data {where} flows at {size(best)} a second, elsewhere at {size(others)}"
        name = seen.paths[pairs[0]].interface
        yield Finding("warn", places, "speed", text, f"ethtool {name} (Speed, Duplex), and who else uses the network")
