"""The quickstart model twice, in torch and in MLX, with the same weights, samples and settings."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.config import trainer as config
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import MicroBatch, Sample, pack, token_scales
from paceline.model import attach_lora, load_model
from paceline.model.loading import trained_adapter
from paceline.model.mlx.loading import MlxModel, clone_model
from paceline.model.mlx.loading import load_model as load_mlx
from paceline.model.mlx.lora import attach_lora as attach_mlx
from paceline.model.mlx.lora import load_adapter
from paceline.trainer import TorchTrainer
from paceline.trainer.mlx.trainer import MlxTrainer
from paceline.weights.mlx_arrays import as_array
from samples import make_batch

SETTINGS = ModelConfig()


class Pair(NamedTuple):
    torch: TorchTrainer
    mlx: MlxTrainer

    def close(self) -> None:
        for trainer in self:
            trainer.close()


def mlx_model(lora: LoRAConfig | None = None) -> MlxModel:
    """With an adapter that starts as peft's does."""
    model = attach_mlx(clone_model(_loaded()), lora, 0)
    if lora is not None:
        tensors, _ = trained_adapter(torch_model(lora))
        load_adapter(model.net, {name: as_array(tensor) for name, tensor in tensors.items()})
    return model


@functools.cache
def _loaded() -> MlxModel:
    return load_mlx(SETTINGS)


def torch_model(lora: LoRAConfig | None = None):
    return attach_lora(load_model(SETTINGS, "cpu"), ModelConfig(lora=lora), seed=0)


def pair(lora: LoRAConfig | None = None, **settings: Any) -> Pair:
    c = config.TrainerConfig(threads=1, **settings)
    return Pair(TorchTrainer(torch_model(lora), c), MlxTrainer(mlx_model(lora), c))


@functools.cache
def samples(seed: int, count: int = 7, noise: float = 0.2) -> tuple[Sample, ...]:
    """All components, a KL reference's scores, and a sampler that is near the policy. Token 0 pads, and torch's
    embedding does not learn from it; it is not among these."""
    rng = np.random.default_rng(seed)
    trainer = TorchTrainer(load_model(SETTINGS, "cpu"), config.TrainerConfig(threads=1))
    out = []
    for sample in make_batch(seed, count=count):
        sample = sample.with_streams(token_ids=sample.token_ids + 1)
        (alone,) = pack([sample], token_scales([sample]), len(sample))
        pi = np.zeros(len(sample), np.float32)
        pi[sample.loss_mask] = trainer.policy.forward.scores(alone)
        apart = [rng.normal(0, noise, len(sample)) for _ in range(3)]
        near = [np.where(sample.loss_mask, np.minimum(pi + n, -1e-3), 0) for n in apart]
        out.append(sample.with_streams(logprobs=near[0], kl_ref_logprobs=near[1], teacher_logprobs=near[2]))
    trainer.close()
    return tuple(out)


def packs(batch: tuple[Sample, ...] | list[Sample], budget: int = 10_000, prox: bool = False) -> list[MicroBatch]:
    """With `prox` the policy at the batch's start is near the sampler."""
    rng = np.random.default_rng(0)
    packed = pack(list(batch), token_scales(list(batch)), budget)
    noise = [m.loss_mask * rng.normal(0, 0.1, len(m)).astype(np.float32) for m in packed if prox]
    return [replace(m, prox_logprobs=m.logprobs + n) for m, n in zip(packed, noise, strict=True)] if prox else packed


def mlx_gradient(trainer: MlxTrainer) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(g)) for name, g in trainer.learner.optimizer.gradients.items()}


def torch_gradient(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: master.grad for name, master in trainer.learner.optimizer.masters.items()}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far two sets of tensors are apart, as a share of their size."""
    assert one.keys() == other.keys()
    gap = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (gap / sum(float(t.double().square().sum()) for t in other.values())) ** 0.5
