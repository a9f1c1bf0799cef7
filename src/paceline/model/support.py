"""Checks whether a model is supported: a refusal that names the feature is better than silently wrong numbers.

Three questions, each asked only if the one before went well. Does the config or the module tree name something the
attention function does not do? Does every layer attend through it, once, and alike? And for model types not yet
verified: do a few tokens get the probabilities that transformers' own attention gives (`check_numerics`)?
`attention_shape` is what a KV cache must know.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.model.attention import (
    ATTENTION,
    Mixer,
    Scores,
    UnsupportedModel,
    hidden_states,
    sdpa,
    window_mask,
)
from paceline.model.head import LMHead
from paceline.model.source import ROPE_OF_WHOLE_BATCH
from paceline.model.states import StateCache, States, mix_by_plan, mixers, steps_like_whole

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer attends with."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """How many tokens a query sees, itself included; None for all."""
    is_plain: bool = True
    """Neither sinks nor capped scores."""

    @property
    def numbers(self) -> int:
        """Of a token's keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim)


AttentionShape = Mapping[int, LayerAttention]
"""The layers that attend, by their number."""


class CacheShape(NamedTuple):
    """What is kept of a sequence, by the numbers of layers; a layer may have both."""

    attention: AttentionShape
    states: Mapping[int, States]
    """States of one sequence, for their shapes and types."""


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Find out what every layer asks of a plan, by letting one token through the model.

    Configs spell heads, windows and layer types in a dozen ways; what reaches the attention function is the truth.
    """
    probe = _Probe(type(model).__name__)
    token = torch.zeros(1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        hidden_states(model.get_decoder(), token, token, probe)
    return probe.shape(model.config.get_text_config())


def called_layers(model: PreTrainedModel) -> dict[nn.Module, set[nn.Module]]:
    """The modules that keep states, each with those of its children that it calls."""
    called: set[nn.Module] = set()
    found = [module for module, _ in mixers(model)]
    hooks = [
        child.register_forward_pre_hook(lambda child, _: called.add(child))
        for module in found
        for child in module.modules()
    ]
    if hooks:
        cache_shape(model)
    for hook in hooks:
        hook.remove()
    return {module: called.intersection(module.modules()) for module in found}


def attention_shape(model: PreTrainedModel) -> AttentionShape:
    """What every layer that attends asks of the attention function."""
    return cache_shape(model).attention


class _Probe:
    """A plan that attends to nothing and writes down what it was asked."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._attention: dict[int, LayerAttention] = {}
        self._states: dict[int, States] = {}

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        layer = int(layer)
        if layer in self._attention:
            raise UnsupportedModel(f"{self._kind}: layer {layer} attends more than once; not supported")
        (_, heads, key_dim), (_, kv_heads, value_dim) = q.shape, v.shape
        self._attention[layer] = LayerAttention(heads, kv_heads, key_dim, value_dim, scores.window, scores.is_plain)
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        if layer in self._states:
            raise UnsupportedModel(f"{self._kind}: layer {layer} has states more than once; not supported")
        cache = StateCache()
        out = mixer(hidden[None], cache)[0]
        if not hidden.is_meta and not steps_like_whole(mixer, hidden):
            raise UnsupportedModel(
                f"{self._kind}: layer {layer} gives a single token another result than the same token in a longer "
                "piece; not supported"
            )
        self._states[layer] = cache.states
        return out

    def shape(self, config: PreTrainedConfig) -> CacheShape:
        layers = range(config.num_hidden_layers)
        named = dict(enumerate(_layer_types(config)))
        heard = self._attention.keys() | self._states.keys()
        silent = [layer for layer in layers if layer not in heard and named.get(layer) not in TOKENS_ALONE]
        if silent or not heard <= set(layers):
            raise UnsupportedModel(
                f"{self._kind}: layers {silent} of {len(layers)} neither attend through transformers' attention "
                "interface nor keep their states in its cache (attention or recurrence of their own); not supported"
            )
        return CacheShape(dict(sorted(self._attention.items())), dict(sorted(self._states.items())))


def _layer_types(config: PreTrainedConfig) -> Sequence[str]:
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()


MAX_HEAD_DIM = 256


