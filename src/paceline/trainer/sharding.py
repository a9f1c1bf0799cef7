"""FSDP2: each rank keeps one part of every weight, and the whole of a layer only while it computes."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from paceline.config.parallel import Parallel
from paceline.model import trainable
from paceline.trainer.base import TrainerError
from paceline.trainer.layout import Layout, T, local
from paceline.trainer.world import World


def make_mesh(group: ProcessGroup, device: str, settings: Parallel) -> DeviceMesh:
    """The ranks in a row that shares one model; under `hybrid` in several rows, a model each."""
    ranks = torch.tensor(get_process_group_ranks(group))
    if settings.shard != "hybrid":
        return DeviceMesh(device, ranks, mesh_dim_names=("shard",))
    return DeviceMesh(device, ranks.view(settings.replicas, -1), mesh_dim_names=("replica", "shard"))


class Whole(nn.Module):
    """The root of a sharded model. Work called through it finds embeddings, last norm and head whole; the trainer calls
    decoder and head apart from each other, so the model's own forward pass is no root."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


class Sharded(Layout):
    """A model cut up by `shard`.

    What trains lies on the ranks in float32 and is rounded to the compute type on its way into a layer, so a rank's
    part of a parameter is its own master. Gradients come back in float32, summed over all ranks and never divided: the
    loss's scales hold the counts of all ranks already. Adapters are small and stay whole on every rank.
    """

    lockstep = True

    def __init__(self, root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._root, self._mesh = root, mesh
        self._parameters = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        self.shards = World(mesh.get_group("shard"), model.device)

    def run(self, work: Callable[[], T]) -> T:
        assert isinstance(self._root, FSDPModule)
        done = self._root(work)
        if not torch.is_grad_enabled():
            # No backward pass will: and until then the root would compute with the weights of now.
            self._root.reshard()
        return done

    def narrow(self, parameter: Tensor) -> torch.dtype:
        return self.dtype

    def like(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._parameters:
            return tensor
        spec = self._parameters[name]._spec
        assert spec.tensor_meta is not None
        # Not `from_local`, which would move what is kept on the host to the mesh's device.
        meta = spec.tensor_meta._replace(dtype=tensor.dtype)
        return DTensor(tensor, replace(spec, tensor_meta=meta), requires_grad=False)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._parameters:
            return tensor
        tensor = tensor.to(self._mesh.device_type, self.dtype)  # rounded first: half the bytes to send
        full = self.like(name, tensor)
        assert isinstance(full, DTensor)
        return full.full_tensor()

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if name not in self._parameters or self._parameters[name].shape != shape:
            return super().room(name, shape, dtype)
        return self.like(name, torch.empty_like(local(self._parameters[name].detach()), dtype=dtype))

    def state(self, model: nn.Module, keep: bool) -> dict[str, Tensor]:
        known = {id(p): name for name, p in self._parameters.items()}
        done: dict[int, Tensor] = {}  # tied tensors are one, also in the file
        out: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in done:
                full = self.whole(known.get(id(tensor), ""), local(tensor.detach()))
                done[id(tensor)] = full.cpu() if keep else full.new_empty(0)
            out[name] = done[id(tensor)]
        return out if keep else {}


def shard(model: PreTrainedModel, mesh: DeviceMesh, settings: Parallel) -> Sharded:
    """Cut a model up in place, layer by layer and then the rest. Each rank comes with the whole model."""
    dtype = model.dtype
    if others := {p.dtype for p in model.parameters()} - {dtype}:
        raise TrainerError(
            f"parts of the model are {', '.join(map(str, others))} and the rest {dtype}, which cannot be sharded "
            'together: set trainer.parallel.shard = "none"'
        )
    adapters = set(trainable(model).values()) if hasattr(model, "peft_config") else set()
    offload = settings.cpu_offload and mesh.device_type != "cpu"
    root = Whole(model)
    for module in (*_blocks(model), root):
        _widen(module, adapters)
        cut = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=module is not root,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            ignored_params=adapters,
        )
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return Sharded(root, model, mesh, dtype)


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def _widen(module: nn.Module, adapters: set[nn.Parameter]) -> None:
    """Float32 for what trains, just before it is cut: at no time is the whole model that wide."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter not in adapters and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()
