"""Laws of the self-play trainer: what accumulates into a step, what is left out, and work that is not awaited."""

import asyncio
import logging

import numpy as np
import pytest

from paceline.clients import Pool
from paceline.config import ConfigError
from paceline.config.inference import EngineConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import load_model
from paceline.runtime.selfplay import (
    Client,
    ConstantCredit,
    GRPOCredit,
    OpenAIClient,
    SelfPlayTrainer,
    SelfPlayTrainerConfig,
    TrainingBatch,
    apply_lora,
    load,
    optim,
)
from paceline.selfplay import Actor, Arena, Artifact, EpisodeRequest, Rubric, SingleTurnEpisode
from trainers import weights_of


class Sum(SingleTurnEpisode):
    """Pays who says an even digit."""

    episode_type = "sum"

    @property
    def rubric(self):
        def even(state, arena):
            return {"player": float(state.last_text[-1:] in set("02468"))}

        return Rubric([even])

    def get_initial_prompt(self, arena, artifact, state):
        return f"add: {artifact.data}+0"


class Sums(Arena):
    def __init__(self, client=None, credit_assigner=None) -> None:
        super().__init__(client, credit_assigner)
        self.add_actor(Actor("player", max_tokens=3))
        self.add_episode(Sum())

    def get_batch(self):
        return [EpisodeRequest("sum", Artifact(row), {"set": "small"}) for row in (3, 4, 5) for _ in range(6)]


@pytest.fixture(scope="module")
def engine():
    """A real engine in this process, with room for the policy's adapter."""
    served = load_model(ModelConfig()).requires_grad_(False)
    engine = EmbeddedEngine(served, EngineConfig(adapters=1, adapter_rank=16, max_running=32, threads=1))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def made(engine):
    """Makes trainers of the quickstart model that publish to the engine."""
    trainers = []

    def make(optimizer=None, **settings) -> SelfPlayTrainer:
        model, _ = load("paceline:quickstart")
        config = SelfPlayTrainerConfig(**settings)
        trainers.append(SelfPlayTrainer(model, optimizer or optim.Adam(1e-3), config, Client(Pool([engine]))))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


def run(work):
    return asyncio.run(asyncio.wait_for(work, 240))


@pytest.fixture(scope="module")
def records(engine):
    """What the untrained policy said, with credit of either sign."""
    model, _ = load("paceline:quickstart")
    trainer = SelfPlayTrainer(model, None, SelfPlayTrainerConfig(), Client(Pool([engine])))
    batch = run(Sums(trainer.client, ConstantCredit()).step())
    trainer.close()
    rng = np.random.default_rng(0)
    return [r.with_streams(advantages=np.where(r.loss_mask, rng.normal(), 0)) for r in batch.records[:16]]


def far(record):
    """The same, sampled by a policy that found it e^3 times likelier than ours does."""
    return record.with_streams(logprobs=np.where(record.loss_mask, record.logprobs + 3, 0))


def flat(trainer):
    weights = weights_of(trainer._trainer)
    return np.concatenate([np.ravel(np.asarray(weights[name])) for name in sorted(weights)])


def test_records_say_what_they_are(records):
    for record in records:
        assert list(record.input_ids) == list(record.token_ids)
        assert {"policy_version", "reward"} <= record.meta.keys()
        assert [record.meta[name] for name in ("set", "policy_version", "actor", "episode_type")] == [
            "small", 0, "player", "sum",
        ]  # fmt: skip


def test_a_micro_batch_far_from_the_sampler_adds_neither_gradient_nor_samples(made, records):
    alone = made(micro_batch_tokens=1, min_samples_per_step=8)
    mixed = made(micro_batch_tokens=1, min_samples_per_step=8)

    async def work():
        assert (await alone.accumulate(records[:8])).metrics["micro_batches"] == 8
        assert await mixed.accumulate([*records[:4], *map(far, records[8:12])]) is None
        assert await mixed.accumulate([far(records[12])]) is None
        assert await mixed.accumulate(records[4:7]) is None
        assert await mixed.accumulate(records[7:8]) is not None

    run(work())
    assert (mixed.skipped, mixed.version) == (5, 1)
    np.testing.assert_allclose(flat(mixed), flat(alone), rtol=0, atol=2e-6)


