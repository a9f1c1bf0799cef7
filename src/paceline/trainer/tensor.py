"""Tensor parallelism: the ranks of a group share each matrix of a layer, by the plan transformers has for the model.

A block's first matrices are cut by rows of their output, so that a rank has some of the heads, or of the MLP's inner
features; its last ones by their input, so that the ranks' results add up to the whole. What lies between works on a
rank's own part; embeddings, norms and head are whole on every rank.
"""

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers import PreTrainedModel

from paceline.model.attention import UnsupportedModel
from paceline.model.shape import attention_shape
from paceline.trainer.base import TrainerError

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
        self._kind = type(model).__name__
        if hasattr(model, "peft_config"):
            raise TrainerError(
                f"trainer.parallel.tensor = {ranks} cuts matrices whose adapters would have to be cut with them: leave "
                '[model.lora] out, or set tensor = 1 and shard = "full", which cuts the frozen weights'
            )
        decoder = model.get_decoder()
        prefix = next(f"{name}." for name, module in model.named_modules() if module is decoder)
        wanted = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
        planned = {name: wanted.get(_generic(name)) for name, _ in decoder.named_modules()}
        styles = {f"{prefix}{name}": style for name, style in planned.items() if style and name not in WHOLE}
        self._refuse_unknown(styles, ranks)
        self._styles = {name: style for name, style in styles.items() if style in STYLES}
        self.summed = frozenset(f"{name}.weight" for name, style in styles.items() if style == SUMMED)
        """Parameters that are whole on every rank and get gradients from its own part alone: they add up."""
        self._refuse_uneven(model, ranks)
        self._refuse_unplanned(model, ranks)

    def within(self, model: nn.Module, block: nn.Module) -> dict[str, ParallelStyle]:
        """The styles of a block's modules, by their names in it."""
        path = next(name for name, module in model.named_modules() if module is block)
        inside = {name.removeprefix(f"{path}."): s for name, s in self._styles.items() if name.startswith(f"{path}.")}
        return {name: STYLES[style]() for name, style in inside.items()}

    def _refuse_unknown(self, styles: Mapping[str, str], ranks: int) -> None:
        if not styles:
            raise TrainerError(
                f"trainer.parallel.tensor = {ranks}: transformers has no tensor plan for {self._kind}; set tensor = 1 "
                'and shard = "full", which divides the memory of weights and optimizer by the ranks'
            )
        for name, style in styles.items():
            if style not in STYLES and style != SUMMED:
                raise TrainerError(
                    f"trainer.parallel.tensor = {ranks}: {self._kind} wants `{name}` laid out as `{style}`, which is "
                    'not supported; set tensor = 1 and shard = "full"'
                )

    def _refuse_uneven(self, model: PreTrainedModel, ranks: int) -> None:
        shape = attention_shape(model)
        for what, number in (("key and value heads", shape.kv_heads), ("attention heads", shape.heads)):
            if number % ranks:
                raise TrainerError(
                    f"trainer.parallel.tensor = {ranks}: {self._kind} has {number} {what}, which cannot be dealt "
                    f"evenly; set tensor to a divisor of {number}"
                )
        for name, style in self._styles.items():
            weight = model.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            size = weight.shape[0 if style.startswith(COLUMNS) else 1]
            if size % ranks:
                raise TrainerError(
                    f"trainer.parallel.tensor = {ranks}: the {size} features of `{name}` cannot be dealt evenly; set "
                    f"tensor to a divisor of {size}"
                )

    def _refuse_unplanned(self, model: nn.Module, ranks: int) -> None:
        """A whole parameter beside cut ones would see a part of the features, and its gradients would not be summed."""
        beside = {name.rpartition(".")[0] for name, style in self._styles.items() if style == COLUMNS}
        for name, _ in model.named_parameters():
            module = name.rpartition(".")[0]
            if module.rpartition(".")[0] in beside and module not in self._styles and name not in self.summed:
                raise TrainerError(
                    f"trainer.parallel.tensor = {ranks}: transformers' tensor plan for {self._kind} says nothing of "
                    f'`{name}`, which lies among cut matrices; set tensor = 1 and shard = "full"'
                )


def check_same(kind: str, before: tuple[float, ...], after: tuple[float, ...], tolerance: float) -> None:
    """A plan that fits the names but not the code behind them gives itself away at a few tokens."""
    apart = sum(abs(a - b) for a, b in zip(before, after, strict=True)) / len(before)
    if not apart <= tolerance:
        raise UnsupportedModel(
            f"{kind}: cut by transformers' tensor plan it computes something else than whole (log probabilities are "
            f"{apart:.2g} apart); set trainer.parallel.tensor = 1"
        )


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
