"""Small real models for the law tests: random weights, every family feature that matters, seconds to build."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from paceline.model import ATTENTION

torch.set_num_threads(1)

VOCABULARY = 67


def tiny_model(seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A two-layer Llama with grouped heads, scaled up so that its distributions are not flat."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model.eval()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()
