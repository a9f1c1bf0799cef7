"""Which part of a run is on which device."""

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.planner.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of each part there are, and what they share."""

    engines: int = 1
    ranks: int = 1
    shards: int = 1
    """Ranks that hold one model, its masters and moments between them; 1: each has all."""
    apart: bool = False
    """Engines have devices of their own; else engine and first rank share one."""
    processes: int = 1
    """Processes on the shared device."""

    @property
    def devices(self) -> int:
        return self.engines + self.ranks if self.apart else self.ranks


def layout_of(config: RunConfig, hardware: Hardware) -> Layout:
    parallel, on_ray = config.trainer.parallel, config.placement == "ray"
    shards = {"none": 1, "full": parallel.ranks, "hybrid": parallel.ranks // parallel.replicas}
    return Layout(
        engines=config.cluster.engines if on_ray else 1,
        ranks=parallel.ranks,
        shards=shards[parallel.shard],
        apart=on_ray and hardware.kind == "cuda",
        processes=1 if config.placement == "local" else 2,
    )
