"""Laws of credit: each algorithm against its formula in float64, and a user's own by import path."""

import asyncio
import statistics

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.algorithms import Algorithm, AlgorithmError, build_algorithm, spread
from paceline.config import algorithm as config
from paceline.data import Sample, Ticket
from paceline.orchestrator.admission import has_no_signal
from paceline.rollout import Group, Rollout
from rollouts import rollout

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
laws = settings(max_examples=40, deadline=None)
TICKET = Ticket(4, "maze", 0, 4, 1)

# Eighths are exact, so two rewards are equal or clearly apart; tenths are not, which is where a mean rounds.
EIGHTHS = st.integers(-80, 80).map(lambda n: n / 8)
REWARDS = st.lists(EIGHTHS, min_size=1, max_size=8)
TENTHS = st.integers(-30, 30).map(lambda n: n / 10)


def group(rewards, lengths: tuple[int, ...] = (2, 1)) -> Group:
    rollouts = [rollout(reward, lengths, member) for member, reward in enumerate(rewards)]
    return Group(ticket=TICKET, rollouts=rollouts, size=len(rollouts))


def credited(settings: config.AlgorithmConfig, rewards: list[float]) -> list[float]:
    """The advantage of each rollout, after checking that all its sampled tokens carry it and no other token does."""
    judged = group(rewards)
    build_algorithm(settings).assign(judged)
    advantages = []
    for member in judged.rollouts:
        assert len(member.samples) == 2
        (advantage,) = {float(a) for s in member.samples for a in s.advantages[s.loss_mask]}
        for sample in member.samples:
            np.testing.assert_array_equal(sample.advantages, np.where(sample.loss_mask, np.float32(advantage), 0))
        advantages.append(advantage)
    return advantages


@laws
@given(REWARDS, st.sampled_from(["none", "population", "sample"]), st.booleans())
def test_grpo_is_the_distance_from_the_mean(rewards, std, positive_only):
    mean = statistics.fmean(rewards)
    deviation = {"none": lambda r: 1.0, "population": statistics.pstdev, "sample": statistics.stdev}[std]
    spread_out = len(set(rewards)) > 1
    expected = [(r - mean) / deviation(rewards) if spread_out else 0.0 for r in rewards]
    if positive_only:
        expected = [max(0.0, advantage) for advantage in expected]
    advantages = credited(config.GRPOConfig(std=std, positive_only=positive_only), rewards)
    assert advantages == pytest.approx(expected, rel=1e-5, abs=1e-6)


@laws
@given(REWARDS)
def test_max_rl_is_the_distance_in_means(rewards):
    mean = statistics.fmean(rewards)
    expected = [(r - mean) / mean if mean > 0 else 0.0 for r in rewards]
    assert credited(config.MaxRLConfig(), rewards) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@laws
@given(REWARDS)
def test_reward_is_the_reward(rewards):
    assert credited(config.RewardConfig(), rewards) == rewards


RELATIVE = [config.MaxRLConfig(), *(config.GRPOConfig(std=std) for std in ("none", "population", "sample"))]


@laws
@given(TENTHS, st.integers(1, 16), st.sampled_from(RELATIVE))
def test_equal_rewards_earn_exactly_nothing(reward, size, settings):
    judged = group([reward] * size)
    build_algorithm(settings).assign(judged)
    assert all(np.all(sample.advantages == 0) for sample in judged.samples())
    assert has_no_signal(judged)


# --- a user's own

CODE = """
from paceline import Algorithm

def by_length(inputs, scale=1.0):
    return inputs.broadcast([scale * r / n for r, n in zip(inputs.rewards, inputs.completion_lengths)])

def ramp(inputs):
    return [range(n) for n in inputs.completion_lengths]

def short(inputs):
    return [*inputs.broadcast(inputs.rewards)[:-1], [1.0]]

def missing(inputs):
    return inputs.broadcast(inputs.rewards)[:-1]

def infinite(inputs):
    return inputs.broadcast([float("inf")] * len(inputs.rollouts))

class Constant(Algorithm):
    def __init__(self, value):
        self.value = value

    def assign(self, group):
        from paceline.algorithms import broadcast
        for rollout in group.rollouts:
            broadcast(rollout, self.value)

def silent(inputs):
    pass

def flat(inputs):
    return inputs.rewards

class Late(Constant):
    async def assign(self, group):
        pass

class Early(Constant):
    def finish_batch(self, groups):
        return {}

class Earlier(Constant):
    async def score(self, groups):
        return {}

class Silent(Constant):
    voice = None

class Unfinished(Algorithm):
    pass

class Stranger:
    pass

NUMBER = 3
"""


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    """Builds what a name in a user's file stands for."""
    path = tmp_path_factory.mktemp("user") / "credit.py"
    path.write_text(CODE)

    def build(name: str, **kwargs) -> Algorithm:
        return build_algorithm(config.CustomConfig(import_path=f"{path}:{name}", kwargs=kwargs))

    return build


