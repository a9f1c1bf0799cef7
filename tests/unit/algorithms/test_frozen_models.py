"""Laws of asking another model: everybody gets its own score, few ask at once, and a failure costs one sample."""

import asyncio

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import ENDS
from paceline.algorithms import AlgorithmError
from paceline.algorithms.distillation import with_teacher_kl_weights
from paceline.algorithms.reference_scorer import MAX_EMPTY_BATCHES, ReferencePrompt, ReferenceScorer
from paceline.clients.frozen import CompletionsEngine, FrozenPool, prompt_logprobs
from paceline.config.model import ModelRef
from paceline.errors import EngineError
from paceline.rollout import Renderer
from rule_scorer import Oracle, context, grouped, spoken, truth

laws = settings(max_examples=12, deadline=None)
REF = ModelRef(name="big", base_url="http://there/v1", concurrency=3)


@pytest.fixture(scope="module")
def renderer(load):
    tokenizer = load("quickstart")
    return Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(ENDS["quickstart"])])


def asked(*replies: str, renderer, **more):
    """A group with one rollout per reply."""
    question = {"role": "user", "content": "go"}
    rollouts = [spoken(renderer, question, replies=[text], member=at, **more) for at, text in enumerate(replies)]
    for rollout in rollouts:
        rollout.samples = [with_teacher_kl_weights(sample) for sample in rollout.samples]
    return grouped(*rollouts)


@laws
@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=9), st.sampled_from([1.0, 0.7, 2.0]))
def test_every_sample_gets_its_own_scores_at_its_own_temperature(renderer, replies, temperature):
    engine = Oracle()

    async def ask():
        reference = await ReferenceScorer.connect(REF, context(renderer, engine))
        return await reference.add_logprobs([group])

    group = asked(*replies, renderer=renderer, temperature=temperature)
    assert not asyncio.run(ask())
    for sample in group.samples():
        expected = np.where(sample.loss_mask, truth(sample.token_ids.tolist(), temperature), 0)
        np.testing.assert_allclose(sample.teacher_logprobs, expected, rtol=1e-6)
    assert engine.most <= REF.concurrency


@laws
@given(st.lists(st.sampled_from(["aa", "z", "ab"]), min_size=1, max_size=6))
def test_a_failed_score_drops_its_sample_and_nothing_else(renderer, replies):
    engine = Oracle(fears=renderer.encode("z"))

    async def ask():
        return await (await ReferenceScorer.connect(REF, context(renderer, engine))).add_logprobs([group])

    group = asked(*replies, renderer=renderer)
    lost = asyncio.run(ask())
    assert lost == ({"teacher_failed": replies.count("z")} if "z" in replies else {})
    assert [len(rollout.samples) for rollout in group.rollouts] == [int(text != "z") for text in replies]
    assert all(sample.teacher_logprobs is not None for sample in group.samples())


def test_a_teacher_that_scores_nothing_any_more_stops_the_run_with_its_cause(renderer):
    async def ask():
        reference = await ReferenceScorer.connect(REF, context(renderer, Oracle(fears=renderer.encode("z"))))
        for _ in range(MAX_EMPTY_BATCHES - 1):
            await reference.add_logprobs([asked("z", renderer=renderer)])
        await reference.add_logprobs([asked("a", "z", renderer=renderer)])  # one that works, and the count begins anew
        for _ in range(MAX_EMPTY_BATCHES):
            await reference.add_logprobs([asked("z", renderer=renderer)])

    with pytest.raises(AlgorithmError, match="`big` at http://there/v1 scored nothing in 3 batches: I fear this"):
        asyncio.run(ask())


def test_who_trains_once_more_is_not_asked_about_again(renderer):
    engine = Oracle()

    async def ask():
        reference = await ReferenceScorer.connect(REF, context(renderer, engine))
        await reference.add_logprobs([group])
        engine.asked.clear()
        engine.fears = set(range(200))
        return await reference.add_logprobs([group])

    group = asked("ab", "cd", renderer=renderer)
    assert not asyncio.run(ask())
    assert engine.asked == []
    assert all(sample.teacher_logprobs is not None for sample in group.samples())


