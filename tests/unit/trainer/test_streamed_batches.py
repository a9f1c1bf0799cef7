"""Training on a batch while it is sampled: the update is that of the whole batch."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import scripted_run
from conftest import tiny_model
from paceline.config import RunConfig
from paceline.config import trainer as config
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import Sample
from paceline.model import attach_lora
from paceline.orchestrator.metrics import Stopwatch
from paceline.trainer import TrainerError
from samples import make_batch
from scripted_run import CoinFlips, CountingTrainer, conduct, states
from trainers import trainer_of, weights_of

PLAIN = {"ce_weights": None, "teacher_kl_weights": None}


def trained(batch: list[Sample], feeds: list[list[int]], budget: int = 64, lora: bool = False, **settings):
    """Weights and metrics after one step, the samples of `feeds` fed before it."""
    model = tiny_model()
    if lora:
        attach_lora(model, ModelConfig(lora=LoRAConfig(rank=2)), seed=0)
    trainer = trainer_of(model, config.TrainerConfig(threads=1, micro_batch_tokens=budget, **settings))

    async def run():
        for indices in feeds:
            await trainer.feed([batch[i] for i in indices])
        return await trainer.step(batch)

    report = asyncio.run(run())
    trainer.close()
    return torch.cat([p.view(-1) for p in weights_of(trainer).values()]).double(), report


def same(one, other, timing=("train_tokens/s", "micro_batches")) -> None:
    """AdamW's first step is lr times a sign: compare where that sign is not a matter of rounding."""
    assert ((one[0] - other[0]).abs() > 1e-7).float().mean() < 2e-3
    assert one[1].metrics.keys() == other[1].metrics.keys()
    for name in one[1].metrics.keys() - set(timing):
        assert one[1].metrics[name] == pytest.approx(other[1].metrics[name], rel=1e-4, abs=1e-7), name
    scores, others = (report.scores.by_sample() for _, report in (one, other))
    assert scores.keys() == others.keys()
    for place, ours in scores.items():
        for name, tolerance in (("logprob", 1e-5), ("entropy", 1e-2), ("flags", 0)):
            np.testing.assert_allclose(ours[name], others[place][name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("normalise", ["token", "sample", "fixed"])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": config.DPPOConfig()},
        {"loss": config.PPOConfig(), "entropy_coef": 0.1, "clip_skip_threshold": 0.5},
        {"loss": config.GSPOConfig(clip_low=0.5, clip_high=0.5)},
        {"loss": config.CISPOConfig(), "kl": config.KLConfig()},
        {"loss": config.PPOConfig(), "kl": config.KLConfig(how="advantage"), "proximal": config.ProximalConfig()},
    ],
    ids=lambda s: "-".join([s["loss"].type, *list(s)[1:]]),
)
def test_a_fed_batch_trains_like_a_whole_one(normalise, settings):
    rng = np.random.default_rng(0)
    batch = [s.with_streams(kl_ref_logprobs=-rng.exponential(3.0, len(s))) for s in make_batch(1)]
    if "clip_skip_threshold" in settings:  # half of the samples are by the policy itself, and stay
        batch[::2] = [s.with_streams(logprobs=None) for s in batch[::2]]
    settings = settings | {"normalise": normalise, "fixed_length": 32}
    whole = trained(batch, [], **settings)
    same(trained(batch, [[4, 0], [7], [1, 2, 8]], **settings), whole)
    same(trained(batch, [[8, 7, 6, 5, 4, 3, 2, 1, 0]], **settings), whole)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.permutations(range(9)), st.integers(0, 9), st.sampled_from([1, 40, 150, 10_000]))
def test_in_any_order_and_any_cut(seed, order, fed, budget):
    batch = make_batch(seed)
    feeds = [[index] for index in order[:fed]]
    same(trained(batch, feeds, budget), trained(batch, [], budget))


def test_the_gradient_itself_is_the_same():
    """To rounding, not only up to what AdamW makes of it."""
    batch = make_batch(3)
    norms = [trained(batch, feeds)[1].metrics["grad_norm"] for feeds in ([], [[0, 1], [2, 3, 4, 5]])]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_adapters_are_fed_too():
    batch = make_batch(5, **PLAIN)
    same(trained(batch, [[1, 2, 3], [5, 6]], lora=True), trained(batch, [], lora=True))


