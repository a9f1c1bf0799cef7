"""Defines a rollout as one flat sequence, for code that samples from the policy by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from paceline.data.rollout import Turn
from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    """One sequence of tokens, those of the policy marked by the loss mask. An environment function may return it.

    >>> sample = RolloutSample(tokens=[3, 4, 5, 6], logprobs=[0, 0, -0.5, -1], loss_mask=[0, 0, 1, 1], reward=1.0)
    >>> [(turn.prompt_ids, turn.completion_ids, turn.versions) for turn in sample.turns(version=7)]
    [([3, 4], [5, 6], [7, 7])]
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Of each token at the sampling temperature; whatever stands off the loss mask does not matter."""
    loss_mask: Sequence[bool | int]
    """1 for each token that the policy sampled."""
    reward: float
    versions: Sequence[int] | None = None
    """The policy version that sampled each token. A function that takes the row alone may leave it out: then it is that
    of the episode's start."""
    finish_reason: str = "stop"
    """`length` where the last reply hit the token limit."""
    text: str = ""
    """What the last reply says; decoded from its tokens when left out."""
    metrics: dict[str, float] = field(default_factory=dict)

    def turns(self, version: int | None = None, temperature: float = 1.0) -> list[Turn]:
        """Each run of sampled tokens, with all that comes before as its prompt."""
        count = len(self.tokens)
        versions = [version] * count if self.versions is None and version is not None else self.versions
        if versions is None:
            raise PacelineError("a RolloutSample needs `versions`: each turn of the seat has those of its tokens")
        for name, stream in (("logprobs", self.logprobs), ("loss_mask", self.loss_mask), ("versions", versions)):
            entries = len(stream) if hasattr(stream, "__len__") else 0
            if entries != count:
                raise PacelineError(f"a RolloutSample has {count} tokens and {entries} entries in `{name}`")
        if odd := [entry for entry in self.loss_mask if entry not in (0, 1)]:
            raise PacelineError(f"a RolloutSample has {odd[0]!r} in its `loss_mask`: 1 trains a token, 0 does not")
        if not any(self.loss_mask):
            raise PacelineError("a RolloutSample has no token in its `loss_mask`: return None to drop the episode")
        turns: list[Turn] = []
        for sampled, places in groupby(range(count), lambda place: bool(self.loss_mask[place])):
            if sampled:
                found = list(places)
                first, end = found[0], found[-1] + 1
                turn = Turn(
                    prompt_ids=list(self.tokens[:first]),
                    completion_ids=list(self.tokens[first:end]),
                    logprobs=list(self.logprobs[first:end]),
                    versions=list(versions[first:end]),
                    finish="length" if self.finish_reason == "length" and end == count else "stop",
                    temperature=temperature,
                    text=self.text if end == count else "",
                )
                turns.append(turn)
        return turns