def test_a_credit_function_gets_rewards_lengths_and_its_arguments(custom):
    judged = group([1.0, 0.5], lengths=(4, 1))
    custom("by_length", scale=10.0).assign(judged)
    for member, expected in zip(judged.rollouts, (2.0, 1.0), strict=True):
        for sample in member.samples:
            np.testing.assert_array_equal(sample.advantages, np.where(sample.loss_mask, expected, 0))


@laws
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_credit_stream_runs_over_the_sampled_tokens_in_order(custom, lengths):
    judged = group([1.0, 0.0], lengths=tuple(lengths))
    custom("ramp").assign(judged)
    for member in judged.rollouts:
        said = np.concatenate([s.advantages[s.loss_mask] for s in member.samples])
        np.testing.assert_array_equal(said, np.arange(sum(lengths)))
        assert not any(s.advantages[~s.loss_mask].any() for s in member.samples)


@laws
@given(st.integers(0, 12))
def test_a_misaligned_stream_names_env_rollout_and_both_lengths(given_length):
    one = rollout(1.0, lengths=(3, 2), member=6)
    if given_length == 5:
        spread(one, [0.0] * given_length)
        return
    with pytest.raises(AlgorithmError) as caught:
        spread(one, [0.0] * given_length)
    for part in ("env `maze`", "ticket 4", "rollout 6", f"gave {given_length} advantages", "5 sampled tokens"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("short", "env `maze`, ticket 4, rollout 1: the algorithm gave 1 advantages for 3 sampled tokens"),
        ("missing", "credit.py:missing: gave 1 lists for 2 rollouts"),
        ("infinite", "env `maze`, ticket 4.*: advantages must be finite"),
        ("silent", "credit.py:silent: gave None for 2 rollouts"),
        ("flat", "credit.py:flat: gave 1.0 for a rollout: it takes a number for each sampled token, which `inputs.b"),
    ],
)
def test_unusable_credit_is_a_sentence(custom, name, sentence):
    with pytest.raises(AlgorithmError, match=sentence):
        custom(name).assign(group([1.0, 0.0]))


def test_an_algorithm_class_by_path(custom):
    algorithm, judged = custom("Constant", value=2.5), group([0.0, 1.0])
    algorithm.observe(judged.rollouts[0])
    algorithm.assign(judged)
    assert all(np.all(s.advantages == np.where(s.loss_mask, 2.5, 0)) for s in judged.samples())
    before = judged.samples()
    assert not asyncio.run(algorithm.finish_batch([judged]))
    assert judged.samples() == before
    algorithm.load(algorithm.state())


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("Stranger", {}, "a class must derive from paceline.Algorithm"),
        ("NUMBER", {}, "neither a credit function nor an Algorithm class"),
        ("Unfinished", {}, ".* abstract .*assign"),
        ("Constant", {"size": 1}, ".* unexpected keyword argument 'size'"),
        ("Late", {"value": 1}, "`assign` is called, not awaited: write it without `async`"),
        ("Early", {"value": 1}, "`finish_batch` is awaited: write `async def finish_batch`"),
        ("Earlier", {"value": 1}, "`score` of an algorithm is called `finish_batch` now"),
        ("Silent", {"value": 1}, "`voice` of an algorithm is called `frozen_sampler` now"),
    ],
)
def test_what_is_no_algorithm_is_refused(custom, name, kwargs, sentence):
    with pytest.raises(AlgorithmError, match=f"credit.py:{name}: {sentence}"):
        custom(name, **kwargs)


def test_a_run_may_go_on_from_a_checkpoint_without_a_baseline():
    algorithm, judged = build_algorithm(config.RAEConfig()), group([2.0])
    algorithm.load(build_algorithm(config.GRPOConfig()).state())
    algorithm.assign(judged)
    assert judged.samples()[0].advantages[-1] == 2.0


# --- what a group without signal is


@laws
@given(
    st.lists(st.sampled_from([0.0, -0.0, 0.25, -1.0]), min_size=1, max_size=4),
    st.sampled_from([None, "ce_weights", "teacher_kl_weights", "rewards", "unassigned"]),
    st.data(),
)
def test_a_group_lacks_signal_only_if_nothing_in_it_would_train(advantages, other, data):
    assume(other != "unassigned" or not any(advantages))
    judged = group(advantages)
    build_algorithm(config.RewardConfig()).assign(judged)
    assert all(isinstance(sample, Sample) for sample in judged.samples())
    if other is not None:
        member = data.draw(st.sampled_from(judged.rollouts))
        at = data.draw(st.integers(0, len(member.samples) - 1))
        sample = member.samples[at]
        stream = {"advantages": None} if other == "unassigned" else {other: np.arange(len(sample))}
        member.samples[at] = sample.with_streams(**stream)
    assert has_no_signal(judged) == (other is None and not any(advantages))


