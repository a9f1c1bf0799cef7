"""A device, and what lies there."""

from dataclasses import dataclass, field

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS = 1 << 25
"""Most logits held at once."""


@dataclass(slots=True)
class Place:
    """One device, or several that hold the same."""

    name: str
    capacity: float | None
    """Bytes that can be used; None where nobody knows."""
    count: int = 1
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def used(self) -> float:
        return sum(self.parts.values())

    @property
    def missing(self) -> float:
        """Bytes that do not fit."""
        return 0.0 if self.capacity is None else max(0.0, self.used - self.capacity)
