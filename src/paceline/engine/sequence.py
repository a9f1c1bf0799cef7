"""The state of a request in the engine, its limits and the models it may name, and its chunks in a step.

`TokenStreamer` batches token callbacks so that streaming never throttles decoding.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.engine.base import MAX_TOP_LOGPROBS, Completion, Finish, GenerateRequest, Listener, Piece, TopLogprobs
from paceline.engine.weight_applier import ServedModels, WeightsKey
from paceline.errors import RequestError, UnknownModel
from paceline.weights.update import Array


class GrammarMatcher(Protocol):
    """A compiled grammar at one place in one completion."""

    def allowed_mask(self, vocabulary: int) -> Array:
        """True for every token that may come next."""
        ...

    def advance(self, token: int) -> bool:
        """Take the token that came; True when the completion is done."""
        ...


MIN_TEMPERATURE = 1e-20
INT64_MAX = (1 << 63) - 1


def check_request(request: GenerateRequest, served: ServedModels, longest_prompt: int, vocabulary: int) -> None:
    """Refuse a request before it enters the engine, for the first thing that is wrong."""
    prompt = len(request.prompt_ids)
    if prompt == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if prompt > longest_prompt:
        raise RequestError(f"the prompt has {prompt} tokens, but the context has room for {longest_prompt}")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
        raise RequestError(f"the prompt holds token ids outside the vocabulary (0 to {vocabulary - 1})")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}: ask for at least one")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise RequestError(f"temperature is {request.temperature}: give a number from 0 on")
    if 0 < request.temperature < MIN_TEMPERATURE:
        raise RequestError(f"temperature is {request.temperature}, too small to divide by: give 0 for greedy")
    if not 0 < request.top_p <= 1 or not 0 <= request.top_k <= INT64_MAX:
        raise RequestError("top_p must be above 0 and at most 1, top_k 0 or more")
    if not -INT64_MAX - 1 <= request.noise <= INT64_MAX:
        raise RequestError("the noise key must fit 64 bits: make it with noise_key")
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs is {request.top_logprobs}: at most {MAX_TOP_LOGPROBS} are given")
    if request.model not in served.versions:
        names = ", ".join(sorted(served.adapters)) or "none"
        raise UnknownModel(f"no adapter `{request.model}` is loaded; loaded are: {names}")


class DoneFlag:
    """Whether a request is over: the engine sets it with the answer, the future on cancellation. `future.done()`
    says the same but takes a lock, and this is read for every token."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False

    def set_by(self, future: "Future[Any]") -> None:
        self.is_set = True


