"""A live vLLM behind the `Engine` protocol: every token has its own version and that version's log probability."""

import asyncio
import copy
import dataclasses
import os

import httpx
import numpy as np
import pytest
import torch
from live_vllm import CONTEXT
from transformers import DynamicCache

from paceline.clients import Pool
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.engine import GenerateRequest
from paceline.errors import EngineError, Mismatch, RequestError
from paceline.model import WeightUpdate, attach_lora, load_model, trainable_parameters
from paceline.model.head import LMHead, make_canary
from paceline.model.loading import trained_adapter
from paceline.weights.update import Adapter

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("PACELINE_VLLM") != "1", reason="needs a live vLLM: `make vllm`"),
]
PROMPT = tuple(range(10, 50))
LONG = CONTEXT - len(PROMPT) - 1
"""Tokens of a request that must be there when this process next looks, however late that is."""
ATTEMPTS = 5
"""At requests that live through two updates: how far vLLM gets meanwhile is the machine's affair."""


def moved(seed: int, by: float = 0.02):
    """The quickstart's model after some training, as it were."""
    model = load_model(ModelConfig())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator) * (parameter.ndim > 1)
    return model


def update(model, version: int, canary_of=None) -> WeightUpdate:
    tensors = {name: p.detach() for name, p in trainable_parameters(model).items()}
    judge = canary_of or model
    return WeightUpdate(version, tensors, canary=make_canary(judge, LMHead(judge)))


def truth(model, prompt, ids, temperature: float = 1.0) -> np.ndarray:
    """log_softmax(logits / temperature) of each sampled token, by transformers."""
    with torch.inference_mode():
        logits = plain(model)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(ids)), ids].numpy()


