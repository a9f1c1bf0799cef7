"""Model code compiled layer by layer."""

import warnings

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn

from paceline.model.background_compile import compile_cache

KEPT = 0.9
"""Share of its activations a compiled layer keeps. At 0.9 it drops what one pointwise pass brings back: a third."""


def compile_blocks(decoder: nn.Module, again: bool = False) -> None:
    """Compile one layer, for any number of tokens, and let all layers run that code.

    The layers differ only in their weights and their number, which is not baked in. The whole model in one piece would
    be a few percent faster and take a minute at every start.

    `again`: one forward pass may have several backward passes, so none may write over its inputs.
    """
    compile_cache()
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # float32 is meant where it is used
    number_layers(decoder)
    # The compiler's settings belong to this thread in torch 2.13 and to the process in 2.11: engine and trainer set the
    # same ones, or one would compile with the other's and not find its code on disk.
    # A float that is no constant reaches the graph as a tensor of the CPU, and with it a C++ kernel, for which torch
    # first tries out what this CPU can do: 45 s on an H200's host, and the layer is traced twice.
    torch._dynamo.config.specialize_float = True  # ty: ignore[invalid-assignment]
    torch._dynamo.config.recompile_limit = 64  # ty: ignore[invalid-assignment]
    torch._functorch.config.activation_memory_budget = KEPT
    if again:
        torch._functorch.config.donated_buffer = False  # ty: ignore[invalid-assignment]
    for child in decoder.children():
        for block in child if isinstance(child, nn.ModuleList) else [child]:
            if not isinstance(block, nn.Embedding):
                block.compile(dynamic=True)


def number_layers(decoder: nn.Module) -> None:
    """Make each layer's number a tensor on the host. Compiled code takes a plain number for a constant, and one layer's
    code would not do for the next."""
    for module in decoder.modules():
        if isinstance(number := getattr(module, "layer_idx", None), int):
            module.layer_idx = torch.tensor(number)
