"""The cache's laws: whose place is whose, what may be found there, and what sharing saves.

The state machine drives the real engine by hand, with a runner in place of the model that writes into every place of
the cache a number standing for exactly what keys and values would depend on: the weights, and all tokens before it.
"""

import asyncio
from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends import MLX, SlotCache, engine_of, held_bytes
from conftest import tiny_model
from engine_requests import serve, together, until
from engines import MATRIX, SymbolicRunner, content, random_adapter
from paceline.config.inference import EngineConfig
from paceline.engine import GenerateRequest
from paceline.engine.cpu.kv_cache import TensorMemory
from paceline.engine.pages import PAGE, PageCache
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import DecodeSequence
from paceline.model import Adapter, WeightUpdate, clone_model
from paceline.model.support import CacheShape, LayerAttention

STOP = 0
CONTEXT = 80
MODEL = tiny_model()
NUMBER = {0: LayerAttention(heads=1, kv_heads=1, key_dim=1, value_dim=1)}
STATES = {0: {"recurrent0": torch.zeros(1, dtype=torch.int64)}}


def prompt(length: int, other: int) -> tuple[int, ...]:
    """Prompts begin alike up to their token number `other`, where they part, if they do."""
    return tuple(1 + (0 < other <= place) for place in range(length))


class EngineByHand(RuleBasedStateMachine):
    """Random lives of requests under a small cache, one step at a time."""

    @initialize(
        paged=st.just(False) if MLX else st.sampled_from([True, True, False]),
        depth=st.sampled_from([0, 1, 3, 3]), pages=st.integers(5, 8), slots=st.integers(2, 6),
        prefill=st.sampled_from([3, 20, 200]), on_swap=st.sampled_from(["keep", "keep", "recompute"]),
        deterministic=st.sampled_from([False, False, False, True]), states=st.booleans(),
    )  # fmt: skip
    def build(self, paged, depth, pages, slots, prefill, on_swap, deterministic, states):
        config = EngineConfig(max_running=slots, on_swap=on_swap, max_context=CONTEXT)
        self.engine = engine = engine_of(MODEL, config)
        given = {"deterministic": deterministic}
        if paged:
            memory = TensorMemory(torch.device("cpu"))
            cache = PageCache(NUMBER, slots, pages, CONTEXT, torch.int64, memory, **given)
        else:
            shape = CacheShape(NUMBER, STATES if states and not MLX else {})
            cache = SlotCache(shape, slots, 8, CONTEXT, torch.int64, "cpu", **given)
        self.served = engine._served
        (
            self.served.adapter_slots["a"],
            self.served.versions["a"],
            self.served.fingerprints["a"],
        ) = 1, 0, {}
        self.cache = engine._cache = cache
        self.scheduler = engine._scheduler = Scheduler(cache, prefill, deterministic, self.served)
        self.runner = engine._runner = SymbolicRunner(cache, depth, self.served)
        self.on_swap = on_swap
        self.alive: dict[Future, DecodeSequence] = {}
        self.heard: dict[Future, list[int]] = {}
        self.submit(length=17, other=0, members=3, max_tokens=70, model="")
        self.submit(length=30, other=20, members=2, max_tokens=40, model="a")

    def add(self, sequence: DecodeSequence) -> None:
        self.alive[self.engine._enqueue(sequence)] = sequence
        while not self.engine._inbox.empty():
            self.engine._inbox.get()()

    @rule(
        length=st.sampled_from([1, 2, 9, 16, 17, 32, 33, 61]), other=st.sampled_from([0, 1, 2, 16, 40]),
        members=st.integers(1, 5), max_tokens=st.sampled_from([1, 5, 20, 70]),
        model=st.sampled_from(["", "", "base", "a"]),
    )  # fmt: skip
    def submit(self, length, other, members, max_tokens, model):
        for _ in range(members):
            heard: list[int] = []
            request = GenerateRequest(
                prompt_ids=prompt(length, other), max_tokens=max_tokens, model=model, stop_token_ids=frozenset([STOP])
            )
            limit = min(length + max_tokens, CONTEXT)
            sequence = DecodeSequence(
                request, Future(), list(request.prompt_ids), limit, lambda p, to=heard: to.extend(p[0])
            )
            self.heard[sequence.future] = heard
            self.add(sequence)

    @rule(length=st.sampled_from([1, 2, 17, 31, 48, 79, 80]), other=st.sampled_from([0, 16]))
    def score(self, length, other):
        request = GenerateRequest(prompt_ids=prompt(length, other), max_tokens=1, model="a")
        self.add(DecodeSequence(request, Future(), list(request.prompt_ids), length, scores=[]))

    @rule(steps=st.integers(1, 25))
    def step(self, steps):
        for _ in range(steps):
            self.engine._step()

    @rule(leave=st.integers(0, 2))
    def land(self, leave):
        self.engine._land(leave)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        data.draw(st.sampled_from(list(self.alive))).cancel()

    @rule(model=st.sampled_from([None, "", "a"]))
    def swap(self, model):
        """What the engine does around new weights, without the weights."""
        self.engine._land(leave=0)
        self.answers_are_what_was_sampled()
        versions = self.served.versions
        if model is None:
            versions["base"] = versions[""] = versions[""] + 1
        else:
            versions[model] += 1
        self.scheduler.on_weight_update(model, self.on_swap == "recompute")

    @precondition(lambda self: self.engine.steps > 20)
    @rule()
    def sleep_and_wake(self):
        self.engine._sleep()
        assert self.cache.usage == 0
        self.engine._set_paused(False)  # a stray `resume` does not wake it
        self.engine._step()
        self.engine._wake()

    # -- what holds at every moment -----------------------------------------------------------------------------------

    def held(self) -> list[DecodeSequence]:
        return [*self.scheduler.running.values(), *self.scheduler._leaving]

    @invariant()
    def every_page_is_free_or_kept_or_held(self):
        if not isinstance(self.cache, PageCache):
            slots = [*self.cache._free, *(s.slot for s in self.held())]
            assert sorted(slots) == list(range(self.cache.slots))
            return
        free, kept = list(self.cache._free), list(self.cache._prefixes.evictable)
        holders = Counter(page for sequence in self.held() for page in sequence.pages)
        assert sorted([*free, *kept, *holders]) == list(range(1, self.cache.pages + 1))
        assert all(self.cache._ref_counts[page] == n for page, n in holders.items())
        assert self.cache.available_pages == self.cache.pages - len(holders)
        flying = set().union(*(self.runner.writes[f] for f in self.engine._steps_in_flight))
        assert flying <= holders.keys(), "freed while a launched step may write it"

    @invariant()
    def places_hold_what_their_owners_computed(self):
        """Whatever was shared, copied, freed or swapped: a sequence of one version sees only that version's keys."""
        for sequence in self.held():
            if sequence.weights_key is not None and sequence.num_computed:
                known = [*sequence.request.prompt_ids, *self.runner.sampled.get(sequence, [])][: sequence.num_computed]
                here = slice(sequence.slot, sequence.slot + 1)
                keys, values = self.cache.read(0, here, sequence.num_computed)
                assert keys.flatten().tolist() == content(sequence.weights_key, known)
                assert torch.equal(keys, -values)

    @invariant()
    def answers_are_what_was_sampled(self):
        for future in [f for f in self.alive if f.done()]:
            sequence = self.alive.pop(future)
            if not future.cancelled() and sequence.scores is not None:
                expected = content(self.served.weights_key(sequence.request.model), sequence.tokens)
                assert future.result() == [0.0, *expected[: len(sequence.tokens) - 1]]
            elif not future.cancelled():
                self.check(sequence, future)

    def check(self, sequence: DecodeSequence, future: Future) -> None:
        answer, sampled = future.result(), self.runner.sampled[sequence]
        tokens = sampled[: sampled.index(STOP) + 1] if STOP in sampled else sampled
        tokens = tokens[: sequence.request.max_tokens]
        assert answer.token_ids == tokens == self.heard.pop(future)
        assert answer.finish == ("stop" if tokens[-1] == STOP else "length")
        assert len(answer.logprobs) == len(answer.versions) == len(tokens)
        prompt = len(sequence.request.prompt_ids)
        assert 0 <= answer.cached <= prompt - len([p for p in self.runner.computed[sequence] if p < prompt])

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if self.scheduler.is_idle and not self.engine._steps_in_flight:
                break
            self.engine._step()
        assert self.scheduler.is_idle, "some request never ends"
        self.answers_are_what_was_sampled()
        self.every_page_is_free_or_kept_or_held()
        assert not self.alive
        assert self.cache.usage == 0
        assert not self.scheduler._prefixes_in_progress


