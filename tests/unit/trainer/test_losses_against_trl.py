"""Where TRL has the same loss, ours is the same number with the same gradient: theirs is really executed."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.config import trainer as config
from paceline.data import Sample, Ticket, pack, token_scales
from paceline.trainer.terms import SCALES, STREAMS
from trainers import slope

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs trl")

ROWS, WIDTH, PROMPT, MAX_LENGTH = 5, 9, 3, 12


def batch(seed: int) -> SimpleNamespace:
    """Right-padded completions of several lengths, as TRL holds them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, WIDTH + 1, ROWS)
    pi = -rng.exponential(1.5, (ROWS, WIDTH)).astype(np.float32)
    return SimpleNamespace(
        lengths=lengths,
        mask=np.arange(WIDTH) < lengths[:, None],
        pi=pi,
        old=pi + rng.normal(0, 0.3, pi.shape).astype(np.float32),
        ref=pi + rng.normal(0, 0.7, pi.shape).astype(np.float32),
        advantages=rng.normal(size=ROWS).astype(np.float32),
    )


def theirs(b: SimpleNamespace, loss_type: str, level: str, low: float, high: float, beta: float, delta: float | None):
    """TRL's own `_compute_loss` on our tensors: a trainer without its constructor, whose model's answer is `b.pi`."""
    trainer = object.__new__(grpo_trainer.GRPOTrainer)
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    trainer.epsilon_low, trainer.epsilon_high, trainer.beta = low, high, beta
    trainer.args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.aux_loss_enabled = trainer.use_vllm = trainer._entropy_bonus_enabled = False
    trainer.vllm_importance_sampling_correction = False
    trainer.current_gradient_accumulation_steps, trainer.max_completion_length = 1, MAX_LENGTH
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer._metrics = {"train": defaultdict(list)}
    pi = torch.tensor(b.pi, requires_grad=True)
    answer = (pi, torch.zeros_like(pi), None)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: answer
    mask = torch.tensor(b.mask).int()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.zeros(ROWS, PROMPT, dtype=torch.long),
            "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.int),
            "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.long),
            "completion_mask": mask,
            "advantages": torch.tensor(b.advantages),
            "old_per_token_logps": torch.tensor(b.old),
            "ref_per_token_logps": torch.tensor(b.ref),
            "num_items_in_batch": mask.sum().float(),
        },
    )
    loss.backward()
    return loss.item(), pi.grad.numpy()[b.mask]


def ours(b: SimpleNamespace, c: config.TrainerConfig):
    """The same batch as samples, scaled, packed and summed our way."""

    def stream(row: int, values) -> np.ndarray:
        return np.concatenate([np.zeros(PROMPT), values[row][: b.lengths[row]]])

    samples = []
    for row in range(ROWS):
        mask = stream(row, b.mask).astype(bool)
        samples.append(
            Sample(
                token_ids=np.zeros(len(mask)),
                loss_mask=mask,
                versions=np.where(mask, 0, -1),
                temperatures=np.ones(len(mask)),
                logprobs=stream(row, b.old),
                kl_ref_logprobs=stream(row, b.ref),
                advantages=mask * b.advantages[row],
                ticket=Ticket(row, "env", 0, row, row),
            )
        )
    loss, grads = 0.0, {}
    for m in pack(samples, token_scales(samples, c.normalise, c.fixed_length), budget=2 * (PROMPT + WIDTH)):
        trained = m.rl_scale.nonzero()[0]
        owners = np.repeat(m.members, m.lengths)[trained]
        pi = np.concatenate([stream(i, b.pi) for i in m.members])[trained].astype(np.float32)
        streams = {name: getattr(m, name)[trained] for name in (*STREAMS, *SCALES)}
        streams |= {"logprobs": pi, "rollout_logprobs": m.logprobs[trained], "entropy": np.zeros_like(pi)}
        streams["segments"] = np.repeat(np.arange(len(m.members)), m.lengths)[trained]
        if c.proximal is not None:  # TRL's old policy is the one at the batch's start
            streams["prox_logprobs"] = streams["rollout_logprobs"]
        part = slope(c, streams, m.names)
        loss += part.loss
        grads |= {i: part.logprobs[owners == i] for i in m.members}
    return loss, np.concatenate([grads[i] for i in range(ROWS)])


CLIP = {"low": 0.2, "high": 0.28, "beta": 0.0, "delta": None}
PPO = config.PPOConfig(clip_low=0.2, clip_high=0.28)
CASES = {
    "grpo": (CLIP | {"loss_type": "grpo", "level": "token"}, {"loss": PPO, "normalise": "sample"}),
    "grpo with kl": (
        CLIP | {"loss_type": "grpo", "level": "token", "beta": 0.04},
        {"loss": PPO, "normalise": "sample", "kl": config.KLConfig(kind="k3", coef=0.04)},
    ),
    "grpo, two-sided": (
        CLIP | {"loss_type": "grpo", "level": "token", "delta": 1.5},
        {"loss": config.PPOConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.5), "normalise": "sample"},
    ),
    "dr_grpo": (
        CLIP | {"loss_type": "dr_grpo", "level": "token"},
        {"loss": PPO, "normalise": "fixed", "fixed_length": MAX_LENGTH},
    ),
    "dapo": (CLIP | {"loss_type": "dapo", "level": "token"}, {"loss": PPO, "normalise": "token"}),
    "gspo": (
        CLIP | {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
        {"loss": config.GSPOConfig(), "normalise": "sample"},
    ),
    "gspo, wide": (
        CLIP | {"loss_type": "grpo", "level": "sequence", "low": 0.1, "high": 0.2},
        {"loss": config.GSPOConfig(clip_low=0.1, clip_high=0.2), "normalise": "sample"},
    ),
    "cispo": (
        CLIP | {"loss_type": "cispo", "level": "token", "high": 1.2},
        {"loss": config.CISPOConfig(max_ratio=1.2), "normalise": "token"},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(8))
def test_our_loss_is_trls(name, seed):
    their_settings, our_settings = CASES[name]
    b = batch(seed)
    expected, expected_grad = theirs(b, **their_settings)
    loss, grad = ours(b, config.TrainerConfig(**our_settings))
    assert loss == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-5)
    assert np.abs(grad).max() > 1e-3
