"""AdamW over float32 masters, gradient clipping, and the tensors that train."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.model import trainable_parameters
from paceline.trainer.backend import Schedule
from paceline.trainer.torch.world import RankLayout, local_shard


class TorchTensors:
    """The tensors of a model that train; of a sharded one, this rank's part. With `offload` copies of them are kept in
    the host's memory."""

    def __init__(self, model: PreTrainedModel, layout: RankLayout, offload: bool) -> None:
        self._layout = layout
        self._parameters = {name: local_shard(p.detach()) for name, p in trainable_parameters(model).items()}
        self._place = torch.device("cpu") if offload else None
        self.adapters_only = hasattr(model, "peft_config")

    def current(self) -> dict[str, Tensor]:
        return self._parameters

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    def set_aside(self, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: (p := self._parameters[name]).to(self._place or p.device, copy=True) for name in names}

    def copy(self, tensor: Tensor, wide: bool) -> Tensor:
        dtype = self._layout.compute_dtype(tensor)
        kept = tensor.to(self._place or tensor.device, copy=True)
        return kept.to(torch.float32 if wide and dtype.itemsize < 4 else dtype)

    @torch.no_grad()
    def copy_into(self, kept: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            kept[name].copy_(local_shard(tensor))

    @torch.no_grad()
    def average_into(self, kept: dict[str, Tensor], name: str, master: Tensor, weight: float) -> None:
        kept[name].lerp_(master.to(kept[name].device), weight)

    def for_checkpoint(self, name: str, tensor: Tensor) -> Tensor:
        return self._layout.shard_like(name, tensor)

    def fingerprint(self, kept: Mapping[str, Tensor]) -> str:
        return self._layout.fingerprint(kept)


class MasterAdamW:
    """AdamW whose masters, moments and gradient sums are float32, whatever the model computes in.

    A float32 model is its own master. Otherwise each backward pass's gradient is moved into the master's at once, so
    that sums over micro-batches are never rounded to the compute type. Offloaded, masters and all that hangs on them
    live in the host's memory, and the model gets only the rounded result. Of a sharded parameter all of this is this
    rank's part.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        c: config.OptimizerConfig,
        total_steps: int | None,
        layout: RankLayout | None = None,
    ) -> None:
        self._layout = layout or RankLayout(torch.float32)
        self._config = c
        self.schedule = Schedule(c, total_steps, self._layout.dtype == torch.float16)
        self._parameters = dict(parameters)
        self.masters = {name: _master(p, c.offload) for name, p in self._parameters.items()}
        pairs = [(self.masters[name], p) for name, p in self._parameters.items()]
        self._apart = [(master, p) for master, p in pairs if master is not p]
        """Masters whose gradients arrive elsewhere."""
        self._rounded = [(master, local_shard(p.detach())) for master, p in pairs if not _in_place(p, c.offload)]
        """Masters whose values the model holds a copy of."""
        self._adam = torch.optim.AdamW(
            self.masters.values(), lr=c.lr, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay, fused=True
        )

    @property
    def unsummed_masters(self) -> list[nn.Parameter]:
        """Masters whose gradients are this rank's alone: a sharded parameter's come summed."""
        return [master for name, master in self.masters.items() if not self._layout.is_summed(name)]

    def backward(self, loss: Tensor, anchor: Tensor, retain_graph: bool = False) -> None:
        """Add a loss's gradient to the masters', scaled until `clip`. The anchor is a zero that gives every parameter a
        gradient even when no token trains; it may be float16, to which a scale can be infinite. `retain_graph`:
        another loss of the same forward pass follows."""
        (loss * self.schedule.scale + anchor).backward(retain_graph=retain_graph)
        self.gather()

    def take_gradients(self) -> dict[str, Tensor]:
        held = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        self.zero()
        return held

    @torch.no_grad()
    def add_gradients(self, held: Mapping[str, Tensor], factor: float = 1.0) -> None:
        for name, gradient in held.items():
            master = self.masters[name]
            gradient = gradient if factor == 1 else gradient.mul_(factor)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    @torch.no_grad()
    def gather(self) -> None:
        """Move fresh gradients into the masters'. Call after each backward pass."""
        begun: list[tuple[Tensor, Tensor]] = []
        for master, parameter in self._apart:
            if parameter.grad is not None and master.grad is not None:
                begun.append((master.grad, local_shard(parameter.grad).to(master.device)))
            elif parameter.grad is not None:
                master.grad = local_shard(parameter.grad).to(master)
            parameter.grad = None
        if begun:
            sums, grads = zip(*begun, strict=True)
            torch._foreach_add_(list(sums), list(grads))

    def clip(self) -> Tensor:
        if self.schedule.scale != 1:
            torch._foreach_div_(_gradients(self.masters.values()), self.schedule.scale)
        norm = self._norm()
        nn.utils.clip_grads_with_norm_(self.masters.values(), self._config.max_grad_norm, norm)
        return norm

    def _norm(self) -> Tensor:
        """Of the whole gradient, wherever its parts are."""
        if self._layout.shards is None:
            return nn.utils.get_total_norm(_gradients(self.masters.values()))
        alike: dict[int, list[nn.Parameter]] = {}
        for name, master in self.masters.items():
            alike.setdefault(self._layout.replica_count(name), []).append(master)
        norms = {copies: nn.utils.get_total_norm(_gradients(some)).double() for copies, some in alike.items()}
        squares = torch.stack([norm.square() / copies for copies, norm in norms.items()])
        return self._layout.shards.sum(squares.sum()[None])[0].sqrt().float()

    @torch.no_grad()
    def step(self) -> None:
        for group in self._adam.param_groups:
            group["lr"] = self.schedule.lr
        self._adam.step()
        self.schedule.count_step()
        if self._rounded:
            masters, parameters = zip(*self._rounded, strict=True)
            torch._foreach_copy_(list(parameters), list(masters))
        self.zero()

    def zero(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        out = {
            f"master/{name}": self._layout.shard_like(name, master.detach()) for name, master in self.masters.items()
        }
        for name, master in self.masters.items():
            state = self._adam.state.get(master, {})
            held = [key for key in ("exp_avg", "exp_avg_sq") if key in state]
            out |= {f"{key}/{name}": self._layout.shard_like(name, state[key]) for key in held}
        return out

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], steps: int, scale: float | None = None) -> None:
        self.schedule.load(steps, scale)
        self._adam.state.clear()
        for name, master in self.masters.items():
            master.copy_(local_shard(tensors[f"master/{name}"]))
            local_shard(self._parameters[name].detach()).copy_(master)
            if f"exp_avg/{name}" in tensors:
                self._adam.state[master] = {
                    "step": torch.tensor(float(steps), device=master.device),
                    "exp_avg": local_shard(tensors[f"exp_avg/{name}"]).to(master.device, copy=True),
                    "exp_avg_sq": local_shard(tensors[f"exp_avg_sq/{name}"]).to(master.device, copy=True),
                }


def _in_place(parameter: nn.Parameter, offload: bool) -> bool:
    return parameter.dtype == torch.float32 and not offload


def _master(parameter: nn.Parameter, offload: bool) -> nn.Parameter:
    if _in_place(parameter, offload):
        return nn.Parameter(local_shard(parameter.detach())) if isinstance(parameter, DTensor) else parameter
    place = torch.device("cpu") if offload else parameter.device
    return nn.Parameter(local_shard(parameter.detach()).to(place, torch.float32, copy=True))


def _gradients(masters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [master.grad for master in masters if master.grad is not None]
