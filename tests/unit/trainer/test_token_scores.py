"""The scores that a step reports are those of the passes that trained it, sample by sample."""

import asyncio

import numpy as np
import pytest

from conftest import tiny_model
from paceline.config import trainer as config
from paceline.data.sample import CLIPPED, SKIPPED, TokenScores, trained_mask
from samples import PLAIN, make_batch, near_policy, plain_logprobs
from trainers import trainer_of


def step(batch, **settings):
    trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1, micro_batch_tokens=64, **settings))
    report = asyncio.run(trainer.step(batch))
    trainer.close()
    return report


def test_log_probabilities_are_those_before_the_step_on_exactly_the_trained_tokens():
    batch = make_batch(1)
    scores = step(batch).scores.by_sample()
    assert sorted(scores) == list(range(len(batch)))
    for place, (sample, expected) in enumerate(zip(batch, plain_logprobs(tiny_model(), batch), strict=True)):
        np.testing.assert_allclose(scores[place]["logprob"], expected.detach()[trained_mask(sample)], atol=1e-4)


def test_the_means_are_the_metrics():
    batch = near_policy(make_batch(2, **PLAIN), noise=0.5)
    report = step(batch, loss=config.PPOConfig(clip_low=0.1, clip_high=0.1), proximal=None)
    scores = np.concatenate([one for _, one in sorted(report.scores.by_sample().items())])
    assert scores["entropy"].astype(float).mean() == pytest.approx(report.metrics["entropy"], rel=1e-2)
    assert (scores["flags"] & CLIPPED != 0).mean() == pytest.approx(report.metrics["clip_fraction"], abs=1e-6)
    assert 0 < report.metrics["clip_fraction"] < 1
    sampler = np.concatenate([sample.logprobs[trained_mask(sample)] for sample in batch])
    assert np.exp(scores["logprob"] - sampler).mean() == pytest.approx(report.metrics["ratio"], rel=1e-4)


def test_a_sample_that_is_left_out_says_so():
    batch = near_policy(make_batch(3, **PLAIN), noise=0.0)
    batch[0] = batch[0].with_streams(logprobs=np.where(batch[0].loss_mask, -20.0, 0))
    report = step(batch, clip_skip_threshold=0.5)
    skipped = {place for place, one in report.scores.by_sample().items() if (one["flags"] & SKIPPED).any()}
    assert skipped == {0}
    assert report.metrics["skipped_samples"] == 1


def test_samples_cut_by_the_trainer_and_samples_without_a_trained_token():
    batch = make_batch(4, longest=40, **PLAIN)
    silent = batch[1].with_streams(rl_weights=np.zeros(len(batch[1])))
    batch[1] = silent
    scores = step(batch, max_sample_tokens=12).scores.by_sample()
    assert 1 not in scores
    for place, one in scores.items():
        assert len(one) == trained_mask(batch[place])[:12].sum()


def test_each_sample_is_scored_in_its_own_optimizer_step():
    batch = near_policy(make_batch(5, **PLAIN))
    settings = {"minibatches": 3, "proximal": config.ProximalConfig(), "loss": config.PPOConfig()}
    scores = step(batch, optimizer=config.OptimizerConfig(lr=1e-2), **settings).scores.by_sample()
    start = [one.detach().numpy() for one in plain_logprobs(tiny_model(), batch)]
    moved = [
        np.abs(scores[place]["logprob"] - start[place][trained_mask(sample)]).max()
        for place, sample in enumerate(batch)
    ]
    assert max(moved[:3]) < 1e-4
    assert min(moved[-3:]) > 1e-3


def test_samples_get_other_numbers():
    scores = TokenScores.of({0: np.zeros(2, "f4,f2,u1"), 2: np.ones(1, "f4,f2,u1")})
    assert {place: len(one) for place, one in scores.renumbered([5, 6, 7]).by_sample().items()} == {5: 2, 7: 1}
    assert TokenScores.merged([None, scores]) is scores
    assert TokenScores.merged([None]) is None
    assert TokenScores.of({}).by_sample() == {}
