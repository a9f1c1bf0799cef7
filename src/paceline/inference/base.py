"""What every engine speaks: requests in, completions out, weights between two tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.errors import PacelineError
from paceline.model.weights import Policy, WeightUpdate

Finish = Literal["stop", "length"]


class EngineError(PacelineError):
    """The engine cannot answer, as a sentence for the user."""


class RequestError(EngineError):
    """This request can never be answered; another may be."""


class Overloaded(EngineError):
    """The queue is full; the same request may succeed later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Exact prompt tokens and how to continue them."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the completion; the one that does is kept."""
    noise: int = 0
    """Key of this request's noise stream: the same key draws the same noise, whatever else the engine does."""
    order: int = 0
    """Lower goes first when requests queue: the ticket's number in a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens, each with its log probability over the full vocabulary and the version it was drawn from."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    log_z: list[float] | None = None
    """Log of the probability mass that top-p and top-k kept, per token; None when nothing was cut."""
    recomputed: bool = False
    """Whether the KV cache was recomputed when the weights changed under this request."""


class Engine(Protocol):
    """Turns token ids into sampled tokens with logprobs, and scores given tokens."""

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log probability of every token given those before it; 0.0 for the first."""
        ...

    async def load_weights(self, update: WeightUpdate) -> float:
        """Apply an update between two decode steps; answers once applied, with the seconds decoding paused."""
        ...

    async def policy(self) -> Policy:
        """Version and fingerprint of the weights really served."""
        ...

    @property
    def busy_seconds(self) -> float:
        """Time spent computing since the start."""
        ...

    def start(self) -> None: ...

    def close(self) -> None: ...
