"""Models of mlx-lm, from a Hugging Face folder.

mlx-lm keeps the parameters' names, so weights travel to and from torch as they are. What it does not keep it is told
here: transformers writes the base of the rotary embedding into `rope_parameters`, where mlx-lm does not look, and a
model with another base runs on and talks nonsense.
"""

import inspect
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model as load_mlx
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from paceline.config.model import ModelConfig
from paceline.errors import first_line
from paceline.model.dtypes import resolve_dtype
from paceline.model.hub import fetch
from paceline.model.source import ROPE_OF_WHOLE_BATCH, ModelError, base_name, check_source, resolve


class ThreadCleanup:
    """Frees what mlx keeps for the thread that owns it, as that thread ends.

    mlx-lm compiles its activations, and mlx keeps the result until the system's thread is over: after Python's is, and
    then it takes Python's lock, which aborts a process that is ending too.
    """

    def __del__(self, is_ending=sys.is_finalizing, free=mx.clear_streams) -> None:  # noqa: ANN001 - bound: ours may be gone
        if not is_ending():
            free()


class ThreadState(threading.local):
    """Holds each thread's cleanup. Python drops it on that thread, before whatever joins the thread goes on."""

    def __init__(self) -> None:
        self.cleanup = ThreadCleanup()


_state = ThreadState()


@dataclass(frozen=True, slots=True)
class MlxModel:
    """A causal LM, and what the rest must know of it. `net` is mlx-lm's module."""

    net: Any
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    folder: Path
    base: str
    """The model's hub name or absolute folder."""
    dtype: mx.Dtype
    """What it computes in; a quantised base keeps its packed weights."""
    fp32_head: bool = False

    @property
    def name_or_path(self) -> str:
        return str(self.folder)

    @property
    def vocabulary(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def max_context(self) -> int:
        return getattr(self.config.get_text_config(), "max_position_embeddings", None) or 1 << 20

    @property
    def layers(self) -> list[Any]:
        return self.net.model.layers

    def hidden(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        """The last hidden states of [rows, tokens], after the final norm."""
        _ = _state.cleanup  # made by the first call on each thread
        return self.net.model(tokens, cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """In float32, whatever the model computes in."""
        head = getattr(self.net, "lm_head", None)
        hidden = hidden.astype(mx.float32) if self.fp32_head else hidden
        out = self.net.model.embed_tokens.as_linear(hidden) if head is None else head(hidden)
        return out.astype(mx.float32)

    @property
    def size(self) -> int:
        """How many weights it is made of; of quantised ones several are packed into a number."""
        total = 0
        for module in self.net.modules():
            packed = hasattr(module, "bits")
            held = {name: value for name, value in module.items() if isinstance(value, mx.array)}
            for name, array in held.items():
                if not packed or name == "bias":
                    total += array.size
                elif name == "weight":
                    total += array.size * 32 // module.bits
        return total

    def parameters(self) -> dict[str, mx.array]:
        """By Hugging Face's names."""
        return dict(tree_flatten(self.net.parameters()))

    @property
    def quantised(self) -> bool:
        return any(isinstance(m, nn.QuantizedLinear) for m in self.net.modules())


def load_model(config: ModelConfig) -> MlxModel:
    """The model in the run's type, computed and at rest."""
    folder = fetch(resolve(config.name))
    check_source(folder, config.trust_remote_code, mlx=True)
    try:
        described = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        asked = rope_settings(described)
        net, _ = load_mlx(folder, model_config=asked, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, TypeError, RuntimeError) as error:  # mlx has the last for a damaged file
        raise ModelError(f"model `{config.name}` cannot be loaded with mlx: {first_line(error)}") from error
    _check_rope(net, asked, config.name)
    dtype = getattr(mx, resolve_dtype(config, mlx_device()))
    net.set_dtype(dtype)
    net.eval()
    generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    model = MlxModel(net, described, generation, folder, base_name(config.name), dtype, config.fp32_head)
    _check(model, config.name)
    mx.eval(net.parameters())
    for name, array in model.parameters().items():
        if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
            raise ModelError(f"model `{config.name}`: {name} holds NaN or infinity: download the model again")
    return model


def mlx_device() -> str:
    return "mlx-gpu" if mx.default_device() == mx.gpu else "mlx-cpu"


def rope_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary embedding as mlx-lm's own settings spell it. transformers fills in what a config leaves out, by the
    model's family."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        return {}
    if "rope_theta" not in rope:
        raise ModelError(f"{text.model_type}: each kind of layer has a rotary embedding of its own; not supported")
    kind = rope.get("rope_type", "default")
    if kind in ROPE_OF_WHOLE_BATCH:
        raise ModelError(f"{text.model_type}: rope type `{kind}` depends on the longest sequence; not supported")
    scaling = None if kind == "default" else {"type": kind} | dict(rope)
    part = {"partial_rotary_factor": rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling} | part


def _check_rope(net: Any, asked: dict[str, Any], name: str) -> None:
    """A setting that the model's class does not take would be left out without a word."""
    if not asked:
        return
    takes = inspect.signature(type(net.args)).parameters
    if left := sorted(key for key, value in asked.items() if key not in takes and value not in (None, 1.0)):
        raise ModelError(f"model `{name}`: mlx-lm's {type(net).__module__} takes no `{left[0]}`; not supported")


def _check(model: MlxModel, name: str) -> None:
    """Refuse what would run but compute something else, or under other names, and say which feature it is."""
    net = model.net
    if not all(hasattr(getattr(net, "model", None), part) for part in ("layers", "embed_tokens")):
        raise ModelError(f"model `{name}`: {type(net).__module__} is built in another way than others; not supported")
    if hasattr(net, "make_cache") and not all(type(cache) is KVCache for cache in net.make_cache()):
        raise ModelError(f"model `{name}`: some layers keep no plain keys and values; not supported with mlx")
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window is not None and window < model.max_context:
        raise ModelError(f"model `{name}` looks back no more than {window} tokens; not supported with mlx")
    typed = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if other := sorted(set(typed) - {"full_attention", "attention"}):
        raise ModelError(f"model `{name}` has `{other[0]}` layers; not supported with mlx")
    if any(".experts." in key or ".switch_mlp." in key for key in model.parameters()):
        raise ModelError(f"model `{name}` is a mixture of experts; not supported with mlx")
    tokens = mx.arange(6)[None] % model.vocabulary
    gap = mx.abs(net(tokens).astype(mx.float32) - model.logits(model.hidden(tokens))).max()
    if not gap.item() <= (1e-3 if model.dtype == mx.float32 else 0.5):
        raise ModelError(f"model `{name}`: its output is more than a product with its last layer; not supported")


def clone_model(model: MlxModel) -> MlxModel:
    """A second module tree over the same arrays, which cost nothing to share: they never change, modules do."""
    return replace(model, net=_clone_part(model.net))


def _clone_part(part: Any) -> Any:
    if isinstance(part, nn.Module):
        clone = type(part).__new__(type(part))
        dict.update(clone, {name: _clone_part(value) for name, value in part.items()})
        clone.__dict__.update({name: _clone_part(value) for name, value in vars(part).items()})
        return clone
    if isinstance(part, list):
        return [_clone_part(value) for value in part]
    if isinstance(part, dict):
        return {name: _clone_part(value) for name, value in part.items()}
    return set(part) if isinstance(part, set) else part
