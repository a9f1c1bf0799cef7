"""AdamW over float32 masters, gradient clipping, the tensors that train, and how they lie on the ranks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.model import trainable_parameters
from paceline.trainer.backend import Schedule
from paceline.trainer.torch.world import Ranks, World
from paceline.weights.update import MASK, fingerprint

T = TypeVar("T")


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


class RankLayout:
    """How a model's weights lie on the ranks. Plainly every rank, or the only one, holds all of them, and ranks need
    not keep step with each other.

    Of a model that `shard` has cut its ranks are given. Under FSDP it has a `root`: what trains lies on the ranks in
    float32 and is rounded to the compute type on its way into a layer, so a rank's part of a parameter is its own
    master. Gradients come back in float32, summed over all ranks and never divided: the loss's scales hold the counts
    of all ranks already. Adapters are small and stay whole on every rank.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        model: nn.Module | None = None,
        ranks: Ranks | None = None,
        root: Any = None,
        partial: frozenset[str] = frozenset(),
    ) -> None:
        self.dtype = dtype
        """What the model computes in and publishes."""
        self.is_sharded = ranks is not None
        """The model's tensors lie on several ranks: all must run equally many forward and backward passes."""
        self._ranks, self._root, self._partial = ranks, root, partial
        named = [] if model is None else model.named_parameters()
        self._parameters = {name: p for name, p in named if isinstance(p, DTensor)}
        self._device = None if ranks is None else ranks.device
        self._tensor = World(None, torch.device("cpu")) if ranks is None else ranks.subgroup("tensor")
        self.shards = None if ranks is None else self._tensor
        """The ranks that share one model between them, where one is shared."""
        if ranks is not None and root is not None:
            self.shards = ranks.subgroup("shard", "context", "tensor")

    def of_parent(self, parent: nn.Module, name: str) -> "RankLayout":
        """The layout of a module that holds the model under this name, beside whole parameters of its own."""
        partial = frozenset(f"{name}.{path}" for path in self._partial)
        return RankLayout(self.dtype, parent, self._ranks, self._root, partial)

    def run_forward(self, work: Callable[[], T]) -> T:
        """Do work that needs the model's own weights: a forward pass and the head after it."""
        if self._root is None:
            return work()
        done = self._root(work)
        if not torch.is_grad_enabled():
            # No backward pass will: and until then the root would compute with the weights of now.
            self._root.reshard()
        return done

    def is_summed(self, name: str) -> bool:
        """Whether a parameter's gradient comes as the sum over all ranks."""
        return self._root is not None and name in self._parameters

    def replica_count(self, name: str) -> int:
        """How many of `shards` hold the same part of a parameter."""
        assert self.shards is not None
        return self.shards.size // prod(self._cuts(name).values())

    def sync_replicated(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Make the gradients of replicated parameters equal on all ranks. Every rank must ask, once per step."""
        whole = [name for name in masters if "tensor" not in self._cuts(name)]
        if self._tensor.size == 1 or not whole:
            return
        self._tensor.sum_gradients(masters[name] for name in whole)
        # The other gradients are the same but for rounding, by which ranks must not drift apart: all take the mean.
        same = [masters[name].grad for name in whole if name not in self._partial]
        torch._foreach_div_([grad for grad in same if grad is not None], self._tensor.size)

    def _cuts(self, name: str) -> dict[str, int]:
        """Into how many parts a parameter is cut along which dimension of the mesh."""
        if name not in self._parameters:
            return {}
        parameter = self._parameters[name]
        mesh = parameter.device_mesh
        sizes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        return {dimension: size for dimension, size, placement in sizes if not placement.is_replicate()}

    def shard_like(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of something shaped like a parameter, as a tensor that knows where it belongs."""
        if name not in self._parameters:
            return tensor
        spec = self._parameters[name]._spec
        assert spec.tensor_meta is not None
        # Not `from_local`, which would move what is kept on the host to the mesh's device.
        meta = spec.tensor_meta._replace(dtype=tensor.dtype)
        return DTensor(tensor, replace(spec, tensor_meta=meta), requires_grad=False)

    def full_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """All ranks' parts of something shaped like a parameter; every rank must ask."""
        if name not in self._parameters:
            return tensor
        tensor = tensor.to(self._device, self.dtype)  # rounded first: half the bytes to send
        full = self.shard_like(name, tensor)
        assert isinstance(full, DTensor)
        for done in range(1, len(full.placements) + 1):  # what is cut twice comes together in two steps
            full = full.redistribute(placements=(Replicate(),) * done + full.placements[done:])
        return full.to_local()

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for this rank's part of a tensor that a checkpoint holds under a parameter's name."""
        if name not in self._parameters or self._parameters[name].shape != shape:
            return torch.empty(shape, dtype=dtype)
        return self.shard_like(name, torch.empty_like(local_shard(self._parameters[name].detach()), dtype=dtype))

    def fingerprint(self, tensors: Mapping[str, Tensor]) -> str:
        """Of the whole tensors, one at a time: fingerprints add up."""
        parts = (fingerprint([(name, self.full_tensor(name, tensor))]) for name, tensor in tensors.items())
        return f"{sum(int(part, 16) for part in parts) & MASK:016x}"

    def state(self, model: nn.Module, keep: bool) -> dict[str, Tensor]:
        """The model's state dict with whole tensors in the type it computes in, for a rank that keeps it. Every rank
        must ask. One tensor at a time: all at once would not fit beside the model."""
        if not self.is_sharded:
            return dict(model.state_dict()) if keep else {}
        known = {id(p): name for name, p in self._parameters.items()}
        done: dict[int, Tensor] = {}  # tied tensors are one, also in the file
        out: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in done:
                full = self.full_tensor(known.get(id(tensor), ""), local_shard(tensor.detach()))
                done[id(tensor)] = full.cpu() if keep else full.new_empty(0)
            out[name] = done[id(tensor)]
        return out if keep else {}


class TorchTensors:
    """The tensors of a model that train, for the KL reference to copy and replace; of a sharded one, this rank's part.
    With `offload` copies of them are kept in the host's memory."""

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
        """The policy's tensors of these names, safe from `put`."""
        return {name: (p := self._parameters[name]).to(self._place or p.device, copy=True) for name in names}

    def copy(self, tensor: Tensor, wide: bool) -> Tensor:
        """A tensor to keep, in float32 if `wide`."""
        dtype = self._layout.dtype if self._layout.is_sharded else tensor.dtype  # sharded ones are kept wider
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
        """A copy as a checkpoint writes it: this rank's part."""
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
        """The gradient so far; what is added from here on is another one."""
        held = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        self.zero()
        return held

    @torch.no_grad()
    def add_gradients(self, held: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Add a gradient that was set aside, times a factor. It is used up."""
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
        """Scale the gradient down to its allowed norm; answers with the norm before. Once per step, since a scaled
        loss's gradient gets its true size here. All ranks must call it."""
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
