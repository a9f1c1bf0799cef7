"""Every family runs on MLX as it does in torch, or is refused by name: none computes something else in silence."""

import asyncio

import pytest

pytest.importorskip("mlx_lm")

from families import FAMILIES, eager_logprobs, sequences, tiny
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.engine.mlx.engine import MlxEngine
from paceline.model import ModelError
from paceline.model.mlx.loading import load_model

REFUSED = {
    "qwen2-windows": "looks back no more than 9 tokens",
    "mistral": "looks back no more than 11 tokens",
    "gemma3": "each kind of layer has a rotary embedding",
    "phi3": "looks back no more than 13 tokens",
    "gpt-neox": "cannot be loaded with mlx",
    "gpt-neox-serial": "cannot be loaded with mlx",
    "starcoder2": "looks back no more than 11 tokens",
    "granite": "more than a product with its last layer",
    "cohere": "more than a product with its last layer",
    "cohere2": "no plain keys and values",
}
TOLERANCE = {"gemma": 1e-2}
"""mlx-lm computes this family's GELU as it is defined, transformers by the approximation it was trained with."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_what_transformers_gives_or_is_refused(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    if family in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[family]):
            load_model(ModelConfig(name=str(tmp_path), dtype="float32"))
        return
    rows = sequences()

    async def scored():
        engine = MlxEngine(
            load_model(ModelConfig(name=str(tmp_path), dtype="float32")), EngineConfig(max_running=4, prefill_tokens=16)
        )
        engine.start()
        try:
            return await asyncio.wait_for(engine.score([row.tolist() for row in rows]), 240)
        finally:
            engine.close()

    for row, scores, logprobs in zip(rows, asyncio.run(scored()), eager_logprobs(model, rows), strict=True):
        expected = logprobs[:-1].gather(-1, row[1:, None])[:, 0].tolist()
        assert scores == pytest.approx([0.0, *expected], abs=TOLERANCE.get(family, 1e-4))