# --- grpo's other options


def turned(reward: float, tokens: int, turns: int, member: int = 0) -> Rollout:
    """A rollout of so many sampled tokens, spread over so many turns."""
    lengths = [tokens // turns + (at < tokens % turns) for at in range(turns)]
    return rollout(reward, tuple(lengths), member)


COSTS = st.lists(st.tuples(EIGHTHS, st.integers(1, 4), st.integers(4, 12)), min_size=1, max_size=6)


@laws
@given(COSTS, st.sampled_from(["tokens", "turns"]))
def test_a_length_bonus_pays_those_that_pass_for_thrift(members, unit):
    """r (1 + clamp(1 - cost / mean passing cost, 0, 1)) for those that pass, r for the rest; then minus the mean."""
    judged = Group(ticket=TICKET, rollouts=[turned(r, n, t, m) for m, (r, t, n) in enumerate(members)], size=1)
    build_algorithm(config.GRPOConfig(length_bonus=unit)).assign(judged)
    costs = [n if unit == "tokens" else t for _, t, n in members]
    passing = [cost for cost, (r, _, _) in zip(costs, members, strict=True) if r >= 0.5]
    shaped = [
        r * (1 + min(max(1 - cost / statistics.fmean(passing), 0.0), 1.0)) if r >= 0.5 else r
        for cost, (r, _, _) in zip(costs, members, strict=True)
    ]
    expected = [value - statistics.fmean(shaped) for value in shaped]
    found = [float(member.samples[0].advantages[-1]) for member in judged.rollouts]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@laws
@given(st.lists(REWARDS, min_size=1, max_size=4), st.sampled_from(["none", "population", "sample"]))
def test_a_batch_baseline_is_the_mean_of_the_batch_and_waits_for_it(batch, std):
    algorithm = build_algorithm(config.GRPOConfig(baseline="batch", std=std))
    groups = [group(rewards) for rewards in batch]
    for judged in groups:
        algorithm.assign(judged)
        # Equal rewards say nothing about a group here, so none may be dropped before the batch is known.
        assert not has_no_signal(judged)
    assert not asyncio.run(algorithm.finish_batch(groups))
    rewards = [reward for some in batch for reward in some]
    deviation = {"none": lambda r: 1.0, "population": statistics.pstdev, "sample": statistics.stdev}[std]
    apart = len(set(rewards)) > 1
    expected = [(r - statistics.fmean(rewards)) / deviation(rewards) if apart else 0.0 for r in rewards]
    found = [float(member.samples[0].advantages[-1]) for judged in groups for member in judged.rollouts]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_batch_baseline_is_each_actors_own():
    algorithm = build_algorithm(config.GRPOConfig(baseline="batch"))
    groups = [group([1.0, 5.0]), group([3.0, 7.0])]
    for judged in groups:
        judged.rollouts[1].actor = "other"
    asyncio.run(algorithm.finish_batch(groups))
    assert [float(r.samples[0].advantages[-1]) for g in groups for r in g.rollouts] == [-1, -1, 1, 1]


@laws
@given(REWARDS, REWARDS)
def test_what_is_replayed_keeps_its_credit_and_is_no_baseline(then, now):
    algorithm, old, new = build_algorithm(config.GRPOConfig(baseline="batch")), group(then), group(now)
    asyncio.run(algorithm.finish_batch([old]))
    before = [sample.advantages.tolist() for sample in old.samples()]
    asyncio.run(algorithm.finish_batch([new, old]))
    assert [sample.advantages.tolist() for sample in old.samples()] == before
    found = [float(member.samples[0].advantages[-1]) for member in new.rollouts]
    assert found == pytest.approx([r - statistics.fmean(now) for r in now], abs=1e-5)


# --- a critic's reward


@laws
@given(REWARDS, st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_gae_pays_where_a_sample_ends_and_gives_no_advantage(rewards, lengths):
    judged = group(rewards, tuple(lengths))
    build_algorithm(config.GAEConfig()).assign(judged)
    assert not has_no_signal(judged)
    for member, reward in zip(judged.rollouts, rewards, strict=True):
        for sample in member.samples:
            expected = np.zeros(len(sample))
            expected[max(at for at, sampled in enumerate(sample.loss_mask) if sampled)] = reward
            np.testing.assert_array_equal(sample.rewards, expected)
            assert (sample.advantages, sample.rl_weights) == (None, None)
