"""Laws of a KL reference outside the trainer: whom it scores, what the reward loses, and what is lost with it."""

import asyncio
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from conftest import tiny_model
from paceline.algorithms import build_algorithm
from paceline.algorithms.base import KL_PENALTY, AlgorithmContext, reward_before_kl
from paceline.algorithms.reference_scorer import MAX_EMPTY_BATCHES, ReferenceScorer
from paceline.clients import Pool
from paceline.config import RunConfig, algorithm
from paceline.config.model import ModelRef
from paceline.config.trainer import KLConfig, TrainerConfig
from paceline.data import Sample
from paceline.errors import RequestError
from paceline.orchestrator.admission import Filters, has_no_signal, reward_before_penalty
from paceline.orchestrator.checkpoint import CheckpointError
from paceline.orchestrator.kl_reference import KLReferenceModel, token_penalty, wanted_scores
from paceline.rollout import Group
from paceline.runtime.scorer import Scorer
from paceline.weights.update import WeightUpdate
from rollouts import TICKET, rollout
from rule_scorer import Oracle, truth
from scripted_run import CoinFlips, conduct

THERE = ModelRef(name="m", base_url="http://there/v1")


def config(kl: KLConfig) -> RunConfig:
    return RunConfig(trainer=TrainerConfig(kl=kl))


def reference(kl: KLConfig, engine: Oracle) -> KLReferenceModel:
    return KLReferenceModel(kl, ReferenceScorer(Pool([engine]), "`m` at http://there/v1", wanted=wanted_scores(kl)))


def grouped(*rewards: float, lengths=((2, 1), (3,), (4, 2))) -> Group:
    rollouts = [rollout(reward, lengths[m % len(lengths)], m) for m, reward in enumerate(rewards)]
    return Group(ticket=TICKET, rollouts=rollouts, size=len(rollouts))


def frozen(sample: Sample) -> Sample:
    return sample.with_streams(logprobs=None, versions=np.full(len(sample), -1))


def by_formula(kl: KLConfig, sample: Sample) -> list[float]:
    """coef times the estimator of each sampled token, in plain Python."""
    ref, found = truth(sample.token_ids.tolist(), 1.0), []
    for t in np.flatnonzero(sample.loss_mask):
        d = float(sample.logprobs[t]) - float(np.float32(ref[t]))
        found.append(kl.coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[kl.kind])
    return found


def scored(kl: KLConfig, group: Group, engine: Oracle | None = None) -> Group:
    group = asyncio.run(reference(kl, engine or Oracle()).score_group(group))
    Filters(config(kl)).before_credit(group)
    return group


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_reward_loses_the_sum_of_the_estimator_over_its_sampled_tokens(kind):
    kl = KLConfig(how="reward", kind=kind, coef=0.05, reference=THERE)
    group = scored(kl, grouped(1.0, 0.0, 0.5))
    for made, raw in zip(group.rollouts, (1.0, 0.0, 0.5), strict=True):
        wanted = sum(value for sample in made.samples for value in by_formula(kl, sample))
        assert made.reward == pytest.approx(raw - wanted, abs=1e-12)
        assert made.metrics[KL_PENALTY] == pytest.approx(wanted, abs=1e-12)
        assert reward_before_penalty(made) == pytest.approx(raw, abs=1e-12)
        assert wanted != 0


def test_every_algorithm_compares_rewards_that_hold_the_penalty_and_equal_ones_are_told_apart_by_it():
    kl = KLConfig(how="reward", kind="k2", coef=0.01, reference=THERE)
    group = scored(kl, grouped(1.0, 1.0, 1.0))
    rewards = np.array([made.reward for made in group.rollouts])
    for c, wanted in (
        (algorithm.GRPOConfig(), rewards - rewards.mean()),
        (algorithm.MaxRLConfig(), rewards / rewards.mean() - 1),
        (algorithm.RewardConfig(), rewards),
        (algorithm.RAEConfig(), rewards),
    ):
        build_algorithm(c).assign(group)
        assert not has_no_signal(group)
        for made, advantage in zip(group.rollouts, wanted, strict=True):
            for sample in made.samples:
                np.testing.assert_allclose(sample.advantages[sample.loss_mask], advantage, rtol=1e-5, atol=1e-7)
    plain = grouped(1.0, 1.0, 1.0)
    build_algorithm(algorithm.GRPOConfig()).assign(plain)
    assert has_no_signal(plain)


