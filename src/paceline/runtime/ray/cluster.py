"""Joins or starts the Ray cluster of a run, and reserves room on it for the actors of the run."""

import asyncio
import math
import os
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.config import RunConfig
from paceline.config.cluster import scored_here
from paceline.errors import PacelineError
from paceline.util.private_folder import shorten_ray_sockets

CONTROL = "control"
"""The group of calls that are answered however many requests there are; it has an event loop of its own."""


class RayActor:
    """A part of a run in a process of Ray's. What it prints goes into the run directory, which every machine of the
    cluster must see under the same path, as checkpoints do."""

    def __init__(self, config: str, name: str, live: str) -> None:
        self.config = RunConfig.model_validate_json(config)
        self.name = name
        if Path(live).is_dir():
            sys.stdout.flush()
            sys.stderr.flush()
            with (Path(live) / f"{name}.log").open("ab", buffering=0) as log:  # for libraries written in C too
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)

    @ray.method(concurrency_group=CONTROL)
    async def whereabouts(self) -> tuple[str, int]:
        """This machine and process."""
        return socket.gethostname(), os.getpid()


NAMESPACE = "paceline"
ROOM_SECONDS = 60.0
"""How long the cluster may take to make room."""

REQUESTS = 4096
"""Calls one actor answers at once; what an engine runs at once is its own setting."""
CONTROLS = 64
"""Calls of its control group that one actor answers at once, beside its requests."""
Resources = dict[str, float]


@dataclass(frozen=True, slots=True)
class Needs:
    """How many actors of each part a run has, and the resources that each of them asks for."""

    counts: dict[str, int]
    """In the order of their bundles."""
    each: dict[str, Resources]

    @classmethod
    def of(cls, config: RunConfig, gpus: float) -> "Needs":
        c = config.cluster
        parts = {
            "engine": (c.engines, c.engine_cpus, c.engine_gpus),
            "rank": (config.trainer.parallel.ranks, c.rank_cpus, c.rank_gpus),
            "worker": (c.workers, c.worker_cpus, 0.0),
            "scorer": (c.scorers * len(scored_here(config)), c.scorer_cpus, c.scorer_gpus),
        }
        one = 1.0 if gpus and config.device != "cpu" else 0.0
        each = {part: {"CPU": cpus, "GPU": one if gpu is None else gpu} for part, (_, cpus, gpu) in parts.items()}
        return cls({part: count for part, (count, *_) in parts.items()}, each)

    @property
    def bundles(self) -> list[Resources]:
        """One for each actor."""
        return [_bundle(self.each[part]) for part, count in self.counts.items() for _ in range(count)]

    def index(self, part: str, number: int) -> int:
        """The bundle of one actor of a part."""
        parts = list(self.counts)
        return number + sum(self.counts[before] for before in parts[: parts.index(part)])

    @property
    def words(self) -> str:
        names = {"rank": "trainer rank"}
        *most, last = [f"{count} {names.get(part, part)}s" for part, count in self.counts.items() if count]
        return f"{', '.join(most)} and {last}"

    def total(self, name: str) -> float:
        return sum(bundle.get(name, 0.0) for bundle in self.bundles)


@contextmanager
def joined(config: RunConfig) -> Generator[None]:
    """Be part of the cluster that the run file names, or of one that lives as long as the run does."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    address = config.cluster.address
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PacelineError(
                f"no Ray answers at {address} ({error}): start one with `paceline up`, or leave cluster.address out"
            ) from error
    else:
        # Alone on a machine, cores are only counted: what must fit is memory, and that the planner looks at.
        cores = max(os.cpu_count() or 1, math.ceil(Needs.of(config, 0).total("CPU")))
        shorten_ray_sockets()
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


class Room:
    """Reserved places, one for each actor of a run. All are reserved or none, so two runs cannot each hold half."""

    def __init__(self, group: PlacementGroup, bundles: Sequence[Resources]) -> None:
        self._group, self._bundles = group, bundles

    @classmethod
    async def reserve(cls, needs: Needs) -> "Room":
        """Room for a whole run, within a bound."""
        there = ray.cluster_resources()
        for name, unit in (("GPU", "GPUs"), ("CPU", "cores")):
            if needs.total(name) > there.get(name, 0.0) + 1e-6:
                raise PacelineError(
                    f"the run needs {needs.total(name):g} {unit} ({needs.words}) and the cluster has "
                    f"{there.get(name, 0.0):g}: ask for fewer in [cluster] or [trainer.parallel], or join more "
                    "machines with `paceline up --join`"
                )
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                return await cls.when_free(needs.bundles)
        except TimeoutError:
            free = ", ".join(f"{amount:g} {name}" for name, amount in sorted(ray.available_resources().items()))
            raise PacelineError(
                f"the cluster made no room for {needs.bundles} within {ROOM_SECONDS:g} s: free are {free}; wait for "
                "other runs to end (`paceline status`), or ask for less"
            ) from None

    @classmethod
    async def when_free(cls, bundles: Sequence[Resources]) -> "Room":
        """Wait for room, each bundle on one machine. A caller that stops waiting leaves nothing behind."""
        group = placement_group([_bundle(one) for one in bundles], strategy="PACK")
        try:
            await group.ready()  # unbounded: the caller decides how long
        except BaseException:
            remove_placement_group(group)
            raise
        return cls(group, bundles)

    def start(self, kind: type, place: int, name: str, arguments: Sequence[Any], *, again: bool) -> Any:
        """An actor in the given place; `again` if Ray is to start it anew after a death."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return actor(kind, name, arguments, self._bundles[place], again=again, strategy=strategy)

    def give_back(self) -> None:
        remove_placement_group(self._group)


def _bundle(resources: Resources) -> Resources:
    """Ray wants something of every bundle, and nothing of which there is none."""
    return {name: amount for name, amount in resources.items() if amount} or {"CPU": 0.001}


def actor(
    kind: type,
    name: str,
    arguments: Sequence[Any],
    resources: Resources,
    *,
    again: bool,
    at_once: int = REQUESTS,
    strategy: PlacementGroupSchedulingStrategy | None = None,
) -> Any:
    """A named actor. Ray itself retries no call: the caller decides."""
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
        "max_restarts": -1 if again else 0,
        "max_task_retries": 0,
        "max_concurrency": at_once,
    }
    if strategy is not None:
        options["scheduling_strategy"] = strategy
    try:
        groups: dict[str, Any] = {"concurrency_groups": {CONTROL: CONTROLS}}
        made: Any = ray.remote(**groups)(kind)
        return made.options(**options).remote(*arguments)
    except ValueError as error:
        if "already" not in str(error):
            raise
        run = name.partition("/")[0]
        raise PacelineError(f"a run named {run} is on this cluster already: choose another --name ({error})") from error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def last_line(error: BaseException) -> str:
    """The cause, where the error's text is a remote traceback."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
