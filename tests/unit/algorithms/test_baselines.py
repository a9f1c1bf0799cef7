"""Laws of self-play credit: baselines per role, comparisons between siblings, state that survives a restart."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms import Algorithm
from paceline.algorithms.baselines import RAE, Constant
from paceline.algorithms.grpo import Hierarchical
from paceline.config import algorithm as config
from paceline.data import Ticket
from paceline.rollout import Group, Rollout
from rollouts import two_turns

laws = settings(max_examples=40, deadline=None)
EIGHTHS = st.integers(-80, 80).map(lambda n: n / 8)
ACTORS = st.sampled_from(["x", "o"])


def group(rollouts: list[Rollout], env: str = "maze") -> Group:
    return Group(ticket=Ticket(4, env, 0, 4, 1), rollouts=rollouts, size=len(rollouts))


def advantage(of: Rollout) -> float:
    """The one number all sampled tokens of a rollout carry, and no other token does."""
    assert len(of.samples) == 2
    (value,) = {float(a) for sample in of.samples for a in sample.advantages[sample.loss_mask]}
    assert not any(sample.advantages[~sample.loss_mask].any() for sample in of.samples)
    return value


def credited(algorithm: Algorithm, rollouts: list[Rollout], env: str = "maze") -> list[float]:
    algorithm.assign(group(rollouts, env))
    return [advantage(one) for one in rollouts]


# --- rae

PLAYED = st.lists(st.lists(st.tuples(ACTORS, EIGHTHS), min_size=1, max_size=4), min_size=1, max_size=6)


@laws
@given(PLAYED, st.floats(0, 0.99))
def test_rae_compares_with_what_the_role_earned_before_this_group(played, decay):
    algorithm, baselines = RAE(config.RAEConfig(decay=decay)), {"x": 0.0, "o": 0.0}
    for rewards in played:
        got = credited(algorithm, [two_turns(reward, actor=actor) for actor, reward in rewards])
        assert got == pytest.approx([reward - baselines[actor] for actor, reward in rewards], rel=1e-5, abs=1e-5)
        for actor in {actor for actor, _ in rewards}:
            own = [reward for who, reward in rewards if who == actor]
            baselines[actor] = decay * baselines[actor] + (1 - decay) * sum(own) / len(own)


@laws
@given(PLAYED, PLAYED)
def test_a_resumed_rae_credits_as_an_unbroken_one(before, after):
    unbroken = RAE(config.RAEConfig())
    for rewards in before:
        credited(unbroken, [two_turns(reward, actor=actor) for actor, reward in rewards])
    resumed = RAE(config.RAEConfig())
    resumed.load(json.loads(json.dumps(unbroken.state())))
    for rewards in after:
        first, second = ([two_turns(reward, actor=actor) for actor, reward in rewards] for _ in range(2))
        assert credited(unbroken, first) == credited(resumed, second)


def test_rae_keeps_environments_kinds_and_actors_apart():
    algorithm = RAE(config.RAEConfig(decay=0.5))
    credited(algorithm, [two_turns(4.0, actor="x", kind="game")])
    assert credited(algorithm, [two_turns(4.0, actor="x", kind="game")]) == [2.0]
    assert credited(algorithm, [two_turns(4.0, actor="o", kind="game")]) == [4.0]
    assert credited(algorithm, [two_turns(4.0, actor="x", kind="duel")]) == [4.0]
    assert credited(algorithm, [two_turns(4.0, actor="x", kind="game")], env="other") == [4.0]


# --- hierarchical

TREES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["", "", "asker", "asker#2"]), st.sampled_from("ab"), ACTORS, EIGHTHS),
    min_size=1,
    max_size=16,
)


@laws
@given(TREES, st.sampled_from(["none", "population", "sample"]))
def test_hierarchical_advantages_of_each_scope_sum_to_zero(tree, std):
    rollouts = [two_turns(r, member=m, parent=parent, kind=kind, actor=actor) for m, parent, kind, actor, r in tree]
    Hierarchical(config.HierarchicalConfig(std=std)).assign(group(rollouts))
    scopes: dict[tuple, list[Rollout]] = {}
    for one in rollouts:
        scopes.setdefault((one.member if one.parent else None, one.parent, one.kind, one.actor), []).append(one)
    for siblings in scopes.values():
        assert sum(map(advantage, siblings)) == pytest.approx(0, abs=1e-4)
        better = sorted(siblings, key=lambda one: one.reward)
        assert [advantage(one) for one in better] == sorted(advantage(one) for one in better)
        if len({one.reward for one in siblings}) == 1:
            assert {advantage(one) for one in siblings} == {0.0}


def test_children_are_compared_with_siblings_only_and_roots_with_the_group():
    easy = [two_turns(r, member=0, actor="solver", kind="solve", parent="asker") for r in (1.0, 1.0, 0.0)]
    hard = [two_turns(r, member=1, actor="solver", kind="solve", parent="asker") for r in (0.0, 0.0, 1.0)]
    roots = [two_turns(r, member=m, actor="asker", kind="ask") for m, r in enumerate((0.5, 1.0))]
    got = credited(Hierarchical(config.HierarchicalConfig()), [*easy, *hard, *roots])
    third = 1 / 3
    assert got == pytest.approx([third, third, -2 * third, -third, -third, 2 * third, -0.25, 0.25])


def test_positive_only_keeps_what_was_better_than_the_mean():
    got = credited(
        Hierarchical(config.HierarchicalConfig(positive_only=True)), [two_turns(0.0), two_turns(1.0, member=1)]
    )
    assert got == [0.0, 0.5]


# --- constant


@laws
@given(EIGHTHS, st.lists(EIGHTHS, min_size=1, max_size=4))
def test_constant_credit_looks_at_nothing(value, rewards):
    algorithm = Constant(config.ConstantConfig(value=value))
    assert credited(algorithm, [two_turns(reward, member=at) for at, reward in enumerate(rewards)]) == [value] * len(
        rewards
    )
