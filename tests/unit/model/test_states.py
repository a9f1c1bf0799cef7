"""The laws of layers with states: in any pieces, shared, adapted or cloned, a token has its own history's state."""

import asyncio
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_requests import serve, trainer_logprobs
from engines import merged
from families import STATEFUL, VOCABULARY, packed_logprobs, sequences, tiny
from paceline.config import trainer as config
from paceline.data import pack, token_scales
from paceline.engine import GenerateRequest
from paceline.errors import EngineError
from paceline.model import Adapter, WeightUpdate, clone_model
from paceline.model.adapters import target_layers
from paceline.model.attention import attending
from paceline.model.states import StateCache, _resumes, mixers
from paceline.model.support import cache_shape
from samples import make_sample
from trainers import gradient_of, trainer_of

stateful = pytest.mark.parametrize("family", STATEFUL)


class Pieces:
    """A plan for one sequence that hands its tokens over in pieces of given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def mix(self, layer, mixer, hidden):
        cache = StateCache()
        return torch.cat([mixer(piece[None], cache)[0] for piece in hidden.split(self.lengths)])


@stateful
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6))
@torch.no_grad()
def test_in_any_pieces_tokens_are_what_they_are_together(family, cuts):
    for module, _ in mixers(tiny(family)):
        tokens = torch.randn(1, sum(cuts), 32, generator=torch.Generator().manual_seed(len(cuts)))
        outs = []
        for lengths in (cuts, [sum(cuts)]):
            with attending(Pieces(lengths)):
                outs.append(module(tokens))
        assert (outs[0] - outs[1]).abs().max() < 1e-4 * outs[1].abs().max() + 1e-6


@stateful
def test_a_clone_computes_with_its_own_weights(family):
    model = tiny(family)
    clone = clone_model(model)
    with torch.no_grad():
        before = packed_logprobs(model, sequences())
        for module, _ in mixers(clone):
            for parameter in module.parameters():
                parameter.mul_(1.5)
        assert all(torch.equal(a, b) for a, b in zip(before, packed_logprobs(model, sequences()), strict=True))
        assert (packed_logprobs(clone, sequences())[0] - before[0]).abs().max() > 1e-3


@stateful
def test_a_group_with_a_common_prompt_has_the_gradient_of_its_samples_alone(family):
    """Where there are no states a common prompt is computed once; branches of one state are not."""
    dice = np.random.default_rng(0)
    common = dice.integers(3, VOCABULARY, 14)
    batch = []
    for number in range(4):
        sample = make_sample(dice, 14 + number + 2, number)
        batch.append(sample.with_streams(token_ids=np.concatenate([common, sample.token_ids[14:]])))
    gradients = []
    for budget in (1000, 1):
        trainer = trainer_of(tiny(family), config.TrainerConfig(threads=1))
        for micro_batch in pack(batch, token_scales(batch), budget):
            trainer.learner.backward(micro_batch, trainer.version)
        trainer.close()
        gradients.append(gradient_of(trainer))
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-4


@stateful
def test_adapters_of_several_requests_reach_their_own_tokens(family):
    """Prompts of several pieces and single tokens, of the base and of an adapter, in the same steps."""
    base = tiny(family)
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, layer in target_layers(base, "all-linear").items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, layer.in_features, generator=generator) * 0.1
        tensors[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, 4, generator=generator) * 0.1
    models = {"base": base, "named": merged(base, tensors, 0.5)}
    dice = random.Random(0)
    wanted = [
        GenerateRequest(
            prompt_ids=tuple(dice.randrange(3, VOCABULARY) for _ in range(length)),
            max_tokens=8,
            noise=length,
            model=name,
        )
        for length in (1, 9, 40)
        for name in models
    ]

    async def work(engine):
        await engine.load_weights(WeightUpdate(1, tensors, Adapter("named", 0.5)))
        return await asyncio.gather(*map(engine.generate, wanted))

    answers = serve(clone_model(base), work, adapters=2, adapter_rank=4, prefill_tokens=16, verify_weights=False)
    for request, answer in zip(wanted, answers, strict=True):
        gap = trainer_logprobs(models[request.model], request, answer) - torch.tensor(answer.logprobs)
        assert gap.abs().max() < 1e-3
        other = models["named" if request.model == "base" else "base"]
        gap = trainer_logprobs(other, request, answer) - torch.tensor(answer.logprobs)
        assert gap.abs().max() > 1e-2


@stateful
@pytest.mark.parametrize("settings", [{"deterministic": True}, {"in_flight": 2}, {"max_running": 2}])
def test_turns_of_a_conversation_and_tries_of_a_prompt_go_on_from_their_states(family, settings):
    """A second turn begins with the first, several tries share a prompt, and slots are used again by others."""
    model = tiny(family)
    dice = random.Random(1)

    async def work(engine):
        done = []
        for length in (2, 23, 37):
            prompt = tuple(dice.randrange(3, VOCABULARY) for _ in range(length))
            tries = [GenerateRequest(prompt_ids=prompt, max_tokens=6, noise=7 * length + i) for i in range(4)]
            answers = await asyncio.gather(*map(engine.generate, tries))
            done += zip(tries, answers, strict=True)
            # One goes on from a try as it stands, the other from the next turn's prompt.
            for longer in ((*prompt, *answers[0].token_ids), (*prompt, *answers[1].token_ids, 5, 6, 7)):
                tries = [GenerateRequest(prompt_ids=longer, max_tokens=6, noise=9 * length + i) for i in range(3)]
                done += zip(tries, await asyncio.gather(*map(engine.generate, tries)), strict=True)
        return done

    for request, answer in serve(clone_model(model), work, prefill_tokens=16, **settings):
        gap = trainer_logprobs(model, request, answer) - torch.tensor(answer.logprobs)
        assert gap.abs().max() < 1e-4


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "qwen3-next", "deepseek-v3"])
def test_bits_of_experts_do_not_depend_on_who_else_is_served(family):
    dice = random.Random(2)
    prompts = [tuple(dice.randrange(3, VOCABULARY) for _ in range(length)) for length in (5, 12, 23, 40)]
    wanted = [GenerateRequest(prompt_ids=prompt, max_tokens=6, noise=len(prompt)) for prompt in prompts]

    async def apart(engine):
        return [await engine.generate(request) for request in wanted]

    async def together(engine):
        return await asyncio.gather(*map(engine.generate, wanted))

    given = {"deterministic": True, "max_running": 4}
    first, second = (serve(clone_model(tiny(family)), work, **given) for work in (apart, together))
    assert [a.logprobs for a in first] == [a.logprobs for a in second]


def test_code_that_begins_anew_is_told_from_code_that_goes_on():
    """By what it reads, not by its numbers, which are close where states are small."""
    for family in ("mamba", "falcon-h1", "qwen3.5"):
        model = tiny(family)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.05)
        _resumes.clear()
        cache_shape(model)
        assert set(_resumes.values()) == {family != "mamba"}


def test_states_need_slots():
    with pytest.raises(EngineError, match=r'set engine\.cache = "slots"'):
        serve(tiny("lfm2"), None, cache="pages")
