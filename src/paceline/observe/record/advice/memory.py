"""Keeps the last steps of a running run in memory, so that advisories need no file."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.rollout import Rollout
from paceline.observe.record.advice.measures import Advisory
from paceline.observe.record.advice.rules import advise
from paceline.observe.record.advice.window import AdviceWindow, advice_limits
from paceline.observe.record.layout import ROW, Names, index_row, rollout_facts

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
        self._steps = advice_limits(config).steps
        self._names: Names = {}
        self._chunks: deque[_Chunk] = deque()
        self._lines: deque[dict[str, float]] = deque(maxlen=MOST_LINES)

    def take(self, step: int, metrics: Mapping[str, float], played: Sequence[tuple[str, Sequence[Rollout]]]) -> None:
        """A step is finished, and these rollouts with their states led to it."""
        self._lines.append({"step": step, **metrics})
        for state, rollouts in played:
            rows = np.array([index_row(step, self._names, rollout_facts(rollout, state)) for rollout in rollouts], ROW)
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

    def advise(self, rules: frozenset[str]) -> list[Advisory]:
        """The advisories of these rules that fire now."""
        return advise(self.window(), rules)

    def window(self) -> AdviceWindow:
        rows = np.concatenate([np.empty(0, ROW), *(chunk.rows for chunk in self._chunks)])
        metrics = [values for chunk in self._chunks for values in chunk.metrics]
        names = dict.fromkeys(name for line in self._lines for name in line)
        columns = {name: [line.get(name) for line in self._lines] for name in names}
        return AdviceWindow(self._config, columns, rows, dict(self._names), measured=metrics.__getitem__)
