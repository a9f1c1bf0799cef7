"""The scheduler's laws: however a request is cut into steps, it gets the same tokens and nothing after its end."""

import asyncio
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from backends import BITS, apply_top_k_top_p, engine_of, paged, sample
from conftest import VOCABULARY, tiny_model
from engine_requests import complete, requests, serve, together, trainer_logprobs, until
from engines import MATRIX, PAGE_GIB
from paceline.config.inference import EngineConfig
from paceline.engine import Completion, GenerateRequest, Piece, noise_key
from paceline.engine.base import Grammar
from paceline.engine.pages import PageCache
from paceline.engine.runner import SamplingMetadata
from paceline.errors import EngineError, RequestError
from paceline.model import LMHead, PackedPlan, WeightUpdate, clone_model, hidden_states

MODEL = tiny_model()
SCARCE = {"cache_gib": 7.5 * PAGE_GIB, "max_running": 8}


@torch.no_grad()
def all_logprobs(ids: list[int], temperature: float) -> torch.Tensor:
    """log-softmax over the vocabulary after each token."""
    plan, positions = PackedPlan([len(ids)], "cpu"), torch.arange(len(ids))
    hidden = hidden_states(MODEL.get_decoder(), torch.tensor(ids), positions, plan)
    return torch.log_softmax(LMHead(MODEL)(hidden) / temperature, -1)


def close(got: list[float], expected) -> bool:
    return np.allclose(got, [float(value) for value in expected], atol=1e-4, rtol=0)


# -- the same tokens --------------------------------------------------------------------------------------------------

WANTED = [replace(r, max_tokens=3 + 11 * i % 50) for i, r in enumerate(requests(groups=6, seed=4))]
PLAIN = complete(clone_model(MODEL), WANTED)


def test_the_plain_run_is_the_trainers():
    for request, completion in zip(WANTED, PLAIN, strict=True):
        assert close(completion.logprobs, trainer_logprobs(MODEL, request, completion))


def over(**cuts: dict):
    """The matrix times some settings; only pages can be scarce."""
    cases = [(p, name) for p in MATRIX for name in cuts if p.values[0]["cache"] == "pages" or "scarce" not in name]
    return pytest.mark.parametrize(
        ("config", "cut"),
        [pytest.param(p.values[0], cuts[name], id=f"{p.id}-{name}", marks=p.marks) for p, name in cases],
    )


@over(
    narrow={"prefill_tokens": 5, "max_running": 3},
    wide={"prefill_tokens": 33},
    scarce=SCARCE,
    scarce_and_narrow=SCARCE | {"prefill_tokens": 7},
)
def test_tokens_do_not_depend_on_how_steps_are_cut(config, cut):
    """Whatever cache, order of arrival, budget and depth, and however often pages run out."""
    order = random.Random(str(cut)).sample(range(len(WANTED)), len(WANTED))
    computed: dict[int, set[int]] = {request.noise: set() for request in WANTED}

    async def work(engine):
        launch = engine._runner.launch

        def listening(chunks):
            for c in chunks:
                computed[c.sequence.request.noise].update(range(c.start, c.start + c.length))
            return launch(chunks)

        engine._runner.launch = listening
        tasks = dict(zip(order, await together(engine, [WANTED[i] for i in order]), strict=True))
        answers = [await tasks[i] for i in range(len(WANTED))]
        await until(lambda: engine._scheduler.is_idle)
        return answers, await engine.stats()

    answers, stats = serve(clone_model(MODEL), work, **config, **cut)
    if "cache_gib" in cut:
        assert stats.preempted > 0
        assert any(answer.recomputed for answer in answers)
    assert [a.token_ids for a in answers] == [p.token_ids for p in PLAIN]
    assert all(close(a.logprobs, p.logprobs) for a, p in zip(answers, PLAIN, strict=True))
    assert (stats.cache_used, stats.running, stats.waiting) == (0, 0, 0)
    for request, answer in zip(WANTED, answers, strict=True):  # what it computed itself was not shared
        assert answer.cached <= len(set(range(len(request.prompt_ids))) - computed[request.noise])


