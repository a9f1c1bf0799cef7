"""The Ray that a run joins or starts, and room on it for the run's parts."""

import asyncio
import math
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.config import RunConfig
from paceline.errors import PacelineError

NAMESPACE = "paceline"
ROOM_SECONDS = 60.0
"""How long the cluster may take to make room."""

Resources = dict[str, float]


@dataclass(frozen=True, slots=True)
class Needs:
    """What each part of a run asks for."""

    engine: Resources
    rank: Resources
    worker: Resources
    engines: int
    ranks: int
    workers: int

    @classmethod
    def of(cls, config: RunConfig, gpus: float) -> "Needs":
        c = config.cluster
        each = 1.0 if gpus and config.device != "cpu" else 0.0
        return cls(
            engine={"CPU": c.engine_cpus, "GPU": each if c.engine_gpus is None else c.engine_gpus},
            rank={"CPU": c.rank_cpus, "GPU": each if c.rank_gpus is None else c.rank_gpus},
            worker={"CPU": c.worker_cpus},
            engines=c.engines,
            ranks=config.trainer.parallel.ranks,
            workers=c.workers,
        )

    @property
    def bundles(self) -> list[Resources]:
        """One for each actor: engines, then ranks, then workers."""
        all_of = [self.engine] * self.engines + [self.rank] * self.ranks + [self.worker] * self.workers
        return [{name: amount for name, amount in one.items() if amount} or {"CPU": 0.001} for one in all_of]

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
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


class Room:
    """Reserved places, one for each actor of a run. All are reserved or none, so two runs cannot each hold half."""

    def __init__(self, group: PlacementGroup, needs: Needs) -> None:
        self.needs, self._group = needs, group
        self._bundles = needs.bundles

    @classmethod
    async def reserve(cls, config: RunConfig) -> "Room":
        there = ray.cluster_resources()
        needs = Needs.of(config, there.get("GPU", 0.0))
        for name, unit in (("GPU", "GPUs"), ("CPU", "cores")):
            if needs.total(name) > there.get(name, 0.0) + 1e-6:
                raise PacelineError(
                    f"the run needs {needs.total(name):g} {unit} ({needs.engines} engines, {needs.ranks} ranks, "
                    f"{needs.workers} workers) and the cluster has {there.get(name, 0.0):g}: ask for fewer in "
                    "[cluster] or [trainer.parallel], or join more machines with `paceline up --join`"
                )
        group = placement_group(needs.bundles, strategy="PACK")
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                await group.ready()
        except TimeoutError:
            remove_placement_group(group)
            free = ", ".join(f"{amount:g} {name}" for name, amount in sorted(ray.available_resources().items()))
            raise PacelineError(
                f"the cluster made no room for {needs.bundles} within {ROOM_SECONDS:g} s: free are {free}; wait for "
                "other runs to end (`paceline status`), or ask for less"
            ) from None
        return cls(group, needs)

    def start(self, kind: type, place: int, name: str, arguments: Sequence[Any], *, again: bool, at_once: int) -> Any:
        """An actor in the given place; `again` if Ray is to start it anew after a death."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return actor(kind, name, arguments, self._bundles[place], again=again, at_once=at_once, strategy=strategy)

    def give_back(self) -> None:
        remove_placement_group(self._group)


def actor(
    kind: type,
    name: str,
    arguments: Sequence[Any],
    resources: Resources,
    *,
    again: bool,
    at_once: int,
    strategy: PlacementGroupSchedulingStrategy | None = None,
) -> Any:
    """A named actor. Nothing is asked of it twice by Ray itself: whoever asks decides."""
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
        return ray.remote(kind).options(**options).remote(*arguments)
    except ValueError as error:
        run = name.partition("/")[0]
        raise PacelineError(f"a run named {run} is on this cluster already: choose another --name ({error})") from error
