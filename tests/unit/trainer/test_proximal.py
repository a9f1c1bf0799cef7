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
        proximal = config.ProximalConfig() if k == 1 else None  # several minibatches need no word
        c = config.TrainerConfig(
            threads=1, loss=config.PPOConfig(), minibatches=k, proximal=proximal, optimizer=SGD_LIKE
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


def mean_divergence(policy, older, batch) -> float:
    """mean of e^d - d - 1 over the tokens that train, d = log policy - log older."""
    pairs = zip(batch, policy, older, strict=True)
    d = np.concatenate([(new.detach().numpy() - old)[s.loss_mask] for s, new, old in pairs])
    return float(np.mean(np.exp(d) - d - 1))


def test_one_step_is_taken_from_the_batchs_start_and_measured_from_the_sampler():
    batch = near_policy(make_batch(2, count=8, **PLAIN), noise=0.3)
    trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1, loss=config.PPOConfig()))
    metrics = asyncio.run(trainer.step(batch)).metrics
    trainer.close()
    assert metrics["ppo_kl"] == 0
    assert metrics["sampler_kl"] == pytest.approx(metrics["mismatch_kl"])
    policy = plain_logprobs(tiny_model(), batch)
    assert metrics["sampler_kl"] == pytest.approx(mean_divergence(policy, [s.logprobs for s in batch], batch), rel=1e-3)


def test_ppo_kl_is_the_distance_from_the_start_and_sampler_kl_that_from_the_sampler():
    """Of two steps: the first is where the batch began, the second where the first has led."""
    batch = near_policy(make_batch(4, count=6, **PLAIN), noise=0.2)
    settings = {"loss": config.PPOConfig(), "optimizer": SGD_LIKE, "threads": 1}
    trainer = trainer_of(tiny_model(), config.TrainerConfig(minibatches=2, **settings))
    metrics = asyncio.run(trainer.step(batch)).metrics
    trainer.close()
    half = trainer_of(tiny_model(), config.TrainerConfig(**settings, proximal=config.ProximalConfig()))
    asyncio.run(half.step(batch[:3]))
    moved = tiny_model()
    for name, tensor in weights_of(half).items():
        moved.get_parameter(name).data.copy_(tensor)
    half.close()
    start = [p.detach().numpy() for p in plain_logprobs(tiny_model(), batch)]
    now = [*plain_logprobs(tiny_model(), batch[:3]), *plain_logprobs(moved, batch[3:])]
    assert metrics["ppo_kl"] == pytest.approx(mean_divergence(now, start, batch), rel=1e-2)
    assert metrics["sampler_kl"] == pytest.approx(mean_divergence(now, [s.logprobs for s in batch], batch), rel=1e-2)


def test_several_minibatches_in_bfloat16_move_away_from_one_start(tmp_path):
    """Two optimizer steps a batch, and a checkpoint counts batches."""
    batch = near_policy(make_batch(2, count=8, **PLAIN), noise=0.05)
    seen = {}
    for k in (1, 2):
        c = config.TrainerConfig(threads=1, loss=config.PPOConfig(), minibatches=k, optimizer=SGD_LIKE)
        trainer = trainer_of(tiny_model(dtype=torch.bfloat16), c)
        seen[k] = [asyncio.run(trainer.step(batch)).metrics for _ in range(2)]
        asyncio.run(trainer.save(tmp_path))
        trainer.close()
        again = trainer_of(tiny_model(dtype=torch.bfloat16), c)
        asyncio.run(again.load(tmp_path))
        assert again.version == 2
        assert again.learner.optimizer.schedule.steps == 2 * k
        again.close()
    assert all(metrics["ppo_kl"] == 0 for metrics in seen[1])
    for number, metrics in enumerate(seen[2]):
        assert metrics["optimizer_steps"] == 2 * (number + 1)
        assert metrics["ppo_kl"] > 1e-4
        assert metrics["clip_fraction"] > 0


def test_without_a_snapshot_only_the_first_step_knows_where_the_batch_began():
    """Engine and trainer are compared there alone, and no distance from the start is claimed."""
    batch = near_policy(make_batch(2, count=8, **PLAIN), noise=0.05)
    seen = []
    for samples, k in ((batch[:4], 1), (batch, 2)):
        c = config.TrainerConfig(threads=1, loss=config.PPOConfig(), minibatches=k, proximal=False, optimizer=SGD_LIKE)
        trainer = trainer_of(tiny_model(), c)
        seen.append(asyncio.run(trainer.step(samples)).metrics)
        trainer.close()
    assert seen[1]["mismatch_kl"] == pytest.approx(seen[0]["mismatch_kl"], rel=1e-4)
    assert seen[0]["ppo_kl"] == 0
    assert "ppo_kl" not in seen[1]
    assert seen[1]["sampler_kl"] > 2 * seen[1]["mismatch_kl"]


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
