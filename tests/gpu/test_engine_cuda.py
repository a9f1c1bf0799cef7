"""The engine's laws on CUDA: captured steps, pages, steps in flight. Skipped where there is no GPU."""

import asyncio
import random

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from conftest import VOCABULARY, tiny_model
from engines import merged, random_adapter
from families import FAMILIES, tiny
from paceline.config.inference import EngineConfig
from paceline.engine import EmbeddedEngine, GenerateRequest, noise_key
from paceline.engine.cpu.sampler import sample, uniform
from paceline.engine.runner import SamplingMetadata
from paceline.errors import EngineError
from paceline.model import (
    Adapter,
    LMHead,
    PackedPlan,
    WeightUpdate,
    clone_model,
    fingerprint,
    hidden_states,
    token_logprobs,
)
from paceline.model.head import make_canary

pytestmark = pytest.mark.gpu


def serve(model, work, deterministic=False, **config):
    async def run():
        settings = {"max_running": 8, "prefill_tokens": 128, "compile": False} | config
        engine = EmbeddedEngine(model, EngineConfig(**settings), deterministic=deterministic)
        await asyncio.to_thread(engine.start)
        try:
            return await asyncio.wait_for(work(engine), 120)
        finally:
            engine.close()

    torch.backends.cuda.matmul.allow_tf32 = False
    return asyncio.run(run())


def requests(count: int = 24, seed: int = 0, **settings) -> list[GenerateRequest]:
    rng = random.Random(seed)
    defaults = [
        {
            "prompt_ids": tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 9, 40]))),
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0.7, 1.0, 1.5]),
            "noise": noise_key(seed, i),
        }
        for i in range(count)
    ]
    return [GenerateRequest(**(given | settings)) for given in defaults]


def complete(model, wanted, order=None, **config):
    async def work(engine):
        tasks = {i: asyncio.create_task(engine.generate(wanted[i])) for i in order or range(len(wanted))}
        answers = [await tasks[i] for i in range(len(wanted))]
        while not engine._scheduler.is_idle:  # noqa: ASYNC110 - the last steps land on another thread
            await asyncio.sleep(0.001)
        return answers, await engine.stats()

    return serve(model, work, **config)


def reference(model, request, completion) -> np.ndarray:
    """The trainer's log probabilities of the sampled tokens."""
    ids = torch.tensor([*request.prompt_ids, *completion.token_ids], device="cuda")
    plan = PackedPlan([len(ids)], "cuda")
    positions = torch.arange(len(ids), device="cuda")
    with torch.no_grad():
        hidden = hidden_states(model.get_decoder(), ids, positions, plan)
        temperatures = torch.full((len(ids) - 1,), request.temperature, device="cuda")
        logprobs, _ = token_logprobs(LMHead(model), hidden[:-1], ids[1:], temperatures)
    return logprobs[len(request.prompt_ids) - 1 :].cpu().numpy()


