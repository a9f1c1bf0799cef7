"""The embedded engine: a thread that decodes, and takes new weights between two steps."""

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.config import inference
from paceline.inference.base import Completion, EngineError, GenerateRequest, Overloaded, RequestError
from paceline.inference.engine.cache import SlotCache
from paceline.inference.engine.runner import Runner
from paceline.inference.engine.scheduler import Scheduler
from paceline.inference.engine.scheduler import Sequence as Running
from paceline.model import Head, Policy, WeightUpdate, fingerprint

FIRST_CACHE_LENGTH = 256
CLOSE_SECONDS = 30.0
FLOCK_SECONDS = 0.001


class EmbeddedEngine:
    """Serves a Hugging Face model from this process.

    Everything that touches the model happens on one thread: a step, then whatever was asked meanwhile (requests, new
    weights, scores), then the next step. So a weight update needs no lock and falls exactly between two tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: inference.Engine,
        *,
        deterministic: bool = False,
        fp32_head: bool = False,
        version: int = 0,
    ) -> None:
        self._model = model
        self._config = config
        self._parameters = dict(model.named_parameters())
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
        self.max_context = min(config.max_context or limit, limit)
        first = self.max_context if deterministic else min(FIRST_CACHE_LENGTH, self.max_context)
        self._cache = SlotCache(
            model.config, config.max_running, first, self.max_context, model.dtype, str(model.device)
        )
        self._scheduler = Scheduler(self._cache, config.prefill_tokens, deterministic)
        self._scheduler.version = version
        self._runner = Runner(model, Head(model, fp32_head), self._cache, fixed_shape=deterministic)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="paceline-engine", daemon=True)
        self._failure: BaseException | None = None
        self._closed = False
        self._busy = 0.0
        self._busy_since: float | None = None
        self.steps = 0
        self.tokens = 0

    # -- what callers see -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the step under way; unanswered requests fail."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    async def generate(self, request: GenerateRequest) -> Completion:
        return await asyncio.wrap_future(self.submit(request))

    def submit(self, request: GenerateRequest) -> "Future[Completion]":
        """Queue a request; cancelling the future takes it out again."""
        prompt = len(request.prompt_ids)
        if prompt == 0:
            raise RequestError("the prompt is empty: give at least one token")
        if prompt >= self.max_context:
            raise RequestError(f"the prompt has {prompt} tokens, but the context holds {self.max_context}")
        waiting = self._scheduler.waiting + self._inbox.qsize()
        if waiting >= self._config.max_waiting:
            raise Overloaded(f"{waiting} requests are waiting already (engine.max_waiting)")
        limit = min(prompt + request.max_tokens, self.max_context)
        sequence = Running(request, Future(), list(request.prompt_ids), limit)
        self._post(lambda: self._scheduler.add(sequence))
        return sequence.future

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return await self._ask(lambda: self._runner.score(sequences, temperature))

    async def load_weights(self, update: WeightUpdate) -> float:
        return await self._ask(lambda: self._swap(update))

    async def policy(self) -> Policy:
        return await self._ask(lambda: Policy(self._scheduler.version, fingerprint(self._parameters.items())))

    @property
    def busy_seconds(self) -> float:
        since = self._busy_since
        return self._busy + (time.perf_counter() - since if since is not None else 0.0)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _post(self, work: Callable[[], None]) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine stopped: {self._failure}") from self._failure
        if self._closed:
            raise EngineError("the engine is closed")
        self._inbox.put(work)

    async def _ask(self, work: Callable[[], Any]) -> Any:
        """Run something on the engine's thread, between two steps."""
        answer: Future = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None or self._closed:
                    raise EngineError(f"the engine stopped: {self._failure or 'it was closed'}")
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        self._post(run)
        return await asyncio.wrap_future(answer)

    def _serve(self) -> None:
        if self._config.threads and self._model.device.type == "cpu":
            torch.set_num_threads(self._config.threads)
        try:
            with torch.inference_mode():
                while self._attend_inbox():
                    self._step()
        except Exception as error:
            self._failure = error
            self._fail_all(EngineError(f"the engine stopped: {error}"))
        else:
            self._fail_all(EngineError("the engine was closed"))

    def _attend_inbox(self) -> bool:
        """Do what was asked since the last step; sleep when there is nothing to decode. False: stop.

        Requests come in flocks: an idle engine that wakes up waits a moment for the rest, and then runs full steps.
        """
        idle = not self._scheduler.running and not self._scheduler.waiting
        wait: float | None = None if idle else 0.0
        while True:
            try:
                work = self._inbox.get(timeout=wait) if wait != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            wait = FLOCK_SECONDS if idle and self._scheduler.waiting else 0.0

    def _step(self) -> None:
        chunks = self._scheduler.schedule()
        if not chunks:
            return
        version = self._scheduler.version
        self._busy_since = time.perf_counter()
        sampled = self._runner.run(chunks)
        self._busy, self._busy_since = self.busy_seconds, None
        self.steps += 1
        self.tokens += len(sampled)
        for chunk in chunks:
            self._scheduler.advance(chunk)
        for chunk, token, logprob, log_z in sampled:
            self._accept(chunk.sequence, token, logprob, log_z, version)

    def _accept(self, sequence: Running, token: int, logprob: float, log_z: float | None, version: int) -> None:
        if sequence.future.cancelled():
            self._scheduler.release(sequence)
        elif not math.isfinite(logprob):
            self._scheduler.release(sequence)
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(EngineError(f"the model's logits are not finite at version {version}"))
        elif finish := sequence.append(token, logprob, log_z, version):
            self._scheduler.release(sequence)
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_result(sequence.completion(finish))

    def _swap(self, update: WeightUpdate) -> float:
        start = time.perf_counter()
        missing = update.tensors.keys() - self._parameters.keys()
        if missing:
            raise EngineError(f"the update names tensors this model does not have: {sorted(missing)[:3]}")
        for name, tensor in update.tensors.items():
            self._parameters[name].copy_(tensor)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        self._scheduler.swap(update.version, recompute=self._config.on_swap == "recompute")
        return time.perf_counter() - start

    def _fail_all(self, error: EngineError) -> None:
        """Answer everybody, those included whose request was still on its way."""
        self._closed = True
        while not self._inbox.empty():
            work = self._inbox.get_nowait()
            if work is not None:
                work()
        for sequence in self._scheduler.drain():
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(error)