TestEngineByHand = EngineByHand.TestCase
TestEngineByHand.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    phases=[Phase.generate],  # shrinking a life of many steps takes minutes
    suppress_health_check=list(HealthCheck),
)


# -- sharing ----------------------------------------------------------------------------------------------------------


def counted(engine) -> list[tuple[GenerateRequest, int]]:
    """Hear of every chunk the engine computes from now on: (request, tokens)."""
    computed: list[tuple[GenerateRequest, int]] = []
    launch = engine._runner.launch
    engine._runner.launch = lambda chunks: (
        computed.extend((c.sequence.request, c.length) for c in chunks),
        launch(chunks),
    )[1]
    return computed


def whole_pages(tokens: int, config: dict) -> int:
    """How much of a common beginning can be shared; the last token is always computed, to sample from."""
    return (tokens - 1) // PAGE * PAGE if config["cache"] == "pages" else tokens - 1


@pytest.mark.parametrize("config", MATRIX)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_group_computes_its_prompt_once(config, warm):
    """Also when the cache is full of older conversations that are the beginning of this one."""
    prompt = tuple(range(40))
    group = [GenerateRequest(prompt_ids=prompt, max_tokens=4, noise=i) for i in range(8)]
    others = [GenerateRequest(prompt_ids=prompt[:3], max_tokens=1) for _ in range(8)]

    async def work(engine):
        if warm:
            await asyncio.gather(*map(engine.generate, others))
        computed = counted(engine)
        answers = await asyncio.gather(*map(engine.generate, group))
        return computed, [answer.cached for answer in answers], (await engine.stats()).cached_tokens

    computed, cached, total = serve(clone_model(MODEL), work, max_running=8, **config)
    shared = whole_pages(len(prompt), config)
    first = min(cached)
    assert first <= 3  # the leader may find an older conversation
    assert sorted(cached)[1:] == [shared] * 7
    assert sum(n for _, n in computed) == (40 - first) + 7 * (40 - shared) + 8 * 3
    assert total >= sum(cached)


