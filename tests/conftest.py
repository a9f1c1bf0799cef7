"""What the law tests share: small real models with random weights, and the real tokenizers."""

import os
import subprocess
import tarfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import paceline
from paceline.cli import main
from paceline.model import ATTENTION

# The same examples every time: a suite that is green stays green. `--hypothesis-profile explore` looks for new ones.
# Neither looks at the clock: how long an example takes is the machine's affair, and it may be a slow or a busy one.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", UNHURRIED, derandomize=True)
settings.register_profile("explore", UNHURRIED, derandomize=False)
settings.load_profile("repeatable")

torch.set_num_threads(1)

# Here and in every process a test starts: nobody asks the hub, and nobody waits for one that cannot be reached.
os.environ["HF_HUB_OFFLINE"] = "1"
huggingface_hub.constants.HF_HUB_OFFLINE = True

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


@pytest.fixture(autouse=True)
def repeatable_draws() -> None:
    """What a test draws without a seed is the same whichever tests ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Call the command as `paceline` does, but in this process: its exit code, what it printed, what it complained."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> subprocess.CompletedProcess:
        capsys.readouterr()
        code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


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
