"""Compiled code that comes while a run goes on: made by a real worker, switched in between two steps."""

import asyncio
import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from torch._dynamo.utils import counters

from conftest import tiny_model
from paceline import RunConfig
from paceline.data import Sample
from paceline.engine import GenerateRequest, noise_key
from paceline.model import clone_model
from paceline.runtime.torch_parts import background_compile, engine_for
from paceline.trainer import TorchTrainer

pytestmark = pytest.mark.gpu

CONFIG = RunConfig.model_validate(
    {"engine": {"max_running": 16, "prefill_tokens": 128}, "model": {"dtype": "bfloat16"}}
)


@pytest.fixture
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")])))


def sample(seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    mask = np.arange(96) > 8
    return Sample(
        token_ids=rng.integers(0, 30, 96),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-3), np.float32(0)),
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(96),
        advantages=mask * rng.normal(),
        env="test",
    )


async def _wait_for(job) -> None:
    for _ in range(1200):
        if not job.is_compiling:
            break
        await asyncio.sleep(0.1)
    assert job.is_ready


@pytest.mark.usefixtures("_empty_cache")
def test_engine_and_trainer_switch_to_compiled_code_and_go_on_as_before():
    """One law for both, as each worker takes half a minute: log probabilities, versions and losses stay the same."""
    counters.clear()
    model = tiny_model(dtype=torch.bfloat16).cuda()
    engine = engine_for(clone_model(model), CONFIG)
    trainer_job = background_compile("trainer", CONFIG, model)
    trainer = TorchTrainer(model, CONFIG.trainer, total_steps=None, background=trainer_job)
    eager = TorchTrainer(clone_model(model).requires_grad_(True), CONFIG.trainer)
    engine_job = engine._runner._background
    requests = [GenerateRequest(prompt_ids=(1, 2, 3 + i), max_tokens=400, noise=noise_key(i)) for i in range(8)]

    async def work():
        before = await asyncio.gather(*(engine.generate(request) for request in requests))
        losses = [(await trainer.step([sample(0)])).metrics, (await eager.step([sample(0)])).metrics]
        assert losses[0]["loss"] == losses[1]["loss"]
        engine_job.start()
        trainer_job.start()
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        during = await asyncio.gather(*running)
        await _wait_for(trainer_job)
        await _wait_for(engine_job)
        after = []
        while engine_job.is_ready:  # requests are under way when the engine switches
            after = await asyncio.gather(*(engine.generate(request) for request in requests))
        await trainer.step([sample(1)])  # notices at its end
        await eager.step([sample(1)])
        assert trainer.policy.forward.is_compiled
        metrics = [(await t.step([sample(2)])).metrics for t in (trainer, eager)]
        # Greedy choices of random weights part at a tie sooner or later: the same tokens are scored once more instead.
        rescored = await engine.score([[*r.prompt_ids, *c.token_ids] for r, c in zip(requests, before, strict=True)])
        return before, during, after, rescored, metrics

    engine.start()
    try:
        before, during, after, rescored, metrics = asyncio.run(work())
        assert engine._runner._compile
    finally:
        engine.close()
        trainer.close()
        eager.close()
    assert [c.token_ids for c in before] == [c.token_ids for c in during]
    for request, old, scores in zip(requests, before, rescored, strict=True):
        assert np.abs(np.array(old.logprobs) - np.array(scores[len(request.prompt_ids) :])).mean() < 2e-2
    assert [c.versions for c in after] == [[0] * len(c.token_ids) for c in after]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=2e-2)
    # Of each part: rotary embedding, layer, norm. One layer's code serves all layers and any number of tokens.
    assert counters["stats"]["unique_graphs"] <= 6
    assert background_compile("trainer", CONFIG, model).is_cached
    assert engine_for(clone_model(model), CONFIG)._runner._compile, "a later run starts compiled"
