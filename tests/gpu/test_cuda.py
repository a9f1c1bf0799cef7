"""The same laws on CUDA. Skipped where there is no GPU."""

import asyncio
import random

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from conftest import VOCABULARY, tiny_model
from paceline import RunConfig, train
from paceline.config import CheckpointConfig, EvalConfig, inference, trainer
from paceline.config.inference import SamplingConfig
from paceline.engine import EmbeddedEngine, GenerateRequest, noise_key
from paceline.model import LMHead, PackedPlan, WeightUpdate, clone_model, fingerprint, hidden_states, token_logprobs

pytestmark = pytest.mark.gpu


def requests(count: int = 24) -> list[GenerateRequest]:
    rng = random.Random(0)
    return [
        GenerateRequest(
            prompt_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 9, 40]))),
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.7, 1.0, 1.5]),
            noise=noise_key(i),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_engine_and_trainer_agree(dtype, bound, deterministic):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model(dtype=dtype).cuda()

    async def work():
        config = inference.EngineConfig(max_running=8, prefill_tokens=16)
        engine = EmbeddedEngine(clone_model(model), config, deterministic=deterministic)
        engine.start()
        try:
            return await asyncio.gather(*(engine.generate(r) for r in requests()))
        finally:
            engine.close()

    gaps = []
    for request, completion in zip(requests(), asyncio.run(work()), strict=True):
        ids = torch.tensor([*request.prompt_ids, *completion.token_ids], device="cuda")
        positions = torch.arange(len(ids), device="cuda")
        with torch.no_grad():
            plan = PackedPlan([len(ids)], "cuda")
            hidden = hidden_states(model.get_decoder(), ids, positions, plan)
            temperatures = torch.full((len(ids) - 1,), request.temperature, device="cuda")
            logprobs, _ = token_logprobs(LMHead(model), hidden[:-1], ids[1:], temperatures)
        gaps += (logprobs[len(request.prompt_ids) - 1 :].cpu().numpy() - np.array(completion.logprobs)).tolist()
    assert np.abs(gaps).mean() < bound


def test_a_fingerprint_is_the_same_on_every_device():
    model = tiny_model()
    here = fingerprint(model.named_parameters())
    assert fingerprint(model.cuda().named_parameters()) == here


def test_weights_swap_under_running_requests():
    model, other = tiny_model(0).cuda(), tiny_model(1).cuda()

    async def work():
        engine = EmbeddedEngine(clone_model(model), inference.EngineConfig(max_running=8))
        engine.start()
        try:
            running = [asyncio.create_task(engine.generate(r)) for r in requests()]
            await asyncio.sleep(0.05)
            await engine.load_weights(WeightUpdate(1, dict(other.named_parameters())))
            await asyncio.gather(*running)
            return await engine.policy()
        finally:
            engine.close()

    policy = asyncio.run(work())
    assert (policy.version, policy.fingerprint) == (1, fingerprint(other.named_parameters()))


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_quickstart_learns_on_cuda(tmp_path, staleness):
    config = RunConfig(
        runs=str(tmp_path),
        steps=40,
        staleness=staleness,
        device="cuda",
        sampling=SamplingConfig(max_tokens=16),
        trainer=trainer.TrainerConfig(optimizer=trainer.OptimizerConfig(lr=1e-3)),
        eval=EvalConfig(every=10, concurrency=128),
        checkpoint=CheckpointConfig(every=0),
    )
    result = train(config, quiet=True)
    assert result.outcome.status == "finished", result.outcome.message
    exact = [line["eval/reverse-text/exact"] for line in result.metrics if "eval/reverse-text/exact" in line]
    assert exact[0] <= 0.30
    assert exact[-1] >= 0.80
