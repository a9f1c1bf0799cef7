"""The critic's value model in torch."""

from collections.abc import Callable, Mapping, Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.model import clone_model, trainable_parameters
from paceline.trainer.torch.forward import ForwardPass
from paceline.trainer.torch.optimizer import MasterAdamW
from paceline.trainer.torch.world import RankLayout, Ranks


class TorchValueModel(nn.Module):
    """On one device, or on ranks that each value their own samples. Frozen tensors are shared with the policy,
    trainable ones are its own."""

    def __init__(
        self, policy: PreTrainedModel, c: config.OptimizerConfig, total_steps: int | None, ranks: Ranks, compiled: bool
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self.body = clone_model(policy)
        names = trainable_parameters(policy).keys()
        unused = {id(p) for p in self.body.get_output_embeddings().parameters()}
        unused -= {id(p) for p in self.body.get_input_embeddings().parameters()}
        for name, parameter in self.body.named_parameters():
            parameter.requires_grad_(name in names and id(parameter) not in unused)
        self.value = nn.Linear(self.body.config.get_text_config().hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.forward_pass = ForwardPass(self.body, compiled=compiled, context=ranks.context)
        self.eval()
        self.optimizer = MasterAdamW(trainable_parameters(self), c, total_steps, RankLayout(policy.dtype))

    def forward(self, micro_batch: MicroBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Values of choosing at `positions`, read off the token before; and a zero that reaches every parameter."""
        dtype = self.value.weight.dtype
        values, zero = self.forward_pass.read(micro_batch, positions, lambda before, _: self.value(before.to(dtype)))
        return values[:, 0], zero + 0 * (self.value.weight.sum() + self.value.bias.sum())

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> NDArray:
        values, _ = self(micro_batch, self.forward_pass.send(micro_batch.loss_mask.nonzero()[0]))
        return values.cpu().numpy()

    def backward(
        self, micro_batch: MicroBatch, positions: NDArray, targets: Sequence[NDArray], loss_of: Callable[..., Tensor]
    ) -> Tensor:
        send = self.forward_pass.send
        values, anchor = self(micro_batch, send(positions))
        loss = loss_of(values, *map(send, targets))
        self.optimizer.backward(loss, anchor)
        return loss.detach()

    def clip(self, losses: list[Tensor]) -> tuple[float, float]:
        self._ranks.tokens.sum_gradients(self.optimizer.unsummed_masters)
        return self._ranks.data.sum(torch.stack(losses).sum()[None]).item(), self.optimizer.clip().item()

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: Mapping) -> None:
        """Its dropout draws from the generators that the policy restores."""