def test_a_critic_gets_each_tokens_penalty_on_the_token_and_the_raw_reward_at_the_end():
    kl = KLConfig(how="reward", kind="k3", coef=0.1, reference=THERE)
    group = scored(kl, grouped(1.0, 0.25))
    gae = build_algorithm(algorithm.GAEConfig())
    asyncio.run(gae.begin(AlgorithmContext("maze", (), None, None, token_penalty=partial(token_penalty, kl))))
    gae.assign(group)
    for made, raw in zip(group.rollouts, (1.0, 0.25), strict=True):
        for sample in made.samples:
            wanted = -np.array(by_formula(kl, sample))
            wanted[-1] += raw
            np.testing.assert_allclose(sample.rewards[sample.loss_mask], wanted, rtol=1e-5)
            assert not sample.rewards[~sample.loss_mask].any()
            assert sample.advantages is None


def test_what_a_frozen_model_sampled_is_neither_scored_nor_fined():
    kl, engine = KLConfig(how="reward", reference=THERE), Oracle()
    group = grouped(1.0, 0.0)
    for made in group.rollouts:
        made.samples = [frozen(sample) for sample in made.samples]
    group = scored(kl, group, engine)
    assert not engine.asked
    assert [made.reward for made in group.rollouts] == [1.0, 0.0]


@pytest.mark.parametrize("how", ["loss", "advantage"])
def test_where_the_reward_holds_no_kl_a_batch_is_scored_when_it_ships_and_each_sample_once(how):
    kl, engine = KLConfig(how=how, reference=THERE), Oracle()
    model, group = reference(kl, engine), grouped(1.0, 0.0)

    async def ships() -> None:
        assert await model.score_group(group) is group
        assert not engine.asked
        for _ in range(2):
            assert not await model.score_batch([group])

    asyncio.run(ships())
    samples = group.samples()
    assert len(engine.asked) == len(samples)
    for sample in samples:
        expected = np.where(sample.loss_mask, truth(sample.token_ids.tolist(), 1.0), 0)
        np.testing.assert_allclose(sample.kl_ref_logprobs, expected, rtol=1e-6)
    assert [made.reward for made in group.rollouts] == [1.0, 0.0]


def test_a_rollout_without_its_kl_has_failed_and_the_others_of_its_group_go_on():
    kl, group = KLConfig(how="reward", reference=THERE), grouped(1.0, 0.0, 0.5)
    group = asyncio.run(reference(kl, Oracle(fears=[3])).score_group(group))  # the third alone says a 3
    assert [made.member for made in group.rollouts] == [0, 1]
    (lost,) = group.failed
    assert lost.member == 2
    assert "maze: `m` at http://there/v1 gave no KL for the reward: I fear this" in lost.error


def test_groups_that_lose_their_kl_together_are_counted_by_the_breaker_and_not_as_batches():
    """A reference that is away for a moment fails every group in flight at once."""
    model = reference(KLConfig(how="reward", reference=THERE), Oracle(fears=[0]))  # every rollout says a 0

    async def together() -> list[Group]:
        return await asyncio.gather(*(model.score_group(grouped(1.0)) for _ in range(2 * MAX_EMPTY_BATCHES)))

    for group in asyncio.run(together()):
        assert (group.rollouts, len(group.failed)) == ([], 1)