def test_the_whole_micro_batch_is_left_out_with_what_is_sound_in_it(made, records):
    together, alone, all_kept = made(), made(), made(clip_skip_threshold=None)
    batch = TrainingBatch([*records[:8], *map(far, records[8:])])

    async def work():
        assert await together.train_step(batch) is None
        assert await together.flush() is None
        assert together.version == 0
        sound = TrainingBatch(records[:8])
        later, only = await together.train_step(sound), await alone.train_step(sound)
        assert later.metrics["grad_norm"] == pytest.approx(only.metrics["grad_norm"], rel=1e-3)
        assert await all_kept.train_step(batch) is not None

    run(work())
    assert (together.skipped, together.version) == (16, 1)
    assert (all_kept.skipped, all_kept.version) == (0, 1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss_type": "sample"}, {"importance_sampling": "sequence"}, {"use_kl_penalty": True, "kl_coef": 5.0}],
    ids=str,
)
def test_however_records_are_handed_over_the_step_is_the_same(made, records, settings):
    settings |= {"clip_skip_threshold": None}
    whole, parts = made(**settings), made(micro_batch_tokens=30, **settings)
    # At the second step adapters differ from the base, and samples from the policy.
    steps = [[range(16)] * 2, [range(5), range(5, 11), range(11, 16)] * 2]

    async def work():
        for trainer, hands in zip((whole, parts), steps, strict=True):
            for hand in hands:
                await trainer.accumulate([records[i] for i in hand])

    run(work())
    assert whole.version == parts.version == 2
    for one, other in zip(whole.reports, parts.reports, strict=True):
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-3, abs=1e-6)
        assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("loss_type", ["token", "sample"])
def test_the_loss_is_the_mean_over_tokens_or_over_samples(made, records, loss_type):
    """At the sampler's own weights every ratio is 1, and the loss of a token is minus its advantage."""
    trainer = made(loss_type=loss_type, min_samples_per_step=16)

    async def work():
        return (await trainer.accumulate(records)).metrics["loss"]

    per_sample = [record.advantages[record.loss_mask] for record in records]
    of_tokens, of_samples = -np.concatenate(per_sample).mean(), -np.mean([one.mean() for one in per_sample])
    assert abs(of_tokens - of_samples) > 0.01
    assert run(work()) == pytest.approx(of_tokens if loss_type == "token" else of_samples, abs=1e-3)


def test_clip_bounds_are_those_of_the_ratio():
    section = SelfPlayTrainerConfig(ppo_clip_min=0.7, ppo_clip_max=1.5).section(optim.Adam())
    assert (section.loss.clip_low, section.loss.clip_high) == (pytest.approx(0.3), pytest.approx(0.5))


def test_the_kl_penalty_pulls_towards_the_base(made, records):
    """With no other advantage, only the penalty moves the policy; its gradient is zero where it is off."""
    idle = [record.with_streams(advantages=np.zeros(len(record))) for record in records]
    with_penalty, without = (
        made(use_kl_penalty=on, kl_coef=5.0, clip_skip_threshold=None, staleness_limit=9) for on in (True, False)
    )

    async def work():
        for trainer in (with_penalty, without):
            await trainer.accumulate(records)  # away from the base
            later = [r.with_streams(logprobs=np.where(r.loss_mask, r.logprobs + 0.1, 0)) for r in idle]
            await trainer.accumulate(later)

    run(work())
    assert with_penalty.reports[1].metrics["grad_norm"] > 0
    assert without.reports[1].metrics["grad_norm"] == 0
    assert "kl" in with_penalty.reports[1].metrics
    assert "kl" not in without.reports[1].metrics


def test_work_that_is_not_awaited_is_done_in_order_before_the_next_batch(made, records):
    trainer = made(clip_skip_threshold=None, staleness_limit=9)
    arena = Sums(trainer.client, GRPOCredit())

    async def work():
        tasks = [trainer.train_step(TrainingBatch(records[i : i + 4])) for i in (0, 4, 8)]
        batch = await arena.step()
        assert all(task.done() for task in tasks)
        assert {record.meta["policy_version"] for record in batch.records} <= {3}
        assert await trainer.client.get_policy_version() == 3
        # Of what accumulates, one call may still be under way.
        tasks = [trainer.accumulate(records) for _ in range(3)]
        await arena.step()
        assert [task.done() for task in tasks[:2]] == [True, True]
        await trainer.flush()

    run(work())
    assert trainer.version == len(trainer.reports) == 6


def test_what_fails_unawaited_is_raised_by_the_next_batch(made, records):
    trainer = made()
    arena = Sums(trainer.client, GRPOCredit())
    bad = records[0].with_streams(advantages=None)

    async def work():
        trainer.accumulate([bad])
        trainer.train_step(TrainingBatch(records))
        with pytest.raises(PacelineError, match="neither advantages nor rewards"):
            await arena.step()
        await arena.step()

    run(work())
    assert trainer.version == 1


def test_what_is_no_record_and_no_place_for_a_step_are_sentences(made, records):
    trainer = made()
    with pytest.raises(PacelineError, match="need a running event loop"):
        trainer.accumulate(records)

    async def work():
        with pytest.raises(PacelineError, match=r"'words' is no record: give those of a batch"):
            await trainer.accumulate(["words"])
        with pytest.raises(PacelineError, match="accumulate got a TrainingBatch: give the records of a batch"):
            await trainer.accumulate(TrainingBatch(records))
        with pytest.raises(PacelineError, match="train_step got a list: give a batch"):
            await trainer.train_step(records)
        assert await trainer.accumulate([]) is None
        assert await trainer.train_step(TrainingBatch([])) is None

    run(work())


