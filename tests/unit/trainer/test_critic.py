"""The critic: advantages by the paper's sum, a clipped value loss, and a policy that waits for it."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import tiny_model
from paceline.config import trainer as config
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import Sample
from paceline.model import attach_lora
from paceline.trainer import TrainerError
from paceline.trainer.backend import Batch
from paceline.trainer.critic import action_rewards, gae
from samples import make_batch, rewarded
from trainers import critic_of, shared_with_critic, trainer_of, value_slope, weights_of

UNIT = st.floats(0, 1)
FINITE = st.floats(-5, 5)


@given(st.lists(st.tuples(FINITE, FINITE), max_size=12), UNIT, UNIT)
def test_advantages_are_the_papers_weighted_sum_of_surprises(steps, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_(t+l), with nothing after the end."""
    rewards, values = np.array([r for r, _ in steps]), np.array([v for _, v in steps])
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(len(steps))]
    wanted = [
        sum((gamma * lam) ** ahead * delta[t + ahead] for ahead in range(len(steps) - t)) for t in range(len(steps))
    ]
    np.testing.assert_allclose(gae(rewards, values, gamma, lam), wanted, rtol=1e-9, atol=1e-9)


def test_what_the_policy_did_not_choose_takes_no_time():
    """Tokens of a tool between two actions change nothing, and a reward given on them goes to the action before."""
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
    sample = Sample(
        token_ids=np.arange(8),
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(8),
        rewards=np.array([9, 0, 0.5, 0, 2, 0, 1, 0.25]),
    )
    assert action_rewards(sample).tolist() == [0.5, 2.0, 1.25]


@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=1, max_size=8), st.floats(0, 2))
def test_the_value_loss_is_the_worse_of_clipped_and_plain(rows, clip):
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    loss, grad = value_slope(*columns, clip)
    for v, o, r, got, slope in zip(*(x.tolist() for x in (*columns, loss, grad)), strict=True):
        near = min(max(v, o - clip), o + clip) if clip else v
        assert got == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2)
        if (v - r) ** 2 > (near - r) ** 2 + 1e-9 or near == v:
            assert slope == pytest.approx(v - r)
        elif (near - r) ** 2 > (v - r) ** 2 + 1e-9:
            assert slope == pytest.approx(0.0)


# --- in the trainer


def made(lora=None, critic: dict | None = None, **settings):
    model = attach_lora(tiny_model(), ModelConfig(lora=lora), seed=0)
    settings = {"loss": config.PPOConfig(), "optimizer": config.OptimizerConfig(lr=1e-3)} | settings
    return trainer_of(model, config.TrainerConfig(threads=1, critic=config.CriticConfig(**(critic or {})), **settings))


def step(trainer, batch) -> dict[str, float]:
    return asyncio.run(trainer.step(batch)).metrics


def credited(trainer, samples) -> tuple[Batch, dict[str, float]]:
    return trainer.learner._critic.credit(trainer.policy.gather(samples))


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.view(-1) for _, p in sorted(weights_of(trainer).items())])


def test_a_new_critic_values_everything_at_zero_so_advantages_are_returns():
    batch = rewarded(0)
    trainer = made(critic={"gamma": 0.9, "lam": 1.0, "whiten": False})
    metrics = step(trainer, batch)
    by_hand, returns = [], []
    for s in batch:
        actions, stream = s.loss_mask.nonzero()[0], np.zeros(len(s))
        for i, t in enumerate(actions):
            stream[t] = sum(0.9**ahead * float(s.rewards[u]) for ahead, u in enumerate(actions[i:]))
            returns.append(stream[t])
        by_hand.append(s.with_streams(advantages=stream, rewards=None))
    plain = trainer_of(
        tiny_model(),
        config.TrainerConfig(threads=1, loss=config.PPOConfig(), optimizer=config.OptimizerConfig(lr=1e-3)),
    )
    step(plain, by_hand)
    torch.testing.assert_close(weights(trainer), weights(plain))
    assert metrics["critic/loss"] == pytest.approx(np.mean(np.square(returns)) / 2, rel=1e-5)
    assert metrics["critic/return"] == pytest.approx(np.mean(returns), rel=1e-5)
    trainer.close()
    plain.close()


def test_a_value_is_of_the_moment_before_the_choice():
    """Another last token changes nothing that the critic said before it."""
    trainer = made(critic={"lr": 1e-2})
    step(trainer, rewarded(0))
    (sample,) = rewarded(3, count=1)
    other = sample.token_ids.copy()
    other[-1] = (other[-1] + 1) % 60
    changed = sample.with_streams(token_ids=other)
    one, two = (credited(trainer, [s])[0].value_targets[0].values for s in (sample, changed))
    assert one[-1] != 0
    np.testing.assert_array_equal(one, two)
    trainer.close()


def test_a_reward_past_the_cut_is_earned_before_it():
    """A sample longer than the trainer takes loses its end, where its reward is, and must not lose the reward."""
    (sample,) = rewarded(0, count=1)
    rewards = np.zeros(len(sample))
    rewards[-1] = 0.75
    long, short = sample.with_streams(rewards=rewards), len(sample) // 2
    trainer = made(critic={"gamma": 1.0, "lam": 1.0}, max_sample_tokens=short)
    metrics = step(trainer, [long])
    assert metrics["critic/return"] == pytest.approx(0.75)
    trainer.close()


