"""Model code compiled layer by layer."""

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn

from paceline.model.background_compile import compile_cache


def compile_blocks(decoder: nn.Module, memory: float = 1.0, again: bool = False) -> None:
    """Compile one layer, for any number of tokens, and let all layers run that code.

    The layers differ only in their weights and their number, which the compiler is told not to bake in. The whole model
    in one piece would be a few percent faster and take a minute at every start.

    `memory` is the share of what a backward pass would like to keep that it may keep; the rest, cheapest first, it
    computes again. `again`: one forward pass may have several backward passes, so none may write over its inputs.
    """
    compile_cache()
    # The compiler's settings belong to a thread: this one is where it will run.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # ty: ignore[invalid-assignment]
    # A float that is no constant reaches the graph as a tensor of the CPU, and with it a C++ kernel, for which torch
    # first tries out what this CPU can do: 45 s on an H200's host, and the layer is traced twice.
    torch._dynamo.config.specialize_float = True  # ty: ignore[invalid-assignment]
    torch._dynamo.config.recompile_limit = 64  # ty: ignore[invalid-assignment]
    torch._functorch.config.activation_memory_budget = memory  # ty: ignore[invalid-assignment]
    torch._functorch.config.donated_buffer = not again  # ty: ignore[invalid-assignment]
    for child in decoder.children():
        for block in child if isinstance(child, nn.ModuleList) else [child]:
            if not isinstance(block, nn.Embedding):
                block.compile(dynamic=True)
