"""Estimates the seconds from a trained step to an engine that samples from it, by weight transport."""

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.planner.hardware import Hardware
from paceline.planner.layout import BYTES
from paceline.planner.measured import reach
from paceline.planner.shape import ModelShape

DISK = 2e9
"""Bytes a second to and from a local drive. Assumed, not measured."""
LOOPBACK = 1e9
"""Bytes a second as the body of a request. Assumed, not measured."""
HOST_LINK = 25e9
"""Bytes a second between a GPU and its host: PCIe 4, 16 lanes."""
OBJECTS = 4e9
"""Bytes a second through a shared object store. Assumed, not measured."""
CHANGED = 0.03
"""Share of the bytes that differ after a step; verl and slime publish 1 to 3%."""
LINKED = 0.7
"""Share of a link's rate that a broadcast reaches. Assumed, not measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to publish."""

    name: str
    seconds: float
    bytes: float
    used: bool = False


def ways(config: RunConfig, shape: ModelShape, hardware: Hardware) -> list[Way]:
    """All of them, the run's own marked."""
    lora = config.model.lora
    size = float(BYTES[config.model.dtype] * (shape.adapters(lora) if lora else shape.parameters))
    r = reach(hardware.kind)
    memory = hardware.card.bandwidth * r.bandwidth
    host = 2 * size / (HOST_LINK if hardware.kind == "cuda" else memory)  # out of one device, into another
    link = hardware.card.link * LINKED
    seconds = {
        "in process": 2 * size / memory,
        "disk": 2 * size / DISK + host,
        "http": 2 * size / LOOPBACK + host,
        "delta": 2 * size / memory + CHANGED * (2 * size / DISK + host),
        "broadcast": size / link,
        "object store": 2 * size / OBJECTS + host,
    }
    mine = _taken(config)
    return [
        Way(name, r.handover + time, size * (CHANGED if name == "delta" else 1), name == mine)
        for name, time in seconds.items()
    ]


def _taken(config: RunConfig) -> str:
    """As the run file says, or as `auto` decides on one machine."""
    if config.placement in ("local", "colocated"):
        return "in process"
    if config.placement == "ray":
        return "object store"
    if config.model.lora:
        return "http"
    if config.weights.path != "auto":
        return config.weights.path
    return "disk" if config.model.dtype == "float32" else "delta"