# -- the end of a completion ------------------------------------------------------------------------------------------


@over(plain={}, scarce=SCARCE)
def test_nothing_comes_after_a_stop_token(config, cut):
    """Steps launched past a stop reach neither the completion nor its listener, and what they held is freed."""
    ends = frozenset(range(0, VOCABULARY, 22))
    wanted = [replace(r, stop_token_ids=ends, max_tokens=25) for r in requests(groups=6, members=4, seed=2)]
    heard: list[list[Piece]] = [[] for _ in wanted]

    async def work(engine):
        calls = [engine.generate(r, pieces.append) for r, pieces in zip(wanted, heard, strict=True)]
        answers = await asyncio.gather(*calls)
        await until(lambda: engine._scheduler.is_idle)
        return answers, engine._cache.usage

    answers, used = serve(clone_model(MODEL), work, **config, **cut)
    assert used == 0
    assert {answer.finish for answer in answers} == {"stop", "length"}
    for request, answer, pieces in zip(wanted, answers, heard, strict=True):
        ended = [token in ends for token in answer.token_ids]
        assert not any(ended[:-1])
        assert ended[-1] == (answer.finish == "stop")
        assert [t for piece in pieces for t in piece.token_ids] == answer.token_ids
        assert [x for piece in pieces for x in piece.logprobs] == answer.logprobs
        assert [v for piece in pieces for v in piece.versions] == answer.versions
        assert close(answer.logprobs, trainer_logprobs(MODEL, request, answer))


@pytest.mark.parametrize("config", MATRIX)
def test_cancelled_requests_free_everything_and_fall_silent(config):
    """Running, waiting or preempted: after a moment their place is free, and the others never noticed."""
    wanted = requests(groups=6, seed=6, max_tokens=60)
    heard: list[list[Piece]] = [[] for _ in wanted]

    async def work(engine):
        tasks = await together(engine, wanted, [pieces.append for pieces in heard], stop_at=40)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks[::2])
        silent = [len(pieces) for pieces in heard[::2]]
        await engine.resume()
        kept = await asyncio.gather(*tasks[1::2])
        await until(lambda: engine._scheduler.is_idle)
        assert all(task.cancelled() for task in tasks[::2])
        assert silent == [len(pieces) for pieces in heard[::2]]
        return kept, engine._cache

    kept, cache = serve(clone_model(MODEL), work, max_running=6, **config)
    assert cache.usage == 0
    assert not isinstance(cache, PageCache) or cache.available_pages == cache.pages
    assert all(close(a.logprobs, trainer_logprobs(MODEL, r, a)) for r, a in zip(wanted[1::2], kept, strict=True))


@pytest.mark.parametrize("config", MATRIX)
def test_a_pause_keeps_everybody(config):
    async def work(engine):
        tasks = await together(engine, WANTED, stop_at=21)
        steps = engine.steps
        await asyncio.sleep(0.03)
        assert engine.steps == steps
        await engine.load_weights(WeightUpdate(1, dict(MODEL.named_parameters())))
        await engine.resume()
        return await asyncio.gather(*tasks)

    answers = serve(clone_model(MODEL), work, max_running=6, **config)
    assert [a.token_ids for a in answers] == [p.token_ids for p in PLAIN]


# -- scoring ----------------------------------------------------------------------------------------------------------

TEXTS = [[random.Random(i).randrange(VOCABULARY) for _ in range(n)] for i, n in enumerate([1, 2, 16, 33, 64, 112, 7])]


