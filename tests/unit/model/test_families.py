"""The law of every family: packed, chunked, batched or alone, a token has the probability transformers gives it."""

import logging

import numpy as np
import pytest
import torch
import transformers as hf

from families import _GROUPED as SMALL
from families import (
    FAMILIES,
    LENGTHS,
    ON_CPU,
    VOCABULARY,
    any_config,
    eager_logprobs,
    engine_gap,
    gradient_gap,
    largest_gap,
    packed_logprobs,
    randomised,
    sequences,
    tiny,
    verdict,
)
from paceline.config.model import ModelConfig
from paceline.model import PackedPlan, UnsupportedModel, load_model
from paceline.model.attention import Scores
from paceline.model.support import (
    CHECKED_LENGTHS,
    VERIFIED,
    LayerAttention,
    attention_shape,
    check_numerics,
    check_supported,
    without_dropout,
)

families = pytest.mark.parametrize("family", [*FAMILIES, *ON_CPU])


@families
@torch.no_grad()
def test_a_pack_gives_what_transformers_gives(family):
    """Our attention and head over a pack of sequences equal eager attention on each sequence alone."""
    model = tiny(family)
    check_supported(model)
    expected = eager_logprobs(model, sequences())
    assert largest_gap(packed_logprobs(model, sequences()), expected) < 1e-4
    entropy = -(expected[3].exp() * expected[3]).sum(-1).mean()
    assert entropy < 0.95 * np.log(VOCABULARY), "a flat distribution proves nothing"


@families
def test_the_engine_gives_what_the_trainer_gives(family):
    """Chunked prefill, groups and a crowd of different lengths change no log probability."""
    assert engine_gap(tiny(family)) < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "phi", *ON_CPU])
def test_the_gradient_of_a_pack_is_the_sum_of_its_sequences(family):
    gap, where = gradient_gap(tiny(family))
    assert gap < 1e-3, where


