"""The conductor's laws, driven by an engine whose tokens take random time and a trainer that only counts."""

import asyncio
import errno
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BreakerConfig, CheckpointConfig, FiltersConfig
from paceline.config.env import CustomEnvConfig
from paceline.data import Sample
from paceline.envs import Outcome
from paceline.orchestrator import (
    Breaker,
    CheckpointError,
    Checkpoints,
    Gate,
    RunStopped,
)
from paceline.orchestrator.evaluation import pass_at_k
from paceline.orchestrator.gate import limit_staleness, staleness
from scripted_run import CoinFlips, conduct, states


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 1000),
    st.sampled_from(["drop", "mask"]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([8, 16, None]),
)
def test_no_trained_token_is_older_than_allowed(tmp_path_factory, allowed, seed, on_stale, failing, inflight):
    """However long tokens and batches take: staleness stays within S, batches are full, each ticket counts once."""
    tmp = tmp_path_factory.mktemp("run")
    environment = CoinFlips(failing=failing)
    trainer, log, _ = conduct(
        tmp, environment, seed, steps=6, staleness=allowed, on_stale=on_stale, max_inflight=inflight
    )
    assert len(trainer.trained) == 6
    for version, batch in trainer.trained:
        ages = [version - s.versions[t] for s in batch for t in range(len(s)) if s.rl_token_weights[t]]
        assert max(ages) <= allowed
    trained, dropped = states(log, "trained"), states(log, "dropped")
    assert len(trained) == 6 * 4
    assert max(Counter(trained + dropped).values()) == 1
    assert all(metrics["batch/rollouts"] <= 8 for metrics in log.metrics)
    for step in range(1, 7):
        numbers = [r["number"] for r in log.records if r["state"] == "trained" and r["step"] == step]
        assert numbers == sorted(numbers)


def test_a_batch_tells_the_staleness_of_its_freshest_mean_and_oldest_sample_when_it_ships(tmp_path):
    """Of each sample that of its oldest trained token."""
    trainer, log, _ = conduct(tmp_path, CoinFlips(), steps=6, staleness=3, max_inflight=64)
    ages = [[version - int(s.versions[s.loss_mask].min()) for s in batch] for version, batch in trainer.trained]
    assert any(min(some) < max(some) for some in ages)
    for some, metrics in zip(ages, log.metrics, strict=True):
        assert metrics["staleness/min"] == min(some)
        assert metrics["staleness/mean"] == pytest.approx(fmean(some))
        assert metrics["staleness/max"] == max(some)


def test_staleness_zero_is_synchronous(tmp_path):
    trainer, log, _ = conduct(tmp_path, CoinFlips(), steps=5, staleness=0)
    for version, batch in trainer.trained:
        assert {int(v) for s in batch for v in s.versions[s.loss_mask]} == {version}
    assert {metrics["staleness/max"] for metrics in log.metrics} == {0.0}


def test_the_last_partial_batch_trains(tmp_path):
    """Every row of every epoch is used; only the last batch may be short."""
    _, log, _ = conduct(tmp_path, CoinFlips(rows=10), epochs=1, filters=FiltersConfig(zero_advantage=False))
    assert len(states(log, "trained")) == 10
    assert [metrics["batch/rollouts"] for metrics in log.metrics] == [8, 8, 4]


def test_groups_without_signal_are_replaced(tmp_path):
    trainer, log, _ = conduct(tmp_path, CoinFlips(), steps=4)
    assert sum(metrics["dropped/zero_advantage"] for metrics in log.metrics) == len(states(log, "dropped")) > 0
    for _, batch in trainer.trained:
        assert len(batch) == 8
        assert all(abs(s.advantages).max() > 0 for s in batch)


class Constant(CoinFlips):
    async def play(self, example, seats):
        await seats["policy"].complete([0, 1])
        return Outcome.solo(1.0)


def test_all_groups_filtered_is_a_state_and_the_user_is_told(tmp_path):
    trainer, log, _ = conduct(tmp_path, Constant(rows=50), epochs=1)
    assert trainer.trained == []
    assert len(states(log, "dropped")) == 50
    assert "nothing trains" in log.notes[0]


class Broken(CoinFlips):
    async def play(self, example, seats):
        await seats["policy"].complete([0, 1])
        raise KeyError("answer")


class NotANumber(CoinFlips):
    async def play(self, example, seats):
        await seats["policy"].complete([0, 1])
        return Outcome.solo(float("nan"))


@pytest.mark.parametrize(("environment", "cause"), [(Broken(), "KeyError: 'answer'"), (NotANumber(), "finite number")])
def test_an_environment_that_always_fails_stops_the_run_with_its_cause(tmp_path, environment, cause):
    with pytest.raises(RunStopped, match="5 rollouts failed in a row") as stopped:
        conduct(tmp_path, environment, steps=3, breaker=BreakerConfig())
    assert cause in str(stopped.value)


