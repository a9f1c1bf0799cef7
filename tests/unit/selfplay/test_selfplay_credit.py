"""Laws of self-play credit (baselines per role, comparisons between siblings, state that survives a restart) and of the
loops that hand it to a trainer."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms import Algorithm
from paceline.algorithms.baselines import RAE, Constant
from paceline.algorithms.grpo import Hierarchical
from paceline.clients import Pool
from paceline.config import algorithm as config
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.data import Sample, Ticket
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import load_model
from paceline.rollout import Group, Rollout
from paceline.runtime.selfplay import (
    Client,
    ConstantCredit,
    GRPOCredit,
    RAECredit,
    SelfPlayTrainer,
    SelfPlayTrainerConfig,
    TrainingBatch,
    load,
    optim,
    synchronous_training_loop,
    training_loop,
)
from paceline.selfplay import Actor, Arena, Artifact, EpisodeRequest, Rubric, SingleTurnEpisode
from rollouts import two_turns as rollout

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
        got = credited(algorithm, [rollout(reward, actor=actor) for actor, reward in rewards])
        assert got == pytest.approx([reward - baselines[actor] for actor, reward in rewards], rel=1e-5, abs=1e-5)
        for actor in {actor for actor, _ in rewards}:
            own = [reward for who, reward in rewards if who == actor]
            baselines[actor] = decay * baselines[actor] + (1 - decay) * sum(own) / len(own)


@laws
@given(PLAYED, PLAYED)
def test_a_resumed_rae_credits_as_an_unbroken_one(before, after):
    unbroken = RAE(config.RAEConfig())
    for rewards in before:
        credited(unbroken, [rollout(reward, actor=actor) for actor, reward in rewards])
    resumed = RAE(config.RAEConfig())
    resumed.load(json.loads(json.dumps(unbroken.state())))
    for rewards in after:
        first, second = ([rollout(reward, actor=actor) for actor, reward in rewards] for _ in range(2))
        assert credited(unbroken, first) == credited(resumed, second)


def test_rae_keeps_environments_kinds_and_actors_apart():
    algorithm = RAE(config.RAEConfig(decay=0.5))
    credited(algorithm, [rollout(4.0, actor="x", kind="game")])
    assert credited(algorithm, [rollout(4.0, actor="x", kind="game")]) == [2.0]
    assert credited(algorithm, [rollout(4.0, actor="o", kind="game")]) == [4.0]
    assert credited(algorithm, [rollout(4.0, actor="x", kind="duel")]) == [4.0]
    assert credited(algorithm, [rollout(4.0, actor="x", kind="game")], env="other") == [4.0]


# --- hierarchical

TREES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["", "", "asker", "asker#2"]), st.sampled_from("ab"), ACTORS, EIGHTHS),
    min_size=1,
    max_size=16,
)


@laws
@given(TREES, st.sampled_from(["none", "population", "sample"]))
def test_hierarchical_advantages_of_each_scope_sum_to_zero(tree, std):
    rollouts = [rollout(r, member=m, parent=parent, kind=kind, actor=actor) for m, parent, kind, actor, r in tree]
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
    easy = [rollout(r, member=0, actor="solver", kind="solve", parent="asker") for r in (1.0, 1.0, 0.0)]
    hard = [rollout(r, member=1, actor="solver", kind="solve", parent="asker") for r in (0.0, 0.0, 1.0)]
    roots = [rollout(r, member=m, actor="asker", kind="ask") for m, r in enumerate((0.5, 1.0))]
    got = credited(Hierarchical(config.HierarchicalConfig()), [*easy, *hard, *roots])
    third = 1 / 3
    assert got == pytest.approx([third, third, -2 * third, -third, -third, 2 * third, -0.25, 0.25])


def test_positive_only_keeps_what_was_better_than_the_mean():
    got = credited(Hierarchical(config.HierarchicalConfig(positive_only=True)), [rollout(0.0), rollout(1.0, member=1)])
    assert got == [0.0, 0.5]


# --- constant


@laws
@given(EIGHTHS, st.lists(EIGHTHS, min_size=1, max_size=4))
def test_constant_credit_looks_at_nothing(value, rewards):
    algorithm = Constant(config.ConstantConfig(value=value))
    assert credited(algorithm, [rollout(reward, member=at) for at, reward in enumerate(rewards)]) == [value] * len(
        rewards
    )


# --- the loops


class Coin(SingleTurnEpisode):
    """Pays who says an even digit, and counts how many are at the table at once."""

    episode_type = "coin"

    def __init__(self) -> None:
        self.playing = self.most = 0

    @property
    def rubric(self):
        def even(state, arena):
            return {"player": float(state.last_text in set("02468"))}

        return Rubric([even])

    def get_initial_prompt(self, arena, artifact, state):
        return f"add: {artifact.data}+0"

    async def rollout(self, arena, artifact, state):
        self.playing += 1
        self.most = max(self.most, self.playing)
        await super().rollout(arena, artifact, state)
        self.playing -= 1


class Coins(Arena):
    def __init__(self, client=None, credit_assigner=None) -> None:
        super().__init__(client, credit_assigner)
        self.add_actor(Actor("player", max_tokens=3))
        self.add_episode(Coin())

    def get_batch(self):
        return [EpisodeRequest("coin", Artifact(row)) for row in (3, 4, 5) for _ in range(6)]


@pytest.fixture
def client():
    """A real engine in this process, with room for the policy's adapter."""
    served = load_model(ModelConfig()).requires_grad_(False)
    engine = EmbeddedEngine(served, EngineConfig(adapters=1, adapter_rank=16, max_running=16, threads=1))
    engine.start()
    yield Client(Pool([engine]))
    engine.close()


