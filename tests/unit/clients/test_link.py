"""An engine behind a socket is the same engine."""

import asyncio
import socket

import pytest
import torch

from conftest import tiny_model
from engine_requests import linked
from paceline.clients.link import EngineLink
from paceline.clients.rpc import EngineHello, FailureFrame, FromEngine, encode_frame
from paceline.config import inference
from paceline.engine import EmbeddedEngine, GenerateRequest, Piece
from paceline.errors import EngineError, Overloaded, PacelineError, RequestError, UnknownModel
from paceline.model import Adapter, Canary, WeightUpdate


@pytest.fixture(scope="module")
def engine():
    engine = EmbeddedEngine(tiny_model(), inference.EngineConfig(max_running=8, adapters=1, adapter_rank=2))
    engine.start()
    yield engine
    engine.close()


def ask(number: int, **more) -> GenerateRequest:
    return GenerateRequest(prompt_ids=(1, 2, 3, number), max_tokens=12, noise=number, top_logprobs=2, **more)


def test_completions_pieces_scores_and_vital_signs_cross_unchanged(engine):
    async def both(link):
        heard: list[Piece] = []
        requests = [ask(number, top_k=number) for number in range(6)]
        mine = await asyncio.gather(*(engine.generate(request) for request in requests))
        theirs = await asyncio.gather(*(link.generate(request, heard.append) for request in requests[:1]))
        theirs += await asyncio.gather(*(link.generate(request) for request in requests[1:]))
        for ours, other in zip(mine, theirs, strict=True):
            assert other.token_ids == ours.token_ids
            assert other.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
            assert (other.finish, other.versions, other.recomputed) == (ours.finish, ours.versions, ours.recomputed)
            assert (other.log_z is None) == (ours.log_z is None)
            assert [[token for token, _ in top] for top in other.top] == [[t for t, _ in top] for top in ours.top]
        assert [token for piece in heard for token in piece.token_ids] == theirs[0].token_ids
        assert [logprob for piece in heard for logprob in piece.logprobs] == theirs[0].logprobs
        assert await link.score([[1, 2], [3, 4, 5]], 0.5) == [
            pytest.approx(scores, abs=1e-4) for scores in await engine.score([[1, 2], [3, 4, 5]], 0.5)
        ]
        assert await link.limits() == await engine.limits()
        assert await link.policy() == await engine.policy()
        assert (await link.stats()).tokens == (await engine.stats()).tokens
        assert 0 < link.busy_seconds <= engine.busy_seconds

    with linked(engine) as link:
        assert link.end_tokens == (5,)
        asyncio.run(both(link))


def test_cancelling_here_frees_the_place_there(engine):
    async def cancel(link):
        await link.pause()
        tasks = [asyncio.ensure_future(link.generate(ask(number))) for number in range(6)]
        await link.stats()
        assert (await link.stats()).waiting > 0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await link.resume()
        async with asyncio.timeout(60):
            while (stats := await link.stats()).running or stats.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert all(task.cancelled() for task in tasks)

    with linked(engine) as link:
        asyncio.run(cancel(link))


def test_weights_cross_and_refusals_keep_their_class(engine):
    name = "model.norm.weight"
    before = asyncio.run(engine.policy())
    old = engine._weights._parameters[name].clone()

    async def load(link):
        assert await link.load_weights(WeightUpdate(4, {name: old * 2})) >= 0
        assert (await link.policy()).version == 4
        with pytest.raises(EngineError, match="damaged"):
            await link.load_weights(WeightUpdate(5, {name: old}, expected="0" * 16))
        a, b = torch.ones(2, 32), torch.ones(32, 2)
        layer = "model.layers.0.self_attn.o_proj"
        adapter = {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
        await link.load_weights(WeightUpdate(6, adapter, Adapter("mine", 0.5)))
        assert (await link.limits()).adapters == {"mine": 6}
        truth = tuple((await link.score([[1, 2, 3]]))[0])
        await link.load_weights(WeightUpdate(before.version, {name: old * 2}, canary=Canary((1, 2, 3), truth, 1e-4)))
        await link.load_weights(WeightUpdate(before.version, {name: old}))
        assert await link.policy() == before
        with pytest.raises(UnknownModel):
            await link.generate(ask(0, model="nobody"))
        with pytest.raises(RequestError, match="empty"):
            await link.generate(GenerateRequest(prompt_ids=(), max_tokens=1))

    with linked(engine) as link:
        asyncio.run(load(link))


@pytest.mark.parametrize("error", [EngineError("a"), RequestError("b"), UnknownModel("c"), Overloaded("d")])
def test_an_error_is_the_same_on_the_other_side(error):
    crossed = FailureFrame.from_error(1, error).error()
    assert (type(crossed), str(crossed)) == (type(error), str(error))


def test_a_bug_keeps_its_name_and_a_lost_engine_is_told(engine):
    assert str(FailureFrame.from_error(1, KeyError("x")).error()) == "KeyError: 'x'"

    async def lose(link, theirs):
        waiting = asyncio.ensure_future(link.stats())
        await asyncio.sleep(0.05)
        theirs.close()
        with pytest.raises(EngineError, match="ended: it was murdered"):
            await waiting
        assert "murdered" in str(await link.wait_closed())
        with pytest.raises(EngineError, match="murdered"):
            await link.generate(ask(0))

    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(encode_frame(FromEngine([EngineHello(0, ())]))))
    link = EngineLink(ours, cause=lambda: "it was murdered")
    link.start()
    asyncio.run(lose(link, theirs))
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(encode_frame(FromEngine([EngineHello(0, (), "no such model")]))))
    with pytest.raises(PacelineError, match="no such model"):
        EngineLink(ours).start()
    theirs.close()
    with pytest.raises(EngineError, match="before it was ready"):
        EngineLink(ours).start()
    ours.close()
