"""Shards a model over ranks, by FSDP2, by tensor parallelism, or by both.

FSDP2: a rank keeps one part of every weight, and the whole of a layer only while it computes. Tensor parallelism: of
each matrix only the part it computes with, by the plan transformers has for the model. Both: a part of that part.

A block's first matrices are cut by rows of their output, so that a rank has some of the heads, or of the MLP's inner
features; its last ones by their input, so that the ranks' results add up to the whole. What lies between works on a
rank's own part; embeddings, norms and head are whole on every rank.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from paceline.config.cluster import ParallelConfig
from paceline.errors import TrainerError
from paceline.model import LMHead, trainable_parameters
from paceline.model.attention import UnsupportedModel
from paceline.model.head import make_canary
from paceline.model.support import attention_shape
from paceline.trainer.torch.optimizer import RankLayout, T
from paceline.trainer.torch.world import Ranks

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
STYLES = {
    COLUMNS: ColwiseParallel,
    ROWS: RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
WHOLE = ("embed_tokens", "norm", "lm_head")
"""Outside the layers, and kept whole: a plan for them would only move logits about."""


class TensorParallelPlan:
    """Which module of a model is cut in which way, and which whole ones see only a rank's own part of the features."""

    def __init__(self, model: PreTrainedModel, ranks: int) -> None:
        if hasattr(model, "peft_config"):
            raise TrainerError(
                f"trainer.parallel.tensor = {ranks} cuts matrices whose adapters would have to be cut with them: leave "
                '[model.lora] out, or set tensor = 1 and shard = "full", which cuts the frozen weights'
            )
        decoder = model.get_decoder()
        prefix = next(f"{name}." for name, module in model.named_modules() if module is decoder)
        wanted = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
        planned = {name: wanted.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name, _ in decoder.named_modules()}
        styles = {f"{prefix}{name}": style for name, style in planned.items() if style and name not in WHOLE}
        self._styles = {name: style for name, style in styles.items() if style in STYLES}
        self.summed = frozenset(f"{name}.weight" for name, style in styles.items() if style == SUMMED)
        """Parameters that are whole on every rank and get gradients from its own part alone: they add up."""
        if problem := next(self._problems(model, ranks, styles), None):
            raise TrainerError(f"trainer.parallel.tensor = {ranks}: {problem}")

    def block_styles(self, model: nn.Module, block: nn.Module) -> dict[str, ParallelStyle]:
        path = next(name for name, module in model.named_modules() if module is block)
        inside = {name.removeprefix(f"{path}."): s for name, s in self._styles.items() if name.startswith(f"{path}.")}
        return {name: STYLES[style]() for name, style in inside.items()}

    def _problems(self, model: PreTrainedModel, ranks: int, styles: Mapping[str, str]) -> Iterator[str]:
        """Reasons against cutting a model by these styles, as the ends of sentences."""
        kind, instead = type(model).__name__, 'set tensor = 1 and shard = "full"'
        if not styles:
            yield (
                f"transformers has no tensor plan for {kind}; {instead}, which divides the memory of weights and "
                "optimizer by the ranks"
            )
        for name, style in styles.items():
            if style not in STYLES and style != SUMMED:
                yield f"{kind} wants `{name}` laid out as `{style}`, which is not supported; {instead}"
        heads = dict.fromkeys(
            pair
            for layer in attention_shape(model).values()
            for pair in (("key and value heads", layer.kv_heads), ("attention heads", layer.heads))
        )
        for what, number in heads:
            if number % ranks:
                yield f"{kind} has {number} {what}, which cannot be dealt evenly; set tensor to a divisor of {number}"
        for name, style in self._styles.items():
            weight = model.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            size = weight.shape[0 if style.startswith(COLUMNS) else 1]
            if size % ranks:
                yield f"the {size} features of `{name}` cannot be dealt evenly; set tensor to a divisor of {size}"
        # A whole parameter beside cut ones would see a part of the features, and its gradients would not be summed.
        beside = {name.rpartition(".")[0] for name, style in self._styles.items() if style == COLUMNS}
        for name, _ in model.named_parameters():
            module = name.rpartition(".")[0]
            if module.rpartition(".")[0] in beside and module not in self._styles and name not in self.summed:
                yield (
                    f"transformers' tensor plan for {kind} says nothing of `{name}`, which lies among cut matrices; "
                    f"{instead}"
                )