def test_a_run_takes_the_penalty_from_every_group_before_credit(tmp_path, monkeypatch):
    """With an orchestrator's loop around it: groups of equal rewards train, and the metric stays the raw reward."""
    kl = KLConfig(how="reward", kind="k2", coef=0.5, reference=THERE)

    class Sure(CoinFlips):
        async def play(self, example, seats):
            outcome = await super().play(example, seats)
            return replace(outcome, rewards=dict.fromkeys(outcome.rewards, 1.0))

    trainer, log, _ = conduct(
        tmp_path, Sure(), steps=2, trainer=TrainerConfig(kl=kl), parts={"reference": reference(kl, Oracle())}
    )
    assert [len(batch) for _, batch in trainer.trained] == [8, 8]
    for line in log.metrics:
        assert line["reward/coins/mean"] == pytest.approx(1.0, abs=1e-6)
        assert line[f"metric/coins/{KL_PENALTY}"] > 0
    assert all(sample.kl_ref_logprobs is not None for _, batch in trainer.trained for sample in batch)


# --- snapshots on workers


def asked() -> list[list[int]]:
    dice = np.random.default_rng(0)
    return [dice.integers(0, 60, 12).tolist() for _ in range(3)]


def update_of(seed: int, version: int) -> WeightUpdate:
    return WeightUpdate(version, dict(tiny_model(seed).named_parameters()))


def test_a_snapshot_is_taken_every_so_many_batches_and_comes_back_with_the_checkpoint(tmp_path):
    kl = KLConfig(reference="snapshot", every=2)
    weights = {version: update_of(version + 1, version) for version in range(4)}

    async def scores_of(scorer: Scorer) -> list[list[float]]:
        return await scorer.score(asked())

    def started(seed: int) -> Scorer:
        scorer = Scorer(tiny_model(seed), budget=64, follows=True)
        scorer.start()
        return scorer

    async def story() -> None:
        plain = {version: Scorer(tiny_model(version + 1), budget=64) for version in weights}
        for scorer in plain.values():
            scorer.start()
        want = {version: await scores_of(scorer) for version, scorer in plain.items()}
        first = started(0)
        model = KLReferenceModel(kl, ReferenceScorer(Pool([first]), "workers"), Pool([first]))
        for version, taken in ((0, 0), (1, 0), (2, 2), (3, 2)):
            await model.take_if_due(weights[version])
            np.testing.assert_allclose(await scores_of(first), want[taken], atol=1e-6)
        for step in ("step-3", "step-4"):
            (tmp_path / step).mkdir()
            model.save(tmp_path / step)
        (one,), (other,) = (list((tmp_path / step).iterdir()) for step in ("step-3", "step-4"))
        assert one.samefile(other), "the same snapshot takes no room twice"
        second = started(9)
        again = KLReferenceModel(kl, ReferenceScorer(Pool([second]), "workers"), Pool([second]))
        await again.load(tmp_path / "step-4")
        await again.take_if_due(weights[3])
        np.testing.assert_allclose(await scores_of(second), want[2], atol=1e-6)
        other.unlink()
        other.write_bytes(b"half a file")
        with pytest.raises(CheckpointError, match="the snapshot of the KL reference, cannot be read"):
            await again.load(tmp_path / "step-4")
        other.unlink()
        await again.load(tmp_path / "step-4")  # of a run that had none: the next version is the snapshot
        await again.take_if_due(weights[3])
        np.testing.assert_allclose(await scores_of(second), want[3], atol=1e-6)
        for scorer in (first, second, *plain.values()):
            scorer.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_a_scorer_of_a_frozen_model_takes_no_weights():
    with pytest.raises(RequestError, match="frozen"):
        asyncio.run(Scorer(tiny_model(), budget=64).load_weights(update_of(1, 1)))


def test_the_raw_reward_is_what_it_was_without_a_penalty():
    assert reward_before_kl(rollout(0.5)) == 0.5
