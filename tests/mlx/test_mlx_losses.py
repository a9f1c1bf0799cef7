"""What MLX computes is what torch computes: log probabilities, every loss, and every gradient."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="needs mlx")

import mlx.core as mx
from pairs import apart, mlx_gradient, mlx_model, packs, pair, samples, torch_gradient

from paceline.config import trainer as config
from paceline.config.model import LoRAConfig
from paceline.trainer import TrainerError
from paceline.trainer.mlx import forward
from paceline.trainer.mlx.trainer import MlxTrainer
from paceline.trainer.terms import clip, trained_positions

LORA = LoRAConfig(rank=4)


def pulled(streams, strength):
    """A user's loss that both libraries can run."""
    return -streams.advantages * streams.logprobs + strength * streams.log_ratio * streams.log_ratio


LOSSES = {
    "dppo": config.DPPOConfig(kl_tau=0.1),
    "ppo": config.PPOConfig(),
    "ppo, dual": config.PPOConfig(clip_high=0.3, dual_clip=1.1),
    "gspo": config.GSPOConfig(),
    "gspo, wide": config.GSPOConfig(clip_low=0.2, clip_high=0.2),
    "cispo": config.CISPOConfig(),
    "reinforce": config.ReinforceConfig(),
    "reinforce, weighed": config.ReinforceConfig(max_ratio=1.05),
    "custom": config.CustomLossConfig(import_path=f"{__name__}:pulled", kwargs={"strength": 0.2}),
}
MORE = {
    "alone": {},
    "k1": {"kl": config.KLConfig(kind="k1", coef=0.5)},
    "k2": {"kl": config.KLConfig(kind="k2", coef=0.5)},
    "k3": {"kl": config.KLConfig(kind="k3", coef=0.5)},
    "entropy": {"entropy_coef": 0.3},
    "skip": {"clip_skip_threshold": 0.35},
    "proximal": {"proximal": config.ProximalConfig()},
    "proximal, sequence": {"proximal": config.ProximalConfig(level="sequence", cap=1.2)},
    "proximal, geometric": {"proximal": config.ProximalConfig(level="sequence", geometric=True)},
    "by sample": {"normalise": "sample"},
}


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_log_probabilities_and_entropies_are_torchs(lora):
    both = pair(lora)
    for micro_batch in packs(samples(0), 120):
        wanted, spread, _ = both.torch.policy.forward.logprobs(
            micro_batch, both.torch.policy.forward.send(trained_positions(micro_batch)), entropy=True
        )
        got, entropy = both.mlx.policy.forward.logprobs(micro_batch, trained_positions(micro_batch), entropy=True)
        np.testing.assert_allclose(np.array(got), wanted.detach().numpy(), atol=1e-4)
        np.testing.assert_allclose(np.array(entropy), spread.detach().numpy(), atol=1e-4)
        np.testing.assert_allclose(
            both.mlx.policy.forward.scores(micro_batch), both.torch.policy.forward.scores(micro_batch), atol=1e-4
        )
    both.close()


def compared(budget: int = 150, lora: LoRAConfig | None = None, **settings) -> None:
    """Value, sums and gradient of a batch in several micro-batches, the three components mixed."""
    both = pair(lora, **settings)
    prox = settings.get("proximal") is not None or isinstance(settings["loss"], config.GSPOConfig)
    for micro_batch in packs(samples(1), budget, prox):
        wanted = both.torch.learner.backward(micro_batch, both.torch.version).values
        got = both.mlx.learner.backward(micro_batch, both.mlx.version).values
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert got[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-4), name
    assert apart(mlx_gradient(both.mlx), torch_gradient(both.torch)) < 1e-4
    both.close()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradient_are_torchs(name):
    compared(loss=LOSSES[name])


@pytest.mark.parametrize("name", list(MORE)[1:])
def test_whatever_is_added_and_its_gradient_are_torchs(name):
    compared(loss=config.PPOConfig(), **MORE[name])


@pytest.mark.parametrize("name", ["dppo", "gspo"])
def test_so_are_an_adapters(name):
    compared(loss=LOSSES[name], lora=LORA, kl=config.KLConfig(), entropy_coef=0.1)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_whatever_the_level(loss, more):
    """A term whose gradient is lost on the way looks like any other: its value is right, and nothing learns."""
    trainer = MlxTrainer(mlx_model(), config.TrainerConfig(loss=LOSSES[loss], **MORE[more]))
    off = {"ce_weights": None, "teacher_kl_weights": None, "kl_ref_logprobs": None, "logprobs": None}
    (micro_batch,) = packs([s.with_streams(**off) for s in samples(2, count=2)])
    trainer.learner.backward(micro_batch, trainer.version)
    size = trainer.learner.optimizer.clip()
    assert np.isfinite(size)
    assert size > 1e-3
    trainer.close()