def mean_gap(model, wanted, completions) -> float:
    gaps = [np.abs(reference(model, r, c) - c.logprobs) for r, c in zip(wanted, completions, strict=True)]
    return float(np.concatenate(gaps).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_the_trainer_in_bf16(family):
    model = tiny(family, dtype=torch.bfloat16).cuda()
    completions, _ = complete(clone_model(model), requests())
    assert mean_gap(model, requests(), completions) < 2e-2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_layers_agree_with_the_trainer_in_fp32(family):
    model = tiny(family).cuda()
    completions, _ = complete(clone_model(model), requests(), compile=True)
    assert mean_gap(model, requests(), completions) < 1e-4


def test_scarce_pages_preempt_and_change_nothing():
    model = tiny_model().cuda()
    page_gib = 2 * 2 * 2 * 8 * 16 * 4 / 2**30
    wanted = requests(max_tokens=60)
    completions, stats = complete(clone_model(model), wanted, cache_gib=12 * page_gib)
    assert stats.preempted > 0
    assert mean_gap(model, wanted, completions) < 1e-4


def test_stop_tokens_end_what_was_already_in_flight():
    ends = frozenset(range(0, VOCABULARY, 5))
    completions, stats = complete(tiny_model().cuda(), requests(stop_token_ids=ends, max_tokens=60))
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & ends
        assert (completion.token_ids[-1] in ends) == (completion.finish == "stop")
    assert stats.cache_used == 0


def test_deterministic_is_bit_for_bit_in_any_order():
    model, wanted = tiny_model(dtype=torch.bfloat16).cuda(), requests(48)
    orders = [random.Random(s).sample(range(48), 48) for s in range(3)]
    runs = [complete(clone_model(model), wanted, order, deterministic=True)[0] for order in orders]
    assert runs[0] == runs[1] == runs[2]


def test_the_kernel_draws_what_the_plain_sampler_draws():
    from paceline.engine.cuda.sampler import sample_into

    torch.manual_seed(0)
    rows, vocabulary = 300, 151_936
    logits = torch.randn(rows, vocabulary, device="cuda") * 3
    temperatures = torch.rand(rows, device="cuda") + 0.5
    temperatures[::7] = 0
    keys = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    indices = torch.arange(rows, device="cuda")
    tokens, last = (torch.zeros(rows, dtype=torch.long, device="cuda") for _ in range(2))
    logprobs = torch.zeros(rows, dtype=torch.float64, device="cuda")
    sample_into(logits, temperatures.double(), keys, indices, torch.arange(rows, device="cuda"), tokens, logprobs, last)
    zeros = torch.zeros(rows, dtype=torch.long, device="cuda")
    plain = SamplingMetadata(
        temperatures, torch.ones(rows, device="cuda"), zeros, keys, indices, truncates=False, greedy=True
    )
    expected = sample(logits, plain)
    assert (tokens == expected.tokens).float().mean() > 0.99  # sums of exponentials may round across a border
    assert torch.equal(last, tokens)
    agreed = tokens == expected.tokens
    assert torch.allclose(logprobs[agreed].float(), expected.logprobs[agreed], atol=1e-4)
    assert uniform(keys, indices).device.type == "cuda"


def test_top_logprobs_truncation_and_greedy_beside_plain_rows():
    model = tiny_model().cuda()
    wanted = [*requests(6), *requests(6, 1, top_k=3), *requests(6, 2, top_logprobs=4), *requests(3, 3, temperature=0.0)]
    completions, _ = complete(clone_model(model), wanted)
    for request, completion in zip(wanted, completions, strict=True):
        if request.temperature:
            assert np.abs(reference(model, request, completion) - completion.logprobs).max() < 1e-3
        if request.top_k:
            assert completion.log_z is not None
            assert all(value <= 1e-6 for value in completion.log_z)
        if request.top_logprobs:
            assert [len(top) for top in completion.top] == [4] * len(completion.token_ids)


def test_a_canary_is_checked_without_compiling_anything_new():
    old, new = tiny_model(0).cuda(), tiny_model(1).cuda()
    good, bad = make_canary(new, LMHead(new)), make_canary(old, LMHead(old))

    async def work(engine):
        running = [asyncio.create_task(engine.generate(r)) for r in requests(8, max_tokens=60)]
        weights = dict(new.named_parameters())
        pause = await engine.load_weights(WeightUpdate(1, weights, canary=good))
        await asyncio.gather(*running)
        with pytest.raises(EngineError, match="canary"):
            await engine.load_weights(WeightUpdate(2, weights, canary=bad))
        return pause

    assert serve(clone_model(old), work, compile=True) < 2


def test_one_request_at_a_time():
    model = tiny_model().cuda()
    completions, _ = complete(clone_model(model), requests(6), max_running=1)
    assert mean_gap(model, requests(6), completions) < 1e-4


@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_tokens_name_the_weights_they_were_drawn_from(on_swap):
    old, new = tiny_model(0).cuda(), tiny_model(1).cuda()
    wanted = requests(32, max_tokens=60)

    async def work(engine):
        running = [asyncio.create_task(engine.generate(r)) for r in wanted]
        while engine.tokens < 200:  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.001)
        await engine.load_weights(WeightUpdate(1, dict(new.named_parameters())))
        return [await task for task in running], await engine.policy()

    completions, policy = serve(clone_model(old), work, on_swap=on_swap)
    assert (policy.version, policy.fingerprint) == (1, fingerprint(new.named_parameters()))
    seen = set()
    for request, completion in zip(wanted, completions, strict=True):
        versions = np.array(completion.versions)
        seen |= set(completion.versions)
        assert sorted(completion.versions) == completion.versions
        gaps = {v: np.abs(reference(m, request, completion) - completion.logprobs) for v, m in ((0, old), (1, new))}
        if (versions == 0).any():
            assert gaps[0][versions == 0].max() < 1e-3
        if (versions == 1).all() or (on_swap == "recompute" and (versions == 1).any()):
            assert gaps[1][versions == 1].max() < 1e-3
    assert seen == {0, 1}