@pytest.fixture
def trainer(client):
    model, _ = load("paceline:quickstart")
    config = SelfPlayTrainerConfig(micro_batch_tokens=4096, staleness_limit=3, kl_coef=0.1, use_kl_penalty=False)
    trainer = SelfPlayTrainer(model, optim.Adam(learning_rate=1e-3), config, client)
    yield trainer
    trainer.close()


def test_the_training_loop_trains_and_publishes_while_it_generates(client, trainer):
    arena = Coins(client, credit_assigner=GRPOCredit())

    async def run():
        await training_loop(arena=arena, trainer=trainer, num_steps=4, episode_concurrency=5)
        return await client.pool.policies()

    (served,) = asyncio.run(asyncio.wait_for(run(), 240))
    assert arena.episodes["coin"].most == 5
    assert served.version == trainer.version == len(trainer.reports) >= 2
    assert not any(report.skipped for report in trainer.reports)
    assert any(report.metrics["grad_norm"] > 0 for report in trainer.reports)
    assert trainer.stale == 0


@pytest.mark.parametrize("credit", [GRPOCredit(normalize=True), RAECredit(), ConstantCredit(0.5)])
def test_the_synchronous_loop_makes_one_step_of_each_batch(client, trainer, credit):
    asyncio.run(asyncio.wait_for(synchronous_training_loop(Coins(client, credit), trainer, 2), 240))
    assert trainer.version == 2
    assert trainer.stale == 0


def test_tries_of_one_artifact_are_compared_and_others_are_not(client, trainer):
    batch = asyncio.run(asyncio.wait_for(Coins(client, GRPOCredit()).step(), 240))
    assert [len(group.rollouts) for group in batch.groups] == [6, 6, 6]
    for played in batch.groups:
        values = [float(r.samples[0].advantages[r.samples[0].loss_mask][0]) for r in played.rollouts]
        assert sum(values) == pytest.approx(0, abs=1e-6)
    kept = [played for played in batch.groups if len({rollout.reward for rollout in played.rollouts}) > 1]
    assert len(batch.records) == 6 * len(kept)
    assert set(batch.rewards()) == {"player"}


def test_samples_wait_until_they_make_a_step_and_old_ones_are_left_out(client):
    model, _ = load("paceline:quickstart")
    # What these samples claim to have been sampled with is far from the model.
    trainer = SelfPlayTrainer(model, None, SelfPlayTrainerConfig(clip_skip_threshold=None), client)

    def sample(version: int) -> Sample:
        return (
            rollout(1.0)
            .samples[0]
            .with_streams(versions=[-1, -1, version, version], advantages=[0, 0, 1, -1], token_ids=[24, 25, 26, 27])
        )

    async def run():
        assert await trainer.accumulate([sample(0)] * 15) is None
        assert await trainer.accumulate([sample(0)]) is not None
        assert await trainer.accumulate([sample(1)] * 3) is None
        assert await trainer.flush() is not None
        assert await trainer.flush() is None
        for version in (2, 3):
            await trainer.train_step(TrainingBatch([sample(version)], []))
        assert trainer.version == 4
        assert await trainer.accumulate([sample(0)] * 16 + [sample(1)]) is None

    asyncio.run(asyncio.wait_for(run(), 240))
    assert trainer.stale == 16


def test_what_the_loop_cannot_do_is_a_sentence(client, trainer):
    with pytest.raises(PacelineError, match="no credit_assigner: give it GRPOCredit"):
        asyncio.run(Coins(client).step())
    with pytest.raises(PacelineError, match="make the SelfPlayTrainer first"):
        _ = Client(client.pool).sampling_client

    class Idle(Coins):
        def get_batch(self):
            return []

    with pytest.raises(PacelineError, match=r"Idle has nothing to play: its get_batch\(\) gave no request"):
        asyncio.run(synchronous_training_loop(Idle(client, GRPOCredit()), trainer, 1))
