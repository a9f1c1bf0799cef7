"""Random samples for the trainer's laws, and what plain transformers say of them."""

import numpy as np
import torch

from conftest import VOCABULARY, tiny_model
from paceline.data import Sample, Ticket
from paceline.model import clone_model

PLAIN = {"ce_weights": None, "teacher_kl_weights": None, "teacher_logprobs": None}
"""Streams that leave rl alone."""


def make_sample(rng: np.random.Generator, length: int, number: int = 0, **streams) -> Sample:
    """A sequence with some sampled tokens, plausible logprobs and all three components mixed in."""
    mask = rng.random(length) < 0.6
    mask[0] = False
    mask[-1] = True
    values = {
        "token_ids": rng.integers(0, VOCABULARY, length),
        "loss_mask": mask,
        "versions": np.where(mask, 0, -1),
        "temperatures": rng.choice([0.7, 1.0, 1.4], length),
        "logprobs": np.where(mask, -rng.exponential(3.0, length), 0),
        "advantages": np.where(mask, rng.normal(size=length), 0),
        "ce_weights": np.where(~mask & (np.arange(length) > 0), 0.1, 0),
        "teacher_kl_weights": np.where(mask, rng.random(length) < 0.5, 0),
        "teacher_logprobs": np.where(mask, -rng.exponential(3.0, length), 0),
    }
    return Sample(**(values | streams), ticket=Ticket(number, "env", 0, number, number), env="env")


def make_batch(seed: int, count: int = 9, longest: int = 60, **streams) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [make_sample(rng, int(rng.integers(2, longest)), i, **streams) for i in range(count)]


def near_policy(batch, noise=0.2, seed=0):
    """The batch with behaviour log probabilities near what the tiny model says."""
    rng = np.random.default_rng(seed)
    out = []
    for sample, pi in zip(batch, plain_logprobs(tiny_model(), batch), strict=True):
        mu = np.minimum(pi.detach().numpy() + rng.normal(0, noise, len(sample)), -1e-3)
        out.append(sample.with_streams(logprobs=np.where(sample.loss_mask, mu, 0)))
    return out


def plain_logprobs(model, batch):
    """Each sample through transformers' own attention, one at a time, with full logits."""
    plain = clone_model(model)
    plain.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():  # the same tensors, so that gradients arrive
        module, _, leaf = name.rpartition(".")
        plain.get_submodule(module)._parameters[leaf] = parameter
    plain.tie_weights()
    out = []
    for s in batch:
        logits = plain(torch.from_numpy(s.token_ids)[None]).logits[0, :-1]
        logits = logits / torch.from_numpy(s.temperatures[1:])[:, None]
        logp = logits.log_softmax(-1).gather(-1, torch.from_numpy(s.token_ids[1:])[:, None])[:, 0]
        out.append(torch.cat([logp.new_zeros(1), logp]))
    return out


def rewarded(seed: int, count: int = 6) -> list[Sample]:
    """Samples with the reward on the last sampled token: one for an even last token."""
    out = []
    for s in near_policy(make_batch(seed, count=count, **PLAIN), noise=0.05):
        rewards = np.zeros(len(s))
        rewards[s.loss_mask.nonzero()[0][-1]] = float(s.token_ids[1] % 2 == 0)
        out.append(s.with_streams(advantages=None, rewards=rewards))
    return out
