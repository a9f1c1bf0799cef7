"""Pauses an environment for some steps when an advisory that the run file names fires for it.

    a step ends -> a thread records it and applies the rules -> pauses are known before the next draws

Pauses take effect when the next weights are published: at staleness 0 no episode runs then, so that a deterministic
run pauses at the same draw.

Keeps the last steps of a running run in memory, so that advisories need no file.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.observe.monitor import Monitor
from paceline.observe.record.advice import Advisory, advise
from paceline.observe.record.advice.window import AdviceWindow, limits
from paceline.observe.record.layout import ROW, Names, facts, index_row
from paceline.orchestrator.train_env import TrainEnv
from paceline.rollout import Rollout

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
        self._names: Names = {}
        self._chunks: deque[_Chunk] = deque()
        self._lines: deque[dict[str, float]] = deque(maxlen=MOST_LINES)

    def take(self, step: int, metrics: Mapping[str, float], played: Sequence[tuple[str, Sequence[Rollout]]]) -> None:
        """A step is finished, and these rollouts with their states led to it."""
        self._lines.append({"step": step, **metrics})
        for state, rollouts in played:
            rows = np.array([index_row(step, self._names, facts(rollout, state)) for rollout in rollouts], ROW)
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


Played = list[tuple[str, Sequence[Rollout]]]
"""States, and rollouts that came to them."""


class Pauses:
    """The paused environments, why, and until when. A run without rules to pause by remembers nothing."""

    def __init__(self, config: RunConfig, courses: Mapping[str, TrainEnv], monitor: Monitor) -> None:
        self._courses, self._monitor = courses, monitor
        self._every, self._rest = config.advice.interval, config.advice.steps
        self._grounds = {name: frozenset(_grounds(course, config)) for name, course in courses.items()}
        self._rules: frozenset[str] = frozenset().union(*self._grounds.values())
        self._memory = AdviceMemory(config.model_dump())
        self._played: Played = []
        self._look: asyncio.Task[list[Advisory]] | None = None
        self._step = 0
        self._until: dict[str, int] = {}
        """The step after which a resting environment is drawn from again."""
        self._because: dict[str, str] = {}
        for course in courses.values():
            course.paused = False

    def played(self, state: str, rollouts: Sequence[Rollout]) -> None:
        """Take finished rollouts, which do not change any more."""
        if self._rules and rollouts:
            self._played.append((state, rollouts))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a finished step; every `advice.interval` steps the rules are applied."""
        self._step = step
        if self._rules:
            played, self._played = self._played, []
            self._look = asyncio.create_task(asyncio.to_thread(self._seen, step, dict(metrics), played))

    async def settle(self) -> None:
        """Let what was seen take effect, before anything is drawn."""
        if self._look is None:
            return
        look, self._look = self._look, None
        try:
            found = await look  # bounded: some thousand rows in memory, asked for a step ago
        except Exception as error:  # a run is worth more than advice
            self._rules, found = frozenset(), []
            self._monitor.note(f"advice failed and pauses no environment from now on: {type(error).__name__}: {error}")
        self._keep_up()
        for name, until in list(self._until.items()):
            if self._step >= until:
                self._wake(name)
        for advisory in found:
            for name in [advisory.env] if advisory.env else list(self._courses):
                if advisory.rule in self._grounds[name] and name not in self._until:
                    self._send(name, advisory)

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()

    def halt(self) -> str:
        """Why a run that has drawn all it may ends, if that is because environments are paused; else empty."""
        left = [name for name, course in self._courses.items() if course.paused and not course.exhausted]
        if not left:
            return ""
        why = "; ".join(dict.fromkeys(self._because[name] for name in left))
        return (
            f"only environments that rest are left to draw from. {why}. Mend that, or take it out of `advice.pause`, "
            "and go on with --resume latest"
        )

    def _seen(self, step: int, metrics: dict[str, float], played: Played) -> list[Advisory]:
        self._memory.take(step, metrics, played)
        return advise(self._memory.sight(), self._rules) if step % self._every == 0 else []

    def _send(self, name: str, advisory: Advisory) -> None:
        self._courses[name].paused = True
        self._until[name] = self._step + self._rest
        self._because[name] = f"`{advisory.rule}` of `{name}`: {advisory.title}. {advisory.seen}".rstrip(".")
        self._monitor.note(
            f"step {self._step}: nothing more is drawn from `{name}` for {self._rest} steps, since `advice.pause` "
            f"names `{advisory.rule}`: {advisory.title}. {advisory.seen}"
        )

    def _wake(self, name: str) -> None:
        """Drawn from again, and judged by what comes from now on."""
        self._courses[name].paused = False
        del self._until[name]
        self._memory.forget(name)
        self._monitor.note(f"step {self._step}: `{name}` has rested and is drawn from again")

    def _keep_up(self) -> None:
        """A paused environment must not have all draws to itself afterwards."""
        awake = [course.share for course in self._courses.values() if not (course.paused or course.exhausted)]
        for course in self._courses.values():
            if course.paused and awake:
                course.forgone += max(0.0, min(awake) - course.share)


def _grounds(course: TrainEnv, config: RunConfig) -> Sequence[str]:
    return config.advice.pause if course.config.pause is None else course.config.pause