@dataclass(eq=False, slots=True)
class DecodeSequence:
    """Its tokens, and how far each stage has come with them.

    tokens      prompt and every sampled token the host has seen
    + pending_tokens    sampled in steps that are launched but not landed: the device knows them, the host not yet
    computed    how many of all these have their keys and values in the cache, in launch order
    """

    request: GenerateRequest
    future: "Future[Any]"
    tokens: list[int]
    limit: int
    """Most tokens it may grow to, prompt included."""
    listener: Listener | None = None
    scores: list[float] | None = None
    """Collects the prompt's log probabilities when the sequence is scored, not continued."""
    matcher: "GrammarMatcher | None" = None
    arrival: int = 0
    queue_round: int = 0
    """Requests of equal `order` go first by this, then by `arrival`: calls that queue take turns."""
    slot: int = -1
    """Its row in the cache; -1 while it waits."""
    num_computed: int = 0
    pending_tokens: int = 0
    pending_steps: int = 0
    """Launched steps that touch it and have not landed: its place in the cache cannot be freed before."""
    num_cached: int | None = None
    submitted: float = field(default_factory=time.perf_counter)
    queued: float = 0.0
    """Seconds that it waited for its first step."""
    weights_key: WeightsKey | None = None
    """None once its cache mixes several versions: such keys are never shared."""
    pages: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_z: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    fingerprints: dict[int, str] | None = None
    """Version and fingerprint of what it was sampled from before the present weights; shared like those."""
    num_streamed: int = 0
    """How many of its sampled tokens its listener has received."""
    recomputed: bool = False
    has_mixed_cache: bool = False
    """Weights changed under it while its cache stayed as it was."""
    is_preempted: bool = False
    may_hold_nan: bool = False
    """Its keys and values may hold NaN, which no mask hides from the sequence that gets the memory next."""
    done_flag: DoneFlag = field(default_factory=DoneFlag)

    def __post_init__(self) -> None:
        self.future.add_done_callback(self.done_flag.set_by)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) + self.pending_tokens - len(self.request.prompt_ids)

    def append(self, sampled: "SampledToken", version: int) -> Finish | None:
        """Take one sampled token; tells how the sequence ended, if it did."""
        self.tokens.append(sampled.token)
        self.logprobs.append(sampled.logprob)
        self.versions.append(version)
        if sampled.log_z is not None:
            self.log_z.append(sampled.log_z)
        if sampled.top is not None:
            self.top.append(sampled.top)
        if sampled.token in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def next_piece(self) -> Piece:
        """The tokens its listener has not received yet; counts them as streamed."""
        start, self.num_streamed = self.num_streamed, len(self.logprobs)
        tokens = self.tokens[len(self.request.prompt_ids) + start :]
        return Piece(tokens, self.logprobs[start:], self.versions[start:], self.top[start:] or None)

    def restart(self) -> None:
        """Forget what was sampled; the same noise draws it anew. Its listener must not have received any."""
        del self.tokens[len(self.request.prompt_ids) :]
        for stream in (self.logprobs, self.log_z, self.top, self.versions):
            stream.clear()
        self.fingerprints, self.recomputed, self.has_mixed_cache = None, False, False

    def completion(self, finish: Finish, weights: dict[int, str]) -> Completion:
        """All of it, its last token drawn from these weights."""
        return Completion(
            token_ids=self.tokens[len(self.request.prompt_ids) :],
            logprobs=self.logprobs,
            versions=self.versions,
            finish=finish,
            log_z=self.log_z or None,
            top=self.top or None,
            recomputed=self.recomputed and not self.has_mixed_cache,
            cached=self.num_cached or 0,
            queued=self.queued,
            weights=weights if self.fingerprints is None else self.fingerprints | weights,
        )


@dataclass(slots=True)
class SampledToken:
    token: int
    logprob: float
    log_z: float | None = None
    top: TopLogprobs | None = None


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, and whether the token after them is sampled."""

    sequence: DecodeSequence
    start: int
    length: int
    samples_token: bool
    version: int
    """Of the weights the step was launched with."""
    adapter: int = 0
    """Slot of the adapter it runs through; 0 for none."""
    index: int = 0
    """Number of the sampled token in its completion: its place in the noise stream."""
    sampled_token: SampledToken | None = None
    scores: list[float] | None = None

    @property
    def targets(self) -> list[int]:
        """The known token after each of its own."""
        return self.sequence.tokens[self.start + 1 : self.start + self.length + 1]


LISTENER_SECONDS = 0.0002
"""Cost of one call of a listener, from here to a client."""
MOST_DELAY_SECONDS = 0.1


class TokenStreamer:
    """Calls each listener with its new tokens.

    A few listeners are called for every token. Many are called again only after as long as calling them all takes, but
    at most `MOST_DELAY_SECONDS`, with several tokens each time: otherwise the calls would throttle decoding.
    A completion's last tokens are streamed before its end.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pending: dict[DecodeSequence, None] = {}
        """Sequences with tokens that their listeners have not received."""
        self._due = 0.0

    def add(self, sequence: DecodeSequence) -> None:
        """It has a new token."""
        self._pending[sequence] = None

    def flush(self, now: bool = False) -> None:
        """Stream all that is new, if it is time."""
        if not self._pending or (self._clock() < self._due and not now):
            return
        for sequence in self._pending:
            _stream(sequence)
        self._due = self._clock() + min(len(self._pending) * LISTENER_SECONDS, MOST_DELAY_SECONDS)
        self._pending.clear()

    def finish(self, sequence: DecodeSequence) -> None:
        """It is over: its listener receives the rest."""
        if sequence in self._pending:
            del self._pending[sequence]
            _stream(sequence)

    def discard(self, sequence: DecodeSequence) -> None:
        """Its listener no longer waits."""
        self._pending.pop(sequence, None)


def _stream(sequence: DecodeSequence) -> None:
    assert sequence.listener is not None
    sequence.listener(sequence.next_piece())
