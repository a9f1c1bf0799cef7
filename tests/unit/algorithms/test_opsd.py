"""Laws of self-distillation: the demonstration stands before what was said, and length buys no influence."""

import asyncio
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frozen_models import REF, renderer  # noqa: F401 - a fixture

from paceline.algorithms import AlgorithmError, build_algorithm
from paceline.config.algorithm import OPSDConfig
from paceline.orchestrator.admission import has_no_signal
from paceline.rollout import Renderer
from rule_scorer import Oracle, context, grouped, spoken, truth

laws = settings(max_examples=20, deadline=None)
USER = {"role": "user", "content": "go"}
ROWS = [{"demonstration": "cab"}, {"demonstration": "bad"}]
SHORT = "see: {demonstration}"


def taught(group, renderer, config=None, rows=ROWS, engine=None):  # noqa: F811
    async def run():
        algorithm = build_algorithm(config or OPSDConfig(block=SHORT))
        await algorithm.begin(context(renderer, engine or Oracle(), rows))
        algorithm.assign(group)
        return await algorithm.finish_batch([group])

    return asyncio.run(run())


@laws
@given(st.integers(1, 3), st.booleans(), st.sampled_from([0, 1]))
def test_the_sampled_ids_stand_behind_the_demonstration_as_they_were_sampled(renderer, turns, system, row):  # noqa: F811
    told = [{"role": "system", "content": "be kind"}] if system else []
    messages = [*told, *[USER] * turns]
    group = grouped(spoken(renderer, *messages, replies=["ab" * (i + 1) for i in range(turns)], row=row))
    (before,), engine = group.samples(), Oracle()
    assert not taught(group, renderer, OPSDConfig(block=SHORT, max_pull=99.0), engine=engine)
    (sample,) = group.samples()
    first = group.rollouts[0].turns[0].prompt_ids
    block = f"see: {ROWS[row]['demonstration']}" + ("\n\nbe kind" if system else "")
    head = renderer.prompt([{"role": "system", "content": block}, *messages[len(told) : len(told) + 1]])
    sequence = head + before.token_ids.tolist()[len(first) :]
    assert engine.asked == [(sequence, 1.0)]
    expected = [*[0.0] * len(first), *truth(sequence, 1.0)[len(head) :]]
    np.testing.assert_allclose(sample.teacher_logprobs, np.where(sample.loss_mask, expected, 0), rtol=1e-6)


@laws
@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([0.5, 2.0]),
)
def test_no_rollout_pulls_harder_for_being_longer(renderer, replies, cap):  # noqa: F811
    group = grouped(
        *(
            spoken(renderer, USER, replies=["a" * length], member=at, finish="length" if cut else "stop")
            for at, (length, cut) in enumerate(replies)
        )
    )
    taught(group, renderer, OPSDConfig(block=SHORT, max_pull=cap))
    mean = np.mean([int(s.loss_mask.sum()) for s in group.samples()])
    for sample, (_, cut) in zip(group.samples(), replies, strict=True):
        assert not sample.rl_token_weights.any()
        if cut:
            assert (sample.teacher_kl_weights, sample.teacher_logprobs) == (None, None)
            continue
        assert sample.teacher_kl_weights.sum() == pytest.approx(mean, rel=1e-5)
        pull = np.abs(sample.teacher_logprobs - sample.logprobs)[sample.loss_mask]
        assert pull.max() <= cap + 1e-5
        assert (sample.teacher_kl_weights[sample.loss_mask] * pull).sum() <= mean * cap * (1 + 1e-5)
    assert has_no_signal(group) == all(cut for _, cut in replies)


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", ["be kind", [{"type": "text", "text": "be kind"}]])
def test_there_is_one_system_block_however_the_conversation_writes_its_own(renderer, role, content):  # noqa: F811
    group, engine = grouped(spoken(renderer, {"role": role, "content": content}, USER, replies=["ab"])), Oracle()
    taught(group, renderer, engine=engine)
    head = renderer.prompt([{"role": "system", "content": "see: cab\n\nbe kind"}, USER])
    assert engine.asked[0][0][: len(head)] == head


def test_cut_replies_train_where_the_user_says_so(renderer):  # noqa: F811
    group = grouped(spoken(renderer, USER, replies=["abc"], finish="length"))
    taught(group, renderer, OPSDConfig(block=SHORT, terminated_only=False))
    assert group.samples()[0].teacher_logprobs is not None


def test_a_frozen_teacher_may_be_shown_the_demonstration_instead(renderer):  # noqa: F811
    group, engine = grouped(spoken(renderer, USER, replies=["abc"])), Oracle()
    assert not taught(group, renderer, OPSDConfig(block=SHORT, teacher=REF), engine=engine)
    assert group.samples()[0].teacher_logprobs is not None


@pytest.mark.parametrize(("demonstration", "text"), [
    ([{"role": "assistant", "content": "cab"}], "cab"),
    ([{"role": "user", "content": "go"}, {"role": "assistant", "content": "cab"}], "user: go\n\nassistant: cab"),
    (42, "42"),
])  # fmt: skip
def test_a_demonstration_is_text_or_messages(renderer, demonstration, text):  # noqa: F811
    group, engine = grouped(spoken(renderer, USER, replies=["ab"])), Oracle()
    taught(group, renderer, rows=[{"demonstration": demonstration}], engine=engine)
    assert engine.asked[0][0][: len(renderer.encode(f"<|system|>see: {text}"))] == renderer.encode(
        f"<|system|>see: {text}"
    )


@pytest.mark.parametrize("missing", [{}, {"demonstration": None}, {"demonstration": ""}, {"demonstration": []}])
def test_a_missing_demonstration_is_skipped_and_many_are_an_error_that_names_row_and_key(renderer, missing):  # noqa: F811
    lacking, algorithm = {"question": "?"} | missing, build_algorithm(OPSDConfig(block=SHORT))
    sentence = r"`maze`, row 2: there is no demonstration under `demonstration`.*`question`"
    asyncio.run(algorithm.begin(context(renderer, Oracle(), [*ROWS, lacking])))
    assert algorithm.bad_rows.indices == {2}
    assert re.search(sentence, str(algorithm.bad_rows))
    with pytest.raises(AlgorithmError, match=sentence):
        taught(None, renderer, rows=[*ROWS, lacking, lacking])


def test_a_template_that_hides_the_demonstration_is_refused(load):
    tokenizer = load("quickstart")
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(AlgorithmError, match="opsd shows the demonstration as a system message"):
        taught(None, Renderer(tokenizer, [6]))
