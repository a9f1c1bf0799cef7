"""Where a step's time went."""

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager

from paceline.orchestrator.clock import Clock
from paceline.waits import beat, waiting

PHASES = ("sample", "score", "train", "publish")

DOING = {
    "sample": ("sampling a batch", ("an episode", "the preparation")),
    "score": ("scoring the batch", ()),
    "train": ("training on the batch", ()),
    "publish": ("publishing the weights", ()),
    "eval": ("evaluating", ()),
}
"""How a phase is called among the waits, and the waits that must end before it can."""


class Stopwatch:
    """Times the phases of a step, and how much of the training time the engine also decoded in."""

    def __init__(self, clock: Clock, engine_busy: Callable[[], float]) -> None:
        self._clock = clock
        self._engine_busy = engine_busy
        self._seconds: dict[str, float] = defaultdict(float)
        self._busy_in: dict[str, float] = defaultdict(float)
        self._inner = (0.0, 0.0)
        """Seconds, and seconds of the engine, in phases within the one under way."""
        self._spans: list[tuple[str, float, float]] = []
        self.restart()

    def restart(self) -> None:
        """A new step begins."""
        self._start, self._busy_start = self._clock.now(), self._engine_busy()
        self._seconds.clear()
        self._busy_in.clear()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time spent in a phase within this one counts there alone. To the watchdog a phase is what the run waits for,
        and the beginning of one is progress."""
        what, on = DOING.get(name, (name, ()))
        beat()
        with waiting(what, on):
            yield from self._timed(name)

    def _timed(self, name: str) -> Generator[None]:
        outer, self._inner = self._inner, (0.0, 0.0)
        start, busy = self._clock.now(), self._engine_busy()
        try:
            yield
        finally:
            end = self._clock.now()
            seconds, engine = end - start, self._busy_since(busy)
            self._spans.append((name, start, end))
            self._seconds[name] += seconds - self._inner[0]
            self._busy_in[name] += max(0.0, engine - self._inner[1])
            self._inner = (outer[0] + seconds, outer[1] + engine)

    def _busy_since(self, then: float) -> float:
        """A server that was started again counts from zero: what it did before is not known any more."""
        return max(0.0, self._engine_busy() - then)

    def seconds(self, phase: str) -> float:
        return self._seconds[phase]

    def take_spans(self) -> list[tuple[str, float, float]]:
        """The phases that ended since this was last asked, by the clock's time."""
        spans, self._spans = self._spans, []
        return spans

    def lap(self, sampled_tokens: int) -> dict[str, float]:
        """The metrics of the step so far, evaluation not yet included."""
        total = max(self._clock.now() - self._start, 1e-9)
        wait, train = self._seconds["sample"], self._seconds["train"]
        return {
            **{f"time/{name}": self._seconds[name] for name in PHASES},
            "time/step": total,
            "tokens/s": sampled_tokens / total,
            "wait_time_ratio": wait / max(wait + train, 1e-9),
            "overlap_ratio": min(1.0, self._busy_in["train"] / max(train, 1e-9)),
            "busy/trainer": train / total,
            "busy/sampler": min(1.0, self._busy_since(self._busy_start) / total),
        }
