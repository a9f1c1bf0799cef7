"""What the law tests share: small real models with random weights, and the real tokenizers."""

import tarfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import paceline
from paceline.model import ATTENTION

# The same examples every time: a suite that is green stays green. `--hypothesis-profile explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")

torch.set_num_threads(1)

VOCABULARY = 67
QUICKSTART = Path(paceline.__file__).parent / "quickstart"
ARCHIVE = Path(__file__).parents[2] / "shared" / "tokenizers.tar.xz"
ENDS = {
    "quickstart": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}
"""Each tokenizer's token at the end of a turn."""


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """Loads a tokenizer by name, unpacking the archive when it is first needed."""
    unpacked: list[Path] = []

    def load(name: str):
        if name == "quickstart":
            return AutoTokenizer.from_pretrained(QUICKSTART, local_files_only=True)
        if not ARCHIVE.exists():
            pytest.skip(f"needs the real tokenizers of {ARCHIVE.parent.name}/{ARCHIVE.name}")
        if not unpacked:
            unpacked.append(tmp_path_factory.mktemp("tokenizers"))
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(unpacked[0], filter="data")
        return AutoTokenizer.from_pretrained(unpacked[0] / "tokenizers" / name, local_files_only=True)

    return load


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