class Gone(Oracle):
    """Answers some requests, then none."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.answers = answers

    async def score(self, sequences, temperature=1.0, model=""):
        self.answers -= 1
        if self.answers >= 0:
            return await super().score(sequences, temperature, model)
        self.asked.append((list(sequences[0]), temperature))
        await asyncio.Event().wait()


@pytest.mark.parametrize("answers", [0, 4])
def test_a_reference_that_is_gone_is_waited_for_once_and_not_by_each_in_turn(renderer, monkeypatch, answers):
    monkeypatch.setattr("paceline.algorithms.reference_scorer.SECONDS", 0.05)
    engine = Gone(answers + 1)  # one more at the start, to see that it can score

    async def ask():
        return await (await ReferenceScorer.connect(REF, context(renderer, engine))).add_logprobs([group])

    group = asked(*["ab"] * 40, renderer=renderer)
    assert asyncio.run(ask()) == {"teacher_failed": 40 - answers}
    assert len(group.samples()) == answers
    assert len(engine.asked) <= 1 + answers + 2 * REF.concurrency


def test_what_stands_before_the_sampled_tokens_may_be_another_prompt(renderer):
    group = asked("ab", renderer=renderer)
    (sample,) = group.samples()
    cut = int(np.flatnonzero(sample.loss_mask)[0])
    head, engine = [7, 8, 9], Oracle()

    async def ask():
        reference = await ReferenceScorer.connect("policy", context(renderer, engine))
        await reference.add_logprobs([group], lambda rollout, sample: ReferencePrompt(head, cut))

    asyncio.run(ask())
    sequence = [*head, *sample.token_ids[cut:].tolist()]
    assert engine.asked == [(sequence, 1.0)]
    np.testing.assert_allclose(
        group.samples()[0].teacher_logprobs, [*[0.0] * cut, *truth(sequence, 1.0)[len(head) :]], rtol=1e-6
    )


def replay(engine, answer):
    """The endpoint's answers come from a function."""
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=engine.name)
    engine._client = lambda: client


@pytest.mark.parametrize("status", [429, 503])
def test_an_endpoint_that_has_too_much_to_do_is_asked_again(status):
    answers = [httpx.Response(status, json={"error": {"message": "later"}})] * 2
    answers.append(httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, -0.5]}]}))
    engine = CompletionsEngine("http://there/v1", "big")
    replay(engine, lambda request: answers.pop(0))

    async def ask():
        pool = FrozenPool([engine], REF)
        try:
            return await pool.score([[3, 5]])
        finally:
            await pool.aclose()

    assert asyncio.run(ask()) == [[0.0, -0.5]]


def test_a_key_that_is_said_back_is_hidden_also_where_the_answer_is_cut():
    key = "sk-2f9c1d7e5b"
    engine = CompletionsEngine("http://there/v1", "big", key)
    said = httpx.Response(401, text="x" * 190 + key)
    replay(engine, lambda request: said)

    async def ask():
        try:
            await engine.policy()
        finally:
            await engine.aclose()

    with pytest.raises(EngineError, match=r"x\*\*\*$"):
        asyncio.run(ask())


VLLM = [None, {"5": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -0.1}}, {"6": {"logprob": -2.0}}]


@pytest.mark.parametrize(
    ("choice", "scores"),
    [
        ({"prompt_logprobs": VLLM}, [0.0, -0.5, -2.0]),
        ({"prompt_logprobs": [None, -0.5, -2]}, [0.0, -0.5, -2.0]),
        ({"logprobs": {"token_logprobs": [None, -0.5, -2.0, -9.0]}}, [0.0, -0.5, -2.0]),
        ({"prompt_logprobs": VLLM[:2]}, None),
        ({"prompt_logprobs": [None, {"4": {"logprob": -1}}, None]}, None),
        ({"logprobs": None}, None),
        ({}, None),
    ],
)
def test_the_ways_in_which_endpoints_tell_a_prompts_log_probabilities(choice, scores):
    assert prompt_logprobs(choice, [3, 5, 6]) == scores
