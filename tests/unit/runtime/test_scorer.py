"""Logprob workers: the trainer's numbers, full packs, and no request waits forever behind a long one."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import VOCABULARY, tiny_model
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import Sample
from paceline.engine.weight_applier import BROKEN_VERSION
from paceline.errors import EngineError, Mismatch, RequestError
from paceline.model import attach_lora, trainable_parameters
from paceline.model.loading import trained_adapter
from paceline.runtime.scorer import Scorer
from paceline.trainer.backend import score_samples
from paceline.weights.update import Adapter, Canary, WeightUpdate
from samples import plain_logprobs


@pytest.fixture
def scorer():
    made = Scorer(tiny_model(), budget=64)
    made.start()
    yield made
    made.close()


def sequences(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, VOCABULARY, dice.integers(1, longest + 1)).tolist() for _ in range(count)]


def plain(ids: list[int], temperature: float) -> list[float]:
    """By the model's own forward pass, one sequence at a time."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
    ahead = torch.log_softmax(logits, -1)
    return [0.0, *(float(ahead[i, token]) for i, token in enumerate(ids[1:]))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_the_model(scorer, temperature):
    asked = sequences(6, 40)
    scores = asyncio.run(scorer.score(asked, temperature))
    for ids, row in zip(asked, scores, strict=True):
        assert row == pytest.approx(plain(ids, temperature), abs=1e-4)


def test_packs_are_filled_across_questions_and_carried_over():
    """Sixteen questions of four sequences of 10 tokens: 6 fit a pack of 64, so 11 packs do for all 640 tokens."""
    scorer = Scorer(tiny_model(), budget=64)

    async def story() -> list:
        asked = [asyncio.ensure_future(scorer.score([[1] * 10] * 4)) for _ in range(16)]
        await asyncio.sleep(0)  # all have asked before anything is computed
        scorer.start()
        return await asyncio.gather(*asked)

    answers = asyncio.run(story())
    scorer.close()
    assert [len(answer) for answer in answers] == [4] * 16
    assert (scorer.packs, scorer.scored) == (11, 640)


def test_a_sequence_beyond_the_budget_has_a_pack_of_its_own(scorer):
    (scores,) = asyncio.run(scorer.score([[1, 2] * 50]))
    assert len(scores) == 100


def test_a_short_question_does_not_wait_behind_all_of_a_long_one(scorer):
    order: list[str] = []

    async def ask(name: str, asked: list[list[int]]) -> None:
        await scorer.score(asked)
        order.append(name)

    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("long", [[1] * 60] * 40))
            tasks.create_task(ask("longer", [[1] * 60] * 80))
            tasks.create_task(ask("none", []))

    asyncio.run(story())
    assert order == ["none", "long", "longer"]


@pytest.mark.parametrize(
    ("asked", "temperature", "said"),
    [
        ([[]], 1.0, "0 tokens"),
        ([[1] * 129], 1.0, "129 tokens"),
        ([[VOCABULARY]], 1.0, "vocabulary"),
        ([[1]], 0.0, "temperature"),
    ],
)
def test_what_cannot_be_scored_is_said(scorer, asked, temperature, said):
    with pytest.raises(RequestError, match=said):
        asyncio.run(scorer.score(asked, temperature))


def test_cancelled_questions_are_not_computed(scorer, monkeypatch):
    begun, cancelled = threading.Event(), threading.Event()

    def slowly(*given):
        begun.set()
        assert cancelled.wait(60)
        return score_samples(*given)

    async def story() -> None:
        many = asyncio.ensure_future(scorer.score([[1] * 60] * 400))
        assert await asyncio.to_thread(begun.wait, 60)
        many.cancel()
        await asyncio.wait([many])
        cancelled.set()
        await scorer.score([[1, 2, 3]])

    monkeypatch.setattr("paceline.runtime.scorer.score_samples", slowly)
    asyncio.run(story())
    assert scorer.packs == 2, "the one under way, and the next question's"


def test_a_failure_reaches_waiting_and_later_requests(scorer, monkeypatch):
    monkeypatch.setattr("paceline.runtime.scorer.score_samples", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(EngineError, match="division by zero"):
            asyncio.run(scorer.score([[1, 2]]))


def test_a_scorer_that_follows_takes_an_adapter_and_scores_as_the_policy_that_has_it():
    config = ModelConfig(lora=LoRAConfig(rank=4))
    policy = attach_lora(tiny_model(), config, seed=0)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    tensors, scale = trained_adapter(policy)
    scorer = Scorer(tiny_model(), budget=64, follows=True, lora=config.lora)
    scorer.start()
    asked = sequences(5, 40)

    async def story() -> list[list[float]]:
        with pytest.raises(EngineError, match="not yet sent the weights"):  # those of the model it loaded are no answer
            await scorer.score(asked, 0.8)
        assert (await scorer.policy()).version == BROKEN_VERSION
        await scorer.load_weights(WeightUpdate(3, tensors, Adapter("", scale)))
        assert (await scorer.policy()).version == 3
        return await scorer.score(asked, 0.8)

    scores = asyncio.run(story())
    scorer.close()
    for ids, row in zip(asked, scores, strict=True):
        (wanted,) = plain_logprobs(policy, [Sample.as_sampled(ids, 0.8)])
        assert row == pytest.approx(wanted.tolist(), abs=1e-3)
        assert len(ids) == 1 or row != pytest.approx(plain(ids, 0.8), abs=1e-3)


def test_weights_that_fail_their_check_score_nothing_until_whole_ones_come():
    scorer = Scorer(tiny_model(), budget=64, follows=True)
    scorer.start()
    update = WeightUpdate(1, dict(tiny_model(1).named_parameters()))
    wrong = Canary((1, 2, 3), (0.0, -1.0, -1.0), tolerance=1e-3)

    async def story() -> None:
        await scorer.load_weights(update)
        assert await scorer.score([[1, 2]])
        with pytest.raises(Mismatch, match="canary"):
            await scorer.load_weights(replace(update, version=2, canary=wrong))
        with pytest.raises(EngineError, match="version 2 failed its canary"):
            await scorer.score([[1, 2]])
        assert (await scorer.policy()).version == BROKEN_VERSION
        await scorer.load_weights(replace(update, version=3))
        assert await scorer.score([[1, 2]])

    asyncio.run(story())
    scorer.close()
