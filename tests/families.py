"""Tiny random models of every family, and the two ways to compute their log probabilities."""

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paceline.config.inference import EngineConfig
from paceline.engine import EmbeddedEngine, GenerateRequest, noise_key
from paceline.model import ATTENTION, LMHead, PackedPlan, UnsupportedModel, clone_model, hidden_states
from paceline.model.states import mix_by_plan
from paceline.model.support import check_supported

VOCABULARY = 67
LENGTHS = [37, 5, 1, 60, 21, 36]
"""Longer than every window below, several in one bucket, one of a single token."""

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SMALL | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LINEAR = {
    **_HYBRID | {"head_dim": 16},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 16, "linear_key_head_dim": 16},
}
_LATENT = {
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": 12},
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "llama-rope-llama3": lambda: hf.LlamaConfig(
        **_GROUPED,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama-rope-yarn": lambda: hf.LlamaConfig(
        **_GROUPED,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED, tie_word_embeddings=True),
    "qwen2-windows": lambda: hf.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=16, tie_word_embeddings=True),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=11),
    "gemma": lambda: hf.GemmaConfig(**_GROUPED, head_dim=16),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_GROUPED,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=7,
        layer_types=_SLIDING,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    ),
    "phi": lambda: hf.PhiConfig(**_GROUPED, partial_rotary_factor=0.5),
    "phi3": lambda: hf.Phi3Config(**_GROUPED, sliding_window=13),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_SMALL, rotary_pct=0.5, use_parallel_residual=True),
    "gpt-neox-serial": lambda: hf.GPTNeoXConfig(**_SMALL, rotary_pct=0.25, use_parallel_residual=False),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "starcoder2": lambda: hf.Starcoder2Config(**_GROUPED, sliding_window=11, use_bias=True),
    "granite": lambda: hf.GraniteConfig(
        **_GROUPED, logits_scaling=0.5, attention_multiplier=0.7, embedding_multiplier=3.0, residual_multiplier=0.6
    ),
    "cohere": lambda: hf.CohereConfig(**_GROUPED, logit_scale=0.7, use_qk_norm=True),
    "cohere2": lambda: hf.Cohere2Config(**_GROUPED, logit_scale=0.7, sliding_window=9, layer_types=_SLIDING),
    "smollm3": lambda: hf.SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0, 1]),
}


STATEFUL: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3.5": lambda: hf.Qwen3_5TextConfig(**_GROUPED, **_LINEAR),
    "qwen3-next": lambda: hf.Qwen3NextConfig(**_GROUPED, **_LINEAR, **_EXPERTS, num_experts=4),
    "mamba": lambda: any_config("mamba"),
    "falcon-h1": lambda: any_config("falcon_h1"),
    "lfm2": lambda: any_config("lfm2"),
}
ON_CPU: dict[str, Callable[[], PreTrainedConfig]] = STATEFUL | {
    "gemma2": lambda: hf.Gemma2Config(**_GROUPED, head_dim=16, sliding_window=7, attn_logit_softcapping=2.0),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_GROUPED, **_EXPERTS, num_experts=4, head_dim=16),
    "gpt-oss": lambda: hf.GptOssConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "deepseek-v3": lambda: hf.DeepseekV3Config(**_SMALL | _EXPERTS | _LATENT | {"num_key_value_heads": 4}),
}
"""What mlx does not run, nor the engine on a GPU in float32."""


def tiny(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a family with Paceline's attention."""
    return randomised((FAMILIES | ON_CPU)[family](), seed).to(dtype)


def randomised(config: PreTrainedConfig, seed: int = 0, attention: str = ATTENTION) -> PreTrainedModel:
    """Weights large enough that distributions are not flat; biases and norms random too, so that all of them count."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    mix_by_plan(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def sequences(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]


def packed_logprobs(model: PreTrainedModel, rows: Sequence[Tensor]) -> list[Tensor]:
    """Log probabilities over the vocabulary at every token: all rows in one pass of our attention, then our head."""
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(model.device)
    plan = PackedPlan(lengths, model.device)
    ids = torch.cat(list(rows)).to(model.device)
    hidden = hidden_states(model.get_decoder(), ids, positions, plan)
    return list(LMHead(model)(hidden).log_softmax(-1).split(lengths))


def eager_logprobs(model: PreTrainedModel, rows: Sequence[Tensor]) -> list[Tensor]:
    """The same by transformers alone: its eager attention and the model's own forward pass, one row at a time."""
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    inputs = (row.to(model.device)[None] for row in rows)
    return [reference(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1) for ids in inputs]


def largest_gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def engine_gap(model: PreTrainedModel) -> float:
    """How far log probabilities of a crowd of replies, prompts computed in chunks, are from those of a pack."""
    rng = random.Random(1)
    wanted = []
    for group, length in enumerate([1, 3, 17, 40, 58]):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(length))
        for member in range(2):
            tokens, noise = rng.randrange(2, 20), noise_key(group, member)
            wanted.append(GenerateRequest(prompt_ids=prompt, max_tokens=tokens, noise=noise, order=group))

    async def work():
        engine = EmbeddedEngine(clone_model(model), EngineConfig(threads=1, prefill_tokens=16, max_running=6))
        engine.start()
        try:
            return await asyncio.gather(*(engine.generate(request) for request in wanted))
        finally:
            engine.close()

    done = asyncio.run(asyncio.wait_for(work(), 240))
    rows = [torch.tensor([*r.prompt_ids, *c.token_ids]) for r, c in zip(wanted, done, strict=True)]
    with torch.no_grad():
        packed = packed_logprobs(model, rows)
    chosen = []
    for request, row, logprobs in zip(wanted, rows, packed, strict=True):
        at = len(request.prompt_ids)
        chosen.append(logprobs[at - 1 : -1].gather(-1, row[at:, None])[:, 0])
    return largest_gap([torch.tensor(c.logprobs) for c in done], chosen)


