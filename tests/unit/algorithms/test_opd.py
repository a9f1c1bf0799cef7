"""Laws of on-policy distillation: all of the pull is the teacher's, none of it the reward's."""

import asyncio

import numpy as np
import pytest
from test_frozen_models import REF, renderer  # noqa: F401 - a fixture

from paceline.algorithms import AlgorithmError, build_algorithm
from paceline.config.algorithm import OPDConfig
from paceline.orchestrator.admission import has_no_signal
from rule_scorer import Attached, Oracle, context, grouped, spoken, truth

USER = {"role": "user", "content": "go"}


def test_two_turns_are_scored_as_one_sequence_and_rewards_play_no_part(renderer):  # noqa: F811
    engine = Oracle()
    more = {"role": "user", "content": "on"}
    group = grouped(*(spoken(renderer, USER, more, replies=["a", "bc"], member=m, reward=float(m)) for m in range(2)))

    async def run():
        algorithm = build_algorithm(OPDConfig(teacher=REF))
        await algorithm.begin(context(renderer, engine))
        algorithm.assign(group)
        assert not has_no_signal(group)
        return await algorithm.finish_batch([group])

    assert not asyncio.run(run())
    one, two = group.samples()
    assert len(one.spans) == 2
    for sample in (one, two):
        assert (sample.advantages, sample.rl_token_weights.any(), sample.ce_weights) == (None, False, None)
        np.testing.assert_array_equal(sample.teacher_kl_weights, sample.loss_mask)
        expected = np.where(sample.loss_mask, truth(sample.token_ids.tolist(), 1.0), 0)
        np.testing.assert_allclose(sample.teacher_logprobs, expected, rtol=1e-6)


def test_a_teacher_at_one_temperature_only_is_refused_at_another(renderer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Attached, "scores_any_temperature", False)
    algorithm = build_algorithm(OPDConfig(teacher=REF))
    asyncio.run(algorithm.begin(context(renderer, Oracle())))
    with pytest.raises(AlgorithmError, match=r"scores at temperature 1 only, and the run samples at 0.7: set sampling"):
        asyncio.run(algorithm.begin(context(renderer, Oracle(), temperature=0.7)))


def test_a_teacher_that_does_not_answer_or_cannot_score_is_refused_at_the_start(renderer):  # noqa: F811
    algorithm = build_algorithm(OPDConfig(teacher=REF))
    with pytest.raises(AlgorithmError, match="environment `maze`: the model does not answer"):
        asyncio.run(algorithm.begin(context(renderer, Oracle(), teacher=False)))
    with pytest.raises(AlgorithmError, match=r"environment `maze`: `big` at .+ cannot score: I fear this"):
        asyncio.run(algorithm.begin(context(renderer, Oracle(fears=range(200)))))
