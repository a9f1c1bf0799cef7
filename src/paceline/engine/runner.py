"""Defines what the decoding loop asks of a runner and a runner of its sampler, whatever the tensor library."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paceline.engine.sequence import Chunk, SampledToken
from paceline.weights.update import Array


class StepInFlight:
    """A launched step. This one was computed while it was launched."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks

    def land(self) -> None:
        """Wait for it, and put what was sampled and scored into its chunks."""


class Runner:
    """Launches steps. At most `depth` of them may be in flight when the next is launched."""

    depth: int
    is_compiling = False
    """Whether faster code is being made, to which it may want to switch soon."""

    def launch(self, chunks: Sequence[Chunk]) -> StepInFlight:
        """Compute the chunks and sample where they ask for it."""
        raise NotImplementedError

    def context(self) -> AbstractContextManager[object]:
        """Held by the engine's thread all its life."""
        return nullcontext()

    def warm_up(self) -> None:
        """Build whatever must be there before the first request."""

    def should_use_compiled(self, busy_seconds: float, swaps: int) -> bool:
        """Whether faster code is ready, given how long the runner has computed and how often the weights have changed:
        by that it decides whether such code is worth making."""
        return False

    def use_compiled(self) -> None:
        """Run the faster code from the next step on. Nothing may be in flight."""

    def close(self) -> None:
        """Free what only this runner needs."""


ArrayFactory = Callable[..., Array]
"""Makes an array of a library from values and the name of a type, as `numpy.array` does."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How each row is sampled; one entry per row of the logits."""

    temperatures: Array
    top_p: Array
    top_k: Array
    keys: Array
    indices: Array
    truncates: bool
    """Whether any row uses top-p or top-k: sorting the vocabulary is skipped when none does."""
    greedy: bool
    """Whether any row has temperature 0."""
    top: int = 0
    """Most alternatives any row wants to hear of."""
    allowed_mask: Array | None = None
    """Tokens that a grammar allows each row."""

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk], make_array: ArrayFactory) -> "SamplingMetadata":
        requests = [chunk.sequence.request for chunk in chunks]
        return cls(
            temperatures=make_array([r.temperature for r in requests], "float32"),
            top_p=make_array([r.top_p for r in requests], "float32"),
            top_k=make_array([r.top_k for r in requests], "int64"),
            keys=make_array([r.noise for r in requests], "int64"),
            indices=make_array([chunk.index for chunk in chunks], "int64"),
            truncates=any(r.top_p < 1 or r.top_k for r in requests),
            greedy=any(r.temperature == 0 for r in requests),
            top=max(r.top_logprobs for r in requests),
        )

    def for_step(self, chunks: Sequence[Chunk], vocabulary: int, make_array: ArrayFactory) -> "SamplingMetadata":
        """The same rows at the tokens that these chunks sample."""
        matchers = [chunk.sequence.matcher for chunk in chunks]
        allowed = None
        if any(matchers):
            rows = [
                np.ones(vocabulary, np.bool_) if matcher is None else matcher.allowed_mask(vocabulary)
                for matcher in matchers
            ]
            allowed = make_array(np.stack(rows), "bool")
        return replace(self, indices=make_array([chunk.index for chunk in chunks], "int64"), allowed_mask=allowed)


class SamplerOutput(NamedTuple):
    """What was drawn for each row."""

    tokens: Array
    logprobs: Array
    log_z: Array | None = None
    """Log of the probability mass that was left to sample from; None where nothing was cut off."""
    top: tuple[Array, Array] | None = None

    def assign_to(self, chunks: Sequence[Chunk]) -> None:
        """Give each chunk what was drawn for it, and no more than its request asked to hear."""
        log_z = [None] * len(chunks) if self.log_z is None else self.log_z.tolist()
        for chunk, token, logprob, z in zip(chunks, self.tokens.tolist(), self.logprobs.tolist(), log_z, strict=True):
            request = chunk.sequence.request
            bounded = request.top_p < 1 or request.top_k or chunk.sequence.matcher is not None
            chunk.sampled_token = SampledToken(token, logprob, z if bounded else None)
        if self.top is not None:
            ids, values = (array.tolist() for array in self.top)
            for chunk, best, logprobs in zip(chunks, ids, values, strict=True):
                assert chunk.sampled_token is not None
                if count := chunk.sequence.request.top_logprobs:
                    chunk.sampled_token.top = list(zip(best[:count], logprobs[:count], strict=True))
