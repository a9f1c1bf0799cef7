"""The pool over real `paceline serve` processes: same tokens as in this process, and none lost when one is killed."""

import asyncio
import signal
from contextlib import ExitStack

import pytest
import torch
from live_server import MODEL, door, served

from paceline.clients import HttpEngine, Pool
from paceline.config import RunConfig
from paceline.engine import GenerateRequest, noise_key
from paceline.errors import EngineError, Mismatch, Overloaded, RequestError, UnknownModel, Unreachable
from paceline.model import Adapter, Canary, LMHead, WeightUpdate, load_model
from paceline.model.head import make_canary
from paceline.runtime.serving import embedded_engine

KEY = "secret"
ROOM = (
    "--engine.max_running",
    "4",
    "--engine.max_waiting",
    "4",
    "--engine.adapters",
    "1",
    "--engine.adapter_rank",
    "4",
)


@pytest.fixture(scope="module")
def config():
    return RunConfig.model_validate({"model": {"name": MODEL}, "device": "cpu"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def servers(folder):
    with ExitStack() as stack:
        flags = ("--api-key", KEY, "--allow", str(folder), *ROOM)
        yield [stack.enter_context(served(*flags, "--port", str(door()))) for _ in range(2)]


@pytest.fixture
def connect(servers, folder):
    """Run work on engines over HTTP, then close them."""

    def run(work, *urls, key=KEY):
        async def whole():
            engines = [HttpEngine(url, api_key=key, folder=folder) for url in urls or [s.url for s in servers]]
            try:
                return await work(*engines)
            finally:
                for engine in engines:
                    await engine.aclose()

        return asyncio.run(asyncio.wait_for(whole(), 240))

    return run


async def until(condition) -> None:
    """Ask again and again; the deadline of `connect` bounds it."""
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def unanswered(engine: HttpEngine) -> int:
    stats = await engine.stats()
    return stats.running + stats.waiting


def requests(count: int, **more) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            **{
                "prompt_ids": tuple(range(3, 20 + n % 7)),
                "max_tokens": 24,
                "stop_token_ids": frozenset({1, 2}),
                "noise": noise_key(7, n),
                "order": n,
            }
            | more
        )
        for n in range(count)
    ]


def weights(config, change: float) -> dict[str, torch.Tensor]:
    model = load_model(config.model, "cpu")
    return {name: parameter.detach() + change for name, parameter in model.named_parameters()}


def canary(config, tensors: dict[str, torch.Tensor]) -> Canary:
    model = load_model(config.model, "cpu")
    model.load_state_dict(tensors, strict=False)
    return make_canary(model, LMHead(model))


def test_tokens_are_those_of_an_engine_in_this_process(config, connect):
    asked = [
        *requests(12),
        *requests(4, temperature=2.5, top_p=0.9, top_k=40),
        *requests(2, temperature=0.0, top_logprobs=3, stop_token_ids=frozenset()),
    ]

    async def both(*engines):
        pool = Pool(engines)
        there = await asyncio.gather(*(pool.generate(request) for request in asked))
        assert all(stats.tokens for stats in await pool.stats()), "one server did all the work"
        scores = await pool.score([asked[0].prompt_ids, asked[1].prompt_ids], 0.7)
        assert pool.running == 0
        return there, scores, await engines[0].limits()

    there, scores, limits = connect(both)
    with embedded_engine(config) as (engine, _):

        async def local():
            here = await asyncio.gather(*(engine.generate(request) for request in asked))
            assert await engine.limits() == type(limits)(
                limits.max_context, limits.vocabulary, limits.max_top_logprobs, {}
            )
            return here, await engine.score([asked[0].prompt_ids, asked[1].prompt_ids], 0.7)

        here, expected = asyncio.run(local())
    for mine, theirs in zip(here, there, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.finish == theirs.finish
        assert mine.versions == theirs.versions
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert (mine.log_z is None) == (theirs.log_z is None)
        assert (mine.top and [[t for t, _ in place] for place in mine.top]) == (
            theirs.top and [[t for t, _ in place] for place in theirs.top]
        )
    for mine, theirs in zip(expected, scores, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_refusals_come_back_as_what_they_were(connect, servers, folder):
    async def refused(engine):
        (good,) = requests(1)
        with pytest.raises(UnknownModel, match="nobody"):
            await engine.generate(requests(1, model="nobody")[0])
        with pytest.raises(RequestError, match="does not exist"):
            await engine.generate(requests(1, prompt_ids=(10**6,))[0])
        with pytest.raises(RequestError, match="max_tokens"):
            await engine.generate(requests(1, max_tokens=0)[0])
        with pytest.raises(EngineError, match="tensors this model does not have"):
            await engine.load_weights(WeightUpdate(1, {"strange": torch.zeros(2)}))
        with pytest.raises(EngineError, match="fingerprint"):
            await engine.load_weights(WeightUpdate(1, {"model.norm.weight": torch.zeros(128)}, expected="beef"))
        assert (await engine.generate(good)).token_ids

    connect(refused, servers[0].url)

    async def locked_out(engine):
        with pytest.raises(EngineError, match="API key"):
            await engine.policy()
        with pytest.raises(EngineError, match="API key"):
            await asyncio.to_thread(engine.start)

    connect(locked_out, servers[0].url, key="wrong")
    HttpEngine(servers[0].url, api_key=KEY).start()
    with pytest.raises(Unreachable, match="does not answer"):
        HttpEngine("http://127.0.0.1:9").start()


def test_a_full_server_is_asked_again_until_all_are_answered(connect, servers):
    async def flood(engine):
        long = requests(16, max_tokens=40, stop_token_ids=frozenset())
        await engine.pause()
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in long]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(task.exception(), Overloaded) for task in done)
        await engine.resume()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(error, Overloaded) for error in refused), refused
        return await asyncio.gather(*(Pool([engine]).generate(request, deadline=200) for request in long))

    assert all(len(answer.token_ids) == 40 for answer in connect(flood, servers[0].url))


