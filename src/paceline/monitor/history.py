"""A run's metrics, folded into the curves that screen, plot and summary show."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeGuard

Curve = list[tuple[int, float]]
"""Points (step, value), in the order they came."""


class MetricHistory:
    """What the metrics say so far. Values that are missing or not finite leave no point."""

    def __init__(self, envs: Iterable[str] = ()) -> None:
        self.step = 0
        self.latest: dict[str, float] = {}
        """The last value of every metric."""
        self.rewards: dict[str, Curve] = {env: [] for env in envs}
        """Training reward by environment."""
        self.exact: dict[str, Curve] = {}
        """Share of held-out rows that are exactly right, by environment."""
        self.held_out: dict[str, Curve] = {}
        """Held-out reward by environment."""
        self.dropped: Counter[str] = Counter()
        """Rollouts dropped since the start, by reason."""
        self.seconds = 0.0
        """Time spent in steps."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]], envs: Iterable[str] = ()) -> Self:
        """The history of `metrics.jsonl`."""
        history = cls(envs)
        for line in lines:
            history.add(line["step"], line)
        return history

    @property
    def envs(self) -> list[str]:
        return list(dict.fromkeys([*self.rewards, *self.exact, *self.held_out]))

    @property
    def trained(self) -> bool:
        return any(self.rewards.values())

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.step = max(self.step, step)
        values = {key: value for key, value in metrics.items() if _finite(value)}
        self.latest.update(values)
        self.seconds += values.get("time/step", 0.0)
        for key, value in values.items():
            self._add(step, key, value)

    def _add(self, step: int, key: str, value: float) -> None:
        family, _, rest = key.partition("/")
        # An environment's name may hold slashes of its own.
        name, _, field = rest.rpartition("/")
        match family, field:
            case "reward", "mean":
                self.rewards.setdefault(name, []).append((step, value))
            case "eval", "exact":
                self.exact.setdefault(name, []).append((step, value))
            case "eval", "reward":
                self.held_out.setdefault(name, []).append((step, value))
            case "dropped", _:
                self.dropped[rest] += round(value)


def _finite(value: float | None) -> TypeGuard[float]:
    """False for a NaN, and for the null that a file has in its place."""
    return value is not None and math.isfinite(value)