def test_whitened_advantages_have_mean_zero_and_variance_one():
    trainer = made()
    batch, _ = credited(trainer, rewarded(1))
    flat = np.concatenate([s.advantages[s.loss_mask] for s in batch.samples])
    assert flat.mean() == pytest.approx(0, abs=1e-6)
    assert flat.std() == pytest.approx(1, rel=1e-4)
    assert len(batch.value_targets) == len(batch.samples)
    trainer.close()


def test_the_critic_learns_what_to_expect():
    trainer = made(critic={"lr": 3e-3, "value_clip": 0.0, "lam": 1.0})
    batch = rewarded(2, count=12)
    seen = [step(trainer, batch)["critic/explained_variance"] for _ in range(25)]
    assert seen[0] == pytest.approx(0, abs=1e-6)
    assert seen[-1] > 0.5
    trainer.close()


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_the_policy_waits_while_the_critic_warms_up(lora):
    trainer = made(lora, critic={"freeze_steps": 2})
    before = weights(trainer)
    values = []
    for seed in range(2):
        assert "loss/rl" not in step(trainer, rewarded(seed))
        values.append(critic_of(trainer)["master/value.weight"])
    assert torch.equal(weights(trainer), before)
    assert trainer.version == 2
    assert not torch.equal(*values)
    assert "loss/rl" in step(trainer, rewarded(2))
    assert not torch.equal(weights(trainer), before)
    trainer.close()


def test_a_policy_that_waited_still_ends_where_its_schedule_does():
    optimizer = config.OptimizerConfig(lr=1e-3, schedule="linear", final_lr_ratio=0.1)
    c = config.TrainerConfig(threads=1, optimizer=optimizer, critic=config.CriticConfig(freeze_steps=2), minibatches=2)
    trainer = trainer_of(tiny_model(), c, total_steps=5)
    for seed in range(5):
        step(trainer, rewarded(seed))
    assert trainer.learner.optimizer.schedule.steps == 6
    assert trainer.learner.optimizer.schedule.lr == pytest.approx(1e-4)
    assert trainer.learner._critic.make().optimizer.schedule.lr == pytest.approx(1e-4)
    trainer.close()


def test_under_lora_the_critic_shares_the_frozen_base_and_has_adapters_of_its_own():
    trainer = made(LoRAConfig(rank=4))
    step(trainer, rewarded(0))
    own = {f"body.{name}" for name in weights_of(trainer)}
    assert {name for name, shared in shared_with_critic(trainer).items() if not shared} == own
    learning = {name.removeprefix("master/") for name in critic_of(trainer) if name.startswith("master/")}
    assert learning == own | {"value.weight", "value.bias"}
    trainer.close()


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path, lora):
    settings = {"minibatches": 2, "proximal": config.ProximalConfig()}
    unbroken = made(lora, **settings)
    for seed in range(2):
        step(unbroken, rewarded(seed))
    asyncio.run(unbroken.save(tmp_path))
    again = made(lora, **settings)
    asyncio.run(again.load(tmp_path))
    for seed in range(2, 4):
        one, two = step(unbroken, rewarded(seed)), step(again, rewarded(seed))
        assert one["critic/loss"] == two["critic/loss"]
        assert one["critic/value"] == two["critic/value"]
    assert torch.equal(weights(unbroken), weights(again))
    unbroken.close()
    again.close()


def test_going_back_to_before_the_critic_is_as_if_it_had_never_been(tmp_path):
    trainer, batch = made(critic={"lr": 1e-2, "freeze_steps": 1}), rewarded(0)
    asyncio.run(trainer.save(tmp_path))
    first = step(trainer, batch), step(trainer, batch)
    assert first[1]["critic/value"] != 0
    asyncio.run(trainer.load(tmp_path))
    assert not critic_of(trainer)
    again = step(trainer, batch), step(trainer, batch)
    for one, two in zip(first, again, strict=True):
        assert {n: v for n, v in one.items() if "/s" not in n} == {n: v for n, v in two.items() if "/s" not in n}
    trainer.close()


def test_samples_with_advantages_need_no_critic_and_make_none():
    trainer = made()
    metrics = step(trainer, make_batch(0))
    assert not critic_of(trainer)
    assert not any(name.startswith("critic/") for name in metrics)
    step(trainer, make_batch(1)[:3] + rewarded(1))
    assert critic_of(trainer)
    trainer.close()


def test_a_minibatch_without_lessons_is_no_step_of_the_critic():
    trainer = made(minibatches=2)
    step(trainer, [*rewarded(0, count=4), *make_batch(0)[4:8]])
    assert trainer.learner._critic.make().optimizer.schedule.steps == 1
    assert trainer.learner.optimizer.schedule.steps == 2
    trainer.close()


def test_rewards_without_a_critic_say_what_to_write():
    trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1))
    with pytest.raises(TrainerError, match=r"write \[trainer.critic\]"):
        step(trainer, rewarded(0))
    with pytest.raises(TrainerError, match="neither advantages nor rewards"):
        step(trainer, make_batch(0, advantages=None))
    trainer.close()


def test_a_critic_that_breaks_skips_its_step():
    trainer = made()
    step(trainer, rewarded(0))
    before = critic_of(trainer)["master/value.weight"]
    batch = rewarded(1)
    batch[0] = batch[0].with_streams(rewards=np.full(len(batch[0]), np.nan))
    assert asyncio.run(trainer.step(batch)).skipped
    assert torch.equal(critic_of(trainer)["master/value.weight"], before)
    trainer.close()
