"""K optimizer steps against one snapshot: what they aim at is fixed when the batch begins."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import tiny_model
from paceline.config import trainer as config
from paceline.data import minibatches
from samples import PLAIN, make_batch, make_sample, near_policy, plain_logprobs
from trainers import trainer_of, weights_of

SGD_LIKE = config.OptimizerConfig(lr=1e-2, max_grad_norm=1e9)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_minibatches_are_two_steps_by_hand(level):
    """The decoupled objective, written out with full logits and torch's own AdamW, ends at the same weights."""
    batch = near_policy(make_batch(1, count=6, **PLAIN))
    by_hand = tiny_model().requires_grad_(True)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    prox = [p.detach() for p in plain_logprobs(by_hand, batch)]
    for half in (batch[:3], batch[3:]):
        tokens = sum(int(s.loss_mask.sum()) for s in half)
        loss = torch.zeros(())
        for s, pi in zip(half, plain_logprobs(by_hand, half), strict=True):
            start = prox[[one is s for one in batch].index(True)]
            mask, a = torch.from_numpy(s.loss_mask), torch.from_numpy(s.advantages)
            log_rho = (start - torch.from_numpy(s.logprobs))[mask]
            rho = (log_rho.sum().exp() if level == "sequence" else log_rho.exp()).clamp(max=1.5)
            r, a = (pi - start)[mask].exp(), a[mask]
            loss = loss - (rho * torch.minimum(r * a, r.clamp(0.8, 1.2) * a)).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    proximal = config.ProximalConfig(cap=1.5, level=level)
    c = config.TrainerConfig(threads=1, loss=config.PPOConfig(), minibatches=2, proximal=proximal, optimizer=SGD_LIKE)
    trainer = trainer_of(tiny_model(), c)
    report = asyncio.run(trainer.step(batch))
    trainer.close()
    assert trainer.version == 1
    assert report.metrics["optimizer_steps"] == 2
    for name, parameter in weights_of(trainer).items():
        torch.testing.assert_close(parameter, by_hand.get_parameter(name), rtol=1e-3, atol=2e-4)


def test_each_batch_is_one_version_and_its_metrics_say_what_moved():
    batch = near_policy(make_batch(2, count=8, **PLAIN), noise=0.05)
    reports = {}
    for k in (1, 2, 4):
        c = config.TrainerConfig(
            threads=1, loss=config.PPOConfig(), minibatches=k, proximal=config.ProximalConfig(), optimizer=SGD_LIKE
        )
        trainer = trainer_of(tiny_model(), c)
        reports[k] = asyncio.run(trainer.step(batch)).metrics
        assert trainer.version == 1
        trainer.close()
    assert [reports[k]["optimizer_steps"] for k in reports] == [1, 2, 4]
    assert reports[1]["ppo_kl"] == pytest.approx(0, abs=1e-9)
    assert reports[1]["clip_fraction"] == 0
    assert reports[2]["ppo_kl"] > 1e-4
    assert reports[2]["clip_fraction"] > 0
    # Engine against trainer at equal version: the steps in between are no mismatch.
    assert reports[2]["mismatch_kl"] == pytest.approx(reports[1]["mismatch_kl"], rel=1e-4)
    assert reports[4]["mismatch_kl"] == pytest.approx(reports[1]["mismatch_kl"], rel=1e-4)


def test_without_proximal_the_sampler_is_the_anchor():
    batch = near_policy(make_batch(2, count=8, **PLAIN), noise=0.3)
    trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1, loss=config.PPOConfig()))
    metrics = asyncio.run(trainer.step(batch)).metrics
    trainer.close()
    assert metrics["ppo_kl"] == pytest.approx(metrics["mismatch_kl"])
    policy = plain_logprobs(tiny_model(), batch)
    d = np.concatenate([(p.detach().numpy() - s.logprobs)[s.loss_mask] for s, p in zip(batch, policy, strict=True)])
    assert metrics["ppo_kl"] == pytest.approx(float(np.mean(np.exp(d) - d - 1)), rel=1e-3)


def test_engine_and_trainer_are_compared_before_the_first_step_only():
    batch = near_policy(make_batch(2, count=8, **PLAIN), noise=0.05)
    seen = []
    for samples, k in ((batch[:4], 1), (batch, 2)):
        c = config.TrainerConfig(threads=1, loss=config.PPOConfig(), minibatches=k, optimizer=SGD_LIKE)
        trainer = trainer_of(tiny_model(), c)
        seen.append(asyncio.run(trainer.step(samples)).metrics)
        trainer.close()
    assert seen[1]["mismatch_kl"] == pytest.approx(seen[0]["mismatch_kl"], rel=1e-4)
    assert seen[1]["ppo_kl"] > 2 * seen[1]["mismatch_kl"]


def test_fewer_rollouts_than_minibatches_are_fewer_steps():
    trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1, minibatches=8, proximal=config.ProximalConfig()))
    report = asyncio.run(trainer.step(make_batch(3, count=3)))
    trainer.close()
    assert report.metrics["optimizer_steps"] == 3


@given(st.lists(st.integers(1, 3), max_size=12), st.integers(1, 6))
def test_minibatches_are_whole_rollouts_in_order_as_evenly_as_they_go(sizes, number):
    rng = np.random.default_rng(0)
    batch = [make_sample(rng, 4, i) for i, size in enumerate(sizes) for _ in range(size)]
    owners = [i for i, size in enumerate(sizes) for _ in range(size)]
    parts = minibatches(batch, number)
    assert len(parts) == number
    assert [i for part in parts for i in part] == list(range(len(batch)))
    counts = [len({owners[i] for i in part}) for part in parts]
    assert sum(counts) == len(sizes)
    assert max(counts) - min(counts) <= 1
