"""A model's size from its `config.json` alone, without weights, torch or transformers; and the tokens of one batch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config import RunConfig
from paceline.config.hardware import UnknownShape, config_file
from paceline.config.inference import EngineConfig
from paceline.config.model import LoRAConfig, ModelRef

TWO_MATRICES = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2", "bloom", "falcon", "mpt")
"""Families whose layer widens with one matrix; all others have a gate beside it."""
TIED = ("gpt2", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "bloom")
"""Families whose `config.json` need not say that input and output share a matrix."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer's sizes, in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    attending: int
    """Layers that keep keys and values; others carry a state or mix nothing."""
    tied: bool = False
    biased: bool = False
    """Queries, keys and values have a bias."""
    gated: bool = True
    experts: int = 1
    active_experts: int = 1
    max_context: int = 1 << 20
    packed: float | None = None
    """Bytes a weight takes in a quantised model."""

    @property
    def parameters(self) -> int:
        """As the model keeps them; a shared matrix counts once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self._layer(self.experts) + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters a token is multiplied with: those of its experts and the output layer, no embedding table."""
        return self.vocabulary * self.hidden + self.layers * self._layer(self.active_experts)

    @property
    def decode_parameters(self) -> int:
        """Parameters a decode step of many requests reads: all but a table that is only looked up in."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values in all layers."""
        return 2 * self.attending * self.kv_heads * self.head_dim

    @property
    def gathered_elements(self) -> int:
        """Elements a rank holds whole while a sharded model computes: embeddings, head, and two layers."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + 2 * self._layer(self.experts)

    def longest(self, engine: EngineConfig) -> int:
        """Tokens of the longest request."""
        return min(engine.max_context or self.max_context, self.max_context)

    def adapters(self, lora: LoRAConfig) -> int:
        """Parameters of the low-rank adapters."""
        sides = self._sides()
        names = sides.keys() if lora.targets == "all-linear" else [n for n in sides if n in lora.targets]
        # Experts have no adapters, nor what is called like their matrices.
        per_layer = sum(sides[name] for name in names if name in ATTENTION or self.experts == 1)
        return lora.rank * self.layers * per_layer

    def _sides(self) -> dict[str, int]:
        """In plus out of each matrix of a layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = dict(zip(ATTENTION, (queries, keys, keys, queries), strict=True))
        mlp = ("gate_proj", "up_proj", "down_proj") if self.gated else ("up_proj", "down_proj")
        return {name: self.hidden + out for name, out in attention.items()} | dict.fromkeys(mlp, self.hidden + self.mlp)

    def _layer(self, experts: int) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys) + (queries + 2 * keys if self.biased else 0)
        mlp = (3 if self.gated else 2) * self.hidden * self.mlp * experts
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + mlp + router + 2 * self.hidden


def shape_of(name: str) -> ModelShape:
    """The shape of the model a run file names: the package's own, a folder's, or one in the hub's local cache."""
    file = config_file(name)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnknownShape(f"{file} is not valid JSON: {error}") from error
    return read_shape(config, name)