def test_a_dropped_rollout_leaves_its_group_smaller(tmp_path):
    trainer, log, _ = conduct(tmp_path, CoinFlips(failing=0.3), steps=5, group_size=4, env=[_env(min_group_size=2)])
    sizes = Counter(s.ticket.number for _, batch in trainer.trained for s in batch)
    assert set(sizes.values()) <= {2, 3, 4}
    assert len(set(sizes.values())) > 1
    assert sum(metrics["dropped/failed_rollouts"] for metrics in log.metrics) > 0


def _env(**settings) -> CustomEnvConfig:
    return CustomEnvConfig(name="coins", import_path="x:y", **settings)


def test_a_resumed_run_trains_the_rows_an_unbroken_one_would(tmp_path):
    """Stopped after any step and resumed: same rows, same order, none twice."""
    plain = {"staleness": 0, "filters": FiltersConfig(zero_advantage=False)}
    _, whole, _ = conduct(tmp_path / "whole", CoinFlips(), steps=7, **plain)
    expected = [(r["number"], r["row"], r["step"]) for r in whole.records if r["state"] == "trained"]
    for cut in (1, 3, 6):
        _, first, _ = conduct(tmp_path / str(cut), CoinFlips(), steps=cut, **plain)
        _, rest, _ = conduct(tmp_path / str(cut), CoinFlips(), steps=7, resume="latest", **plain)
        both = [r for r in [*first.records, *rest.records] if r["state"] == "trained"]
        assert [(r["number"], r["row"], r["step"]) for r in both] == expected


def test_open_tickets_wait_again_after_a_resume(tmp_path):
    """Riding ahead, a checkpoint catches tickets in flight: they are played again before anything new is drawn."""
    plain = {"staleness": 3, "filters": FiltersConfig(zero_advantage=False)}
    _, first, _ = conduct(tmp_path, CoinFlips(), steps=50, checkpoint=CheckpointConfig(every=2), **plain)
    _, rest, _ = conduct(tmp_path, CoinFlips(), steps=50, resume=str(tmp_path / "ckpt" / "step-000020"), **plain)
    before = {r["number"] for r in first.records if r["state"] == "trained" and r["step"] <= 20}
    after = [r["number"] for r in rest.records if r["state"] == "trained"]
    assert before.isdisjoint(after)
    assert sorted(before | set(after)) == list(range(200))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_gate_never_lets_in_too_much(data):
    """A model of the gate over random schedules: capacity is kept, places come back, nothing goes negative."""
    batch = data.draw(st.integers(1, 8))
    gate = Gate(
        batch, data.draw(st.integers(0, 4)), data.draw(st.integers(1, 40)), data.draw(st.none() | st.integers(1, 9))
    )
    for _ in range(40):
        action = data.draw(st.sampled_from(["start", "accept", "reject", "give_back", "publish"]))
        if action == "start" and gate.capacity:
            gate.start(data.draw(st.integers(1, gate.capacity)))
        elif action == "accept" and gate.running:
            gate.accept(data.draw(st.integers(1, gate.running)))
        elif action == "reject" and gate.running:
            gate.reject(data.draw(st.integers(1, gate.running)))
        elif action == "give_back" and gate.accepted > gate.version * batch:
            gate.release(data.draw(st.integers(1, gate.accepted - gate.version * batch)))
        elif action == "publish" and gate.accepted >= (gate.version + 1) * batch:
            gate.open_for(gate.version + 1)
        assert 0 <= gate.running <= gate.max_inflight
        assert 0 <= gate.accepted + gate.running <= (gate.staleness + gate.version + 1) * batch
        if gate.total is not None:
            assert gate.accepted + gate.running <= gate.total * batch
    with pytest.raises(RuntimeError):
        gate.start(gate.capacity + 1)


def test_the_breaker_opens_on_a_row_or_on_half_of_a_window():
    row = Breaker(BreakerConfig(consecutive=3, window=100))
    for _ in range(10):
        row.record_failure("a")
        row.record_failure("b")
        row.record_success()
    row.record_failure("c", " (row 1)")
    row.record_failure("d")
    # An earlier failure that came to nothing is not what stops the run.
    with pytest.raises(RunStopped, match=r"3 rollouts failed in a row; the first cause: c \(row 1\); the last: e\."):
        row.record_failure("e")
    half = Breaker(BreakerConfig(consecutive=100, window=10))
    for _ in range(4):
        half.record_failure("flaky")
        half.record_success()
    half.record_success()
    with pytest.raises(RunStopped, match=r"5 of the last 10 rollouts failed; the first cause: flaky\. Mend"):
        half.record_failure("flaky")


def _aged(versions: list[int]) -> Sample:
    n = len(versions)
    return Sample(
        token_ids=range(n),
        loss_mask=[v >= 0 for v in versions],
        versions=versions,
        temperatures=[1.0] * n,
        logprobs=[0.0] * n,
        advantages=[1.0] * n,
    )