@pytest.mark.parametrize("config", MATRIX)
@pytest.mark.parametrize("stops", [False, True])
def test_the_next_turn_computes_only_what_is_new(config, stops):
    prompt = tuple(range(30))
    ends = frozenset(range(0, 67, 4)) if stops else frozenset()
    first = GenerateRequest(prompt_ids=prompt, max_tokens=25, noise=2, stop_token_ids=ends)

    async def work(engine):
        turn = await engine.generate(first)
        ids = (*prompt, *turn.token_ids, 5, 6, 7)
        await until(lambda: engine._scheduler.is_idle)
        computed = counted(engine)
        second = await engine.generate(GenerateRequest(prompt_ids=ids, max_tokens=1))
        return turn, ids, second, sum(n for _, n in computed)

    turn, ids, second, computed = serve(clone_model(MODEL), work, **config)
    assert turn.finish == ("stop" if stops else "length")
    known = len(ids) - 3
    assert second.cached == len(ids) - computed
    assert whole_pages(known, config) <= second.cached <= known


@pytest.mark.parametrize("config", MATRIX)
def test_nothing_is_shared_across_models_or_versions(config):
    """The same prompt again, to another model or after an update: every token of it is computed."""
    request = {"prompt_ids": tuple(range(40)), "max_tokens": 3}

    async def work(engine):
        cached = []

        async def ask(model):
            cached.append((await engine.generate(GenerateRequest(**request, model=model))).cached)
            await until(lambda: engine._scheduler.is_idle)

        for version, name in enumerate(("a", "b")):
            await engine.load_weights(WeightUpdate(version, random_adapter(MODEL, version), Adapter(name, 1.0)))
        for model in ("", "", "a", "a", "b", "b"):
            await ask(model)
        assert all(cached[1::2]), "the same model finds its own"
        await engine.load_weights(WeightUpdate(7, random_adapter(MODEL, 3), Adapter("a", 1.0)))
        await ask("a")
        await engine.load_weights(WeightUpdate(9, dict(tiny_model(1).named_parameters())))
        for model in ("", "a", "b"):
            await ask(model)
        await engine.load_weights(WeightUpdate(9, dict(tiny_model(2).named_parameters())))
        await ask("")  # a number that comes again is not the same version
        return cached[:6:2] + cached[6:]

    assert serve(clone_model(MODEL), work, adapters=2, adapter_rank=4, **config) == [0] * 8


# -- sleep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", MATRIX)
def test_a_sleeping_engine_gives_its_memory_back_and_loses_no_request(config):
    wanted = [GenerateRequest(prompt_ids=tuple(range(5 + i)), max_tokens=60, noise=i) for i in range(6)]

    async def work(engine):
        undisturbed = await asyncio.gather(*map(engine.generate, wanted))
        before = held_bytes(engine._cache)
        tasks = await together(engine, wanted[:4], stop_at=6 * 60 + 10)
        await engine.sleep()
        assert (await engine.stats()).asleep
        assert (held_bytes(engine._cache), engine._cache.usage) == (0, 0)
        tasks += [asyncio.create_task(engine.generate(r)) for r in wanted[4:]]
        await engine.resume()  # asleep is asleep
        await asyncio.sleep(0.05)
        steps = engine.steps
        assert not any(task.done() for task in tasks)
        await engine.wake()
        assert held_bytes(engine._cache) == before
        answers = await asyncio.gather(*tasks)
        assert engine.steps > steps
        return undisturbed, answers

    undisturbed, answers = serve(clone_model(MODEL), work, max_running=4, **config)
    assert [a.token_ids for a in answers] == [u.token_ids for u in undisturbed]
    assert any(a.recomputed for a in answers[:4])
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
