"""The KL reference: whose log probabilities, kept where, and what survives a restart."""

import asyncio

import numpy as np
import pytest
import torch

from conftest import tiny_model
from paceline.config import trainer as config
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.model import attach_lora
from paceline.trainer import TrainerError
from samples import PLAIN, make_batch, near_policy, plain_logprobs
from trainers import NO_OFFLOAD, trainer_of
from trainers import weights_of as state

FAST = config.OptimizerConfig(lr=1e-2)
LORA = LoRAConfig(rank=4)


def made(lora=None, seed=0, **settings):
    model = attach_lora(tiny_model(seed), ModelConfig(lora=lora), seed=0)
    settings = {"loss": config.PPOConfig(), "optimizer": FAST} | settings
    return trainer_of(model, config.TrainerConfig(threads=1, **settings))


def run(trainer, seeds) -> list[dict]:
    async def steps():
        return [(await trainer.step(near_policy(make_batch(seed, count=4, **PLAIN)))).metrics for seed in seeds]

    return asyncio.run(steps())


def divergence(old: dict, now: dict, lora, batch) -> float:
    """k3 of a policy with the tensors `now` against one with the tensors `old`, both through plain transformers."""
    policies = [attach_lora(tiny_model(), ModelConfig(lora=lora), seed=0) for _ in range(2)]
    for policy, tensors in zip(policies, (now, old), strict=True):
        policy.load_state_dict(tensors, strict=False)
    total, count = 0.0, 0
    pairs = zip(batch, *(plain_logprobs(policy, batch) for policy in policies), strict=True)
    for sample, pi, ref in pairs:
        d = (pi - ref)[torch.from_numpy(sample.loss_mask)].detach().double()
        total, count = total + ((-d).exp() + d - 1).sum().item(), count + len(d)
    return total / count


REFERENCES = [(reference, lora, False) for reference in ("base", "snapshot", "ema") for lora in (None, LORA)]
OFFLOADED = [("base", None, True), ("snapshot", LORA, True), ("ema", None, True)]


