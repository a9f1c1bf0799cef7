"""Checks whether a model is supported: a refusal that names the feature is better than silently wrong numbers.

Three questions, each asked only if the one before went well. Does the config or the module tree name something the
attention function does not do? Does every layer attend through it, once, and alike? And for model types not yet
verified: do a few tokens get the probabilities that transformers' own attention gives (`check_numerics`)?
`attention_shape` is what a KV cache must know.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.model.attention import ATTENTION, ATTENTION_KEY, NoAttentionPlan, UnsupportedModel, sdpa, window_mask
from paceline.model.head import LMHead
from paceline.model.source import ROPE_OF_WHOLE_BATCH

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The same heads in every layer; windows may differ."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Per layer, how many tokens a query sees, itself included; None for all."""


def attention_shape(model: PreTrainedModel) -> AttentionShape:
    """Found by asking: one token goes through the model and every layer says what it would attend to.

    Configs spell heads, windows and layer types in a dozen ways; what reaches the attention function is the truth.
    """
    probe = _Probe(type(model).__name__)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model.get_decoder()(input_ids=token, position_ids=token, use_cache=False, **{ATTENTION_KEY: probe})
    return probe.shape(model.config.get_text_config().num_hidden_layers)


class _Probe:
    """An attention plan (`model/attention.py`: what one forward pass attends to) that attends to nothing and writes
    down what it was asked."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._asked: dict[int, tuple[int, int, int]] = {}
        self._windows: dict[int, int | None] = {}

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        layer = int(layer)
        if layer in self._asked:
            raise UnsupportedModel(f"{self._kind}: layer {layer} attends more than once; not supported")
        if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            sizes = f"{q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
            raise UnsupportedModel(
                f"{self._kind}: queries, keys and values of different sizes ({sizes}); not supported"
            )
        self._asked[layer] = (q.shape[1], k.shape[1], q.shape[2])
        self._windows[layer] = window or None
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def shape(self, layers: int) -> AttentionShape:
        if sorted(self._asked) != list(range(layers)):
            silent = sorted(set(range(layers)) - self._asked.keys())
            raise UnsupportedModel(
                f"{self._kind}: layers {silent} of {layers} do not attend through transformers' attention interface "
                "(state-space, linear or convolutional layers, or attention of their own); not supported"
            )
        shapes = set(self._asked.values())
        if len(shapes) > 1:
            raise UnsupportedModel(f"{self._kind}: layers with different numbers of heads {shapes}; not supported")
        heads, kv_heads, head_dim = shapes.pop()
        windows = tuple(self._windows[layer] for layer in range(layers))
        return AttentionShape(layers, heads, kv_heads, head_dim, windows)


MAX_HEAD_DIM = 256


def can_varlen(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether FlashAttention computes this model's attention there; float32 takes the padded way."""
    if device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return False
    return attention_shape(model).head_dim <= MAX_HEAD_DIM


PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")

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
        model = build(lambda: AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION))
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
        shape = attention_shape(model)
        typed = getattr(model.config.get_text_config(), "layer_types", None) or []
        for layer, (asked, window) in enumerate(zip(typed, shape.windows, strict=False)):
            if asked == "sliding_attention" and window is None:
                raise UnsupportedModel(
                    f"{kind}: layer {layer} does not hand its sliding window to the attention function"
                )
        if model.config.model_type not in VERIFIED and model.device.type != "meta":
            check_numerics(model)
    except torch.OutOfMemoryError:
        raise
    except UnsupportedModel as error:  # the attention function knows the layer's class, not the model's
        if kind in str(error):
            raise
        raise UnsupportedModel(f"{kind}: {error}") from error
    except NoAttentionPlan as error:
        raise UnsupportedModel(f"{kind}: it hands no keyword arguments to its attention; not supported") from error
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        raise UnsupportedModel(f"{kind}: fails with Paceline's attention ({error}); not supported") from error


def _unsupported_features(model: PreTrainedModel) -> list[str]:
    """Unsupported features that config and modules name."""
    config = model.config.get_text_config()

    def has(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None))), None)

    counts = [getattr(config, name, 0) for name in EXPERTS]  # one for the model, or one for each layer
    experts = any(n > 1 if isinstance(n, int) else isinstance(n, list | tuple) for n in counts)
    experts |= any(name.endswith(".experts") for name, _ in model.named_modules())
    rope = next((kind for kind in _rope_types(config) if kind in ROPE_OF_WHOLE_BATCH), None)
    other = [name for name in dict.fromkeys(has("layer_types", "layers_block_type") or ()) if name not in PLAIN_LAYERS]
    ahead = any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules())
    found = {
        "it is an encoder-decoder": model.config.is_encoder_decoder,
        f"rope type `{rope}` depends on the longest sequence in the batch": rope,
        "it caps attention scores (attn_logit_softcapping)": has("attn_logit_softcapping"),
        "it uses multi-head latent attention (MLA)": has("kv_lora_rank"),
        "some of its layers share keys and values (num_kv_shared_layers)": has("num_kv_shared_layers"),
        "it adds position biases to attention scores (ALiBi)": has("alibi", "use_alibi"),
        "it uses attention sinks": any(isinstance(getattr(m, "sinks", None), Tensor) for m in model.modules()),
        "it is a mixture of experts": experts,
        f"it has {' and '.join(f'`{name}`' for name in other)} layers": other,
        "transformers offers no attention interface for it": not getattr(model, "_supports_attention_backend", False),
        "its attention looks ahead": ahead,
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

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        seen = self._same & window_mask(self._positions, self._positions, window)
        return sdpa(q[None], k[None], v[None], scale, seen)[0]


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
    out = model.get_decoder()(
        input_ids=ids[order][None], position_ids=positions[order][None], use_cache=False, **{ATTENTION_KEY: plan}
    )
    ours = LMHead(model)(out.last_hidden_state[0]).softmax(-1)[order.argsort()]
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
    """Switch dropout off for good: the trainer must see the very policy that was sampled from."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
