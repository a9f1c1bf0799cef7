"""Scores of trained tokens: what the trainer computed for each token of a batch, for the record, in seven bytes.

Only tokens that a component of the loss trains have scores. Where they lie in a sample follows from its weights
(`trained_mask`), so no positions are kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample

CLIPPED, SKIPPED = 1, 2
"""Flags: a bound of the loss held the token back; its sequence was left out (`trainer.clip_skip_threshold`)."""
TOKEN_SCORE = np.dtype([("logprob", "<f4"), ("entropy", "<f2"), ("flags", "u1")])
"""The policy's log probability in the forward pass of its optimizer step, the entropy before the token, and flags."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of a batch, sample after sample. Bytes, so that it travels and is written as it is."""

    samples: bytes
    """Which samples of the batch have scores, and how many each: pairs of u4."""
    tokens: bytes
    """`TOKEN_SCORE`s, in the order of `samples`."""

    @classmethod
    def of(cls, scores: Mapping[int, NDArray]) -> Self:
        """Of the `TOKEN_SCORE`s of each sample, by its place in the batch."""
        counts = np.array([(place, len(one)) for place, one in scores.items()], "<u4")
        return cls(counts.tobytes(), b"".join([one.tobytes() for one in scores.values()]))

    @classmethod
    def joined(cls, parts: Sequence["TokenScores"]) -> Self:
        """Of different samples."""
        return cls(b"".join([part.samples for part in parts]), b"".join([part.tokens for part in parts]))

    def by_sample(self) -> dict[int, NDArray]:
        """The scores of each sample, by its place in the batch."""
        counts = np.frombuffer(self.samples, "<u4").reshape(-1, 2)
        parts = np.split(np.frombuffer(self.tokens, TOKEN_SCORE), np.cumsum(counts[:, 1])[:-1])
        return dict(zip(counts[:, 0].tolist(), parts, strict=True)) if len(counts) else {}

    @classmethod
    def merged(cls, parts: Iterable["TokenScores | None"]) -> "TokenScores | None":
        """Those of all ranks. Ranks that share a sample have computed the same."""
        known = [part for part in parts if part is not None]
        if len(known) < 2:
            return known[0] if known else None
        return cls.of({place: one for part in known for place, one in part.by_sample().items()})

    def renumbered(self, places: Sequence[int] | Mapping[int, int]) -> "TokenScores":
        """The same samples at other places: sample i at `places[i]`."""
        counts = np.frombuffer(self.samples, "<u4").reshape(-1, 2).copy()
        counts[:, 0] = [places[place] for place in counts[:, 0].tolist()]
        return type(self)(counts.tobytes(), self.tokens)


NO_SCORES = TokenScores(b"", b"")


def trained_mask(sample: Sample) -> NDArray:
    """The tokens that a component of the loss trains."""
    trained = sample.rl_token_weights != 0
    if sample.ce_weights is not None:
        trained |= sample.ce_weights != 0
    if sample.teacher_kl_weights is not None:
        trained |= sample.loss_mask & (sample.teacher_kl_weights != 0)
    return trained