def test_the_optimizer_brings_the_learning_rate(made, records, caplog):
    with caplog.at_level(logging.WARNING):
        given = made(optim.Adam(learning_rate=3e-4), lr=1e-5, min_samples_per_step=1)
    assert "lr = 1e-05 is not used: the optimizer that was given has 0.0003" in caplog.text
    model, _ = load("paceline:quickstart")
    own = SelfPlayTrainer(model, None, SelfPlayTrainerConfig(lr=2e-4, min_samples_per_step=1), given.client)

    async def work():
        return [(await trainer.accumulate(records)).metrics["lr"] for trainer in (given, own)]

    assert run(work()) == [3e-4, 2e-4]
    own.close()


def test_a_trainer_that_cannot_be_made_says_why(made):
    model, _ = load("paceline:quickstart")
    with pytest.raises(PacelineError, match=r"pad_token_id = 9999 is no token of this model, which has \d+"):
        SelfPlayTrainer(model, None, SelfPlayTrainerConfig(pad_token_id=9999))
    with pytest.raises(PacelineError, match=r"give optim\.Adam"):
        SelfPlayTrainer(model, 1e-5)
    with pytest.raises(PacelineError, match=r"inference_url = `http://a:1`, but the client speaks to http://b:2"):
        SelfPlayTrainer(model, None, SelfPlayTrainerConfig(inference_url="http://a:1/"), OpenAIClient("http://b:2/v1"))
    with pytest.raises(PacelineError, match="`localhost` is no address of a server: write one as http://HOST:PORT"):
        SelfPlayTrainer(model, None, SelfPlayTrainerConfig(inference_url="localhost"))
    with pytest.raises(PacelineError, match=r"model: got a tuple, .* as in `model, tokenizer = load\(NAME\)`"):
        SelfPlayTrainer(load("paceline:quickstart"))
    with pytest.raises(PacelineError, match=r"model: got a NoneType"):
        apply_lora(None)
    with pytest.raises(PacelineError, match=r"config: got a dict: give TrainerConfig\(...\)"):
        SelfPlayTrainer(model, None, {"lr": 1e-5})
    with pytest.raises(PacelineError, match=r"client: got a str: give OpenAIClient\(base_url=...\)"):
        SelfPlayTrainer(model, None, None, "http://localhost:8000/v1")
    assigned = SelfPlayTrainerConfig()
    assigned.eval_every = "ten"
    with pytest.raises(ConfigError, match=r'eval_every: expected a whole number, .*got "ten"'):
        SelfPlayTrainer(model, None, assigned)
    with pytest.raises(PacelineError, match="load: backend = 'jax' is none: write auto, torch or mlx"):
        load("paceline:quickstart", backend="jax")
    apply_lora(model, inference_mode=True)
    with pytest.raises(PacelineError, match=r"nothing of this model trains: .*apply_lora\(model\)"):
        SelfPlayTrainer(model)
    apply_lora(model)
    trainer = SelfPlayTrainer(model, config=SelfPlayTrainerConfig(inference_url="http://127.0.0.1:1"))
    assert trainer.client.url == "http://127.0.0.1:1"
    trainer.close()


def test_a_server_that_is_not_there_is_a_sentence_at_once(made):
    model, _ = load("paceline:quickstart")
    trainer = SelfPlayTrainer(model, None, None, OpenAIClient("http://127.0.0.1:9/v1"))
    with pytest.raises(PacelineError, match=r"http://127\.0\.0\.1:9 does not answer.* `paceline serve NAME --engine"):
        run(Sums(trainer.client, GRPOCredit()).step())
    trainer.close()


def test_adapters_are_put_beside_a_model_once():
    model, _ = load("paceline:quickstart", lora=None)
    assert all(parameter.requires_grad for parameter in model.parameters())
    apply_lora(model, LoRAConfig(rank=2))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names
    assert all(".lora_" in name for name in names)
    apply_lora(model, inference_mode=False)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == names
    with pytest.raises(PacelineError, match="has adapters already"):
        apply_lora(model, LoRAConfig(rank=4))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"importance_sampling": "word"}, "importance_sampling.*expected.*sequence.*got"),
        ({"clip_skip_threshold": 2.0}, "clip_skip_threshold"),
        ({"ppo_clip_min": 1.5}, "ppo_clip_min"),
        ({"min_samples_per_step": "16"}, "min_samples_per_step"),
        ({"staleness": 3}, "staleness_limit"),
        ({"wandb_run_name": "x"}, "set wandb_project too"),
        ({"checkpoint_dir": ""}, "checkpoint_dir"),
    ],
)
def test_wrong_settings_are_sentences(settings, why):
    with pytest.raises(ConfigError, match=why):
        SelfPlayTrainerConfig(**settings)


def test_a_sequence_ratio_weighs_samples_alike_and_measures_from_the_sampler():
    section = SelfPlayTrainerConfig(importance_sampling="sequence").section(optim.Adam())
    assert (section.normalise, section.proximal, section.loss.clip_low, section.loss.clip_high) == (
        "sample", None, 3e-4, 3e-4,
    )  # fmt: skip