@over(narrow={"prefill_tokens": 9}, scarce=SCARCE, deterministic={"deterministic": True, "max_running": 6})
def test_scores_are_the_trainers_beside_generation(config, cut):
    """Alone or in the same steps as a crowd, in pieces of any size, preempted or not, at every temperature."""

    async def work(engine):
        crowd = [asyncio.create_task(engine.generate(r)) for r in WANTED[:9]]
        cold, warm = await asyncio.gather(engine.score(TEXTS, 0.5), engine.score(TEXTS, 1.3))
        answers = await asyncio.gather(*crowd)
        assert await engine.score([]) == []
        await until(lambda: engine._scheduler.is_idle)
        return {0.5: cold, 1.3: warm}, answers, engine._cache.usage

    scores, answers, used = serve(clone_model(MODEL), work, **config, **cut)
    for temperature, rows in scores.items():
        for ids, got in zip(TEXTS, rows, strict=True):
            expected = all_logprobs(ids, temperature)[range(len(ids) - 1), ids[1:]].tolist()
            assert close(got, [0.0, *expected])
    assert [a.token_ids for a in answers] == [p.token_ids for p in PLAIN[:9]]
    assert used == 0


def test_bad_scores_are_refused_before_anything_runs():
    async def work(engine):
        for bad, temperature in (([[]], 1), ([[1, VOCABULARY]], 1), ([[1, -1]], 1), ([[1] * 129], 1), ([[1, 2]], 0)):
            with pytest.raises(RequestError):
                await engine.score([[1, 2, 3], *bad], temperature)
        with pytest.raises(RequestError):
            await engine.score([[1, 2]], math.nan)
        await asyncio.sleep(0.02)
        assert engine.steps == 0
        return await engine.score([[1] * 128])

    assert len(serve(clone_model(MODEL), work)[0]) == 128


def test_scores_that_are_not_numbers_are_an_error():
    broken = clone_model(MODEL)
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
    with pytest.raises(EngineError, match="not finite"):
        serve(broken, lambda engine: engine.score([[1, 2, 3]]))


# -- what is drawn ----------------------------------------------------------------------------------------------------


class Ladder:
    """A grammar by which each token is one of three, depending on the one before, and the fifth is the last."""

    def __init__(self) -> None:
        self.last, self.count = 0, 0

    def may(self) -> list[int]:
        return sorted({(self.last * 7 + step) % VOCABULARY for step in (1, 20, 45)})

    def allowed_mask(self, vocabulary: int) -> torch.Tensor:
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        mask[self.may()] = True
        return mask

    def advance(self, token: int) -> bool:
        assert token in self.may()
        self.last, self.count = token, self.count + 1
        return self.count == 5


def guided(model, wanted: list[GenerateRequest], config: dict) -> list[Completion]:
    async def run():
        engine = engine_of(model, EngineConfig(threads=1, **config), grammars=lambda grammar: Ladder())
        engine.start()
        try:
            return await asyncio.wait_for(asyncio.gather(*map(engine.generate, wanted)), 240)
        finally:
            engine.close()

    return asyncio.run(run())


SETTINGS = [
    {"top_p": 0.6},
    {"top_k": 3},
    {"top_k": 8, "top_p": 0.5, "top_logprobs": 4},
    {"temperature": 0.0, "top_logprobs": 2},
    {"grammar": Grammar("regex")},
    {"grammar": Grammar("regex"), "temperature": 0.05},  # most masses are far too small for float32
    {"grammar": Grammar("regex"), "temperature": 0.0},
    {"grammar": Grammar("regex"), "top_k": 2},
    {"top_logprobs": 20},
    {},
]


