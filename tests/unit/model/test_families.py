"""The law of every family: packed, chunked, batched or alone, a token has the probability transformers gives it."""

import asyncio
import logging
import random

import numpy as np
import pytest
import torch
import transformers as hf

from families import _GROUPED as SMALL
from families import (
    FAMILIES,
    LENGTHS,
    VOCABULARY,
    eager_logprobs,
    largest_gap,
    packed_logprobs,
    randomised,
    sequences,
    tiny,
    verdict,
)
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.engine import EmbeddedEngine, GenerateRequest, noise_key
from paceline.model import PackedPlan, UnsupportedModel, clone_model, load_model
from paceline.model.support import (
    CHECKED_LENGTHS,
    VERIFIED,
    AttentionShape,
    attention_shape,
    check_numerics,
    check_supported,
    without_dropout,
)

families = pytest.mark.parametrize("family", FAMILIES)


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
    model = tiny(family)
    rng = random.Random(1)
    wanted = []
    for group, length in enumerate([1, 3, 17, 40, 58]):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(length))
        for member in range(2):
            wanted.append(
                GenerateRequest(
                    prompt_ids=prompt, max_tokens=rng.randrange(2, 20), noise=noise_key(group, member), order=group
                )
            )

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
        ours = packed_logprobs(model, rows)
    for request, completion, row, logprobs in zip(wanted, done, rows, ours, strict=True):
        at = len(request.prompt_ids)
        expected = logprobs[at - 1 : -1].gather(-1, row[at:, None])[:, 0]
        assert np.abs(expected.numpy() - np.array(completion.logprobs)).max() < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "phi"])
def test_the_gradient_of_a_pack_is_the_sum_of_its_sequences(family):
    model = tiny(family)
    rows = sequences([21, 4, 33])

    def gradient(packs):
        model.zero_grad()
        for pack in packs:
            outs = packed_logprobs(model, pack)
            sum(o[:-1].gather(-1, r[1:, None]).sum() for o, r in zip(outs, pack, strict=True)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    together, apart = gradient([rows]), gradient([[row] for row in rows])
    for name, grad in together.items():
        assert torch.allclose(grad, apart[name], rtol=1e-3, atol=1e-3 * float(grad.abs().max()) + 1e-6), name
        assert grad.abs().max() > 0 or "k_proj.bias" in name, name  # softmax does not see a shift of all keys


WINDOWS = {
    "qwen2-windows": (None, 9, 9),
    "mistral": (11, 11, 11),
    "gemma3": (7, None, 7),
    "phi3": (13, 13, 13),
    "starcoder2": (11, 11, 11),
    "cohere2": (9, None, 9),
}


@families
def test_the_shape_of_attention(family):
    model = tiny(family)
    dim = 16 if family in ("qwen3", "gemma", "gemma3") else 8
    kv_heads = 4 if family.startswith("gpt-neox") else 2
    windows = WINDOWS.get(family, (None, None, None))
    assert max(LENGTHS) > max(w or 0 for w in windows)
    assert attention_shape(model) == AttentionShape(3, 4, kv_heads, dim, windows)


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
    "gemma2": "caps attention scores",
    "vaultgemma": "caps attention scores",
    "gpt_oss": "attention sinks",
    "granite_swa": "attention sinks",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "minicpm3": "latent attention",
    "mixtral": "mixture of experts",
    "qwen2_moe": "mixture of experts",
    "qwen3_moe": "mixture of experts",
    "olmoe": "mixture of experts",
    "llama4_text": "mixture of experts",
    "glm4_moe": "mixture of experts",
    "phimoe": "mixture of experts",
    "qwen3_5_text": "`linear_attention`",
    "mamba2": "`linear_attention`",
    "bamba": "`linear_attention`",
    "recurrent_gemma": " layers",  # `recurrent`, or `linear_attention` since transformers 5.23
    "lfm2": "`conv`",
    "gemma3n_text": "share keys and values",
    "gemma4_unified_text": "different numbers of heads",
    "diffllama": "attends more than once",
    "bert": "looks ahead",
    "bart": "no attention interface",
    "bloom": "no attention interface",
    "mpt": "no attention interface",
    "falcon": "no attention interface",
    "gptj": "no attention interface",
    "stablelm": "no attention interface",
    "nemotron": "keyword arguments",
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

    @pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("kind", ["GPTJ", "Gemma2"])
def test_loading_refuses_with_a_sentence(tmp_path, kind):
    config = getattr(hf, f"{kind}Config")(vocab_size=67, n_embd=32, n_layer=1, n_head=4) if kind == "GPTJ" else None
    config = config or hf.Gemma2Config(**SMALL)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"not supported|no attention interface"):
        load_model(ModelConfig(name=str(tmp_path)))


def test_plans_agree_on_a_window_longer_than_everything():
    q, k, v = (torch.randn(9, n, 8) for n in (4, 2, 2))
    plan = PackedPlan([4, 5], "cpu")
    assert plan.attend(0, q, k, v, 1.0, 100).equal(plan.attend(0, q, k, v, 1.0, None))