WINDOWS = {
    "qwen2-windows": (None, 9, 9),
    "mistral": (11, 11, 11),
    "gemma3": (7, None, 7),
    "phi3": (13, 13, 13),
    "starcoder2": (11, 11, 11),
    "cohere2": (9, None, 9),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_of_attention(family):
    model = tiny(family)
    dim = 16 if family in ("qwen3", "gemma", "gemma3") else 8
    kv_heads = 4 if family.startswith("gpt-neox") else 2
    windows = WINDOWS.get(family, (None, None, None))
    assert max(LENGTHS) > max(w or 0 for w in windows)
    layers = [LayerAttention(4, kv_heads, dim, dim, window) for window in windows]
    assert attention_shape(model) == dict(enumerate(layers))


def rope(kind):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


long = rope("longrope") | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED = {
    "dynamic rope": (lambda: hf.Qwen2Config(**SMALL, rope_parameters=rope("dynamic")), "rope type `dynamic`"),
    "longrope": (lambda: hf.Phi3Config(**SMALL, rope_parameters=long), "rope type `longrope`"),
    "nested rope": (
        lambda: hf.Gemma3TextConfig(
            **SMALL,
            head_dim=8,
            rope_parameters={
                "full_attention": rope("dynamic"),
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        "rope type `dynamic`",
    ),
    "bidirectional": (lambda: hf.GemmaConfig(**SMALL, use_bidirectional_attention=True), "looks ahead"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_known_model_with_an_unknown_setting_is_refused(case):
    make, reason = REFUSED[case]
    model = randomised(make())
    with pytest.raises(UnsupportedModel, match=f"{type(model).__name__}: .*{reason}"):
        check_supported(model)


KNOWN = {
    **dict.fromkeys(sorted(VERIFIED), "exact"),
    "gemma3": "exact",
    "bitnet": "exact",
    **dict.fromkeys(("gemma2", "gemma3n_text", "gemma4_unified_text", "gpt_oss", "stablelm", "nemotron"), "exact"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "jetmoe", "longcat_flash", "mimo_v2_flash"), "exact"),
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open", "youtu"), "exact"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "kimi_linear", "olmo_hybrid"), "exact"),
    **dict.fromkeys(("mamba2", "falcon_mamba", "falcon_h1", "bamba", "jamba", "granitemoehybrid", "lfm2_moe"), "exact"),
    "llama4_text": "`chunked_attention`",
    "phimoe": "draws noise",
    "doge": "attention mask",
    "deepseek_v32": "`indexed_attention`",
    "minimax": "`linear_attention`",
    "nemotron_h": "gives a single token another result",
    "recurrent_gemma": " layers",  # `recurrent`, or `linear_attention` since transformers 5.23
    "diffllama": "attends more than once",
    "bert": "looks ahead",
    "bart": "looks ahead",
    "bloom": "attention interface",
    "falcon": "no attention interface",
    "gptj": "no attention interface",
}


@pytest.mark.parametrize("model_type", KNOWN)
def test_nothing_runs_and_is_silently_wrong(model_type, caplog):
    """All of transformers is walked by scripts/check_families.py; these are the best known."""
    caplog.set_level(logging.ERROR)
    found = verdict(model_type)
    if KNOWN[model_type] == "exact":
        assert found.outcome == "exact", found
    else:
        assert found.outcome == "refused", found
        assert KNOWN[model_type] in found.detail


class TestCheckNumerics:
    """What no list names, a few shuffled tokens give away."""

    def model(self, **settings):
        return randomised(hf.LlamaConfig(**SMALL, **settings))

    @families
    def test_it_lets_the_families_pass(self, family):
        check_numerics(tiny(family))
        check_numerics(tiny(family, dtype=torch.bfloat16))

    def test_it_leaves_the_model_as_it_was(self):
        model = self.model()
        check_numerics(model)
        assert model.config._attn_implementation == "paceline"
        packed_logprobs(model, sequences())

    def test_a_head_that_scales_in_its_own_way(self):
        model = self.model()
        forward = model.forward
        model.forward = lambda **inputs: _scaled(forward(**inputs))
        with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*something else"):
            check_numerics(model)

    def test_tokens_mixed_outside_of_attention(self):
        model = self.model()
        mlp = model.model.layers[1].mlp
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) + 0.5 * x.roll(1, dims=-2)
        with pytest.raises(UnsupportedModel, match="something else"):
            check_numerics(model)

    def test_positions_counted_by_the_model_itself(self):
        model = self.model()
        rotary = model.model.rotary_emb
        forward = rotary.forward
        rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
        with pytest.raises(UnsupportedModel, match="something else"):
            check_numerics(model)
        # A pack alone would not have noticed: rope is relative, and a sequence's own order is kept.
        assert largest_gap(packed_logprobs(model, sequences()), eager_logprobs(model, sequences())) < 1e-4
        assert len(CHECKED_LENGTHS) > 1


def _scaled(output):
    output.logits = output.logits * 0.8
    return output


def test_dropout_is_switched_off():
    """Starcoder2 and GPT-2 ship with dropout: in training mode they must still be the policy that was sampled from."""
    model = randomised(hf.Starcoder2Config(**SMALL, attention_dropout=0.3, residual_dropout=0.3, embedding_dropout=0.3))
    expected = packed_logprobs(model, sequences())
    without_dropout(model)
    assert largest_gap(packed_logprobs(model.train(), sequences()), expected) == 0
    assert model.config.attention_dropout == 0.3  # what is exported stays as it was


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3"])
@torch.no_grad()
def test_a_checkpoint_with_an_image_tower_loads_its_text(tmp_path, model_type):
    torch.manual_seed(0)
    whole = hf.AutoModelForImageTextToText.from_config(any_config(model_type)).eval()
    whole.save_pretrained(tmp_path)
    model = load_model(ModelConfig(name=str(tmp_path)))
    theirs = [whole(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1) for row in sequences()]
    assert largest_gap(packed_logprobs(model, sequences()), theirs) < 1e-4


@pytest.mark.parametrize("kind", ["GPTJ", "Recurrent_Gemma"])
def test_loading_refuses_with_a_sentence(tmp_path, kind):
    config = any_config(kind.lower())
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"not supported|no attention interface"):
        load_model(ModelConfig(name=str(tmp_path)))


def test_plans_agree_on_a_window_longer_than_everything():
    q, k, v = (torch.randn(9, n, 8) for n in (4, 2, 2))
    plan = PackedPlan([4, 5], "cpu")
    assert plan.attend(0, q, k, v, Scores(1.0, 100)).equal(plan.attend(0, q, k, v, Scores(1.0)))
