"""Starts the agents of a job's worlds on this machine. What the ranks of several worlds import is imported once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from launchpad import linux
from launchpad.image import Cold
from launchpad.image import place as images
from launchpad.job.role_places import RoleNode
from launchpad.job.spec import JobSpec
from launchpad.runner.kept import fork_request, look_for_image, may_fork
from launchpad.runner.links import LocalAgent
from launchpad.transport import FEW_LINKS, Link
from launchpad.transport.local import guard_environ

if TYPE_CHECKING:
    from launchpad.image.job_image import JobImage

# So many agents that start cold come up sooner if one guard forks them.
_FEWEST_FORKED = 4


class RoleAgents:
    """Those of the nodes that are on this machine."""

    def __init__(self, local: LocalAgent, here: Mapping[int, RoleNode], closing: ExitStack, *, leaves: bool) -> None:
        """Begin: they come up meanwhile. `here`: the nodes, by their places in the job. Raises NodeError.

        `local` is one of them, unless all come from images of the job's own: then it is closed.
        """
        if len(here) > FEW_LINKS:
            linux.raise_file_limit()
        self._here = here
        self._leaves = leaves
        self._closing = closing
        self._unused = [local]
        self._agents: dict[int, LocalAgent] = {}
        self._kept: list[LocalAgent] = []  # that are to be forked from kept images
        self._images: list[JobImage] = []
        self._led: list[Sequence[int]] = []  # nodes whose agents are forked by the guard of the first one's
        kept = images.exists(os.environ)
        # Only agents count GPUs, and from the number of ranks follows that of their threads, which torch reads.
        counted = all(isinstance(node.share.ranks, int) or node.share.ranks == "cpu" for node in here.values())
        cold: list[int] = []
        own = []
        for places in _alike(here):
            if kept:
                self._from_kept(places)
            elif counted and len(places) > 1 and self._spec(places).preload and (image := self._own_image()):
                own.append((places, image))
            else:
                cold += places
        for places, image in own:
            self._from_own(places, image)
        self._start_cold(cold)

    def links(self) -> dict[int, Link]:
        """The links to all of them, by the nodes' places. Raises NodeError."""
        for places in self._led:  # `_from_own` may add to them
            if self._agents[places[0]] not in self._kept or not self._import_for_others(places):
                self._fork_others(places)
        for image in self._images:
            image.dismiss()
        for agent in self._unused:
            agent.close()
        return {place: agent.link() for place, agent in self._agents.items()}

    def abandon(self) -> None:
        """Have a thread that waits in `links` for images of the job's own go on without them."""
        for image in self._images:
            image.abandon()

    @property
    def importing_since(self) -> int | None:
        """When the first image of the job's own was begun, by time.monotonic_ns(); None if there is none."""
        return min((image.begun for image in self._images), default=None)

    @property
    def why_cold(self) -> str:
        """Why one of them was not forked from a kept image, though there is one."""
        return next((agent.why_cold for agent in self._kept if agent.why_cold), "")

    def _spec(self, places: Sequence[int]) -> JobSpec:
        return self._here[places[0]].role.spec

    def _ranks(self, cores: int) -> int:
        """How many share this machine."""
        counts = [node.share.ranks for node in self._here.values()]
        return sum(count if isinstance(count, int) else cores for count in counts)

    def _new(self, place: int, agent: LocalAgent) -> LocalAgent:
        self._closing.callback(agent.close)
        self._agents[place] = agent
        return agent

    def _next(self, place: int) -> LocalAgent:
        """The agent of a node: the one that there is already, or a further one."""
        return self._new(place, self._unused.pop() if self._unused else LocalAgent(leaves=self._leaves))

    def _from_kept(self, places: Sequence[int]) -> None:
        spec = self._spec(places)
        first = self._next(places[0])
        look_for_image(first, spec, os.environ, ranks=self._ranks, more=True)
        first.begin()
        self._kept.append(first)
        self._led.append(places)

    def _import_for_others(self, places: Sequence[int]) -> bool:
        """Have all but the first of these forked from an image of the job's own, if the kept one does not fit."""
        first, *others = places
        agent = self._agents[first]
        agent.link()
        forked = agent.keeper is not None and not agent.why_cold
        if forked or len(others) < 2 or not self._spec(places).preload or not (image := self._own_image()):
            return False
        self._from_own(others, image)
        return True

    def _own_image(self) -> JobImage | None:
        from launchpad.image.job_image import JobImage

        try:
            image = JobImage(guard_environ())
        except OSError:
            return None
        self._closing.callback(image.close)
        self._images.append(image)
        return image

    def _from_own(self, places: Sequence[int], image: JobImage) -> None:
        spec = self._spec(places)
        with suppress(Cold):
            threads = image.cores // self._ranks(image.cores)
            image.want(fork_request(spec, os.environ, threads)._replace(more=True))
        self._new(places[0], LocalAgent(keeper=image, leaves=self._leaves))
        self._led.append(places)

    def _start_cold(self, places: Sequence[int]) -> None:
        for place in places[:1] if len(places) >= _FEWEST_FORKED else places:
            self._next(place).begin()
        if len(places) >= _FEWEST_FORKED:
            self._fork_others(places)

    def _fork_others(self, places: Sequence[int]) -> None:
        zygote = self._agents[places[0]].zygote() if len(places) > 1 else None
        for place in places[1:]:
            self._new(place, LocalAgent(zygote=zygote, leaves=self._leaves)).begin()


def _alike(here: Mapping[int, RoleNode]) -> list[list[int]]:
    """The nodes' places in groups whose ranks' forkservers would be the same."""
    from launchpad.image.fit import may_be_read

    groups: dict[object, list[int]] = {}
    for place, node in here.items():
        spec = node.role.spec
        read = frozenset(item for item in spec.environ.items() if may_be_read(item[0]))
        groups.setdefault((spec.python, spec.preload, may_fork(spec), read), []).append(place)
    return list(groups.values())
