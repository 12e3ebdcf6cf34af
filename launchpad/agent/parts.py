"""The agent's features: which commands each takes, and where it is. Each is loaded when it is first needed."""

from collections.abc import Callable, Iterator
from typing import Any

from ..named import NamedTuple
from ..protocol import commands
from ..protocol.commands import Start
from .part import AgentHub, AgentPart
from .poll import earliest


class Feature(NamedTuple):
    """Where a part is, and when it is needed."""

    module: str
    name: str  # of the class
    takes: tuple[type, ...]  # the types of its commands
    begins: Callable[[Start], bool] = lambda _: False  # whether it is needed for these ranks, without a command


# When ranks start and end, the parts are told in this order.
FEATURES = (
    Feature(".host.probe", "HostProbe", (commands.Probe,)),
    Feature(".host.topology", "HostTopology", (commands.ReadTopology,)),
    Feature(".host.synced_folder", "FolderSync", (commands.Sync, commands.FileChunk)),
    Feature(".host.environments", "Environments", (commands.FindEnvironment, commands.MakeEnvironment)),
    Feature(".host.gpu_leases", "GpuLeases", (commands.LeaseGpus, commands.ListGpus)),
    Feature(".host.health", "HealthChecker", (commands.CheckHealth,)),
    Feature(".host.kept", "Cleaner", (commands.ListKept, commands.RemoveKept)),
    Feature(".net.reachability", "Reachability", (commands.Listen, commands.Reach)),
    Feature(".ranks.calls", "Calls", (commands.Call, commands.NextCall, commands.EndCall, commands.EndSession)),
    Feature(".stacks.part", "NodeStacks", (commands.DumpStacks,)),
    Feature(".stacks.profiler", "Profiler", (commands.Profile,)),
    Feature(".ranks.time_limit", "TimeLimit", (commands.StopBy,)),
    Feature(".ranks.sampler", "Sampler", (commands.Sample,)),
    Feature(
        ".ranks.debuggers",
        "Debuggers",
        (commands.Debug, commands.TunnelOpen, commands.TunnelData, commands.TunnelCredit),
        lambda start: any(entry.get("debug") for entry in start.ranks),
    ),
    Feature(".ranks.prompt", "PromptWatch", (), lambda start: start.typed),
    Feature(
        ".mpi.own_worlds",
        "OwnWorlds",
        (),
        lambda start: any(entry["environ"]["WORLD_SIZE"] != "1" for entry in start.ranks),
    ),
    Feature(
        ".mpi.part",
        "NodeMpi",
        (commands.MpiWorld, commands.BarrierOut, commands.MpiReply, commands.PmixReply, commands.PmixFetch),
    ),
)


class Parts:
    """The parts that have been needed so far."""

    def __init__(self, hub: AgentHub, features: tuple[Feature, ...] = FEATURES) -> None:
        self._hub = hub
        self._features = features
        self._routes = {kind: feature for feature in features for kind in feature.takes}
        self._loaded: dict[Feature, AgentPart] = {}

    def __iter__(self) -> Iterator[AgentPart]:
        return iter(self._loaded.values())

    def on(self, command: Any) -> None:
        """Have the part carry out the command that takes it; a command that none takes is not for an agent."""
        feature = self._routes.get(type(command))
        if feature is not None:
            self._part(feature).on(command)

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        return earliest(part.deadline for part in self)

    def tick(self, now: float) -> None:
        """Tell the parts whose deadline has come."""
        for part in self:
            if part.deadline is not None and now >= part.deadline:
                part.tick(now)

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """Ranks are about to start. What the parts add to `environ` is for all of them."""
        for feature in self._features:
            if feature.begins(start):
                self._part(feature)
        for part in self:
            part.starting(start, environ)

    def environ(self, rank: int) -> dict[str, str]:
        """What the parts have for this rank alone."""
        return {name: value for part in self for name, value in part.environ(rank).items()}

    def _part(self, feature: Feature) -> AgentPart:
        if feature not in self._loaded:
            import importlib

            kind = getattr(importlib.import_module(feature.module, __package__), feature.name)
            loaded = {**self._loaded, feature: kind(self._hub)}
            self._loaded = {one: loaded[one] for one in self._features if one in loaded}
        return self._loaded[feature]