def test_a_clip_without_room_has_its_gradient_on_the_bound():
    """The ratio of a policy to itself is 1, which is where PPO with a clip of 0 begins and ends."""
    for low, high, wanted in ((1.0, 1.0, 1.0), (None, 1.0, 1.0), (1.0, None, 1.0), (1.5, 2.0, 0.0), (0.0, 0.5, 0.0)):
        assert mx.grad(lambda x, low=low, high=high: clip(x, low, high))(mx.array(1.0)).item() == wanted
    assert mx.isnan(clip(mx.array(float("nan")), 0.0, 1.0)).item()


def gradient(monkeypatch=None, logits: int | None = None, lora: LoRAConfig | None = None, **settings):
    if monkeypatch is not None and logits is not None:
        monkeypatch.setattr(forward, "LOGIT_ELEMENTS", logits)
    trainer = MlxTrainer(mlx_model(lora), config.TrainerConfig(loss=config.PPOConfig(), entropy_coef=0.1, **settings))
    trainer.policy.net.train()
    for micro_batch in packs(samples(3), 150):
        trainer.learner.backward(micro_batch, trainer.version)
    trainer.close()
    return mlx_gradient(trainer)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_logits_in_chunks_are_the_same_logits(monkeypatch, lora):
    """Also where the head's weights are the embedding's, which get a gradient from both ends."""
    whole = gradient(lora=lora)
    asked = []
    logits = type(mlx_model()).logits
    monkeypatch.setattr(
        type(mlx_model()), "logits", lambda self, hidden: (asked.append(len(hidden)), logits(self, hidden))[1]
    )
    assert apart(gradient(monkeypatch, 7 * 103, lora), whole) < 1e-5
    assert max(asked) == 7


@pytest.mark.parametrize("lora", [None, LORA, LoRAConfig(rank=4, dropout=0.5)], ids=["full", "lora", "dropout"])
def test_a_layer_that_is_computed_again_computes_the_same(lora):
    """Its noise too; and its weights must not lose their gradient over it."""
    kept, again = (gradient(lora=lora, gradient_checkpointing=on) for on in (False, True))
    assert apart(again, kept) < 1e-5


def test_noise_differs_from_pass_to_pass_and_layer_to_layer():
    trainer = MlxTrainer(mlx_model(LoRAConfig(rank=4, dropout=0.5)), config.TrainerConfig(loss=config.PPOConfig()))
    (micro_batch,) = packs(samples(3, count=1))
    for layer in trainer.policy._model.layers:  # what adapters say of a blank second matrix is nothing
        layer.self_attn.q_proj.lora_B = mx.ones_like(layer.self_attn.q_proj.lora_B)
    trainer.policy.net.train()
    one, two = (np.array(trainer.policy.tokens(micro_batch).logprobs) for _ in range(2))
    assert np.abs(one - two).max() > 1e-3
    trainer.policy.net.eval()
    one, two = (np.array(trainer.policy.tokens(micro_batch).logprobs) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    trainer.close()


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_micro_batches_leave_nothing_behind(again):
    """A gradient that is put off keeps every activation it is made of: memory would grow with the micro-batches."""
    batch = [sample for seed in range(2) for sample in samples(seed)]
    trainer = MlxTrainer(mlx_model(), config.TrainerConfig(gradient_checkpointing=again))
    trainer.policy.net.train()
    held = []
    for micro_batch in packs(batch, 64):
        trainer.learner.backward(micro_batch, trainer.version)
        held.append(mx.get_active_memory())
    assert len(held) > 6
    assert max(held) - held[0] < 1 << 17
    trainer.close()


def test_steps_leave_nothing_behind():
    trainer = MlxTrainer(mlx_model(), config.TrainerConfig(kl=config.KLConfig(reference="ema"), micro_batch_tokens=64))
    held = []
    for seed in range(4):
        asyncio.run(trainer.step(list(samples(seed % 2))))
        asyncio.run(trainer.weights())
        held.append(mx.get_active_memory())
    assert max(held) - held[0] < 1 << 17
    trainer.close()


def broken(streams):
    return streams.logprobs[1:]


def test_a_loss_that_breaks_off_leaves_the_model_as_it_was():
    c = config.TrainerConfig(
        loss=config.CustomLossConfig(import_path=f"{__name__}:broken"), gradient_checkpointing=True
    )
    trainer = MlxTrainer(mlx_model(), c)
    before = asyncio.run(trainer.weights())
    with pytest.raises(TrainerError, match="give one per token"):
        asyncio.run(trainer.step(list(samples(0))))
    after = asyncio.run(trainer.weights())
    assert all(after.tensors[name] is array for name, array in before.tensors.items())
    assert after.canary == before.canary
    trainer.close()
