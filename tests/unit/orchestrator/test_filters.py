"""Laws of what stands between a group and its batch: the user's filter, and what becomes of long replies."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms import build_algorithm
from paceline.config import RunConfig, algorithm, load
from paceline.config.base import UserCode
from paceline.config.filters import FiltersConfig, LengthConfig
from paceline.config.inference import SamplingConfig
from paceline.config.model import ModelRef
from paceline.envs import Outcome
from paceline.orchestrator.admission import LENGTH_PENALTY, FilterError, Filters, has_no_signal
from paceline.rollout import Group
from paceline.util.importing import HookError
from paceline.util.user_code import UserCodeError
from rollouts import rollout
from scripted_run import CoinFlips, conduct, states

laws = settings(max_examples=30, deadline=None)
REF = ModelRef(name="big", base_url="http://there/v1")

CODE = """
import numpy as np

def even(group, keep=0):
    assert all(sample.advantages is not None for sample in group.samples()), "credit comes first"
    return np.bool_(group.ticket.row % 2 == keep)

def never(group):
    return False

def vague(group):
    return None

def broken(group):
    return group.nonsense

NUMBER = 3
"""


@pytest.fixture
def hook(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return lambda name, **kwargs: UserCode(import_path=f"{tmp_path / 'mine.py'}:{name}", kwargs=kwargs)


@pytest.mark.parametrize("parity", [0, 1])
def test_a_users_filter_drops_groups_under_a_reason_of_its_own_and_their_places_are_refilled(tmp_path, hook, parity):
    filters = FiltersConfig(group=hook("even", keep=parity))
    trainer, log, _ = conduct(tmp_path, CoinFlips(), steps=4, filters=filters)
    assert {s.ticket.row % 2 for _, batch in trainer.trained for s in batch} == {parity}
    assert all(len(batch) == 8 for _, batch in trainer.trained)
    reasons = [record["reason"] for record in log.records if record["state"] == "dropped"]
    for reason in ("group_filter", "zero_advantage"):
        assert sum(line.get(f"dropped/{reason}", 0) for line in log.metrics) == reasons.count(reason) > 0


def test_a_filter_that_keeps_nothing_is_told_as_what_it_is(tmp_path, hook):
    filters = FiltersConfig(group=hook("never"), zero_advantage=False)
    trainer, log, _ = conduct(tmp_path, CoinFlips(rows=50), epochs=1, filters=filters)
    assert trainer.trained == []
    assert len(states(log, "dropped")) == 50
    assert "(group_filter), so nothing trains: look at what filters.group asks for" in log.notes[0]


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("vague", FilterError, r"mine.py:vague, env `coins`, ticket \d+: gave None: answer True to keep"),
        ("broken", UserCodeError, "mine.py:broken, env `coins`.* AttributeError: .*nonsense.*, in broken"),
        ("NUMBER", FilterError, "mine.py:NUMBER is no function: name one"),
        ("nobody", HookError, "has no `nobody`"),
    ],
)
def test_a_filter_that_cannot_judge_stops_the_run_with_a_sentence(tmp_path, hook, name, error, sentence):
    with pytest.raises(error, match=sentence):
        conduct(tmp_path, CoinFlips(), steps=2, filters=FiltersConfig(group=hook(name), zero_advantage=False))


def test_the_run_file_names_the_filter_and_doubts_too_large_a_buffer(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[filters.group]\nimport_path = "a:b"\nkwargs = { least = 2 }\n[length]\nmask_truncated = true\n')
    config = load(file).config
    assert config.filters.group == UserCode(import_path="a:b", kwargs={"least": 2})
    assert config.length.mask_truncated
    file.write_text("[length]\nbuffer = 9\n[sampling]\nmax_tokens = 8\n")
    (warning,) = load(file).warnings
    assert "length.buffer = 9 is more than sampling.max_tokens = 8, so that even the shortest reply" in str(warning)


# --- long replies


def judged(config: algorithm.AlgorithmConfig, members, length: LengthConfig, max_tokens: int = 8) -> Group:
    """A group of rollouts (reward, lengths of turns, whether the last was cut off) after rules and credit."""
    rollouts = []
    for number, (reward, lengths, cut) in enumerate(members):
        made = rollout(reward, tuple(lengths), number)
        if cut:
            made.samples[-1] = replace(made.samples[-1], ended="truncated")
        rollouts.append(made)
    group = Group(ticket=rollouts[0].ticket, rollouts=rollouts, size=len(rollouts))
    filters = Filters(RunConfig(length=length, sampling=SamplingConfig(max_tokens=max_tokens)))
    filters.before_credit(group)
    found = build_algorithm(config)
    found.assign(group)
    filters.after_credit(group)
    if isinstance(config, algorithm.GRPOConfig):
        asyncio.run(found.finish_batch([group]))
    return group


MEMBERS = st.lists(
    st.tuples(
        st.integers(-8, 8).map(lambda n: n / 4), st.lists(st.integers(1, 8), min_size=1, max_size=3), st.booleans()
    ),
    min_size=1,
    max_size=6,
)


@laws
@given(MEMBERS, st.sampled_from(["group", "batch"]))
def test_a_cut_off_rollout_says_nothing_and_still_counts_in_the_baseline(members, baseline):
    group = judged(algorithm.GRPOConfig(baseline=baseline), members, LengthConfig(mask_truncated=True))
    mean = np.mean([reward for reward, _, _ in members])
    for member, (reward, _, cut) in zip(group.rollouts, members, strict=True):
        for sample in member.samples:
            assert sample.rl_token_weights.any() == (not cut)
            np.testing.assert_allclose(sample.advantages[sample.loss_mask], reward - mean, atol=1e-5)
    telling = [reward != members[0][0] for reward, _, _ in members]
    assert has_no_signal(group) == (not any(telling) or all(cut or reward == mean for reward, _, cut in members))


@pytest.mark.parametrize(
    "config",
    [
        algorithm.OPDConfig(teacher=REF),
        algorithm.SFTConfig(teacher=REF),
        algorithm.GAEConfig(),
        algorithm.ConstantConfig(),
    ],
)
def test_whatever_trains_a_cut_off_rollout_falls_silent(config):
    group = judged(config, [(1.0, (2, 3), True)], LengthConfig(mask_truncated=True))
    assert has_no_signal(group)
    for sample in group.samples():
        assert (sample.rl_token_weights.any(), sample.ce_weights, sample.teacher_kl_weights) == (False, None, None)


def test_what_a_cut_off_rollout_was_told_may_still_train():
    group = judged(algorithm.GRPOConfig(), [(1.0, (2,), True)], LengthConfig())
    member = group.rollouts[0]
    told = np.array([0, 0.1, 0, 0], np.float32)
    member.samples = [member.samples[0].with_streams(ce_weights=told)]
    Filters(RunConfig(length=LengthConfig(mask_truncated=True))).after_credit(group)
    np.testing.assert_array_equal(member.samples[0].ce_weights, told)


@laws
@given(MEMBERS, st.integers(0, 8), st.sampled_from([0.5, 1.0]))
def test_the_last_tokens_before_the_limit_cost_reward_line_by_line(members, buffer, penalty):
    """DAPO, equation 13, of the longest reply."""
    group = judged(algorithm.RewardConfig(), members, LengthConfig(buffer=buffer, penalty=penalty))
    for member, (reward, lengths, _) in zip(group.rollouts, members, strict=True):
        length, limit = max(lengths), 8
        free = buffer == 0 or length <= limit - buffer
        cost = 0.0 if free else ((limit - buffer) - length) / buffer
        assert member.reward == pytest.approx(reward + penalty * cost)
        assert member.samples[0].advantages[-1] == pytest.approx(reward + penalty * cost, abs=1e-5)
        assert member.metrics.get(LENGTH_PENALTY, 0.0) == pytest.approx(-penalty * cost)


def test_the_rewards_shown_are_the_environments_own(tmp_path):
    class Pays(CoinFlips):
        async def play(self, example, seats):
            await seats["policy"].complete([0, 1])
            return Outcome.solo(1.0)

    rules = {"length": LengthConfig(buffer=2), "sampling": SamplingConfig(max_tokens=3), "filters": FiltersConfig()}
    trainer, log, _ = conduct(tmp_path, Pays(), steps=3, group_size=4, **rules)
    for line in log.metrics:
        assert line["reward/coins/mean"] == line["reward_trained/coins/mean"] == 1.0
        assert 0 < line[f"metric/coins/{LENGTH_PENALTY}"] < 1
    # Equal answers of unequal length now tell: that is all there is to learn from here.
    for _, batch in trainer.trained:
        costs = {s.rollout: (int(s.loss_mask.sum()), s.advantages[-1]) for s in batch if s.ticket == batch[0].ticket}
        assert [a for _, a in sorted(costs.values())] == sorted((a for _, a in costs.values()), reverse=True)
