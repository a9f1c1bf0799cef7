"""LoRA adapters run unmerged from static slots: several at once, chosen per token.

Every adapted layer holds the matrices of all slots stacked, and one mask says which slot each token uses:

    base(x) + ((x @ A.T) * mask) @ B.T        A [slots * rank, in], B [out, slots * rank], mask [tokens, slots * rank]

Shapes and addresses never change: `load` copies into the stacked tensors and `route` rewrites the mask's rows, so
compiled code and captured CUDA graphs go on unharmed. Merging one small update into bf16 weights would lose most of it.

Reads a LoRA adapter from a folder in peft's form: `adapter_config.json` and `adapter_model.safetensors`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.model.adapter_names import AdapterError, check_scale, pair_halves
from paceline.model.support import called_layers
from paceline.weights.manifest import find_problems, join_first


class AdapterRoutes(nn.Module):
    """Which slot each token of the current pass uses; one for all layers of a model."""

    mask: Tensor
    off: Tensor

    def __init__(self, slots: int, rank: int, max_tokens: int, device: torch.device) -> None:
        super().__init__()
        shape = (max_tokens, slots * rank)
        # Float32 whatever the model computes in: a scale of 1/3 rounded to bf16 would be another adapter.
        self.register_buffer("mask", torch.zeros(shape, device=device), persistent=False)
        self.register_buffer("off", torch.ones(shape, dtype=torch.bool, device=device), persistent=False)


class SlotLinear(nn.Linear):
    """A linear layer with the adapters of all slots beside it.

    Takes over the layer's own parameters, so their names in the model stay as they were.
    """

    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, base: nn.Linear, routes: AdapterRoutes, slots: int, rank: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.routes = routes
        self.register_buffer("lora_a", base.weight.new_zeros(slots * rank, base.in_features), persistent=False)
        self.register_buffer("lora_b", base.weight.new_zeros(base.out_features, slots * rank), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        tokens = math.prod(input.shape[:-1])
        low = nn.functional.linear(input, self.lora_a).view(tokens, -1)
        # Zeroed before the product: another slot's overflow times zero would be NaN.
        low = low.masked_fill(self.routes.off[:tokens], 0.0) * self.routes.mask[:tokens]
        low = low.to(input.dtype).view(*input.shape[:-1], -1)
        return self.base_forward(input) + nn.functional.linear(low, self.lora_b)

    def base_forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


class Adapters:
    """The slots of one model. Slot 0 is the base itself; adapters live in 1 to `slots`."""

    def __init__(self, layers: Mapping[str, SlotLinear], routes: AdapterRoutes, slots: int, rank: int) -> None:
        self.layers, self.slots, self.rank = dict(layers), slots, rank
        self._routes = routes
        self._table = torch.zeros(slots + 1, slots * rank, device=routes.mask.device)
        self._ranks: list[dict[str, int]] = [{} for _ in range(slots + 1)]

    @property
    def max_tokens(self) -> int:
        return self._routes.mask.shape[0]

    def route(self, slots: Tensor) -> None:
        """Choose each token's slot for the next pass: int64 of 0 to `slots`, on the model's device."""
        tokens = slots.shape[0]
        if tokens > self.max_tokens:
            raise AdapterError(f"{tokens} tokens in one pass, but the adapter slots were made for {self.max_tokens}")
        mask = self._routes.mask[:tokens]
        torch.index_select(self._table, 0, slots, out=mask)
        torch.eq(mask, 0.0, out=self._routes.off[:tokens])

    def load(self, slot: int, tensors: Mapping[str, Tensor], scale: float) -> None:
        """Replace what a slot holds. A layer the tensors do not name becomes zero; a bad adapter changes nothing."""
        self._check_slot(slot)
        check_scale(scale)
        pairs = self._fit(tensors)
        with torch.no_grad():
            self._zero(slot)
            # Before the first is written: whatever breaks off is zeroed by the next.
            ranks = {name: len(a) for name, (a, _) in pairs.items()}
            self._ranks[slot] |= ranks
            views = [(*self._view(slot, name), rank) for name, rank in ranks.items()]
            # Few launches for hundreds of small matrices: a running engine stands still meanwhile.
            torch._foreach_copy_([mine[:rank] for mine, _, rank in views], [a for a, _ in pairs.values()])
            torch._foreach_copy_([mine[:, :rank] for _, mine, rank in views], [b for _, b in pairs.values()])
            self._table[slot, self._columns(slot)].fill_(scale)
        self._ranks[slot] = ranks

    def clear(self, slot: int) -> None:
        """Empty a slot: its tokens get the base."""
        self._check_slot(slot)
        with torch.no_grad():
            self._zero(slot)
            self._table[slot].zero_()
        self._ranks[slot] = {}

    def tensors(self, slot: int) -> dict[str, Tensor]:
        """Views of what a slot really holds, at its true rank, by canonical name."""
        self._check_slot(slot)
        held = {}
        for name, rank in self._ranks[slot].items():
            a, b = self._view(slot, name)
            held[f"{name}.lora_A.weight"] = a[:rank]
            held[f"{name}.lora_B.weight"] = b[:, :rank]
        return held

    def fit_to_slot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as a slot would hold them: canonical names, the model's type. What a sender's fingerprint must be
        compared on when the adapter comes from a file; refuses what `load` refuses."""
        pairs = self._fit(tensors)
        halves = {f"{name}.lora_A.weight": a for name, (a, _) in pairs.items()}
        return halves | {f"{name}.lora_B.weight": b for name, (_, b) in pairs.items()}

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= self.slots:
            raise AdapterError(f"adapter slot {slot} does not exist: the slots are 1 to {self.slots}")

    def _columns(self, slot: int) -> slice:
        return slice((slot - 1) * self.rank, slot * self.rank)

    def _view(self, slot: int, name: str) -> tuple[Tensor, Tensor]:
        layer, here = self.layers[name], self._columns(slot)
        return layer.lora_a[here], layer.lora_b[:, here]

    def _zero(self, slot: int) -> None:
        if held := [half for name in self._ranks[slot] for half in self._view(slot, name)]:
            torch._foreach_zero_(held)

    def _fit(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The tensors as pairs in the model's type, or an error that says what is wrong with them."""
        widths = {name: (layer.in_features, layer.out_features) for name, layer in self.layers.items()}
        given = pair_halves(tensors, widths, self.rank)
        mine = {name: layer.lora_a for name, layer in self.layers.items()}
        pairs = {name: (a.detach().to(mine[name]), b.detach().to(mine[name])) for name, (a, b) in given.items()}
        # All tensors at once: one answer from the device instead of one a tensor.
        good = torch.stack(torch._foreach_norm([half for pair in pairs.values() for half in pair], math.inf)).isfinite()
        if not good.all():
            name = list(pairs)[int(good.int().argmin()) // 2]
            raise AdapterError(f"adapter layer `{name}` has values that are not finite in the model's type")
        return pairs


def install(model: PreTrainedModel, targets: Iterable[str] | str, slots: int, rank: int, max_tokens: int) -> Adapters:
    """Put adapter slots beside the target layers, in place. The model must be on its device and in its type already."""
    if slots < 1 or rank < 1 or max_tokens < 1:
        raise AdapterError(
            f"adapter slots need slots, rank and tokens of 1 at least, not {slots}, {rank}, {max_tokens}"
        )
    found = target_layers(model, targets)
    routes = AdapterRoutes(slots, rank, max_tokens, model.device)
    layers = {}
    for name, linear in found.items():
        layers[name] = SlotLinear(linear, routes, slots, rank).train(linear.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layers[name])
    return Adapters(layers, routes, slots, rank)


def target_layers(model: PreTrainedModel, targets: Iterable[str] | str) -> dict[str, nn.Linear]:
    """The layers peft would adapt for the same targets, by name."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    modules = dict(model.named_modules())
    left_out = unadaptable_layers(model)
    if targets == "all-linear":
        linear = {n: m for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m is not head}
        chosen = {name: module for name, module in linear.items() if name not in left_out}
    else:
        wanted = [targets] if isinstance(targets, str) else list(targets)
        chosen = {n: m for n, m in modules.items() if any(n == t or n.endswith(f".{t}") for t in wanted)}
        if not chosen:
            raise AdapterError(f"no layer of {type(model).__name__} is called {' or '.join(f'`{t}`' for t in wanted)}")
    for name, module in chosen.items():
        if module is head or module is embeddings or isinstance(module, nn.Embedding):
            raise AdapterError(
                f"adapter target `{name}` is an embedding or the output layer, which the engine cannot adapt: "
                'leave it out, or write targets = "all-linear"'
            )
        if name in left_out:
            raise AdapterError(f"adapter target `{name}`: {left_out[name]}; leave it out")
        if type(module) is not nn.Linear:
            raise AdapterError(f"adapter target `{name}` is a {type(module).__name__}, not a plain linear layer")
    return {name: module for name, module in chosen.items() if isinstance(module, nn.Linear)}


EXPERT_MATRICES = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""In a model with experts peft reads these names as their matrices, whatever else is called so."""
PEFT_REFUSES = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
"""Model types whose output projections peft does not adapt: kernels for them read the weights by themselves."""


def unadaptable_layers(model: PreTrainedModel) -> dict[str, str]:
    """Layers on which an adapter would not be felt, or could not be held, with the reason."""
    names = {module: name for name, module in model.named_modules()}
    found = {name: "the engine has no slots for experts" for name in names.values() if "experts" in name.split(".")}
    if found:
        of_experts = [name for name in names.values() if name.rpartition(".")[2] in EXPERT_MATRICES]
        found |= dict.fromkeys(of_experts, "peft takes its name for that of the experts'")
    for module, called in called_layers(model).items():
        for child in module.modules():
            if isinstance(child, nn.Linear) and child not in called:
                found[names[child]] = f"{type(module).__name__} reads its weights without calling it"
        if model.config.model_type in PEFT_REFUSES:
            out = f"{names[module]}.out_proj"
            found[out] = f"peft does not adapt it in models of type `{model.config.model_type}`"
    return found


UNSUPPORTED = (
    "use_dora", "lora_bias", "fan_in_fan_out", "bias", "modules_to_save", "rank_pattern", "alpha_pattern",
    "layer_replication", "trainable_token_indices", "target_parameters",
)  # fmt: skip
"""Keys of a peft config that would change the numbers and have no place in a slot."""
UNUSED = (None, False, "none", [], {})
"""What says that such a key is not used."""


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], float]:
    """The adapter's tensors under the names of the file, and its scale: what `Adapters.load` takes."""
    if found := find_problems(folder):
        raise AdapterError(f"adapter folder `{folder}` is damaged: {join_first(found)}; export it again")
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"adapter folder `{folder}` cannot be read: {error}") from error
    return tensors, adapter_scale(config)


def adapter_scale(config: dict[str, Any]) -> float:
    """alpha / rank of a peft config; refuses what is more than plain LoRA."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError("adapter_config.json: only adapters of peft_type LORA are supported")
    for name in UNSUPPORTED:
        if config.get(name) not in UNUSED:
            raise AdapterError(f"adapter_config.json: `{name}` is set, which adapter slots do not support")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise AdapterError(f"adapter_config.json: r = {rank} and lora_alpha = {alpha} give no scale")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
