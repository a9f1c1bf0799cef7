"""What the law tests share: small real models with random weights, and the real tokenizers."""

import gc
import os
import subprocess
import sys
import tarfile
from copy import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import paceline

if TYPE_CHECKING:  # the process that only distributes tests needs neither
    import torch
    from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # for its simulator, which has a virtual clock

# The same examples every time: a suite that is green stays green. `--hypothesis-profile explore` looks for new ones.
# Neither looks at the clock: how long an example takes is the machine's affair, and it may be a slow or a busy one.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", UNHURRIED, derandomize=True, max_examples=25)
settings.register_profile("explore", UNHURRIED, derandomize=False, max_examples=200)
settings.load_profile("repeatable")

# Here and in every process a test starts: no request to the hub, and the same terminal and language everywhere, so that
# what a test reads is broken into the same lines and written in the same characters.
SURROUNDINGS = {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
UNSET = (
    "PYTHONUNBUFFERED",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "LANGUAGE",
)
os.environ.update(SURROUNDINGS)
for name in UNSET:
    os.environ.pop(name, None)

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


def pytest_configure(config) -> None:
    """One thread each where tests run, which is not where they are handed out; there one fork server starts for all."""
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        import child_processes

        if sys.platform == "linux" and not config.option.collectonly:
            os.environ[child_processes.ADDRESS] = child_processes.start_fork_server()
            subprocess.Popen = child_processes.LaunchedWorker
    else:
        import torch
        from huggingface_hub import constants

        torch.set_num_threads(1)
        constants.HF_HUB_OFFLINE = True
        gc.disable()  # all that collecting makes stays


def pytest_collection_finish() -> None:
    """Half a million objects of modules and tests live to the end: no search for garbage looks at them again. It took
    a sixth of the time of the files that were measured."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Or native modules would report on stderr what is still alive when the interpreter ends."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """`make smoke` names its tests: one that is skipped there proves nothing, and fails."""
    report = yield
    if report.skipped and os.environ.get("PACELINE_NO_SKIPS") == "1":
        report.outcome = "failed"
    return report


@pytest.fixture(autouse=True)
def repeatable_draws() -> None:
    """What a test draws without a seed is the same whichever tests ran before it in this process."""
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed writes the whole stack down for CUDA, each time


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Call the command as `paceline` does, but in this process: its exit code, what it printed, what it complained."""
    from paceline.commands import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> subprocess.CompletedProcess:
        capsys.readouterr()
        code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """Loads a tokenizer by name, unpacking the archive when it is first needed. A large one is read once; each caller
    gets a copy whose template it may change."""
    from transformers import AutoTokenizer

    @cache
    def unpacked() -> Path:
        folder = tmp_path_factory.mktemp("tokenizers")
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        return folder / "tokenizers"

    @cache
    def large(name: str):
        return AutoTokenizer.from_pretrained(unpacked() / name, local_files_only=True)

    def load(name: str):
        if name == "quickstart":
            return AutoTokenizer.from_pretrained(QUICKSTART, local_files_only=True)
        if not ARCHIVE.exists():
            pytest.skip(f"needs the real tokenizers of {ARCHIVE.parent.name}/{ARCHIVE.name}")
        return copy(large(name))

    return load


def tiny_model(seed: int = 0, layers: int = 2, dtype: "torch.dtype | None" = None) -> "PreTrainedModel":
    """A two-layer Llama with grouped heads, scaled up so that its distributions are not flat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline.model import ATTENTION

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
    model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION).to(dtype or torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model.eval()


@pytest.fixture
def model() -> "PreTrainedModel":
    return tiny_model()
