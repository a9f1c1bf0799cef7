"""The trainer under law: torch's, or MLX's where the environment says `PACELINE_BACKEND=mlx`.

The laws are the same and so are their oracles, models and numbers in torch. What differs is here: how a trainer is made
of such a model, how a loss is differentiated, and how a test reaches what it looks at.
"""

import functools
import json
import os
import tempfile
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.model import trainable_parameters
from paceline.trainer.critic import value_loss
from paceline.trainer.loss import Loss, LossStats
from paceline.trainer.terms import TrainedTokens

MLX = os.environ.get("PACELINE_BACKEND", "torch") == "mlx"


def torch_only(why: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(MLX, reason=why)


NO_OFFLOAD = torch_only("MLX has one memory, and nowhere to offload to")
EXACT = 1e-6 if MLX else 1e-9
"""How far a loss in float64 may be off: of what mlx says of exp(x) only float32 is right."""


class Slope(NamedTuple):
    """A loss, its sums, and its gradient."""

    loss: float
    sums: LossStats
    logprobs: NDArray
    entropy: NDArray


if MLX:
    import mlx.core as mx

    from paceline.config.model import LoRAConfig, ModelConfig
    from paceline.model.loading import trained_adapter
    from paceline.model.mlx.loading import MlxModel, clone_model, load_model
    from paceline.model.mlx.lora import attach_lora, load_adapter
    from paceline.trainer.mlx.optimizer import flatten_tree, unflatten_tree
    from paceline.trainer.mlx.trainer import MlxTrainer
    from paceline.weights.mlx_arrays import as_array

    LIBRARY = "an mlx array"

    @functools.cache
    def _loaded(described: str, kind: type, dtype: str) -> MlxModel:
        """A model of this config, with whatever weights."""
        with tempfile.TemporaryDirectory() as folder:
            kind._from_config(kind.config_class.from_dict(json.loads(described))).save_pretrained(folder)
            return load_model(ModelConfig(name=folder, dtype=dtype))

    def as_mlx(model: PreTrainedModel) -> MlxModel:
        """The same weights in MLX, the adapter too if there is one."""
        dtype = str(model.dtype).removeprefix("torch.")
        made = clone_model(_loaded(model.config.to_json_string(use_diff=False), type(model), dtype))
        base = {name: p for name, p in model.named_parameters() if "lora_" not in name}
        made.net.update(unflatten_tree({name.replace(".base_layer.", "."): as_array(p) for name, p in base.items()}))
        if (adapter := trained_adapter(model)) is not None:
            peft = model.peft_config["default"]
            lora = LoRAConfig(
                rank=peft.r, alpha=peft.lora_alpha, dropout=peft.lora_dropout, targets=sorted(peft.target_modules)
            )
            attach_lora(made, lora, 0)
            load_adapter(made.net, {name: as_array(tensor) for name, tensor in adapter[0].items()})
        return made

    def trainer_of(model: PreTrainedModel, c: config.TrainerConfig, **more: Any) -> MlxTrainer:
        return MlxTrainer(as_mlx(model), c, **more)

    def _torch(array: mx.array) -> Tensor:
        half = array.dtype == mx.bfloat16
        tensor = torch.from_numpy(np.ascontiguousarray(array.astype(mx.float32) if half else array))
        return tensor.bfloat16() if half else tensor

    def as_numpy(array: Any) -> NDArray:
        return np.array(array)

    def weights_of(trainer: MlxTrainer) -> dict[str, Tensor]:
        """What trains, as it is now, by torch's names."""
        return {name: _torch(array) for name, array in trainer.policy.parameters.current().items()}

    def put_weights(trainer: MlxTrainer, tensors: dict[str, Tensor]) -> None:
        trainer.policy.parameters.put({name: as_array(t) for name, t in tensors.items()})
        trainer.learner.optimizer.masters |= {name: as_array(t).astype(mx.float32) for name, t in tensors.items()}

    def gradient_of(trainer: MlxTrainer) -> Tensor:
        """All of it as it stands, in the order of names."""
        optimizer = trainer.learner.optimizer
        parts = [optimizer.gradients.get(name, mx.zeros_like(m)) for name, m in sorted(optimizer.masters.items())]
        return torch.cat([_torch(part).view(-1) for part in parts]).double()

    def tensors_of(trainer: MlxTrainer) -> dict[str, Tensor]:
        """Masters, moments and whatever else a checkpoint keeps."""
        return {name: _torch(array) for name, array in trainer.learner.tensors().items()}

    def shared_with_critic(trainer: MlxTrainer) -> dict[str, bool]:
        """Which of the policy's arrays the critic's value model holds too, by its own names."""
        value = flatten_tree(trainer.learner._critic._model.parameters())
        policy = flatten_tree(trainer.policy.net.parameters())
        return {f"body.{name}": value.get(f"body.{name}") is array for name, array in policy.items()}

    def value_slope(values: NDArray, old: NDArray, returns: NDArray, clip: float) -> tuple[NDArray, NDArray]:
        with mx.stream(mx.cpu):
            columns = [mx.array(x, mx.float64) for x in (values, old, returns)]
            gradient = mx.grad(lambda v: value_loss(v, *columns[1:], clip).sum())(columns[0])
            return np.array(value_loss(*columns, clip)), np.array(gradient)

    def tokens_of(trainer: MlxTrainer, micro_batch: MicroBatch) -> TrainedTokens:
        return trainer.policy.tokens(micro_batch)

    def tokens(streams: dict[str, NDArray], names: tuple[str, ...]) -> TrainedTokens:
        with mx.stream(mx.cpu):  # which has float64 everywhere
            kinds = {name: mx.float64 if x.dtype == np.float64 else None for name, x in streams.items()}
            return TrainedTokens(names=names, **{name: mx.array(x, kinds[name]) for name, x in streams.items()})

    def slope(c: config.TrainerConfig, streams: dict[str, NDArray], names: tuple[str, ...]) -> Slope:
        """A loss at these numbers."""

        def value(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
            loss, sums = Loss(c)(TrainedTokens(names=names, logprobs=logprobs, entropy=entropy, **rest), 0)
            return loss, sums.values

        with mx.stream(mx.cpu):
            made = tokens(streams, names)
            rest = {name: getattr(made, name) for name in streams if name not in ("logprobs", "entropy")}
            (loss, sums), grads = mx.value_and_grad(value, (0, 1))(made.logprobs, made.entropy)
            mx.eval(loss, sums, grads)
        return Slope(loss.item(), LossStats(sums), *map(np.array, grads))

else:
    from paceline.trainer import TorchTrainer as trainer_of
    from paceline.trainer.torch.optimizer import local_shard

    LIBRARY = "a torch tensor"

    def as_numpy(array: Any) -> NDArray:
        return array.detach().numpy()

    def weights_of(trainer: trainer_of) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in trainable_parameters(trainer.policy.net).items()}

    def put_weights(trainer: trainer_of, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                trainable_parameters(trainer.policy.net)[name].copy_(tensor)

    def gradient_of(trainer: trainer_of) -> Tensor:
        masters = [master for _, master in sorted(trainer.learner.optimizer.masters.items())]
        return torch.cat([(torch.zeros_like(m) if m.grad is None else m.grad).view(-1) for m in masters]).double()

    def tensors_of(trainer: trainer_of) -> dict[str, Tensor]:
        return {name: local_shard(tensor).clone() for name, tensor in trainer.learner.tensors().items()}

    def shared_with_critic(trainer: trainer_of) -> dict[str, bool]:
        body = dict(trainer.learner._critic._model.body.named_parameters())
        policy = trainer.policy.net.named_parameters()
        return {f"body.{name}": body[name].data_ptr() == p.data_ptr() for name, p in policy}

    def value_slope(values: NDArray, old: NDArray, returns: NDArray, clip: float) -> tuple[NDArray, NDArray]:
        columns = [torch.from_numpy(x) for x in (values, old, returns)]
        loss = value_loss(columns[0].requires_grad_(), *columns[1:], clip)
        (gradient,) = torch.autograd.grad(loss.sum(), columns[0])
        return loss.detach().numpy(), gradient.numpy()

    def tokens_of(trainer: trainer_of, micro_batch: MicroBatch) -> TrainedTokens:
        return trainer.policy.tokens(micro_batch)[0]

    def tokens(streams: dict[str, NDArray], names: tuple[str, ...]) -> TrainedTokens:
        return TrainedTokens(names=names, **{name: torch.from_numpy(x) for name, x in streams.items()})

    def slope(c: config.TrainerConfig, streams: dict[str, NDArray], names: tuple[str, ...]) -> Slope:
        made = tokens(streams, names)
        for leaf in (made.logprobs, made.entropy):
            leaf.requires_grad_().grad = None
        loss, sums = Loss(c)(made, 0)
        loss.backward()
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (made.logprobs, made.entropy)]
        return Slope(loss.item(), sums, *(grad.numpy() for grad in grads))


def critic_of(trainer: Any) -> dict[str, Tensor]:
    """What a checkpoint keeps of the critic; nothing where none was made."""
    held = tensors_of(trainer).items()
    return {name.removeprefix("critic/"): tensor for name, tensor in held if name.startswith("critic/")}