def check_same(kind: str, before: tuple[float, ...], after: tuple[float, ...], tolerance: float) -> None:
    """A plan that fits the names but not the code behind them gives itself away at a few tokens."""
    apart = sum(abs(a - b) for a, b in zip(before, after, strict=True)) / len(before)
    if not apart <= tolerance:
        raise UnsupportedModel(
            f"{kind}: cut by transformers' tensor plan it computes something else than whole (log probabilities are "
            f"{apart:.2g} apart); set trainer.parallel.tensor = 1"
        )


class ShardedRoot(nn.Module):
    """The root of a sharded model. Work called through it finds embeddings, last norm and head whole; the trainer calls
    decoder and head apart from each other, so the model's own forward pass is no root."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def shard(model: PreTrainedModel, ranks: Ranks, settings: ParallelConfig) -> RankLayout:
    """Cut a model up in place, layer by layer and then the rest. Each rank comes with the whole model; without tensor
    parallelism it may still lie on the host, and of each layer only this rank's part stays on the device. The result of
    `empty_copy` is cut alike."""
    if not settings.divides_model:
        return RankLayout(model.dtype)
    plan = TensorParallelPlan(model, settings.tensor) if settings.tensor > 1 else None
    head, dtype, mesh = LMHead(model), model.dtype, ranks.mesh
    before = make_canary(model, head) if plan is not None and not _is_empty(model) else None
    if others := {p.dtype for p in model.parameters()} - {dtype}:
        raise TrainerError(
            f"parts of the model are {', '.join(map(str, others))} and the rest {dtype}, which cannot be sharded "
            'together: set trainer.parallel.shard = "none"'
        )
    adapters = set(trainable_parameters(model).values()) if hasattr(model, "peft_config") else set()
    for adapter in () if _is_empty(model) else adapters:
        adapter.data = adapter.data.to(ranks.device)
    root = None if settings.shard == "none" else ShardedRoot(model)
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    for block in chain.from_iterable(lists):
        if root is not None:
            _widen(block, adapters)
        if plan is not None:
            parallelize_module(block, mesh["tensor"], plan.block_styles(model, block))
        if root is not None:
            _fully_shard(block, mesh, settings, dtype, adapters)
    if root is not None:
        _widen(root, adapters)
        _fully_shard(root, mesh, settings, dtype, adapters)
    layout = RankLayout(dtype, model, ranks, root, frozenset() if plan is None else plan.summed)
    if before is not None:
        with torch.no_grad():
            after = layout.run_forward(lambda: make_canary(model, head, dtype))
        check_same(type(model).__name__, before.logprobs, after.logprobs, before.tolerance)
    return layout


def empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model without its head, whose parameters are on the meta device and so take no memory."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    copied = copy.deepcopy(model, empty)
    copied.set_output_embeddings(None)
    return copied


def _is_empty(model: nn.Module) -> bool:
    return next(model.parameters()).is_meta


def fill(copied: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give an empty copy that `shard` has cut the weights of a model that it has cut alike: of what trains a copy, and
    the very tensors of what is frozen."""
    weights = {name: model.get_parameter(name).detach() for name, _ in copied.named_parameters()}
    own = {name: weights[name].clone() if p.requires_grad else weights[name] for name, p in copied.named_parameters()}
    copied.load_state_dict(own, strict=False, assign=True)  # after which FSDP pads uneven parts


def _fully_shard(
    module: nn.Module, mesh: DeviceMesh, settings: ParallelConfig, dtype: torch.dtype, adapters: set[nn.Parameter]
) -> None:
    offload = settings.cpu_offload and mesh.device_type != "cpu"
    cut = fully_shard(
        module,
        mesh=mesh["replica", "shard"] if settings.shard == "hybrid" else mesh["shard"],
        reshard_after_forward=not isinstance(module, ShardedRoot),
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
        ignored_params=adapters,
    )
    cut.set_gradient_divide_factor(1.0)
    cut.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def _widen(module: nn.Module, adapters: set[nn.Parameter]) -> None:
    """Float32 for what trains, just before it is cut: at no time is the whole model that wide."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter not in adapters and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()
