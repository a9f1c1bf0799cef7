"""Assigns the parts of a run to devices."""

from dataclasses import dataclass, field

from paceline.config import RunConfig
from paceline.config.cluster import scored_here
from paceline.planner.hardware import Hardware

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS = 1 << 25
"""Most logits held at once."""


@dataclass(slots=True)
class DevicePlace:
    """One device, or several that hold the same."""

    name: str
    capacity: float | None
    """Bytes that can be used; None where unknown."""
    count: int = 1
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def used(self) -> float:
        return sum(self.parts.values())

    @property
    def missing(self) -> float:
        """Bytes that do not fit."""
        return 0.0 if self.capacity is None else max(0.0, self.used - self.capacity)


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """How many of each part there are, and what they share."""

    engines: int = 1
    ranks: int = 1
    shards: int = 1
    """Ranks that hold one model, its masters and moments between them; 1: each has all of what `tensor` leaves it."""
    tensor: int = 1
    """Ranks that share each matrix."""
    context: int = 1
    """Ranks that share each sequence."""
    scorers: int = 0
    """For teachers of the run's own; each has a device of its own."""
    colocated: bool = False
    """Each rank hosts an engine, which sleeps while it trains."""
    apart: bool = False
    """Engines have devices of their own; else engine and first rank share one."""
    processes: int = 1
    """Processes on the shared device."""

    @property
    def devices(self) -> int:
        return self.engines + self.ranks + self.scorers if self.apart else self.ranks


def layout_of(config: RunConfig, hardware: Hardware) -> PlannedLayout:
    parallel, on_ray = config.trainer.parallel, config.placement == "ray"
    colocated, left = config.placement == "colocated", max(1, parallel.ranks // parallel.tensor)
    shards = {"none": 1, "full": left, "hybrid": max(1, left // parallel.replicas)}
    return PlannedLayout(
        engines=config.cluster.engines if on_ray else parallel.ranks if colocated else 1,
        ranks=parallel.ranks,
        shards=shards[parallel.shard],
        apart=on_ray and hardware.kind == "cuda",
        processes=1 if config.placement in ("local", "colocated") else 2,
        tensor=parallel.tensor,
        context=parallel.context,
        scorers=config.cluster.scorers * len(scored_here(config)),
        colocated=colocated,
    )