def check_cuda_engine(model: PreTrainedModel, shape: CacheShape) -> None:
    """Refuse what the engine's kernels and captured steps do not do on a GPU."""
    reason, layers = "", shape.attention.values()
    if shape.states:
        reason = "layers with states"
    elif not all(layer.is_plain for layer in layers):
        reason = "attention sinks or capped scores"
    elif any(layer.key_dim != layer.value_dim for layer in layers):
        reason = "keys and values of different widths"
    elif any(layer.key_dim > MAX_HEAD_DIM for layer in layers):
        reason = f"heads wider than {MAX_HEAD_DIM}"
    elif has_experts(model) and (model.dtype != torch.bfloat16 or not model._can_set_experts_implementation()):
        reason = "experts in another type than bfloat16, or not through transformers' experts interface"
    if reason:
        raise UnsupportedModel(
            f"{type(model).__name__}: {reason}, which the engine does not run on a GPU; it does on a CPU"
        )


def has_experts(model: PreTrainedModel) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def compute_experts_alone(model: PreTrainedModel) -> None:
    """Let a token's bits not depend on how many others its experts were chosen by."""
    if has_experts(model):
        if not model._can_set_experts_implementation():
            raise UnsupportedModel(
                f"{type(model).__name__}: experts outside of transformers' experts interface round by the tokens "
                "beside them, so that `deterministic` is not kept; set deterministic = false"
            )
        model.set_experts_implementation("batched_mm")


def can_varlen(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether FlashAttention computes this model's attention there; float32 takes the padded way."""
    if device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return False
    layers = attention_shape(model).values()
    return all(layer.is_plain and layer.key_dim == layer.value_dim <= MAX_HEAD_DIM for layer in layers)


TOKENS_ALONE = {"mlp", "moe"}
"""Layers that compute each token by itself."""
PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention", *TOKENS_ALONE}

# fmt: off
VERIFIED = frozenset((
    "apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2",
    "llama", "ministral", "ministral3", "mistral", "nanochat", "olmo", "olmo2", "olmo3", "opt", "persimmon",
    "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
))
# fmt: on
"""Model types that `scripts/check_families.py` has compared with transformers; they need no check of their numbers."""


def check_family(config: PreTrainedConfig) -> None:
    """Run `check_supported` on the model that a config describes, without its weights: the module tree is built on
    the meta device, where tensors have shapes and no memory. Only `check_numerics` waits for the weights."""
    with torch.device("meta"):
        # The other ways of experts ask the device how many tokens each gets, or know fewer types.
        way = {"attn_implementation": ATTENTION, "experts_implementation": "batched_mm"}
        model = build(lambda: AutoModelForCausalLM.from_config(config, **way))
    mix_by_plan(model)
    check_supported(model.eval())


@contextmanager
def refusals_name(name: str) -> Generator[None]:
    """A model class that is refused inside, told with the name the user gave."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"model `{name}`: {error}. docs/models.md lists the families that are") from error


def build(make: Callable[[], T]) -> T:
    """Make a model with Paceline's attention. Old model code picks a class by the attention's name meanwhile."""
    try:
        return make()
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise UnsupportedModel("transformers offers no attention interface for it; not supported") from error


def check_supported(model: PreTrainedModel) -> None:
    """Refuse what would run but compute something else, and say which feature it is."""
    kind = type(model).__name__
    for reason in _unsupported_features(model):
        raise UnsupportedModel(f"{kind}: {reason}; not supported")
    try:
        _check_windows(model.config.get_text_config(), attention_shape(model))
        if model.config.model_type not in VERIFIED and model.device.type != "meta":
            check_numerics(model)
    except torch.OutOfMemoryError:
        raise
    except UnsupportedModel as error:  # the attention function knows the layer's class, not the model's
        if kind in str(error):
            raise
        raise UnsupportedModel(f"{kind}: {error}") from error
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        reason = f"fails with Paceline's attention ({error})"
        if not getattr(model, "_supports_attention_backend", False):
            reason = "transformers offers no attention interface for it"
        raise UnsupportedModel(f"{kind}: {reason}; not supported") from error


def _check_windows(config: PreTrainedConfig, shape: AttentionShape) -> None:
    """Refuse a window that stands in the config and reaches no layer's attention: masks are not used."""
    unheard = UnsupportedModel("it does not hand its sliding window to the attention function; not supported")
    typed = getattr(config, "layer_types", None) or []
    for layer, asked in enumerate(typed):
        if asked == "sliding_attention" and layer in shape and shape[layer].window is None:
            raise unheard
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    if not typed and window and window < longest and all(layer.window is None for layer in shape.values()):
        raise unheard


def _unsupported_features(model: PreTrainedModel) -> list[str]:
    """Unsupported features that config and modules name."""
    config = model.config.get_text_config()

    def has(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None))), None)

    rope = next((kind for kind in _rope_types(config) if kind in ROPE_OF_WHOLE_BATCH), None)
    mixed = {module.layer_idx for module, _ in mixers(model)}
    named = [name for layer, name in enumerate(_layer_types(config)) if layer not in mixed]
    other = [name for name in dict.fromkeys(named) if name not in PLAIN_LAYERS]
    ahead = any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules())
    found = {
        "it is an encoder-decoder": model.config.is_encoder_decoder,
        f"rope type `{rope}` depends on the longest sequence in the batch": rope,
        "it adds position biases to attention scores (ALiBi)": has("alibi", "use_alibi"),
        f"it has {' and '.join(f'`{name}`' for name in other)} layers": other,
        "its attention looks ahead": ahead,
        "its router draws noise in training": any(hasattr(m, "router_jitter_noise") for m in model.modules()),
    }
    return [reason for reason, applies in found.items() if applies]


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """Every rope type a config names, for the whole model or per layer type."""
    found = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while found:
        rope = found.pop()
        if isinstance(rope, Mapping):
            yield str(rope.get("rope_type") or rope.get("type") or "default")
            found += rope.values()


