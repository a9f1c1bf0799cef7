"""Defines the `Engine` protocol: requests in, completions out, weight updates between two tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from paceline.weights.update import ServedPolicy, WeightUpdate

Finish = Literal["stop", "length"]
TopLogprobs = list[tuple[int, float]]
"""The most probable tokens at one place with their log probabilities, best first."""
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form a completion must have: any JSON, JSON of a schema, or a regular expression."""

    kind: Literal["json", "json_schema", "regex"]
    source: str = ""


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
    """Seed of this request alone: the same seed draws the same noise, whatever else the engine does, and with
    `deterministic` the same tokens from the same weights."""
    order: int = 0
    """Priority when requests queue, lower first: the ticket's number in a run."""
    queue_round: int = 0
    """Its number among the requests of one call. Calls that queue take turns, so that a call of many does not hold up
    one of few that comes later."""
    model: str = ""
    """The adapter that answers, by name; empty for the policy itself."""
    top_logprobs: int = 0
    """How many of the most probable tokens to report beside each sampled one."""
    grammar: Grammar | None = None


class Piece(NamedTuple):
    """Newly sampled tokens of a completion that is still running."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    top: list[TopLogprobs] | None = None


Listener = Callable[[Piece], None]
"""Receives every piece of one completion, in order, on the engine's thread; must return at once and never raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens, each with its log probability over the full vocabulary and the version it was drawn from."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    log_z: list[float] | None = None
    """Log of the probability mass that top-p, top-k and a grammar left, per token; None when nothing was cut."""
    top: list[TopLogprobs] | None = None
    recomputed: bool = False
    """Whether the KV cache was recomputed each time the weights changed under this request. Otherwise tokens of later
    versions than the first were sampled on keys and values of older weights."""
    weights: Mapping[int, str] = field(default_factory=dict)
    """Fingerprint of what the engine really held, for each version these tokens were drawn from. Shared by all
    completions of the same weights; empty where the engine does not check its updates."""
    cached: int = field(default=0, compare=False)
    """Prompt tokens whose keys and values were shared instead of computed."""
    queued: float = field(default=0.0, compare=False)
    """Seconds that the request waited in the engine for its first step; 0 where an engine does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters and gauges, for metrics and routing."""

    running: int = 0
    waiting: int = 0
    capacity: int = 0
    """Requests that may run at once."""
    steps: int = 0
    tokens: int = 0
    """Tokens sampled since the start."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens shared instead of computed."""
    preempted: int = 0
    swaps: int = 0
    """Weight updates applied."""
    pause_seconds: float = 0.0
    """Time decoding stood still for weight updates, all in all."""
    busy_seconds: float = 0.0
    cache_used: float = 0.0
    """Part of the KV cache in use, 0 to 1."""
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's limits; a request beyond them is refused at once."""

    max_context: int
    vocabulary: int
    max_top_logprobs: int = MAX_TOP_LOGPROBS
    adapters: Mapping[str, int] = field(default_factory=dict)
    weight_bytes: int = field(default=0, compare=False)
    """Of all its parameters: no update can be larger."""


class Engine(Protocol):
    """Turns token ids into sampled tokens with logprobs, and scores given tokens."""

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        """One completion. Cancelling the awaiting task takes the request out of the engine."""
        ...

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        """Log probability of every token given those before it; 0.0 for the first."""
        ...

    async def load_weights(self, update: WeightUpdate) -> float:
        """Apply an update between two decode steps; answers once applied, with the seconds decoding paused."""
        ...

    async def policy(self) -> ServedPolicy:
        """Version and fingerprint of the weights really served."""
        ...

    async def limits(self) -> EngineLimits: ...

    async def stats(self) -> EngineStats: ...

    async def pause(self) -> None:
        """Stop between two steps; requests wait where they are."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Pause and give the KV cache's memory back; running requests are computed anew after `wake`."""
        ...

    async def wake(self) -> None: ...

    @property
    def busy_seconds(self) -> float:
        """Time with a step under way since the start."""
        ...

    def start(self) -> None: ...

    def close(self) -> None: ...
