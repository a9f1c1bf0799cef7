"""Runs the decoding loop: one thread launches steps and applies weight updates between them.

    drain the inbox -> schedule -> launch -> land the oldest step -> process its output -> flush the streams

It depends on no tensor library.
"""

import asyncio
import contextlib
import dataclasses
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from paceline.config import inference
from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, Grammar, Listener
from paceline.engine.kv_cache import KVCache
from paceline.engine.runner import Runner, StepInFlight
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Chunk, DecodeSequence, GrammarMatcher, SampledToken, TokenStreamer, check_request
from paceline.engine.weight_applier import StagedUpdate, WeightApplier
from paceline.errors import DeltaBaseMismatch, EngineError, Mismatch, Overloaded, PartialUpdateError, RequestError
from paceline.weights.update import ServedPolicy, WeightUpdate

CLOSE_SECONDS = 30.0
WARM_SECONDS = 900.0
GATHER_SECONDS = 0.001
"""How long an idle engine that wakes up waits for more requests: they come in groups, which then run in full steps."""
IDLE_POLL_SECONDS = 0.5
"""How often an idle engine looks whether compiled code is ready."""


class DecodingEngine:
    """Serves a model from this process, whatever it computes with.

    Everything that touches the model happens on one thread: launch a step, land an older one (wait for it and read its
    tokens back; the runner's `depth` says how many may be launched ahead), then whatever was asked meanwhile (requests,
    new weights, scores). So a weight update needs no lock and falls exactly between two tokens.
    """

    def __init__(
        self, config: inference.EngineConfig, cache: KVCache, runner: Runner, weights: WeightApplier, *,
        max_context: int, vocabulary: int, deterministic: bool, grammars: Callable[[Grammar], GrammarMatcher] | None,
    ) -> None:  # fmt: skip
        self.max_context = max_context
        self._config, self._cache, self._runner, self._weights = config, cache, runner, weights
        self._vocabulary, self._grammars, self._served = vocabulary, grammars, weights.served
        self._scheduler = Scheduler(cache, config.prefill_tokens, deterministic, weights.served)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()
        self._steps_in_flight: deque[StepInFlight] = deque()
        self._streamer = TokenStreamer()
        self._thread = threading.Thread(target=self._serve, name="paceline-engine", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._update_lock = asyncio.Lock()
        self._closed = self._paused = self._asleep = False
        self._busy: tuple[float, float | None] = (0.0, None)
        """Seconds of finished busy periods, and the start of the one under way: one tuple, so that other threads never
        see half of an update."""
        self.steps = self.tokens = self.swaps = 0
        self.pause_seconds = 0.0

    # -- what callers see -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve; answers once the engine is warm."""
        self._thread.start()
        if not self._ready.wait(WARM_SECONDS):
            raise EngineError(f"the engine was not ready within {WARM_SECONDS:.0f} s")
        if self._failure is not None:
            raise EngineError(f"the engine could not start: {self._failure}") from self._failure

    def close(self) -> None:
        """Stop after the step under way; unanswered requests fail."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        elif not self._ready.is_set():  # it was never started
            self._free_memory()

    def outlive(self) -> BaseException | None:
        """Wait for the end of the engine's thread; answers with the error that ended it, None if it was closed."""
        self._thread.join()  # unbounded: serving is its job
        return self._failure

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        if request.grammar is not None:
            await asyncio.to_thread(self._make_matcher, request.grammar)  # compiled off the loop, and found again below
        return await asyncio.wrap_future(self.submit(request, listener))

    def submit(self, request: GenerateRequest, listener: Listener | None = None) -> "Future[Completion]":
        """Queue a request; cancelling the future takes it out again."""
        self._check_request(request)
        limit = min(len(request.prompt_ids) + request.max_tokens, self.max_context)
        sequence = DecodeSequence(request, Future(), list(request.prompt_ids), limit, listener)
        if request.grammar is not None:
            sequence.matcher = self._make_matcher(request.grammar)
        return self._enqueue(sequence)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        """Scored tokens go through the same steps as prompts, beside whatever is being generated."""
        if temperature == 0:
            raise RequestError("temperature 0 has no log probabilities to score with: give a positive one")
        running = []
        for ids in sequences:
            request = GenerateRequest(prompt_ids=tuple(ids), max_tokens=1, temperature=temperature, model=model)
            self._check_request(request, room=0)
            running.append(DecodeSequence(request, Future(), list(ids), len(ids), scores=[]))
        futures = [self._enqueue(sequence) for sequence in running]
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))  # bounded: by the pool's deadline

    async def load_weights(self, update: WeightUpdate) -> float:
        event = self._weights.record_cuda_event()
        try:
            async with self._update_lock:  # bounded: by those before it, and applied in the order in which they came
                # Read before decoding has to pause, and beside it: the pause is then the copy alone.
                staged = await asyncio.to_thread(self._weights.stage, update, self._config.verify_weights, event)
                return await self._run_between_steps(lambda: self._apply_update(staged))
        except DeltaBaseMismatch:
            if update.delta is None or not update.tensors:
                raise
        return await self.load_weights(dataclasses.replace(update, delta=None))  # all of it is here too

    async def policy(self) -> ServedPolicy:
        return await self._run_between_steps(self._weights.policy)

    async def limits(self) -> EngineLimits:
        adapters, weight_bytes = self._served.adapters, self._weights.weight_bytes
        return EngineLimits(self.max_context, self._vocabulary, adapters=adapters, weight_bytes=weight_bytes)

    async def stats(self) -> EngineStats:
        if self._failure is not None:
            raise EngineError(f"the engine stopped: {self._failure}") from self._failure
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + self._inbox.qsize(),
            capacity=self._config.max_running,
            steps=self.steps,
            tokens=self.tokens,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            preempted=scheduler.num_preempted,
            swaps=self.swaps,
            pause_seconds=self.pause_seconds,
            busy_seconds=self.busy_seconds,
            cache_used=self._cache.usage,
            asleep=self._asleep,
        )

    async def pause(self) -> None:
        await self._run_between_steps(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._run_between_steps(lambda: self._set_paused(False))

    async def sleep(self) -> None:
        await self._run_between_steps(self._sleep)

    async def wake(self) -> None:
        await self._run_between_steps(self._wake)

    @property
    def busy_seconds(self) -> float:
        done, since = self._busy
        return done + (time.perf_counter() - since if since is not None else 0.0)

    # -- admission, on the caller's thread ----------------------------------------------------------------------------

    def _check_request(self, request: GenerateRequest, room: int = 1) -> None:
        check_request(request, self._served, self.max_context - room, self._vocabulary)
        self._weights.check_trusted(request.model)

    def _make_matcher(self, grammar: Grammar) -> GrammarMatcher:
        if self._grammars is None:
            raise RequestError("constrained output needs xgrammar: pip install 'paceline[grammar]'")
        return self._grammars(grammar)

    def _enqueue(self, sequence: DecodeSequence) -> "Future[Any]":
        if not self._cache.fits(sequence.limit):
            raise RequestError(f"{sequence.limit} tokens do not fit the engine's KV cache: lower max_tokens")
        waiting = self._scheduler.num_waiting + self._inbox.qsize()
        if waiting >= self._config.max_waiting:
            raise Overloaded(f"{waiting} requests are waiting already (engine.max_waiting)")
        self._post(lambda: self._admit(sequence))
        return sequence.future

    def _admit(self, sequence: DecodeSequence) -> None:
        """An update may have gone wrong since the request was checked."""
        try:
            self._weights.check_trusted(sequence.request.model)
        except EngineError as error:
            return self._fail(sequence, str(error), type(error))
        self._scheduler.add(sequence)

    def _post(self, work: Callable[[], None]) -> None:
        with self._inbox_lock:
            if self._failure is not None:
                raise EngineError(f"the engine stopped: {self._failure}") from self._failure
            if self._closed:
                raise EngineError("the engine is closed")
            self._inbox.put(work)

    async def _run_between_steps(self, work: Callable[[], Any]) -> Any:
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
        return await asyncio.wrap_future(answer)  # bounded: by the pool's deadline

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _context(self) -> AbstractContextManager[object]:
        """Held by the engine's thread all its life."""
        return self._runner.context()

    def _serve(self) -> None:
        try:
            with self._context():
                self._runner.warm_up()
                self._weights.warm_up()
                self._ready.set()
                while self._drain_inbox():
                    self._step()
        except Exception as error:
            self._failure = error
            self._fail_all(EngineError(f"the engine stopped: {error}"))
        else:
            self._fail_all(EngineError("the engine was closed"))
        finally:
            self._ready.set()
            self._free_memory()

    def _free_memory(self) -> None:
        """Free what the model's owner would not; a broken device may refuse, and the first cause is already known."""
        with contextlib.suppress(Exception):
            self._runner.close()
            self._cache.sleep()

    def _drain_inbox(self) -> bool:
        """Do what was asked since the last step; sleep when there is nothing to decode. False: stop."""
        idle = not self._steps_in_flight and (self._paused or self._scheduler.is_idle)
        wait: float | None = (IDLE_POLL_SECONDS if self._runner.is_compiling else None) if idle else 0.0
        while True:
            try:
                work = self._inbox.get(timeout=wait) if wait != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            wait = GATHER_SECONDS if idle and self._scheduler.num_waiting else 0.0

    def _step(self) -> None:
        """Launch the next step, then land what is due: the device never waits for the host to look."""
        if self._runner.should_use_compiled(self.busy_seconds, self.swaps):
            self._land(leave=0)
            self._runner.use_compiled()
        chunks = [] if self._paused else self._scheduler.schedule()
        if chunks:
            if not self._steps_in_flight:
                self._busy = (self.busy_seconds, time.perf_counter())
            self._steps_in_flight.append(self._runner.launch(chunks))
            self.steps += 1
        self._land(self._runner.depth if chunks else max(0, len(self._steps_in_flight) - 1))

    def _land(self, leave: int) -> None:
        """Land the oldest steps until `leave` are in flight. With the last of them the clock stops before any request
        is answered, so that a caller does not find the engine still busy with it. While others are in flight it runs
        on, for the device does compute them."""
        while len(self._steps_in_flight) > leave:
            flight = self._steps_in_flight.popleft()
            flight.land()
            if not self._steps_in_flight:
                self._busy = (self.busy_seconds, None)
            for chunk in flight.chunks:
                self._process(chunk)
        self._streamer.flush(now=leave == 0)

    def _process(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if sequence.done_flag.is_set:  # the caller gave up, or it ended while this step was in flight
            self._scheduler.release(sequence)
            self._streamer.discard(sequence)
        elif chunk.sampled_token is not None:
            self._process_token(sequence, chunk, chunk.sampled_token)
        elif chunk.scores is not None:
            self._process_scores(sequence, chunk.scores)
        # Only now: a preempted sequence waits again from here on, with all it has, or is over.
        self._scheduler.land(chunk)

    def _process_scores(self, sequence: DecodeSequence, scores: list[float]) -> None:
        assert sequence.scores is not None
        sequence.scores += scores
        if any(map(math.isnan, scores)):
            sequence.may_hold_nan = True
            self._fail(sequence, "the model's logits are not finite for these tokens")
        elif len(sequence.scores) >= len(sequence.tokens) - 1:
            self._scheduler.release(sequence)
            _set_result(sequence, [0.0, *sequence.scores])

    def _process_token(self, sequence: DecodeSequence, chunk: Chunk, sampled: SampledToken) -> None:
        if not math.isfinite(sampled.logprob):
            sequence.may_hold_nan = True
            return self._fail(sequence, f"the model's logits are not finite at version {chunk.version}")
        if sampled.log_z is not None and not math.isfinite(sampled.log_z):
            return self._fail(sequence, "the grammar allows no token that the model could say here", RequestError)
        self.tokens += 1
        finish = sequence.append(sampled, chunk.version)
        if sequence.matcher is not None and sequence.matcher.advance(sampled.token):
            finish = finish or "stop"
        if sequence.listener is not None:
            self._streamer.add(sequence)
        if finish:
            self._scheduler.release(sequence)
            self._streamer.finish(sequence)
            _set_result(sequence, sequence.completion(finish, self._served.fingerprints[sequence.request.model]))

    def _fail(self, sequence: DecodeSequence, why: str, kind: type[EngineError] = EngineError) -> None:
        sequence.done_flag.is_set = True
        self._scheduler.release(sequence)
        self._streamer.finish(sequence)
        if sequence.future.set_running_or_notify_cancel():
            sequence.future.set_exception(kind(why))

    # -- between two steps --------------------------------------------------------------------------------------------

    def _apply_update(self, staged: StagedUpdate) -> float:
        """Apply a weight update and verify it. Steps in flight land with the old version; nothing drains, and what runs
        goes on with the new."""
        self._land(leave=0)
        start = time.perf_counter()
        update, before = staged.update, dict(self._served.fingerprints)
        model = None if update.adapter is None else update.adapter.name
        try:
            staged_fingerprint = self._weights.apply(staged)
        except PartialUpdateError as error:
            self._quarantine(model, error, PartialUpdateError)
            raise
        self._keep_old_fingerprints(model, update.version, before, staged_fingerprint)
        self._scheduler.on_weight_update(model, self._config.on_swap == "recompute")
        try:
            if staged_fingerprint is not None:
                self._weights.verify(update, staged_fingerprint)
        except Exception as error:  # whatever it was, these weights are not proved
            self._quarantine(model, error, Mismatch)
            raise
        self._weights.quarantine.pop(model, None)
        pause = time.perf_counter() - start
        self.swaps += 1
        self.pause_seconds += pause
        return pause

    def _quarantine(self, model: str | None, error: Exception, kind: type[EngineError]) -> None:
        """Sample nothing more from these weights, None being the base's and so all: running, waiting and later
        requests fail with the reason."""
        self._weights.quarantine[model] = kind(str(error))
        self._scheduler.on_weight_update(model, recompute=True)
        for sequence in self._scheduler.abort_model(model):
            self._fail(sequence, str(error), kind)

    def _keep_old_fingerprints(
        self, model: str | None, version: int, before: dict[str, dict[int, str]], staged_fingerprint: str | None
    ) -> None:
        """Sequences that go on under new weights keep the fingerprints of the old. After a roll-back a version comes
        again with other weights: a completion that already holds tokens of that number begins anew, for one that mixed
        both could not say which is which."""
        carried: dict[tuple[tuple[int, str], ...], dict[int, str]] = {}
        for sequence in self._scheduler.sampled_sequences(model):
            old, last = before[sequence.request.model], sequence.versions[-1]
            if self._served.fingerprints[sequence.request.model] is old:
                continue  # an adapter beside a new base
            sampled_from = (sequence.fingerprints or {}) | ({last: old[last]} if last in old else {})
            if version not in sequence.versions or sampled_from.get(version) == staged_fingerprint:
                sequence.fingerprints = carried.setdefault(tuple(sampled_from.items()), sampled_from)
            elif sequence.num_streamed:
                self._scheduler.abort([sequence])
                why = f"version {version} has other weights now than when this request began to stream: retry it"
                self._fail(sequence, why)
            else:
                sequence.restart()
                if sequence.request.grammar is not None:
                    sequence.matcher = self._make_matcher(sequence.request.grammar)

    def _set_paused(self, paused: bool) -> None:
        self._land(leave=0)
        self._paused = paused or self._asleep

    def _sleep(self) -> None:
        if not self._asleep:
            self._set_paused(True)
            self._scheduler.preempt(list(self._scheduler.running.values()))
            self._cache.sleep()
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._cache.wake()
            self._asleep = False
        self._paused = False

    def _fail_all(self, error: EngineError) -> None:
        """Answer all requests, those included that were still on their way."""
        with self._inbox_lock:  # requests past it are in the inbox; none comes after
            self._closed = True
        self._streamer.flush(now=True)
        while not self._inbox.empty():
            work = self._inbox.get_nowait()
            if work is not None:
                work()
        for sequence in self._scheduler.drain():
            if not sequence.future.done() and sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(error)


def _set_result(sequence: DecodeSequence, result: Any) -> None:
    sequence.done_flag.is_set = True  # now: the future's callback may run later if it is cancelled at this moment
    if sequence.future.set_running_or_notify_cancel():
        sequence.future.set_result(result)