def test_an_abandoned_request_frees_its_place(connect, servers):
    endless = requests(3, max_tokens=100_000, stop_token_ids=frozenset())

    async def leave(engine):
        pool = Pool([engine])
        await engine.pause()
        tasks = [asyncio.ensure_future(pool.generate(request)) for request in endless[1:]]
        with pytest.raises(EngineError, match=r"no completion within 0\.3 s"):
            await pool.generate(endless[0], deadline=0.3)
        assert pool.running == 2

        async def arrived():
            return await unanswered(engine) >= 2

        await until(arrived)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.resume()

        async def empty():
            return await unanswered(engine) == 0

        await until(empty)

    connect(leave, servers[0].url)


def test_new_weights_reach_both_and_show_in_every_token(config, connect, folder):
    full, lora = weights(config, 0.01), Adapter("side", 2.0)
    shape = full["model.layers.0.self_attn.q_proj.weight"].shape
    adapter = {
        "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, shape[1]),
        "model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(shape[0], 4),
    }

    async def push(*engines):
        pool = Pool(engines)
        before = await asyncio.gather(*(pool.generate(request) for request in requests(8)))
        mark, right = WeightUpdate(5, full).fingerprint(), canary(config, full)
        with pytest.raises(Mismatch, match="version 4 failed its canary"):
            await pool.load_weights(WeightUpdate(4, weights(config, 0.0), canary=right))
        with pytest.raises(EngineError, match="version 4 failed its canary"):
            await pool.generate(requests(1)[0])
        assert await pool.load_weights(WeightUpdate(5, full, expected=mark, canary=right)) > 0
        after = await asyncio.gather(*(pool.generate(request) for request in requests(8)))
        assert {version for answer in before for version in answer.versions} == {0}
        assert {version for answer in after for version in answer.versions} == {5}
        assert all(answer.weights == {5: mark} for answer in after)
        assert [p.version for p in await pool.policies()] == [5, 5]
        assert len({p.fingerprint for p in await pool.policies()}) == 1
        await pool.load_weights(WeightUpdate(6, full))
        assert len(list(folder.iterdir())) == 1, "older weights stay on disk"
        await pool.load_weights(WeightUpdate(9, adapter, lora))
        side = await asyncio.gather(*(pool.generate(request) for request in requests(8, model="side")))
        assert {version for answer in side for version in answer.versions} == {9}
        assert pool.busy_seconds > 0
        zero = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
        await pool.load_weights(WeightUpdate(7, zero))
        (flat,) = await asyncio.gather(*(pool.generate(r) for r in requests(1)))
        assert flat.logprobs == pytest.approx([flat.logprobs[0]] * len(flat.logprobs))
        await pool.load_weights(WeightUpdate(8, weights(config, 0.0)))

    connect(push)
    assert not list(folder.iterdir())


def test_a_killed_server_loses_no_request_and_its_heir_gets_the_weights(config, connect, servers, folder):
    """SIGKILL in mid-run; then another server at the same address, with the weights it was born with."""
    asked = requests(20, max_tokens=80, stop_token_ids=frozenset())
    victim = servers[1]
    port = victim.url.rpartition(":")[2]

    async def run(*engines):
        pool = Pool(engines)
        await pool.load_weights(WeightUpdate(20, weights(config, 0.001)))
        await engines[1].pause()  # so that it still has its share when it dies
        work = asyncio.gather(*(pool.generate(request, deadline=200) for request in asked))

        async def compute_settings():
            return await unanswered(engines[1]) > 0

        await until(compute_settings)
        victim.process.send_signal(signal.SIGKILL)
        answers = await work
        assert pool.running == 0
        assert len(await pool.policies()) == 1
        await asyncio.to_thread(victim.process.wait)
        heir = served("--api-key", KEY, "--allow", str(folder), "--port", port, *ROOM)
        await asyncio.to_thread(heir.__enter__)
        try:

            async def both():
                return len(await pool.policies()) == 2

            await until(both)
            assert [policy.version for policy in await pool.policies()] == [20, 20]
            again = await asyncio.gather(*(pool.generate(request, deadline=200) for request in asked))
            assert (await engines[1].stats()).tokens > 0
        finally:
            pool.close()
            await asyncio.to_thread(heir.__exit__, None, None, None)
        return answers, again

    answers, again = connect(run)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in again]
    assert {version for answer in answers for version in answer.versions} == {20}