@pytest.mark.parametrize(
    ("reference", "lora", "offload"), [*REFERENCES, *(pytest.param(*case, marks=NO_OFFLOAD) for case in OFFLOADED)]
)
def test_the_reference_is_who_it_says(reference, lora, offload):
    trainer = made(lora, kl=config.KLConfig(reference=reference, every=2, decay=0.75, offload=offload))
    history = [state(trainer)]
    mean = history[0]
    for seed in range(4):
        batch = near_policy(make_batch(seed, count=4, **PLAIN))
        expected = {
            "base": history[0],
            "snapshot": history[2 * (seed // 2)],
            "ema": mean,
        }[reference]
        wanted = divergence(expected, state(trainer), lora, batch)
        (metrics,) = run(trainer, [seed])
        assert metrics["kl"] == pytest.approx(wanted, rel=1e-3, abs=1e-6)
        history.append(state(trainer))
        mean = {name: 0.75 * mean[name] + 0.25 * history[-1][name] for name in mean}
    assert metrics["kl"] > 1e-4
    trainer.close()


def test_the_base_under_lora_keeps_nothing_and_leaves_the_policy_as_it_was():
    trainer = made(LORA, kl=config.KLConfig())
    run(trainer, range(2))
    reference = trainer.learner._reference
    assert not reference._tensors
    before = state(trainer)
    with reference.swapped_in():
        assert any(not torch.equal(before[name], p) for name, p in state(trainer).items())
    assert all(torch.equal(before[name], p) for name, p in state(trainer).items())
    trainer.close()


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("reference", ["base", "snapshot", "ema"])
def test_a_resumed_run_is_held_near_the_same_reference(tmp_path, reference, lora):
    kl = config.KLConfig(reference=reference, every=2, decay=0.5)
    unbroken = made(lora, kl=kl)
    run(unbroken, range(3))
    asyncio.run(unbroken.save(tmp_path))
    expected = run(unbroken, range(3, 6))
    again = made(lora, kl=kl)
    asyncio.run(again.load(tmp_path))
    got = run(again, range(3, 6))
    assert [m["kl"] for m in got] == [m["kl"] for m in expected]
    assert all(torch.equal(tensor, state(again)[name]) for name, tensor in state(unbroken).items())
    for trainer in (unbroken, again):
        trainer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_with_dropout_score_without_it_from_the_start(tmp_path, dtype):
    """New adapters come in training mode. A resumed trainer scores, and proves its weights, before it first trains."""
    settings = {"kl": config.KLConfig(reference="ema"), "minibatches": 2, "proximal": config.ProximalConfig()}

    def fresh():
        model = attach_lora(tiny_model().to(dtype), ModelConfig(lora=LoRAConfig(rank=4, dropout=0.5)), seed=0)
        return trainer_of(model, config.TrainerConfig(threads=1, loss=config.PPOConfig(), optimizer=FAST, **settings))

    unbroken, again = fresh(), fresh()
    run(unbroken, range(2))
    asyncio.run(unbroken.save(tmp_path))
    asyncio.run(again.load(tmp_path))
    assert asyncio.run(again.weights()).canary == asyncio.run(unbroken.weights()).canary
    for trainer in (unbroken, again):
        torch.manual_seed(7)
        run(trainer, range(2, 4))
        trainer.close()
    assert all(torch.equal(tensor, state(again)[name]) for name, tensor in state(unbroken).items())


def test_another_base_is_refused_on_resume(tmp_path):
    first = made(kl=config.KLConfig())
    run(first, [0])
    asyncio.run(first.save(tmp_path))
    second = made(seed=1, kl=config.KLConfig())
    with pytest.raises(TrainerError, match=r"model\.name now holds other weights"):
        asyncio.run(second.load(tmp_path))
    first.close()
    second.close()


def test_a_reference_that_starts_late_starts_where_the_policy_is(tmp_path):
    first = made()
    run(first, range(2))
    asyncio.run(first.save(tmp_path))
    second = made(kl=config.KLConfig(reference="snapshot"))
    asyncio.run(second.load(tmp_path))
    assert run(second, [2])[0]["kl"] == pytest.approx(0, abs=1e-6)
    first.close()
    second.close()


def test_scores_that_come_with_the_samples_are_used():
    batch = near_policy(make_batch(0, count=3, **PLAIN))
    given = [s.with_streams(kl_ref_logprobs=s.logprobs) for s in batch]  # an endpoint's, say
    trainer = made(kl=config.KLConfig(kind="k1", coef=0.5))
    metrics = asyncio.run(trainer.step(given)).metrics
    pi = plain_logprobs(tiny_model(), batch)
    d = np.concatenate([(p.detach().numpy() - s.logprobs)[s.loss_mask] for s, p in zip(batch, pi, strict=True)])
    assert metrics["loss/kl"] == pytest.approx(0.5 * d.mean(), rel=1e-3, abs=1e-5)
    trainer.close()


@pytest.mark.parametrize("policy", ["behaviour", "prox", "frozen"])
def test_shaping_subtracts_the_clipped_mean_log_ratio_from_the_advantages(policy):
    """The same update as a trainer without KL that is handed the shaped advantages."""
    rng = np.random.default_rng(0)
    batch = near_policy(make_batch(0, count=5, **PLAIN))
    now = [p.detach().numpy() for p in plain_logprobs(tiny_model(), batch)]
    if policy == "frozen":
        batch = [s.with_streams(logprobs=None, versions=np.full(len(s), -1)) for s in batch]
    offsets = [0.3, -0.2, 0.05, 9.0, -9.0]
    batch = [
        s.with_streams(kl_ref_logprobs=np.where(s.loss_mask, pi + o + rng.normal(0, 0.1, len(s)), 0))
        for s, pi, o in zip(batch, now, offsets, strict=True)
    ]
    by_hand = []
    for s, pi in zip(batch, now, strict=True):
        who = s.logprobs if policy == "behaviour" else pi
        k1 = np.mean([float(who[t]) - float(s.kl_ref_logprobs[t]) for t in range(len(s)) if s.loss_mask[t]])
        by_hand.append(s.with_streams(advantages=s.advantages - 0.2 * min(max(k1, -4.0), 4.0) * s.loss_mask))
    more = {"minibatches": 2, "proximal": config.ProximalConfig() if policy == "prox" else False}
    shaped = made(kl=config.KLConfig(how="advantage", coef=0.2, kl_max=4.0), **more)
    plain = made(**more)
    metrics = asyncio.run(shaped.step(batch)).metrics
    asyncio.run(plain.step(by_hand))
    for name, tensor in state(plain).items():
        torch.testing.assert_close(state(shaped)[name], tensor, rtol=1e-3, atol=1e-4)
    assert "loss/kl" not in metrics
    assert metrics["kl"] > 0
    for trainer in (shaped, plain):
        trainer.close()