def test_two_batches_do_not_mix():
    """What was fed for one batch leaves nothing behind for the next."""
    first, second = make_batch(6), make_batch(7)

    def run(feed: bool):
        trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1, micro_batch_tokens=64))

        async def steps():
            for batch in (first, second):
                if feed:
                    await trainer.feed(batch[:5])
                await trainer.step(batch)

        asyncio.run(steps())
        trainer.close()
        return torch.cat([p.view(-1) for p in weights_of(trainer).values()])

    difference = (run(True) - run(False)).abs()
    assert (difference > 1e-6).float().mean() < 5e-3


def test_a_gradient_that_is_not_finite_skips_the_step():
    batch = make_batch(8, **PLAIN)
    broken = batch[0].with_streams(advantages=np.full(len(batch[0]), np.inf))
    before = torch.cat(
        [p.view(-1) for p in weights_of(trainer_of(tiny_model(), config.TrainerConfig())).values()]
    ).double()
    weights, report = trained([broken, *batch[1:]], [[0, 1], [2]])
    assert report.skipped
    torch.testing.assert_close(weights, before)


def test_what_is_fed_must_be_in_the_batch():
    batch = make_batch(9)
    trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1))

    async def run():
        await trainer.feed(batch[:2])
        await trainer.step(batch[1:])

    with pytest.raises(TrainerError, match="1 samples were fed"):
        asyncio.run(run())
    trainer.close()


class Fed(CountingTrainer):
    """Remembers what it was fed, and what it was then asked to step on."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.fed: list[Sample] = []
        self.shares: list[float] = []

    async def feed(self, samples) -> None:
        assert samples
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(0)
        self.fed += samples

    async def step(self, batch):
        here = {id(sample) for sample in batch}
        assert len({id(sample) for sample in self.fed}) == len(self.fed), "nothing is fed twice"
        assert {id(sample) for sample in self.fed} <= here, "what is fed is in the batch"
        self.shares.append(len(self.fed) / len(batch))
        self.fed = []
        return await super().step(batch)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 3), st.integers(0, 1000), st.sampled_from([0.0, 0.2]))
def test_what_is_fed_is_what_the_batch_holds(tmp_path_factory, allowed, seed, failing):
    """However groups come back: batches are full, no token is too old, each ticket counts once."""
    made: list[Fed] = []

    def trainer(seed: int) -> Fed:
        made.append(Fed(seed))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted_run, "CountingTrainer", trainer)
        settings = {"steps": 6, "staleness": allowed, "trainer": config.TrainerConfig(stream=True)}
        _, log, _ = conduct(tmp_path_factory.mktemp("run"), CoinFlips(failing=failing), seed, **settings)
    assert len(made[0].trained) == 6
    for version, batch in made[0].trained:
        assert max(version - s.versions[t] for s in batch for t in range(len(s)) if s.rl_token_weights[t]) <= allowed
    trained_tickets = states(log, "trained")
    assert len(trained_tickets) == 6 * 4
    assert max(Counter(trained_tickets + states(log, "dropped")).values()) == 1
    assert any(0 < share < 1 for share in made[0].shares), "some groups were there before the others"


def test_feeding_counts_as_training_not_as_waiting():
    now = [0.0]
    watch = Stopwatch(SimpleNamespace(now=lambda: now[0]), lambda: now[0] / 2)
    with watch.phase("sample"):
        now[0] += 1.0
        with watch.phase("score"):
            now[0] += 2.0
        with watch.phase("train"):
            now[0] += 4.0
        now[0] += 8.0
    with watch.phase("train"):
        now[0] += 16.0
    assert [watch.seconds(name) for name in ("sample", "score", "train")] == [9.0, 2.0, 20.0]
    lap = watch.lap(0)
    assert lap["overlap_ratio"] == 0.5  # the engine decodes half of the time; not 1 - wait_time_ratio
    assert lap["wait_time_ratio"] == pytest.approx(9 / 29)


def test_an_engine_that_was_started_again_has_not_worked_less_than_nothing():
    now, busy = [0.0], [100.0]
    watch = Stopwatch(SimpleNamespace(now=lambda: now[0]), lambda: busy[0])
    with watch.phase("train"):
        now[0], busy[0] = 10.0, 3.0
    lap = watch.lap(0)
    assert (lap["overlap_ratio"], lap["busy/sampler"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"trainer": {"stream": True, "minibatches": 2}}, "minibatches"),
        ({"trainer": {"stream": True, "critic": {}}}, "critic"),
        ({"trainer": {"stream": True}, "deterministic": True}, "deterministic"),
        ({"trainer": {"stream": True}, "algo": {"type": "grpo", "baseline": "batch"}}, "baseline"),
    ],
)
def test_what_cannot_be_streamed_is_refused(changes, word):
    with pytest.raises(ValidationError, match=word):
        RunConfig.model_validate(changes)
