"""Says in words which nodes can't reach each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# More sentences than this are for a network that is down altogether.
MOST_SENTENCES = 4

# More names than this are counted.
MOST_NAMES = 8


def sentences(pairs: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """Pairs [from, to] of nodes, as sentences: the node that most of them are about first."""
    one_way = {(one, other) for one, other in pairs}
    both = {(one, other) for one, other in one_way if (other, one) in one_way}
    found = [
        f"{names[node]} and {_list(others, names)} can't reach each other" for node, others in _by_node(both, names)
    ]
    found += [
        f"{names[one]} can't reach {names[other]}, which reaches {names[one]}" for one, other in sorted(one_way - both)
    ]
    if len(found) > MOST_SENTENCES:
        more = len(found) - MOST_SENTENCES + 1
        found = [*found[: MOST_SENTENCES - 1], f"… ({more} more like this)"]
    return found


def _by_node(both: set[tuple[int, int]], names: Sequence[str]) -> list[tuple[int, list[int]]]:
    """Each pair once, under the node that is in most of those that are left."""
    left, found = set(both), []
    while left:
        others = {node: sorted(other for one, other in left if one == node) for node in range(len(names))}
        node = max(others, key=lambda one: len(others[one]))
        found.append((node, others[node]))
        left = {pair for pair in left if node not in pair}
    return found


def _list(nodes: list[int], names: Sequence[str]) -> str:
    if len(nodes) > 1 and len(nodes) == len(names) - 1:
        return "the other nodes"
    shown = [names[node] for node in nodes[:MOST_NAMES]]
    if len(nodes) > MOST_NAMES:
        return f"{', '.join(shown)} and {len(nodes) - MOST_NAMES} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