def test_staleness_counts_from_the_oldest_trained_token():
    sample = _aged([-1, 3, 5, -1, 4])
    assert staleness(sample, 6) == 3
    assert limit_staleness(sample, 6, 3, "drop") is sample
    assert limit_staleness(sample, 6, 2, "drop") is None
    assert limit_staleness(sample, 6, 2, "keep") is sample
    masked = limit_staleness(sample, 6, 2, "mask")
    assert masked.rl_token_weights.tolist() == [0, 0, 1, 0, 1]
    assert staleness(masked, 6) == 2
    assert limit_staleness(sample, 9, 2, "mask") is None
    assert staleness(sample.with_streams(logprobs=None), 100) == 0
    by_ce = sample.with_streams(rl_weights=[0, 0, 0, 0, 1], ce_weights=[0, 1, 0, 1, 0])
    assert staleness(by_ce, 6) == 3, "a token that cross entropy alone trains has an age too"
    masked = limit_staleness(by_ce, 6, 2, "mask")
    assert masked.ce_weights.tolist() == [0, 0, 0, 1, 0], "what the policy did not say has none"


async def _nothing(folder: Path) -> None:
    (folder / "weights").write_text("w")


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    asyncio.run(store.save(1, '{"step": 1}', _nothing))

    async def full(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device.*newest whole.*step-000001"):
        asyncio.run(store.save(2, '{"step": 2}', full))
    assert store.find("latest")[1] == {"step": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "latest"}


def test_checkpoints_appear_whole_and_old_ones_go(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        asyncio.run(store.save(step, f'{{"step": {step}}}', _nothing))
    assert [path.name for path in store.all()] == ["step-000002", "step-000003"]
    assert store.find("latest")[1]["step"] == 3
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-000009")
    assert store.find("latest")[1]["step"] == 3
    store.delete_after(2)
    assert [path.name for path in store.all()] == ["step-000002"]
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        store.find(str(tmp_path / "nowhere"))


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_chance_of_a_hit(n, data):
    from itertools import combinations

    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    picks = list(combinations(range(n), k))
    hits = sum(any(i < correct for i in pick) for pick in picks)
    assert pass_at_k(n, correct, k) == pytest.approx(hits / len(picks))


class SelfCancelling(CoinFlips):
    async def play(self, example, seats):
        await seats["policy"].complete([0, 1])
        inner = asyncio.ensure_future(asyncio.sleep(10))
        inner.cancel()
        await inner


class Misshapen(CoinFlips):
    async def play(self, example, seats):
        await seats["policy"].complete([0, 1])
        return Outcome({"another actor": 1.0})


@pytest.mark.parametrize(("environment", "cause"), [(SelfCancelling(), "was cancelled"), (Misshapen(), "policy")])
def test_whatever_an_episode_does_harms_only_itself(tmp_path, environment, cause):
    with pytest.raises(RunStopped, match=cause):
        conduct(tmp_path, environment, steps=3, breaker=BreakerConfig())


class Dropping(CoinFlips):
    async def play(self, example, seats):
        return None if example["row"] % 2 else await super().play(example, seats)


def test_draws_given_up_on_purpose_are_no_failures(tmp_path):
    trainer, _, _ = conduct(tmp_path, Dropping(), steps=3, group_size=4, breaker=BreakerConfig())
    assert len(trainer.trained) == 3
    assert {s.ticket.row % 2 for _, batch in trainer.trained for s in batch} == {0}


def test_batches_that_groups_cannot_fill_do_not_open_the_gate(tmp_path):
    """Groups of 4 and 6 leave places of a batch of 12 empty; staleness holds all the same."""
    envs = [
        CustomEnvConfig(name="coins", import_path="x:y", group_size=4),
        CustomEnvConfig(name="six", import_path="x:y", group_size=6),
    ]
    config = {"batch_size": 12, "steps": 12, "staleness": 1, "env": envs}
    trainer, _, conductor = conduct(tmp_path, CoinFlips(), also={"six": CoinFlips()}, **config)
    for version, batch in trainer.trained:
        assert max(version - s.versions[t] for s in batch for t in range(len(s)) if s.rl_token_weights[t]) <= 1
    left = sum(group.size for group in conductor._dispatcher._buffered_groups())
    assert conductor._gate.accepted - left == 12 * 12  # each batch counted whole, and what no batch had room for


def test_a_resume_with_another_batch_size_still_trains(tmp_path):
    conduct(tmp_path, CoinFlips(), steps=4, batch_size=16)
    trainer, _, _ = conduct(tmp_path, CoinFlips(), steps=6, batch_size=8, resume="latest")
    assert len(trainer.trained) == 2


class Leaver(CoinFlips):
    """Calls sys.exit in one episode of five."""

    async def play(self, example, seats):
        outcome = await super().play(example, seats)
        if self._played % 5 == 0:
            raise SystemExit(3)
        return outcome


def test_an_environment_that_exits_loses_its_episode_and_nothing_else(tmp_path):
    trainer, _, _ = conduct(tmp_path, Leaver(), steps=4)
    assert len(trainer.trained) == 4