def read_shape(config: Mapping[str, Any], name: str = "the model") -> ModelShape:
    """From a parsed `config.json`, in any of the spellings that families use."""
    table = config.get("text_config") or config

    def first(*keys: str) -> int | None:
        return next((table[key] for key in keys if isinstance(table.get(key), int)), None)

    hidden, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "num_layers")
    heads, vocabulary = first("num_attention_heads", "n_head"), first("vocab_size")
    if not (hidden and layers and vocabulary):
        raise UnknownShape(f"the config.json of `{name}` does not say how large the model is")
    family = str(table.get("model_type", ""))
    experts = first("num_experts", "num_local_experts", "n_routed_experts") or 1
    plain = first("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
    mlp = (first("moe_intermediate_size") if experts > 1 else None) or plain
    every = first("full_attention_interval", "attn_layer_period") or 1  # where no list says which layers attend
    spread = ["attention" if heads and index % every == 0 else "none" for index in range(layers)]
    types = table.get("layer_types") or table.get("layers_block_type") or spread
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads or 0,
        kv_heads=first("num_key_value_heads") or heads or 0,
        head_dim=first("head_dim") or (hidden // heads if heads else 0),
        attending=sum("linear" not in kind and ("attention" in kind or kind == "hybrid") for kind in types),
        mlp=mlp,
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", table.get("tie_word_embeddings", family in TIED))),
        biased=bool(table.get("attention_bias")) or family.startswith("qwen2"),
        gated=family not in TWO_MATRICES,
        experts=experts,
        active_experts=min(experts, first("num_experts_per_tok", "moe_topk") or 1),
        max_context=first("max_position_embeddings", "n_positions") or 1 << 20,
        packed=_packed(config.get("quantization")),
    )


def _packed(quantization: Any) -> float | None:
    """mlx's way: so many bits, and for each group a scale and a bias of two bytes."""
    if not isinstance(quantization, Mapping) or not isinstance(quantization.get("bits"), int):
        return None
    return quantization["bits"] / 8 + 4 / (quantization.get("group_size") or 64)


def teachers(config: RunConfig) -> list[tuple[float, ModelShape | None]]:
    """The share of the rollouts that each teacher scores, and its shape; None for the policy, which its own engines
    serve. The speed of an external endpoint cannot be planned."""
    total = sum(env.weight for env in config.env)
    shares: dict[str | None, float] = {}
    for env in config.env:
        asked = [getattr(algo, "teacher", None) for _, algo in env.algorithms]
        names = {ref.name for ref in asked if isinstance(ref, ModelRef) and ref.base_url is None}
        for name in (*names, None) if "policy" in asked else names:
            shares[name] = shares.get(name, 0.0) + env.weight / total
    return [(share, None if name is None else shape_of(name)) for name, share in shares.items()]


PROMPT = 128
"""Tokens of a prompt where none are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One batch, in tokens of an average rollout. Before a run these are assumptions."""

    rollouts: float
    group: float
    prompt: float
    reply: float
    longest: float
    """Reply that a synchronous batch waits for."""
    kept: float = 1.0
    """Share of the sampled groups that train; filters drop the rest, and others are sampled in their stead."""
    played: float = 1.0
    """Share of the rollouts that the engine samples; demonstrations are only read."""
    evaluated: float = 0.0
    """Episodes of one evaluation; 0 where the run file does not say."""
    assumed: bool = True

    @property
    def sampled(self) -> float:
        """Rollouts sampled for a batch."""
        return self.rollouts * self.played / max(self.kept, 0.01)

    @property
    def trained_tokens(self) -> float:
        return self.rollouts * (self.prompt + self.reply)

    def computed_tokens(self, shared: bool) -> float:
        """Tokens of a batch, prompts once a group where they are shared."""
        prompts = self.rollouts / (self.group if shared else 1)
        return prompts * self.prompt + self.rollouts * self.reply


def assumed(config: RunConfig, shape: ModelShape, prompt: int | None = None, reply: int | None = None) -> Work:
    """Prompts of 128 tokens and replies of half the allowed length, where no lengths are given."""
    most = config.sampling.max_tokens
    weights = [(env.weight, env.algo.plays if env.algo else True, env.group_size or 1) for env in config.env]
    total = sum(weight for weight, _, _ in weights)
    # Where a section counts its held-out examples.
    held_out = [getattr(env, "eval_examples", None) or 0 for env in config.env if config.eval.every]
    return Work(
        rollouts=config.batch_size,
        group=sum(weight * size for weight, _, size in weights) / total,
        prompt=prompt or max(1, min(PROMPT, shape.longest(config.engine) - most)),
        reply=reply or max(1.0, most / 2),
        longest=max(most, reply or 0),
        played=sum(weight for weight, plays, _ in weights if plays) / total,
        evaluated=sum(min(n, config.eval.examples or n) for n in held_out) * config.eval.samples,
        assumed=prompt is None or reply is None,
    )
