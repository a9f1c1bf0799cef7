"""Shared prompts in slots: whatever comes, is cancelled, asked again or computed anew under new weights, a chunk stands
on keys and values of its own tokens."""

import random
from concurrent.futures import Future

import pytest
import torch

from backends import SlotCache
from paceline.engine import GenerateRequest
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import DecodeSequence
from paceline.engine.weight_applier import ServedModels
from paceline.model.support import CacheShape, LayerAttention

PROMPTS = [(5, 6, 7), (5, 6, 8, 9), (5, 6, 7, 1, 1)]
"""The third is the first with two tokens that it is likely to sample."""


class Shadow(SlotCache):
    """Also remembers, for each slot, of which tokens its keys and values are."""

    def __init__(self, slots: int) -> None:
        layer = LayerAttention(heads=1, kv_heads=1, key_dim=1, value_dim=1)
        super().__init__(CacheShape({0: layer}, {}), slots, 64, 64, torch.float32, "cpu")
        self.held: dict[int, list[int]] = {}

    def flush_copies(self) -> None:
        for (source, length), targets in self._copies.items():
            for target in targets:
                self.held[target] = self.held.get(source, [])[:length]
        super().flush_copies()


@pytest.mark.parametrize("seed", range(30))
def test_a_chunk_stands_on_its_own_tokens(seed):
    dice, cache, served = random.Random(seed), Shadow(slots=5), ServedModels()
    scheduler, alive = Scheduler(cache, prefill_tokens=dice.choice([4, 100]), served=served), []
    for _ in range(300):
        if dice.random() < 0.4:
            request = GenerateRequest(prompt_ids=dice.choice(PROMPTS), max_tokens=6)
            sequence = DecodeSequence(request, Future(), list(request.prompt_ids), len(request.prompt_ids) + 6)
            scheduler.add(sequence)
            alive.append(sequence)
        if alive and dice.random() < 0.2:
            dice.choice(alive).future.cancel()
        if dice.random() < 0.15:
            served.versions[""] += 1
            served.versions["base"] += 1
            scheduler.on_weight_update(None, recompute=True)
        for chunk in scheduler.schedule():
            sequence, slot = chunk.sequence, chunk.sequence.slot
            assert cache.held.get(slot, [])[: chunk.start] == sequence.tokens[: chunk.start]
            cache.held[slot] = sequence.tokens[: chunk.start + chunk.length]
            if sequence.future.cancelled():
                scheduler.release(sequence)
            elif chunk.samples_token:
                sequence.tokens.append(dice.choice([1, 1, 1, 2]))
                if len(sequence.tokens) >= sequence.limit:
                    scheduler.release(sequence)
                    sequence.future.set_result(None)
            scheduler.land(chunk)
        alive = [sequence for sequence in alive if not sequence.future.done()]


def test_equal_prompts_are_admitted_together():
    """The first computes the prompt, and all others share it one step later, not one a step."""
    cache, served = Shadow(slots=64), ServedModels()
    scheduler = Scheduler(cache, prefill_tokens=100, served=served)
    request = GenerateRequest(prompt_ids=PROMPTS[1], max_tokens=6)
    for _ in range(64):
        scheduler.add(DecodeSequence(request, Future(), list(request.prompt_ids), 10))
    assert len(scheduler.schedule()) == 1
    assert len(scheduler.schedule()) == 64


def test_calls_that_queue_take_turns():
    """A call of many requests does not hold up a later call of few, and a stream of short calls does not starve it."""
    cache, served = Shadow(slots=4), ServedModels()
    scheduler = Scheduler(cache, prefill_tokens=100, served=served)
    admitted = []

    def call(name: str, count: int) -> None:
        for turn in range(count):
            request = GenerateRequest(prompt_ids=(len(name), turn, 1), max_tokens=1, queue_round=turn, model="")
            scheduler.add(DecodeSequence(request, Future(), list(request.prompt_ids), 4))

    def step() -> None:
        for chunk in scheduler.schedule():
            scheduler.land(chunk)
            admitted.append(chunk.sequence.request.prompt_ids[:2])
            scheduler.release(chunk.sequence)

    call("many", 40)
    step()
    call("a", 2)
    step()
    assert {(1, 0), (1, 1)} <= set(admitted[:8])
    for _ in range(30):  # a stream of short calls
        call("bb", 4)
        step()
    assert {(4, turn) for turn in range(16)} <= set(admitted)
