"""The critic in torch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.model import trainable, twin
from paceline.trainer.critic import Critic, Lesson, value_loss
from paceline.trainer.forward import ForwardPass
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.world import RankLayout, Ranks, World


class ValueModel(nn.Module):
    """A copy of the policy with one number per token instead of logits. The new layer starts at zero, so that the first
    advantages are plain returns. Frozen tensors are shared with the policy, trainable ones are its own."""

    def __init__(self, policy: PreTrainedModel, compiled: bool, context: World | None = None) -> None:
        super().__init__()
        self.body = twin(policy)
        names = trainable(policy).keys()
        unused = {id(p) for p in self.body.get_output_embeddings().parameters()}
        unused -= {id(p) for p in self.body.get_input_embeddings().parameters()}
        for name, parameter in self.body.named_parameters():
            parameter.requires_grad_(name in names and id(parameter) not in unused)
        self.value = nn.Linear(self.body.config.get_text_config().hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.forwards = ForwardPass(self.body, compiled=compiled, context=context)

    def forward(self, micro_batch: MicroBatch, places: Tensor) -> tuple[Tensor, Tensor]:
        """Values of choosing at `places`, read off the token before; and a zero that reaches every parameter."""
        dtype = self.value.weight.dtype
        values, zero = self.forwards.read(micro_batch, places, lambda before, _: self.value(before.to(dtype)))
        return values[:, 0], zero + 0 * (self.value.weight.sum() + self.value.bias.sum())


class TorchCritic(Critic):
    """On one device, or on ranks that each judge their own samples."""

    _model: ValueModel
    _optimizer: MasterAdamW | None

    def __init__(self, policy: PreTrainedModel, c: config.TrainerConfig, total_steps: int | None, ranks: Ranks) -> None:
        super().__init__(c, total_steps)
        self._policy, self._ranks, self._device = policy, ranks, policy.device

    def _build(self, c: config.OptimizerConfig) -> MasterAdamW:
        compiled = self._trainer.compile is True and self._device.type == "cuda"
        self._model = ValueModel(self._policy, compiled, self._ranks.context).eval()
        return MasterAdamW(trainable(self._model), c, self._total, RankLayout(self._policy.dtype))

    @torch.no_grad()
    def _read(self, micro_batch: MicroBatch, places: NDArray) -> NDArray:
        values, _ = self._model(micro_batch, self._send(places))
        return values.cpu().numpy()

    def _gradient(self, packs: Sequence[MicroBatch], lessons: Sequence[Lesson]) -> tuple[float, float]:
        assert self._optimizer is not None
        self._model.train()
        losses = [self._backward(micro_batch, lessons, self._optimizer) for micro_batch in packs]
        self._model.eval()
        self._ranks.tokens.sum_gradients(self._optimizer.unsummed)
        return self._ranks.data.sum(torch.stack(losses).sum()[None]).item(), self._optimizer.clip().item()

    def _backward(self, micro_batch: MicroBatch, lessons: Sequence[Lesson], optimizer: MasterAdamW) -> Tensor:
        places, old, returns, scales = map(self._send, self._targets(micro_batch, lessons))
        values, anchor = self._model(micro_batch, places)
        loss = (value_loss(values, old, returns, self._config.value_clip) * scales).sum()
        optimizer.backward(loss, anchor)
        return loss.detach()

    def _send(self, stream: NDArray) -> Tensor:
        return torch.from_numpy(stream).to(self._device)

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        return self._ranks.data.sum(torch.from_numpy(np.array(numbers, np.float64))).tolist()