def gradient_gap(model: PreTrainedModel) -> tuple[float, str]:
    """Of the gradient of a pack from the sum of its sequences', the largest part of a parameter's own, and of which."""
    rows = sequences([21, 4, 33])

    def gradient(packs: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        model.zero_grad()
        for pack in packs:
            outs = packed_logprobs(model, pack)
            sum(o[:-1].gather(-1, r[1:, None]).sum() for o, r in zip(outs, pack, strict=True)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    together, apart = gradient([rows]), gradient([[row] for row in rows])
    assert together.keys() == apart.keys()
    gaps = {name: float((g - apart[name]).abs().max() / (g.abs().max() + 1e-3)) for name, g in together.items()}
    worst = max(gaps, key=gaps.__getitem__)
    return gaps[worst], worst


# -- every causal language model of transformers --------------------------------------------------------------------

_ANY: dict[str, Any] = {
    **_GROUPED,
    "head_dim": 8,
    "sliding_window": 9,
    # The same under other names.
    **dict.fromkeys(("n_embd", "d_model", "emb_dim", "dim", "dim_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "ffn_hidden_size"), 48),
    "n_positions": 128,
    "encoder_layers": 1,
    "num_kv_heads": 2,
    # Scales that default to 1, so that forgetting one shows.
    "logit_scale": 0.7,
    "logits_scaling": 0.6,
    "final_logit_softcapping": 3.0,
    "attention_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.6,
    "query_pre_attn_scalar": 24,
    # Experts and latent attention.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 12,  # and keys have 16
}
_MIXED = {"layer_types": _SLIDING}
_ASIDE: dict[str, dict[str, Any]] = {
    "cohere2": _MIXED,
    "cwm": _MIXED,
    "exaone4": _MIXED,
    "gemma3_text": _MIXED,
    "gemma3n_text": _MIXED
    | {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    | {"activation_sparsity_pattern": [0.0] * 3, "laurel_rank": 4, "intermediate_size": [48] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "dots1": {"n_shared_experts": 1},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _HYBRID),
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "zamba": {"num_hidden_layers": 4},
    "olmo3": _MIXED,
    "ministral": _MIXED,
    "falcon": {"head_dim": ...},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "emu3": {"pad_token_id": 0},
    "moshi": {"sliding_window": 128},
    "modernbert-decoder": {"pad_token_id": 0},
    "gemma3": {"final_logit_softcapping": ...} | _MIXED,
    "gemma4_text": {"head_dim": ..., "num_key_value_heads": ...},
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class Verdict(NamedTuple):
    """What we do with a model type: run it exactly, refuse it, run it wrongly, or fail to build it small."""

    kind: str
    outcome: str
    detail: str


def verdict(model_type: str) -> Verdict:
    """Build a tiny random model of this type; either we refuse it by name or the packed law holds."""
    try:
        config = any_config(model_type)
        with torch.device("meta"):
            size = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").num_parameters()
        if size > 20e6:
            return Verdict(model_type, "not built", f"{size / 1e6:.0f} M parameters")
        model = randomised(config)
    except KeyError as error:
        if error.args == (ATTENTION,):
            return Verdict(model_type, "refused", "transformers offers no attention interface for it")
        return Verdict(model_type, "not built", repr(error))
    except Exception as error:
        return Verdict(model_type, "not built", f"{type(error).__name__}: {error}".splitlines()[0])
    kind = type(model).__name__
    try:
        check_supported(model)
    except UnsupportedModel as refusal:
        named = str(refusal).startswith(f"{kind}: ")
        reason = str(refusal).removeprefix(f"{kind}: ").removesuffix("; not supported")
        return Verdict(kind, "refused" if named else "refused without its name", reason)
    with torch.no_grad():
        gap = largest_gap(packed_logprobs(model, sequences()), eager_logprobs(model, sequences()))
    gradient, where = gradient_gap(model)
    engine = engine_gap(model)
    gaps = f"{gap:.0e} packed, {engine:.0e} engine, {gradient:.0e} gradient"
    if gradient > 1e-3:
        gaps += f" of {where}"
    return Verdict(kind, "exact" if max(gap, engine) < 1e-4 and gradient < 1e-3 else "WRONG", gaps)


def any_config(model_type: str) -> PreTrainedConfig:
    """A small config of any model type, made of the fields it happens to have."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    values = {name: value for name, value in _ANY.items() if name in _fields(text)}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= _ASIDE.get(model_type, {})
    values = {name: value for name, value in values.items() if value is not ...}
    if text is default:
        return kind(**values)
    inner = next(name for name in default.sub_configs if getattr(default, name, None) is text)
    vision = {"vision_config": _VISION} if "vision_config" in default.sub_configs else {}
    return kind(**{inner: values}, **vision)


def _fields(config: PreTrainedConfig) -> set[str]:
    return {*vars(config), *type(config).attribute_map}