def test_base_and_adapters_side_by_side():
    model = tiny_model().cuda()
    adapters = {"": random_adapter(model, 1), "other": random_adapter(model, 2)}
    models = {"base": model} | {name: merged(model.cpu(), tensors, 0.5).cuda() for name, tensors in adapters.items()}
    model.cuda()
    wanted = [
        GenerateRequest(prompt_ids=r.prompt_ids, max_tokens=r.max_tokens, noise=r.noise, model=list(models)[i % 3])
        for i, r in enumerate(requests(18))
    ]

    async def work(engine):
        for name, tensors in adapters.items():
            await engine.load_weights(WeightUpdate(3, {n: t.cuda() for n, t in tensors.items()}, Adapter(name, 0.5)))
        return await asyncio.gather(*(engine.generate(r) for r in wanted))

    completions = serve(clone_model(model), work, adapters=2, adapter_rank=4)
    for request, completion in zip(wanted, completions, strict=True):
        assert np.abs(reference(models[request.model], request, completion) - completion.logprobs).max() < 1e-3


def test_scores_beside_generation_and_a_second_turn_that_shares():
    model = tiny_model().cuda()

    async def work(engine):
        first = await engine.generate(GenerateRequest(prompt_ids=tuple(range(40)), max_tokens=30, noise=3))
        turn = (*range(40), *first.token_ids, 5, 6, 7)
        running = [asyncio.create_task(engine.generate(r)) for r in requests()]
        second = await engine.generate(GenerateRequest(prompt_ids=turn, max_tokens=10, noise=4))
        scores = await engine.score([turn, (1, 2, 3)], temperature=0.8)
        await asyncio.gather(*running)
        return turn, second, scores

    turn, second, scores = serve(clone_model(model), work, prefill_tokens=32)
    assert second.cached >= 64
    request = GenerateRequest(prompt_ids=turn, max_tokens=10)
    assert np.abs(reference(model, request, second) - second.logprobs).max() < 1e-3
    whole = GenerateRequest(prompt_ids=turn[:1], max_tokens=len(turn), temperature=0.8)
    ids = type("Given", (), {"token_ids": list(turn[1:])})
    assert np.abs(reference(model, whole, ids) - scores[0][1:]).max() < 1e-3


def test_sleep_gives_memory_back_and_wake_goes_on():
    model = tiny_model().cuda()
    wanted = requests(16, max_tokens=60)

    async def work(engine):
        running = [asyncio.create_task(engine.generate(r)) for r in wanted]
        while engine.tokens < 50:  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.001)
        await engine.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        tokens = engine.tokens
        await asyncio.sleep(0.05)
        assert engine.tokens == tokens
        await engine.wake()
        awake = torch.cuda.mem_get_info()[0]
        return [await task for task in running], asleep - awake

    completions, freed = serve(clone_model(model), work, max_context=128, max_running=512)
    assert freed >= 14 << 20
    assert mean_gap(model, wanted, completions) < 1e-4
