"""Shared prompts in slots: whatever comes, is cancelled, asked again or computed anew under new weights, a chunk stands
on keys and values of its own tokens."""

import random
from concurrent.futures import Future

import pytest
import torch

from backends import SlotCache
from paceline.inference import GenerateRequest
from paceline.inference.engine.catalog import Catalog
from paceline.inference.engine.scheduler import Scheduler
from paceline.inference.engine.sequence import Sequence
from paceline.model.shape import AttentionShape

PROMPTS = [(5, 6, 7), (5, 6, 8, 9), (5, 6, 7, 1, 1)]
"""The third is the first with two tokens that it is likely to sample."""


class Shadow(SlotCache):
    """Also remembers, for each slot, of which tokens its keys and values are."""

    def __init__(self, slots: int) -> None:
        shape = AttentionShape(layers=1, heads=1, kv_heads=1, head_dim=1, windows=(None,))
        super().__init__(shape, slots, 64, 64, torch.float32, "cpu")
        self.held: dict[int, list[int]] = {}

    def settle(self) -> None:
        for (source, length), targets in self._copies.items():
            for target in targets:
                self.held[target] = self.held.get(source, [])[:length]
        super().settle()


@pytest.mark.parametrize("seed", range(30))
def test_a_chunk_stands_on_its_own_tokens(seed):
    dice, cache, catalog = random.Random(seed), Shadow(slots=5), Catalog()
    scheduler, alive = Scheduler(cache, prefill_tokens=dice.choice([4, 100]), catalog=catalog), []
    for _ in range(300):
        if dice.random() < 0.4:
            request = GenerateRequest(prompt_ids=dice.choice(PROMPTS), max_tokens=6)
            sequence = Sequence(request, Future(), list(request.prompt_ids), len(request.prompt_ids) + 6)
            scheduler.add(sequence)
            alive.append(sequence)
        if alive and dice.random() < 0.2:
            dice.choice(alive).future.cancel()
        if dice.random() < 0.15:
            catalog.versions[""] += 1
            catalog.base_version += 1
            scheduler.swap(None, recompute=True)
        for chunk in scheduler.schedule():
            sequence, slot = chunk.sequence, chunk.sequence.slot
            assert cache.held.get(slot, [])[: chunk.start] == sequence.tokens[: chunk.start]
            cache.held[slot] = sequence.tokens[: chunk.start + chunk.length]
            if sequence.future.cancelled():
                scheduler.release(sequence)
            elif chunk.samples:
                sequence.tokens.append(dice.choice([1, 1, 1, 2]))
                if len(sequence.tokens) >= sequence.limit:
                    scheduler.release(sequence)
                    sequence.future.set_result(None)
            scheduler.land(chunk)
        alive = [sequence for sequence in alive if not sequence.future.done()]
