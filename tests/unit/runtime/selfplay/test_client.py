"""Laws of batches that an arena plays on a client, and of the loops that hand them to a trainer."""

import asyncio

import pytest

from paceline.clients import Pool
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.data import Sample
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import load_model
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
from rollouts import two_turns


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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Loops write their checkpoints where they are started."""
    monkeypatch.chdir(tmp_path)


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
            two_turns(1.0)
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