class ShuffledPlan:
    """Sequences whose tokens lie in any order: a token sees the earlier positions of its own sequence.

    A model that mixes tokens anywhere but in its attention, or counts positions by itself, gives itself away.
    """

    def __init__(self, sequences: Tensor, positions: Tensor) -> None:
        self._same = sequences[:, None] == sequences[None, :]
        self._positions = positions

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        seen = self._same & window_mask(self._positions, self._positions, scores.window)
        return sdpa(q[None], k[None], v[None], scores, seen)[0]

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        for sequence in self._same.unique(dim=0):
            tokens = sequence.nonzero()[:, 0]
            tokens = tokens[self._positions[tokens].argsort()]
            out[tokens] = mixer(hidden[tokens][None], None)[0]
        return out


CHECKED_LENGTHS = (9, 14)
HALF_TOLERANCE = 0.1
"""Mean total variation distance allowed where float16 or bfloat16 rounds differently; wrong attention is far beyond."""
TOLERANCE = 1e-3


@torch.no_grad()
def check_numerics(model: PreTrainedModel) -> None:
    """Compare our attention and head with transformers' own on a few shuffled tokens; raise where they differ."""
    lengths, total = CHECKED_LENGTHS, sum(CHECKED_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(total, generator=generator).to(model.device)
    ids = torch.randint(LMHead(model).vocabulary, (total,), generator=generator).to(model.device)
    sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(model.device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(model.device)
    plan = ShuffledPlan(sequences[order], positions[order])
    hidden = hidden_states(model.get_decoder(), ids[order], positions[order], plan)
    ours = LMHead(model)(hidden).softmax(-1)[order.argsort()]
    theirs = torch.cat([p.softmax(-1) for p in _eager(model, list(ids.split(lengths)))])
    apart = (ours - theirs).abs().sum(-1).mean() / 2
    bound = TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE
    if not apart <= bound:
        raise UnsupportedModel(
            f"{type(model).__name__}: packed, it computes something else than transformers does (its probabilities are "
            f"{float(apart):.2g} apart); not supported"
        )


def _eager(model: PreTrainedModel, rows: list[Tensor]) -> list[Tensor]:
    model.set_attn_implementation("eager")
    try:
        return [model(input_ids=row[None], use_cache=False).logits[0].float() for row in rows]
    finally:
        model.set_attn_implementation(ATTENTION)


def without_dropout(model: nn.Module) -> None:
    """Switch dropout and the noise of routers off for good: the trainer must see the very policy that was sampled
    from."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            noise = "drop" in name or "jitter" in name or (name == "p" and isinstance(module, nn.Dropout))
            if isinstance(value, float) and noise:
                setattr(module, name, 0.0)
