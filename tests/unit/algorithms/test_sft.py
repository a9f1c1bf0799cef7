"""Laws of imitation: what another model said trains token by token, without a ratio, and never goes stale."""

import asyncio
import copy
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frozen_models import REF

from conftest import ENDS
from paceline.algorithms import AlgorithmError, build_algorithm
from paceline.algorithms.sft import demonstration_turns
from paceline.config import RunConfig
from paceline.config.algorithm import SFTConfig
from paceline.config.env import ReverseTextConfig
from paceline.data import Ticket
from paceline.envs import POLICY, Environment, Outcome
from paceline.orchestrator import build_train_envs
from paceline.orchestrator.admission import has_no_signal
from paceline.orchestrator.gate import limit_staleness, staleness
from paceline.rollout import Renderer, Rollout, SessionMap, assemble
from rule_scorer import Oracle, context, grouped, spoken

laws = settings(max_examples=12, deadline=None)
USER = {"role": "user", "content": "go"}


@pytest.fixture(scope="module", params=list(ENDS))
def renderer(request, load):
    tokenizer = load(request.param)
    return Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(ENDS[request.param])])


@pytest.fixture(scope="module")
def quick(load):
    return Renderer(load("quickstart"), [6])


@laws
@given(st.integers(1, 3), st.integers(0, 100))
def test_every_token_trains_by_itself_and_age_is_no_matter(quick, turns, version):
    group = grouped(spoken(quick, *[USER] * turns, replies=["ab"] * turns, reward=0.0))
    before = group.samples()
    build_algorithm(SFTConfig(teacher=REF)).assign(group)
    assert not has_no_signal(group)
    for sample, old in zip(group.samples(), before, strict=True):
        assert (sample.logprobs, sample.advantages, sample.teacher_kl_weights) == (None, None, None)
        assert not sample.rl_token_weights.any()
        np.testing.assert_array_equal(sample.ce_weights, old.loss_mask)
        np.testing.assert_array_equal(sample.token_ids, old.token_ids)
        assert staleness(sample, version) == 0
        assert limit_staleness(sample, version, 0, "drop") is sample


def test_the_teacher_speaks_in_training_and_no_other_model_is_asked(quick):
    algorithm, given = build_algorithm(SFTConfig(teacher=REF)), context(quick, Oracle())
    assert algorithm.frozen_sampler is None
    asyncio.run(algorithm.begin(given))
    assert algorithm.frozen_sampler.pool.ref == REF
    assert (algorithm.frozen_sampler.renderer, algorithm.frozen_sampler.sampling) == (quick, given.client.sampling)


# --- demonstrations


@laws
@given(st.lists(st.text("ab c1", min_size=1, max_size=9).map(str.strip).filter(bool), min_size=1, max_size=3))
def test_a_recited_conversation_reads_as_the_template_writes_it(renderer, replies):
    messages = [m for text in replies for m in (USER, {"role": "assistant", "content": text})]
    turns = demonstration_turns(renderer, messages)
    # A template may put an empty thought before the last reply.
    assert [renderer.reply(turn.completion_ids).rpartition("</think>")[2].strip() for turn in turns] == replies
    assert all(turn.completion_ids[-1] in renderer.end_tokens for turn in turns)
    made = Rollout(ticket=Ticket(0, "e", 0, 0, 0), member=0, turns=turns)
    samples = assemble(made)
    whole = renderer.text(messages, reply=False)
    assert whole.startswith(renderer.decode(samples[-1].token_ids.tolist()))
    # Whatever is trained is a reply and its end, each once.
    said = [renderer.decode(s.token_ids[s.loss_mask].tolist()) for s in samples]
    assert "".join(said).count(renderer.decode([min(renderer.end_tokens)])) == len(replies)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize("words", [None, "", "wait", [{"type": "text", "text": "wait"}]])
def test_calls_and_parts_are_recited_too(renderer, words):
    calling = {"role": "assistant", "content": words, "tool_calls": [CALL]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "it is 2"}]}
    turns = demonstration_turns(
        renderer, [USER, calling, {"role": "tool", "tool_call_id": "1", "content": "2"}, answer], [TOOL]
    )
    first, last = (renderer.reply(turn.completion_ids).rpartition("</think>")[2].strip() for turn in turns)
    assert first.startswith("wait" if words else "<")
    assert all(part in first for part in ("add", '"x": 1'))
    assert last == "it is 2"
    assert all(turn.tools == [TOOL] for turn in turns)


class Rows(Environment):
    """Rows of a test's own; a played one tells that it was, and what was asked."""

    def __init__(self, *rows):
        self.rows, self.asked = rows, []

    def examples(self, split):
        return self.rows if split == "train" else self.rows[:1]

    async def play(self, example, seats):
        self.asked.append(example["messages"])
        return Outcome.solo(0.25)


def course(rows: Environment, demonstrations):
    algo = SFTConfig(demonstrations=demonstrations)
    config = RunConfig(batch_size=8, env=[ReverseTextConfig(name="maze", algo=algo)])
    return build_train_envs(config, {"maze": rows})["maze"]


def begun(quick, rows, demonstrations):
    found = course(Rows(*rows), demonstrations)
    given = context(quick, Oracle(), found.rows)
    asyncio.run(found.algorithm.begin(given))
    return found, given.client


ASKED = [{"role": "user", "content": "go"}]
SAID = {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    ("row", "demonstrations"),
    [
        ({"messages": [*ASKED, SAID]}, True),
        ({"messages": ASKED, "completion": "ab"}, True),
        ({"messages": ASKED, "answer": "ab"}, "answer"),
        ({"messages": ASKED, "shown": [*ASKED, SAID]}, "shown"),
        ({"messages": [*ASKED, SAID]}, "messages"),
    ],
)
def test_a_row_is_read_out_in_training_and_played_when_held_out(quick, row, demonstrations):
    found, client = begun(quick, [row], demonstrations)
    assert found.group_size == 1
    whole = copy.deepcopy(row)

    async def play(example):
        table = SessionMap(client, (0,), 0, found.environment.actors)
        return await found.environment.play(await found.environment.prepare(example), table), table[POLICY].turns

    async def both():
        drawn = await found.environment.assign(dict(row), 0, random.Random(0))
        return await play(drawn), await play(dict(row))

    (outcome, turns), (held_out, nothing) = asyncio.run(both())
    assert (outcome.rewards[POLICY], [turn.text for turn in turns]) == (1.0, ["ab"])
    assert (held_out.rewards[POLICY], nothing) == (0.25, [])
    # An evaluated policy is asked, and not told.
    assert found.environment._played.asked == [ASKED]
    assert row == whole


@pytest.mark.parametrize(
    ("row", "demonstrations", "name"),
    [
        ({"messages": ASKED}, True, "messages"),
        ({"messages": ASKED, "answer": ""}, "answer", "answer"),
        ({"messages": [SAID]}, True, "messages"),
        ({"answer": "ab"}, "answer", "answer"),
    ],
)
def test_a_row_without_a_demonstration_is_named_at_the_start(quick, row, demonstrations, name):
    good = {"messages": [*ASKED, SAID], "answer": "ab"}
    with pytest.raises(AlgorithmError, match=f"environment `maze`, row 1: there is no demonstration under `{name}`"):
        begun(quick, [good, row], demonstrations)


def test_demonstrations_have_one_speaker():
    class Two(Rows):
        actors = ("a", "b")

    with pytest.raises(AlgorithmError, match="has several seats"):
        course(Two({"messages": [*ASKED, SAID]}), True)
