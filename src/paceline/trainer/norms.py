"""How one optimizer step came out, and whether its gradient can be trusted."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from statistics import median

import numpy as np
from numpy.typing import NDArray

KEPT = 32
"""Steps the median is of: enough to be calm, few enough to follow a run whose gradients shrink."""
WARM_UP = 8
"""Steps before anything is judged: a run's first gradients say little about the next."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One optimizer step."""

    sums: NDArray
    """Of all its tokens, in the order of `loss.NAMES`."""
    grad_norm: float
    micro_batches: int
    trouble: str = ""
    """Why it was left out; empty if it was taken."""

    @property
    def finite(self) -> bool:
        return isfinite(self.grad_norm) and self.sound

    @property
    def sound(self) -> bool:
        """Nothing is wrong with the loss; the gradient may still have overflown."""
        return bool(np.isfinite(self.sums).all())


class Norms:
    """The norms, before clipping, of the last gradients that were stepped on.

    A gradient whose norm is above `spike` times their median is a spike. The median and not the mean, and spikes are
    never kept, so that one cannot make room for the next. `summed` adds a number up over the ranks.
    """

    def __init__(self, spike: float | None, summed: Callable[[float], float] = float) -> None:
        self._spike, self._summed = spike, summed
        self._last: deque[float] = deque(maxlen=KEPT)

    def add(self, norm: float) -> None:
        """A step was taken. One without a gradient is no measure."""
        if norm > 0:
            self._last.append(norm)

    def trouble(self, outcome: Outcome) -> str:
        """What is wrong with a gradient; empty if nothing is."""
        if not outcome.finite:
            return "the gradient was not finite"
        if self._spike is None:
            return ""
        trouble = self._spiked(outcome.grad_norm, self._spike)
        # All ranks have the same gradient; should one round its norm differently, still all step or none does.
        votes = self._summed(float(bool(trouble)))
        return trouble or ("another rank saw the gradient's norm jump" if votes else "")

    def _spiked(self, norm: float, spike: float) -> str:
        if len(self._last) < WARM_UP or norm <= spike * (usual := median(self._last)):
            return ""
        return (
            f"the gradient's norm was {norm:.3g}, {norm / usual:.3g} times the median of the last {len(self._last)} "
            f"steps (trainer.spike allows {spike:g})"
        )

    def state(self) -> list[float]:
        return list(self._last)

    def load(self, norms: Iterable[float]) -> None:
        self._last = deque(norms, maxlen=KEPT)