def plain(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


def asked(noise: int = 0, **more) -> GenerateRequest:
    return GenerateRequest(**{"prompt_ids": PROMPT, "max_tokens": 80, "noise": noise} | more)


def run(work):
    """Everything of one test in one event loop, within a bound."""
    return asyncio.run(asyncio.wait_for(work, 900))


def test_tokens_come_with_the_log_probabilities_the_trainer_computes_and_repeat_by_their_key(attached):
    engine, model = attached(), moved(1)

    async def work():
        await engine.load_weights(update(model, 3))
        requests = [asked(n, temperature=t, max_tokens=30) for n, t in ((5, 0.7), (6, 1.0), (5, 0.7), (7, 1.6))]
        said = await asyncio.gather(*map(engine.generate, requests))
        scores = await engine.score([PROMPT, PROMPT[:7]])
        top = await engine.generate(asked(temperature=0.0, top_logprobs=3, max_tokens=4))
        return requests, said, scores, top, await engine.policy(), await engine.limits(), await engine.stats()

    requests, said, scores, top, policy, limits, stats = run(work())
    for request, one in zip(requests, said, strict=True):
        assert set(one.versions) == {3}
        expected = truth(model, PROMPT, one.token_ids, request.temperature)
        np.testing.assert_allclose(one.logprobs, expected, atol=2e-4)
    assert said[0].token_ids == said[2].token_ids != said[1].token_ids
    np.testing.assert_allclose(scores[0][1:], truth(model, PROMPT[:1], PROMPT[1:]), atol=2e-4)
    np.testing.assert_allclose(scores[1], scores[0][:7], atol=2e-4)
    assert [place[0][0] for place in top.top] == top.token_ids
    assert {len(place) for place in top.top} == {3}
    assert policy.version == 3
    assert (limits.max_context, stats.capacity) == (CONTEXT, 16)
    assert stats.tokens > 60
    assert engine.busy_seconds > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_a_request_that_lives_through_updates_says_which_version_drew_each_token(attached, recompute):
    """Each log probability is that of the weights named for it, over the keys that `on_swap` says: with `recompute` as
    if these weights had computed the whole sequence, with `keep` over what each version left behind."""
    models = {version: moved(version) for version in (1, 2, 3)}

    async def work(engine):
        await engine.load_weights(update(models[1], 1))
        running = [asyncio.create_task(engine.generate(asked(n, max_tokens=LONG))) for n in range(6)]
        for version in (2, 3):
            await drawn(engine, 12)
            await engine.pause()  # frozen with tokens to come, however long the weights take to write
            await engine.load_weights(update(models[version], version))
        late = await engine.generate(asked(99, max_tokens=5))
        return await asyncio.gather(*running), late

    for _ in range(ATTEMPTS):
        said, late = run(work(attached(recompute=recompute)))
        if any(set(one.versions) == {1, 2, 3} for one in said):
            break
    else:
        pytest.fail(f"no request lived through both updates in {ATTEMPTS} attempts")
    assert set(late.versions) == {3}
    np.testing.assert_allclose(late.logprobs, truth(models[3], PROMPT, late.token_ids), atol=2e-4)
    for one in said:
        assert one.versions == sorted(one.versions)
        expected = kept(models, PROMPT, one)
        if recompute:
            each = {v: truth(models[v], PROMPT, one.token_ids) for v in set(one.versions)}
            expected = np.array([each[v][place] for place, v in enumerate(one.versions)])
        np.testing.assert_allclose(one.logprobs, expected, atol=2e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_request_sent_before_an_update_and_begun_after_it_is_drawn_from_the_new_weights(attached, recompute):
    """It was sent under the old version's name, under which a request that lives through the update holds the keys of
    their common prompt. With `keep` it goes on from those, so that the keys of its prompt are older than all of its
    tokens; with `recompute` what is shared is new too."""
    engine = attached(recompute=recompute)
    models = {version: moved(version) for version in (1, 2)}

    async def work():
        await engine.load_weights(update(models[1], 1))
        running = asyncio.create_task(engine.generate(asked(0)))
        await drawn(engine, 4)
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(asked(1, max_tokens=10)))
        await asyncio.wait([waiting], timeout=0.5)  # it is there, and nothing tells so
        await engine.load_weights(update(models[2], 2))
        return await running, await waiting

    before, after = run(work())
    assert set(after.versions) == {2}
    expected = truth(models[2], PROMPT, after.token_ids)
    if not recompute:
        assert bool(after.cached) == (2 in before.versions)
        expected = kept(models, PROMPT, after, [(1, after.cached)] if after.cached else [])
    np.testing.assert_allclose(after.logprobs, expected, atol=2e-4)


async def under_way(engine) -> asyncio.Task:
    """A request of which some tokens are drawn and more are to come, however late an update is."""
    running = asyncio.create_task(engine.generate(asked(1, max_tokens=LONG)))
    await drawn(engine, 2)
    await engine.pause()
    return running


async def drawn(engine, more: int) -> None:
    """Return once vLLM has drawn so many tokens more."""
    before = (await engine.stats()).tokens
    await until(engine, lambda stats: stats.tokens >= before + more)


async def until(engine, holds) -> None:
    """Return once vLLM's own figures say so."""
    while not holds(await engine.stats()):  # noqa: ASYNC110 - it cannot call us
        await asyncio.sleep(0.01)


def kept(models, prompt, said, shared=()) -> np.ndarray:
    """Log probabilities by transformers where each version goes on with the keys and values of those before it. A
    token's own are computed when the next one is drawn, so by that one's version. `shared` is what others had computed
    of the prompt: versions, and up to where."""
    ids, cache, expected, fed = [*prompt, *said.token_ids], DynamicCache(), [], 0
    for version, until in shared:
        with torch.inference_mode():
            plain(models[version])(torch.tensor([ids[fed:until]]), past_key_values=cache)
        fed = until
    for version in sorted(set(said.versions)):
        until = len(prompt) + max(place for place, v in enumerate(said.versions) if v == version)
        with torch.inference_mode():
            logits = plain(models[version])(torch.tensor([ids[fed:until]]), past_key_values=cache).logits[0]
        first = max(len(prompt), fed + 1)  # the first of this version's tokens
        scores = logits[first - 1 - fed :].log_softmax(-1)
        expected += scores[range(until + 1 - first), ids[first : until + 1]].tolist()
        fed = until
    return np.array(expected)


def test_weights_that_are_not_what_they_claim_are_refused_until_good_ones_come(attached):
    engine, good, other = attached(), moved(1), moved(2)

    async def work():
        await engine.load_weights(update(good, 1))
        running = await under_way(engine)
        with pytest.raises(Mismatch, match="version 2 failed its canary"):
            await engine.load_weights(update(other, 2, canary_of=good))
        for work in (running, engine.generate(asked(2)), engine.score([PROMPT])):
            with pytest.raises(Mismatch):
                await work
        await engine.load_weights(update(other, 3))
        return await engine.generate(asked(3, max_tokens=8))

    said = run(work())
    assert set(said.versions) == {3}
    np.testing.assert_allclose(said.logprobs, truth(other, PROMPT, said.token_ids), atol=2e-4)


def test_an_adapter_is_exchanged_while_older_requests_end_with_their_own(attached):
    engine = attached()
    base = load_model(ModelConfig())
    model = attach_lora(load_model(ModelConfig()), ModelConfig(lora=LoRAConfig(rank=4)), seed=0)

    def adapter(version: int) -> WeightUpdate:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in trainable_parameters(model).values():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        tensors, scale = trained_adapter(model)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        return WeightUpdate(version, copies, Adapter("", scale), canary=make_canary(model, LMHead(model)))

    async def names() -> set[str]:
        return {name for name in await engine._adapter_names() if name.startswith("paceline-")}

    async def work():
        await engine.load_weights(update(base, 0))
        first, second = adapter(1), adapter(2)
        await engine.load_weights(first)
        running = [asyncio.create_task(engine.generate(asked(n))) for n in range(3)]
        await asyncio.sleep(0.1)
        before = await names()
        await engine.load_weights(second)
        late = await engine.generate(asked(7, max_tokens=12))
        said = await asyncio.gather(*running)
        while len(after := await names()) > 1:  # noqa: ASYNC110 - it cannot call us
            await asyncio.sleep(0.05)
        with pytest.raises(Mismatch):
            await engine.load_weights(dataclasses.replace(first, version=3, canary=second.canary))
        policy = await engine.policy()
        return said, late, before, after, policy, await names()

    said, late, before, after, policy, at_last = run(work())
    assert {version for one in said for version in one.versions} == {1}
    assert set(late.versions) == {2}
    np.testing.assert_allclose(late.logprobs, truth(model, PROMPT, late.token_ids), atol=2e-4)
    assert len(before) == len(after) == 1 != before | after
    assert (policy.version, at_last) == (2, after)


def test_what_it_cannot_do_is_said(attached):
    engine = attached()

    async def refused(work) -> str:
        with pytest.raises(RequestError) as caught:
            await work
        return str(caught.value)

    async def work():
        await engine.load_weights(update(load_model(ModelConfig()), 0))
        return [
            await refused(engine.generate(asked(top_p=0.9))),
            await refused(engine.score([PROMPT], temperature=0.5)),
            await refused(engine.generate(asked(prompt_ids=(1,) * (CONTEXT + 72)))),
            await refused(engine.generate(asked(model="nobody"))),
            await refused(engine.generate(asked(temperature=1e-3))),
        ]

    parts = ("top-p and top-k", "temperature 1 only", "maximum model length", "no adapter `nobody`", "samples at 0 or")
    for told, part in zip(run(work()), parts, strict=True):
        assert part in told


def test_a_pool_gives_a_server_that_lost_its_weights_the_last_ones_again(attached):
    engine, model = attached(), moved(4)

    async def work():
        pool = Pool([engine])
        await pool.load_weights(update(model, 1))
        # As after a restart: weights of unknown version.
        await engine.send_command("/update_weight_version", {"new_version": "default"})
        try:
            return await pool.generate(asked(1, max_tokens=6))
        finally:
            pool.close()

    assert set(run(work()).versions) == {1}


def test_requests_wait_out_a_pause_and_a_sleep(attached):
    engine = attached()

    async def work():
        await engine.load_weights(update(load_model(ModelConfig()), 0))
        for stop, go in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
            await stop()
            waiting = asyncio.create_task(engine.generate(asked(1, max_tokens=3)))
            done, _ = await asyncio.wait([waiting], timeout=0.5)
            assert not done
            await go()
            assert len((await waiting).token_ids) == 3

    run(work())


def test_only_a_client_with_the_key_may_replace_weights(process):
    for path in ("/weight_info", "/v1/models", "/metrics"):
        assert httpx.get(process.url + path, trust_env=False).status_code == 401
    assert httpx.post(process.url + "/pause", trust_env=False).status_code == 401
    assert httpx.get(process.url + "/health", trust_env=False).status_code == 200


def test_a_reload_that_fails_is_told_and_nothing_is_sampled_after_it(attached):
    """The last test, for it leaves vLLM without weights: what it was given stays in its way until it is restarted."""
    engine, model = attached(), moved(5)

    async def work():
        await engine.load_weights(update(model, 1))
        running = await under_way(engine)
        broken = update(model, 2)
        tensors = {**broken.tensors, "model.norm.weight": torch.ones(7)}
        with pytest.raises(EngineError, match="Attempted to load weight"):
            await engine.load_weights(dataclasses.replace(broken, tensors=tensors))
        for work in (running, engine.generate(asked(2)), engine.policy()):
            with pytest.raises(EngineError, match=r"Attempted to load weight|gave a request up"):
                await work

    run(work())
