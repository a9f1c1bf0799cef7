"""Keeps the last steps of a running run in memory, so that advisories need no file."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.record.advice.window import AdviceWindow, limits
from paceline.record.body import RolloutLike
from paceline.record.facts import facts
from paceline.record.layout import NAMED, ROW

MOST_LINES = 600
"""Steps of metrics: enough for the last evaluations of any run."""


@dataclass(slots=True)
class _Chunk:
    step: int
    rows: NDArray[Any]
    metrics: list[Mapping[str, Any]]


class AdviceMemory:
    """Rows and metrics, without tokens and words. One thread at a time fills or reads it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._steps = limits(config).steps
        self._names: dict[tuple[str, str], int] = {}
        self._chunks: deque[_Chunk] = deque()
        self._lines: deque[dict[str, float]] = deque(maxlen=MOST_LINES)

    def take(
        self, step: int, metrics: Mapping[str, float], played: Sequence[tuple[str, Sequence[RolloutLike]]]
    ) -> None:
        """A step is finished, and these rollouts with their states led to it."""
        self._lines.append({"step": step, **metrics})
        for state, rollouts in played:
            rows = np.array([self._row(step, rollout, state) for rollout in rollouts], ROW)
            self._chunks.append(_Chunk(step, rows, [rollout.metrics for rollout in rollouts]))
        while self._chunks and self._chunks[0].step <= step - self._steps:
            self._chunks.popleft()

    def forget(self, env: str) -> None:
        """Forget what was seen of an environment."""
        number = self._names.get(("env", env), -1)
        for chunk in self._chunks:
            others = chunk.rows["env"] != number
            chunk.rows = chunk.rows[others]
            chunk.metrics = [metrics for metrics, other in zip(chunk.metrics, others, strict=True) if other]
        for line in self._lines:
            for name in [name for name in line if f"/{env}/" in name]:
                del line[name]

    def sight(self) -> AdviceWindow:
        rows = np.concatenate([np.empty(0, ROW), *(chunk.rows for chunk in self._chunks)])
        metrics = [told for chunk in self._chunks for told in chunk.metrics]
        names = dict.fromkeys(name for line in self._lines for name in line)
        columns = {name: [line.get(name) for line in self._lines] for name in names}
        return AdviceWindow(self._config, columns, rows, dict(self._names), measured=metrics.__getitem__)

    def _row(self, step: int, rollout: RolloutLike, state: str) -> tuple[Any, ...]:
        fact = facts(rollout, state)
        named = [self._number(column, name) for column, name in zip(NAMED, fact[:6], strict=True)]
        return (step, *named, fact.domain, 0, *fact[7:], 0.0, 0, 0, 0, 0)

    def _number(self, column: str, name: str) -> int:
        return self._names.setdefault((column, name), len(self._names) + 1) if name else 0
