"""Records each token's share of the loss while a batch trains, for `paceline replay`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.trainer.batch import TrainedTokens
from paceline.trainer.loss import TokenLosses
from paceline.trainer.rules import Moved, held_back
from paceline.trainer.stepping import trained


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The tokens of one sample that train, in their order."""

    places: NDArray
    """Their positions in the sample."""
    logprobs: NDArray
    """The policy's."""
    sampler: NDArray
    """The sampler's; NaN where that was a frozen model."""
    ratio: NDArray
    """Policy over where the rl term measures: the sampler, or under `proximal` the batch's start."""
    advantages: NDArray
    entropy: NDArray
    shares: dict[str, NDArray]
    """Of the optimizer step's loss, by component."""
    left: list[tuple[int, str, str]]
    """Tokens that a bound held back: which of these, in which component, and by which rule."""
    skipped: bool
    """The whole sample was left out (`clip_skip_threshold`)."""


class Witness:
    """A `Stepper.watch` callback that records tokens by sample. A micro-batch that runs again replaces its record."""

    def __init__(self, c: config.TrainerConfig, told: Callable[[int], None]) -> None:
        self._config, self._told = c, told
        self.heard: dict[int, RecordedTokens] = {}
        """By the sample's place in the batch."""

    def __call__(self, micro_batch: MicroBatch, tokens: TrainedTokens, judged: TokenLosses) -> None:
        starts = np.cumsum(micro_batch.lengths) - micro_batch.lengths
        places, segments = trained(micro_batch), tokens.segments.cpu().numpy()
        shares = {name: _array(values) for name, values in judged.scaled().items()}
        used = {name: _array(scale) != 0 for name, scale in judged.scales.items()}
        left = {name: _array(values) & used[name] for name, values in judged.left.items()}
        moved = judged.moved
        streams = [tokens.logprobs, tokens.behaviour, moved.value, tokens.advantages, tokens.entropy]
        streams, apart, rl = [_array(stream) for stream in streams], _array(moved.difference), used["rl"]
        for number, member in enumerate(micro_batch.members):
            at = np.flatnonzero(segments == number)
            if not len(at):
                continue
            skipped = bool(judged.skipped[number])
            own = Moved(streams[2][at], apart[at], streams[3][at], rl[at])
            self.heard[member] = RecordedTokens(
                places[at] - starts[number],
                *(stream[at] for stream in streams),
                shares={name: values[at] for name, values in shares.items() if used[name][at].any()},
                left=[] if skipped else held_back(self._config.loss, own, {k: v[at] for k, v in left.items()}),
                skipped=skipped,
            )
        self._told(len(self.heard))


def _array(values: Tensor) -> NDArray:
    return values.detach().cpu().numpy()