@pytest.mark.parametrize("config", [*MATRIX, paged({"cache": "pages", "in_flight": 3} | SCARCE)])
def test_truncated_and_guided_draws_obey_and_tell_what_they_kept(config):
    """Logprobs are those of the full vocabulary; log_z is the log of what was kept; alternatives are the best ones."""
    wanted = [
        GenerateRequest(prompt_ids=(i, 2, 3), max_tokens=30, noise=noise_key(i), **setting)
        for i, setting in enumerate(SETTINGS * 2)
    ]
    for request, answer in zip(wanted, guided(clone_model(MODEL), wanted, config), strict=True):
        rows = all_logprobs([*request.prompt_ids, *answer.token_ids], request.temperature or 1.0)[2:-1]
        ladder = Ladder() if request.grammar else None
        assert len(answer.token_ids) == (5 if ladder else 30)
        cut = ladder is not None or request.top_p < 1 or request.top_k > 0
        assert (answer.log_z is not None, answer.top is not None) == (cut, request.top_logprobs > 0)
        for place, (row, token) in enumerate(zip(rows, answer.token_ids, strict=True)):
            assert close([answer.logprobs[place]], [row[token]])
            kept = row.masked_fill(~ladder.allowed_mask(VOCABULARY), -math.inf) if ladder else row
            best = kept.argsort(descending=True)[: request.top_k or VOCABULARY]
            if request.top_p < 1:
                mass = torch.softmax(kept[best], -1)
                best = best[mass.cumsum(-1) - mass < request.top_p]
            assert token in (best[:1] if request.temperature == 0 else best)
            if cut:
                assert close([answer.log_z[place]], [row[best[kept[best] > -math.inf]].logsumexp(-1)])
            if ladder:
                ladder.advance(token)
            if request.top_logprobs:
                values, _ = row.topk(request.top_logprobs)
                assert close([value for _, value in answer.top[place]], values)
                assert close([row[token] for token, _ in answer.top[place]], values)


def test_a_row_is_drawn_the_same_whatever_its_neighbours_ask_for():
    """Bit for bit: another row's top-p or grammar must not touch the tail of this one."""
    logits = torch.randn(64, 900, generator=torch.Generator().manual_seed(0)) * 4
    keys = torch.arange(64) * 7919
    plain = SamplingMetadata(
        torch.ones(64), torch.ones(64), torch.zeros(64, dtype=torch.long), keys, keys, False, False
    )
    alone = sample(logits, plain)
    top_p = torch.ones(64)
    top_p[0] = 0.5
    allowed = torch.ones(64, 900, dtype=torch.bool)
    allowed[0, :500] = False
    crowd = sample(logits, replace(plain, top_p=top_p, truncates=True, allowed_mask=allowed))
    assert crowd.tokens[1:].equal(alone.tokens[1:])
    assert sample(logits, replace(plain, allowed_mask=allowed)).log_z[1:].eq(0).all()
    probs = logits.softmax(-1)
    assert apply_top_k_top_p(probs, top_p, plain.top_k)[1:].equal(probs[1:])
    said = logits.log_softmax(-1).gather(-1, crowd.tokens[:, None])[:, 0]
    assert torch.allclose(crowd.logprobs, said, rtol=0, atol=BITS)


# -- bad requests -----------------------------------------------------------------------------------------------------

BAD: list[dict] = [
    {"prompt_ids": ()},
    {"prompt_ids": (1, -1)},
    {"prompt_ids": (1, VOCABULARY)},
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": -1.0},
    {"temperature": 1e-50},
    {"top_p": 0.0},
    {"top_p": 2.0},
    {"top_p": math.nan},
    {"top_k": -1},
    {"top_k": 1 << 70},
    {"noise": 1 << 64},
    {"top_logprobs": 21},
    {"prompt_ids": (1,) * 128},  # no room for an answer
    {"grammar": Grammar("json")},
    {"model": "nobody"},
    {"prompt_ids": (1,) * 60, "max_tokens": 60},  # more than all pages hold
]


@pytest.mark.parametrize("config", MATRIX)
def test_bad_requests_are_refused_at_once_and_others_go_on(config):
    async def work(engine):
        good = await together(engine, WANTED, stop_at=6)
        for bad in BAD if config["cache"] == "pages" else BAD[:-1]:
            request = GenerateRequest(**({"prompt_ids": (1, 2), "max_tokens": 4} | bad))
            with pytest.raises(RequestError):
                engine.submit(request)
        await engine.resume()
        huge = await engine.generate(GenerateRequest(prompt_ids=(1,), max_tokens=9, top_k=(1 << 63) - 1, noise=-1))
        return await asyncio.gather(*good), huge

    answers, huge = serve(clone_model(MODEL), work, **config, **SCARCE)
    assert [a.token_ids for a in answers] == [p.token_ids for p in PLAIN]
    assert len(huge.token_ids) == 9
