"""Computes log probabilities of given tokens, by the trainer's own loading and scoring code.

Teachers and the KL reference never sample and need no KV cache and no decode loop. A scorer packs the sequences of all
requests into micro-batches of one token budget; what does not fit any more is carried over into the next. So a long
request does not hold up a short one for longer than a micro-batch, and the GPU sees full packs.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from paceline.config.model import LoRAConfig
from paceline.data import Sample
from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, Listener
from paceline.engine.embedded import TorchWeights
from paceline.engine.weight_applier import BROKEN_VERSION
from paceline.errors import EngineError, Overloaded, RequestError
from paceline.model import LMHead, ServedPolicy, WeightUpdate, fingerprint, set_cpu_threads
from paceline.model.adapters import Adapters, install
from paceline.trainer.backend import score_samples
from paceline.trainer.torch.forward import ForwardPass
from paceline.weights.update import POLICY_MODEL

MAX_WAITING_TOKENS = 1 << 24
"""Tokens that may wait before further questions are sent away."""


@dataclass(slots=True)
class ScoreRequest:
    """Sequences of one request, and what is known of them so far."""

    sequences: Sequence[Sequence[int]]
    temperature: float
    answer: "Future[list[list[float]]]" = field(default_factory=Future)
    scores: dict[int, list[float]] = field(default_factory=dict)


class Scorer:
    """Speaks the scoring part of the `Engine` protocol. All computing is done by one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int,
        *,
        fp32_head: bool = False,
        threads: int = 1,
        follows: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        """One that `follows` takes weights of the policy, all of them or where `lora` says so its adapter, and scores
        once it has some: a process that was started again would score as the model it loaded."""
        self._model = model.eval().requires_grad_(False)
        self._forward = ForwardPass(model, fp32_head)
        text = model.config.get_text_config()
        self._context = getattr(text, "max_position_embeddings", None) or 1 << 20
        self._vocabulary = text.vocab_size
        self._budget, self._cores = budget, threads
        self._adapters: Adapters | None = None
        if follows and lora is not None:
            self._adapters = install(model, lora.targets, 1, lora.rank, max(budget, self._context))
        head = LMHead(model, fp32_head)
        self._weights = TorchWeights(model, head, self._adapters, [], 0) if follows else None
        self._weights_lock = threading.Lock()
        """Held for one pack, and for one update."""
        self._distrust = EngineError("it was started and not yet sent the weights to score with") if follows else None
        """Why nothing is scored with the weights held: there were none, or the last update failed."""
        self._waiting: deque[tuple[ScoreRequest, int]] = deque()
        """Single sequences, the oldest question's first."""
        self._tokens = 0
        self._news = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self._mark: str | None = None
        self.busy_seconds = 0.0
        self.packs = 0
        self.scored = 0
        """Tokens."""
        self._thread = threading.Thread(target=self._work, name="paceline-scorer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join(30.0)

    def outlive(self) -> Exception | None:
        """Wait for the end of the scorer's thread; answers with what it failed of, None if it was closed."""
        self._thread.join()  # unbounded: being asked is its job
        return self._failure

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        """Log probability of every token given those before it; 0.0 for the first."""
        if temperature <= 0:
            raise RequestError(f"temperature = {temperature:g} has no distribution to score by: it must be above 0")
        for ids in sequences:
            if not 0 < len(ids) <= self._context:
                raise RequestError(f"a sequence of {len(ids)} tokens cannot be scored: from 1 to {self._context} fit")
            if min(ids) < 0 or max(ids) >= self._vocabulary:
                raise RequestError(f"a token is outside the vocabulary of {self._vocabulary}")
        question = ScoreRequest(sequences, temperature)
        with self._news:
            if self._closed or self._failure is not None:
                raise EngineError(f"the scorer has stopped: {self._failure or 'it was closed'}")
            if self._tokens > MAX_WAITING_TOKENS:
                raise Overloaded(f"{self._tokens:,} tokens wait to be scored: ask later, or start another worker")
            self._waiting.extend((question, at) for at in range(len(sequences)))
            self._tokens += sum(map(len, sequences))
            self._news.notify()
        if not sequences:
            return []
        return await asyncio.wrap_future(question.answer)  # bounded: by the asker's deadline

    # -- on the scorer's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        set_cpu_threads(self._cores)
        while pack := self._next():
            began = time.perf_counter()
            try:
                self._score(pack)
            except torch.OutOfMemoryError as error:  # this pack is too large; the next may fit
                _fail_requests(pack, error)
            except Exception as error:
                with self._news:  # every pending request fails, those in the queue too, and every later one
                    self._failure, self._tokens = error, 0
                    pack += self._waiting
                    self._waiting.clear()
                _fail_requests(pack, error)
                return
            self.busy_seconds += time.perf_counter() - began

    def _next(self) -> list[tuple[ScoreRequest, int]]:
        """The oldest sequences that fit into one micro-batch; nothing once closed."""
        with self._news:
            while not self._closed:
                pack, room = [], self._budget
                while self._waiting:
                    question, at = self._waiting[0]
                    length = len(question.sequences[at])
                    gone = question.answer.done()  # cancelled, or failed with another part of it
                    if pack and length > room and not gone:
                        break  # carried over
                    self._waiting.popleft()
                    self._tokens -= length
                    if not gone:
                        room -= length
                        pack.append((question, at))
                if pack:
                    return pack
                self._news.wait()  # unbounded: being asked is its job
        return []

    def _score(self, pack: Sequence[tuple[ScoreRequest, int]]) -> None:
        with self._weights_lock:
            if self._distrust is None:
                self._score_samples(pack)
            else:
                _fail_requests(pack, self._distrust)

    def _score_samples(self, pack: Sequence[tuple[ScoreRequest, int]]) -> None:
        if self._adapters is not None and self._weights is not None:
            slot = self._weights.served.adapter_slots[POLICY_MODEL]
            self._adapters.route(torch.full((self._adapters.max_tokens,), slot, device=self._model.device))
        samples = [Sample.as_sampled(question.sequences[at], question.temperature) for question, at in pack]
        scores = score_samples(self._forward.scores, samples, [list(range(len(samples)))])
        self.packs += 1
        self.scored += sum(map(len, samples))
        for number, (question, at) in enumerate(pack):
            question.scores[at] = scores[number].tolist()
            if len(question.scores) == len(question.sequences) and question.answer.set_running_or_notify_cancel():
                question.answer.set_result([question.scores[i] for i in range(len(question.sequences))])

    # -- the rest of an engine ----------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        raise RequestError("this server only scores: sample from one that was started without --scores-only")

    async def load_weights(self, update: WeightUpdate) -> float:
        """Take new weights between two packs, and prove that they are those sent."""
        if self._weights is None:
            raise RequestError("this server's weights are frozen: it only scores")
        return await asyncio.to_thread(self._load_weights, self._weights, update)

    def _load_weights(self, weights: TorchWeights, update: WeightUpdate) -> float:
        staged = weights.stage(update)
        with self._weights_lock, torch.no_grad():
            began = time.perf_counter()
            try:
                sent = weights.apply(staged)
                assert sent is not None
                weights.verify(update, sent)
            except EngineError as error:
                self._distrust = error
                raise
            self._distrust = None
            return time.perf_counter() - began

    async def policy(self) -> ServedPolicy:
        if self._failure is not None:
            raise EngineError(f"the scorer has stopped: {self._failure}")
        if self._distrust is not None:
            return ServedPolicy(BROKEN_VERSION, "")
        if self._weights is not None:
            return await asyncio.to_thread(self._weights.policy)
        if self._mark is None:
            named = dict(self._model.named_parameters())
            self._mark = await asyncio.to_thread(fingerprint, named.items())
        return ServedPolicy(0, self._mark)

    async def limits(self) -> EngineLimits:
        return EngineLimits(self._context, self._vocabulary)

    async def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            capacity=max(1, self._budget // 512),
            steps=self.packs,
            prompt_tokens=self.scored,
            busy_seconds=self.busy_seconds,
        )

    async def pause(self) -> None:
        raise RequestError("a scorer does not pause")

    resume = sleep = wake = pause


def _fail_requests(pack: Sequence[tuple[ScoreRequest, int]], error: Exception) -> None:
    for request, _ in pack:
        with contextlib.suppress(InvalidStateError):  # answered before, or cancelled
            request.answer.set_exception(EngineError(f"scoring failed: {error}"))
