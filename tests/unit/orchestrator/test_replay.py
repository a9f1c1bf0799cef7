"""Replay's laws: recent groups train once more, within the staleness limit and without displacing fresh groups."""

import json
from collections import Counter, deque
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scripted_run
from paceline.config import BreakerConfig, CheckpointConfig, ConfigWarning, FiltersConfig, ReplayConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.filters import PriorityConfig
from paceline.data import Cursor, Ledger, Sample, State, Ticket
from paceline.data.ledger import LedgerError
from paceline.orchestrator import Checkpoints, Gate, RunStopped
from paceline.orchestrator.dispatcher import Dispatcher
from paceline.orchestrator.replay import Replay as Memory
from paceline.orchestrator.replay import ReplayedGroup, group_priority
from paceline.orchestrator.saved_groups import read_groups
from paceline.rollout import Group, Rollout
from paceline.trainer import StepReport
from scripted_run import CoinFlips, ScriptedEngine, conduct, states

EVERYTHING = FiltersConfig(zero_advantage=False)
REASONS = ("zero_advantage", "group_too_small", "stale")


def replays(log) -> dict[int, int]:
    """Ticket numbers of replayed groups, and what each first trained as."""
    return {r["number"]: r["replays"] for r in log.records if "replays" in r}


def keep_the_laws(trainer, log, conductor, staleness: int, share: float, batch: int, group: int) -> None:
    """What holds for every run, however long tokens and batches take."""
    for version, samples in trainer.trained:
        assert (
            max(version - s.versions[t] for s in samples for t in range(len(s)) if s.rl_token_weights[t]) <= staleness
        )
    trained, dropped, again = states(log, "trained"), states(log, "dropped"), replays(log)
    assert max(Counter(trained + dropped).values()) == 1
    assert again.keys() <= set(trained)
    assert again.keys().isdisjoint(again.values())
    ledger = conductor._ledger
    assert (ledger.drawn, ledger.replayed) == (len(trained) + len(dropped), len(again))
    assert [ledger.count(state) for state in (State.WAITING, State.IN_FLIGHT, State.BUFFERED)] == [0, 0, 0]
    assert conductor._gate.accepted == conductor._gate.version * batch
    for step in range(1, len(trainer.trained) + 1):
        numbers = [r["number"] for r in log.records if r["state"] == "trained" and r["step"] == step]
        assert numbers == sorted(numbers)
        assert len(numbers) * group == batch
        assert len(again.keys() & numbers) * group <= share * batch
        scored = [tuple(one[0].tolist()[:2]) for _, one in sorted(log.scores[step].by_sample().items())]
        assert scored == [(sample.ticket.number, sample.rollout) for sample in log.shipped[step]]
        metrics = log.metrics[step - 1]
        assert metrics.get("replay/groups", 0) == len(again.keys() & numbers)
        lost, fresh = sum(metrics[f"dropped/{reason}"] for reason in REASONS), len(set(numbers) - again.keys())
        assert metrics["drop_ratio"] == pytest.approx(lost / (lost + fresh))


@pytest.mark.filterwarnings("ignore::paceline.config.ConfigWarning")
@settings(max_examples=15, deadline=None)
@given(
    staleness=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    batch=st.sampled_from([8, 12, 16]),
    group=st.sampled_from([2, 4]),
    times=st.integers(1, 2),
    on_stale=st.sampled_from(["drop", "mask"]),
    failing=st.sampled_from([0.0, 0.2]),
    inflight=st.sampled_from([8, 16, None]),
    priority=st.sampled_from(["newest", "rubric", "advantage", PriorityConfig(importance=1.0)]),
    seed=st.integers(0, 1000),
)
def test_whatever_is_replayed_the_books_balance_and_nothing_old_trains(
    tmp_path_factory, staleness, share, batch, group, times, on_stale, failing, inflight, priority, seed
):
    run = conduct(
        tmp_path_factory.mktemp("run"),
        CoinFlips(failing=failing),
        seed,
        steps=6,
        staleness=staleness,
        on_stale=on_stale,
        batch_size=batch,
        group_size=group,
        max_inflight=inflight,
        replay=ReplayConfig(share=share, times=times, priority=priority),
    )
    assert len(run[0].trained) == 6
    keep_the_laws(*run, staleness, share, batch, group)
    assert max(Counter(replays(run[1]).values()).values(), default=0) <= times


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.sampled_from([0.25, 0.5, 0.75]), st.integers(0, 1000))
def test_an_eager_sampler_loses_nothing_to_replay(tmp_path_factory, staleness, share, seed):
    """Everything sampled is trained: the gate left replay its places in advance, so no fresh group waits too long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted_run, "ScriptedEngine", partial(ScriptedEngine, patience=1))
        run = conduct(
            tmp_path_factory.mktemp("run"),
            CoinFlips(),
            seed,
            steps=12,
            staleness=staleness,
            filters=EVERYTHING,
            replay=ReplayConfig(share=share),
        )
    keep_the_laws(*run, staleness, share, 8, 2)
    assert states(run[1], "dropped") == []
    assert len(replays(run[1])) > 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_gate_keeps_places_for_replay_and_no_fresh_rollout_waits_too_long(data):
    """First come, first trained, with as much replay as the gate grants: each rollout joins a batch in its time."""
    batch, staleness = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 4))
    reserve, total = data.draw(st.integers(0, batch - 1)), data.draw(st.none() | st.integers(1, 12))
    gate = Gate(batch, staleness, 1000, total, reserve=reserve)
    queue: deque[int] = deque()
    for version in range(total or 12):
        gate.open_for(version)
        assert gate.replay_capacity == reserve
        replayed = data.draw(st.integers(0, reserve))
        gate.replay(replayed)
        fresh = data.draw(st.integers(0, gate.capacity))
        for places in (fresh, max(0, batch - replayed - len(queue) - fresh)):
            queue.extend([version] * places)
            gate.start(places)
            gate.accept(places)
        for _ in range(batch - replayed):
            assert version - queue.popleft() <= staleness
    assert not (total and queue)
    with pytest.raises(RuntimeError, match="room to replay"):
        gate.replay(gate.replay_capacity + 1)


def test_a_step_reports_what_led_to_its_fresh_groups(tmp_path, monkeypatch):
    """A replay's ticket is the newest there is, but it does not pull later groups into this step's metrics."""
    seen: list[tuple[list[int], list[int]]] = []
    take = Dispatcher.take_tally

    def watched(self, batch):
        tally = take(self, batch)
        fresh = [group.ticket.number for group in batch if not isinstance(group, ReplayedGroup)]
        seen.append((fresh, [group.ticket.number for group in tally.resolved]))
        return tally

    monkeypatch.setattr(Dispatcher, "take_tally", watched)
    conduct(tmp_path, CoinFlips(), steps=10, staleness=3, replay=ReplayConfig(share=0.5))
    for fresh, resolved in seen:
        assert max(resolved) == max(fresh)


def test_a_replayed_group_is_the_group_that_trained(tmp_path, monkeypatch):
    """The same tokens, weights and credit under another ticket; neither the algorithm nor the curriculum sees it."""
    credited, learned = [], []
    algorithm = conduct(tmp_path / "any", CoinFlips(), steps=1)[2]._parts.envs["coins"].algorithm
    assign, learn = type(algorithm).assign, Cursor.update
    monkeypatch.setattr(type(algorithm), "assign", lambda self, g: credited.append(g.ticket.number) or assign(self, g))
    monkeypatch.setattr(Cursor, "update", lambda self, row, rewards: learned.append(row) or learn(self, row, rewards))
    trainer, log, _ = conduct(
        tmp_path, CoinFlips(), steps=10, staleness=2, on_stale="mask", replay=ReplayConfig(share=0.5, times=2)
    )
    again = replays(log)
    by_ticket: dict[int, list[Sample]] = {}
    for _, samples in trainer.trained:
        for sample in samples:
            by_ticket.setdefault(sample.ticket.number, []).append(sample)
    assert len(again) > 5
    for number, first in again.items():
        for copy, sample in zip(by_ticket[number], by_ticket[first], strict=True):
            assert copy.ticket == sample.ticket._replace(number=number)
            assert copy.streams().keys() == sample.streams().keys()
            assert all(np.array_equal(copy.streams()[k], v) for k, v in sample.streams().items())
    drawn = {r["number"] for r in log.records} - again.keys()
    assert sorted(credited) == sorted(drawn)
    assert len(learned) == len(drawn)
    ages = [m["replay/age"] for m in log.metrics if m["replay/groups"]]
    assert min(ages) >= 1
    assert max(ages) <= 2


@pytest.mark.filterwarnings("ignore::paceline.config.ConfigWarning")
def test_without_a_group_to_replay_a_run_is_as_it_was(tmp_path):
    """Off, or at staleness 0: the same tickets in the same order, whatever the section says."""
    for staleness, replay in ((2, ReplayConfig(groups=8, times=3)), (0, ReplayConfig(share=0.5))):
        plain = conduct(tmp_path / f"plain{staleness}", CoinFlips(), steps=6, staleness=staleness)
        other = conduct(tmp_path / f"other{staleness}", CoinFlips(), steps=6, staleness=staleness, replay=replay)
        assert other[1].records == plain[1].records


def test_the_rows_of_an_epoch_still_train_and_a_short_batch_replays_nothing(tmp_path):
    short = 0
    for count in range(16, 24):
        _, log, conductor = conduct(
            tmp_path / str(count),
            CoinFlips(count),
            epochs=1,
            staleness=3,
            filters=EVERYTHING,
            replay=ReplayConfig(share=0.5),
        )
        again = replays(log)
        rows = [r["row"] for r in log.records if r["state"] == "trained" and r["number"] not in again]
        assert sorted(rows) == list(range(count))
        assert len(again) > 0
        *whole, last = log.metrics
        assert {m["batch/rollouts"] for m in whole} == {8}
        assert last["batch/rollouts"] == 8 or last["replay/groups"] == 0
        assert conductor._gate.accepted == conductor._gate.version * 8
        short += last["batch/rollouts"] < 8
    assert short > 0


def test_groups_of_several_sizes_leave_room_for_one_another(tmp_path):
    """Two replayed groups of 4 would leave no place for a fresh one of 6 in a batch of 12; all batches train."""
    envs = [CustomEnvConfig(name=n, import_path="x:y", group_size=g) for n, g in (("coins", 4), ("six", 6))]
    for share in (0.4, 0.7, 0.99):
        trainer, log, conductor = conduct(
            tmp_path / str(share),
            CoinFlips(),
            also={"six": CoinFlips()},
            batch_size=12,
            steps=12,
            staleness=2,
            env=envs,
            replay=ReplayConfig(share=share, times=3),
        )
        assert len(trainer.trained) == 12
        for version, samples in trainer.trained:
            assert max(version - s.versions[t] for s in samples for t in range(len(s)) if s.rl_token_weights[t]) <= 2
            places = sum({s.ticket: {"coins": 4, "six": 6}[s.env] for s in samples}.values())
            assert places <= 12
            assert places > 12 - 4 or version >= 10  # in the end, what may still be drawn need not fill a batch
            assert {s.ticket.number for s in samples} - replays(log).keys()
        left = sum(group.size for group in conductor._dispatcher._buffered_groups())
        assert conductor._gate.accepted - left == 12 * 12


class Dying(CoinFlips):
    """Fails for good after some episodes, and the run with it."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    async def play(self, example, seats):
        if self._played >= self._after:
            raise ValueError("gone")
        return await super().play(example, seats)


@pytest.mark.parametrize("priority", ["newest", "rubric"])
def test_a_run_that_died_goes_on_with_its_memory(tmp_path, priority):
    """Whether a checkpoint finds groups that were chosen already depends on how long it takes: one of several does."""
    assert sum(died_and_resumed(tmp_path / str(after), after, priority) for after in (30, 50, 70, 90)) > 0


def died_and_resumed(tmp_path, after: int, priority: str) -> int:
    """Nothing the checkpoint counted as trained trains again, nothing is lost, and what was to be replayed still is."""
    plain = {
        "staleness": 2,
        "deterministic": True,
        "filters": EVERYTHING,
        "replay": ReplayConfig(share=0.5, times=2, priority=priority),
        "checkpoint": CheckpointConfig(every=1),
    }
    with pytest.raises(RunStopped):
        conduct(tmp_path, Dying(after), steps=20, breaker=BreakerConfig(), **plain)
    path, kept = Checkpoints(tmp_path / "ckpt", 100).find("latest")
    books, waiting = kept["ledger"], {fields[0] for fields in kept["ledger"]["open"]}
    assert books["replayed"] > 0
    assert books["drawn"] == books["trained"] + sum(books["dropped"].values()) + len(waiting)
    trainer, log, conductor = conduct(tmp_path, CoinFlips(), steps=20, resume="latest", **plain)
    for version, samples in trainer.trained:
        assert max(version - s.versions[t] for s in samples for t in range(len(s)) if s.rl_token_weights[t]) <= 2
    trained, dropped, again = states(log, "trained"), states(log, "dropped"), replays(log)
    assert max(Counter(trained + dropped).values()) == 1
    assert set(trained + dropped) == waiting | set(range(books["drawn"], conductor._ledger.drawn))
    assert conductor._ledger.trained == 20 * 4
    assert conductor._ledger.replayed == books["replayed"] + len(again)
    chosen = [group.ticket.number for group in read_groups(path).chosen]
    first = [r["number"] for r in log.records if r["state"] == "trained" and r["step"] == kept["step"] + 1]
    assert [again[number] for number in first if number in again] == chosen
    return len(chosen)


def test_a_replay_is_a_ticket_of_its_own_and_no_checkpoint_plays_it_anew():
    told: list[dict] = []
    ledger = Ledger(told.append)
    first, second = Ticket(0, "a", 0, 0, 3), Ticket(1, "a", 0, 0, 3)
    ledger.draw(first)
    ledger.start()
    ledger.buffer(first)
    with pytest.raises(LedgerError, match="out of order"):
        ledger.replay(first, first=0)
    ledger.train(first, 1, 8)
    ledger.replay(second, first=0)
    assert told[-1] == {**second._asdict(), "state": "buffered", "replays": 0, "since": -1}
    rolled_back = Ledger()
    rolled_back.load(json.loads(json.dumps(ledger.state())))
    assert not rolled_back.waiting
    assert rolled_back.drawn == rolled_back.trained + rolled_back.dropped.total() == 2
    ledger.train(second, 2, 8)
    with pytest.raises(LedgerError, match="cannot go from"):
        ledger.train(second, 3, 8)
    assert (ledger.drawn, ledger.trained, ledger.replayed, ledger.trained_rollouts) == (2, 2, 1, 16)
    assert ledger.state()["dropped"] == {}


def remembered(number: int, version: int, places: int = 2) -> Group:
    ticket = Ticket(number, "a", 0, number, number)
    sample = Sample(
        token_ids=[1, 2],
        loss_mask=[False, True],
        versions=[-1, version],
        temperatures=[1.0, 1.0],
        logprobs=[0.0, -1.0],
        advantages=[0.0, 1.0],
        ticket=ticket,
    )
    return Group(ticket=ticket, rollouts=[Rollout(ticket=ticket, member=0, samples=[sample])], size=places)


def test_the_memory_offers_the_newest_groups_that_are_young_enough():
    def offered(version: int, room: int) -> list[int]:
        return [group.ticket.number for group in memory.choose(version, room)]

    memory = Memory(ReplayConfig(share=0.5, groups=4, times=2), staleness=2)
    memory.remember([remembered(n, version) for n, version in enumerate([5, 5, 3, 5, 4])])
    assert offered(5, 100) == [4, 3, 2, 1]  # of five, the four newest
    assert offered(6, 100) == [4, 3, 1]  # one token of ticket 2 is three versions old
    assert offered(6, 5) == [4, 3]
    assert offered(6, 0) == []
    group = memory.choose(6, 2)[0]
    for number, left in ((9, [4, 3, 1]), (10, [3, 1])):
        again = memory.reissue(group, number)
        assert (again.ticket.number, again.size) == (number, 2)
        again.rollouts[0].samples.clear()
        memory.remember([again])  # what it is remembered by is its first ticket
        assert offered(6, 100) == left
    assert len(group.samples()) == 1
    assert offered(8, 100) == []


def test_a_batch_that_broke_the_gradient_is_not_replayed(tmp_path, monkeypatch):
    async def broken(self, batch) -> StepReport:
        self.trained.append((self.version, list(batch)))
        self.version += 1
        return StepReport({"loss": 0.0}, skipped=True)

    monkeypatch.setattr(scripted_run.CountingTrainer, "step", broken)
    _, log, _ = conduct(tmp_path, CoinFlips(), steps=6, staleness=2, replay=ReplayConfig(share=0.5))
    assert not replays(log)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"staleness": 0}, "no effect at staleness = 0"),
        ({"batch_size": 8, "group_size": 8}, "no room for a replayed group beside a fresh one"),
        ({"batch_size": 16, "group_size": 8, "replay": ReplayConfig(share=0.4)}, "raise replay.share"),
    ],
)
def test_a_share_that_changes_nothing_is_noted(settings, sentence):
    with pytest.warns(ConfigWarning, match=sentence):
        RunConfig(**{"replay": ReplayConfig(share=0.5)} | settings)


def test_replayed_groups_are_groups():
    group = remembered(0, 0)
    memory = Memory(ReplayConfig(share=0.5), staleness=1)
    memory.remember([group])
    again = memory.reissue(group, 7)
    assert isinstance(again, ReplayedGroup)
    assert isinstance(again, Group)
    assert {rollout.ticket.number for rollout in again.rollouts} == {s.ticket.number for s in again.samples()} == {7}


# --- by priority


def scored(number: int, *rewards: float | None, metrics: dict[str, float] | None = None, size: float = 1.0) -> Group:
    """A group of rollouts with these rewards, sampled by version 5, with advantages of this size."""
    ticket = Ticket(number, "a", 0, number, number)
    sample = remembered(number, 5).samples()[0].with_streams(advantages=np.array([0.0, size], np.float32))
    rollouts = [
        Rollout(ticket=ticket, member=member, reward=reward, samples=[sample], metrics=metrics or {})
        for member, reward in enumerate(rewards)
    ]
    return Group(ticket=ticket, rollouts=rollouts, size=2)


def memory_of(groups: list[Group], seed: int = 0, warn=lambda text: None, **priority) -> Memory:
    config = ReplayConfig(share=0.5, groups=1000, priority=PriorityConfig(**priority))
    memory = Memory(config, 2, seed, warn)
    memory.remember(groups)
    return memory


SCORES = st.lists(st.lists(st.floats(-2, 3), min_size=1, max_size=4), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(SCORES, st.floats(0, 20), st.floats(1e-6, 1), st.floats(0.1, 3), st.floats(0, 1))
def test_chances_and_importance_weights_are_the_formulas(scores, sharpness, floor, best, importance):
    groups = [scored(number, *rewards) for number, rewards in enumerate(scores)]
    memory = memory_of(groups, sharpness=sharpness, floor=floor, best=best, importance=importance)
    priorities = [min(1.0, max(0.0, 1 - np.mean(rewards) / best)) for rewards in reversed(scores)]
    weights = np.exp(sharpness * np.array(priorities))
    expected = (1 - floor) * weights / weights.sum() + floor / len(scores)
    np.testing.assert_allclose(memory.probabilities(), expected, rtol=1e-9)
    assert memory.probabilities().min() >= floor / len(scores) * (1 - 1e-12)
    largest = max((len(scores) * p) ** -importance for p in expected)
    offered = memory.choose(6, 1000)
    assert sorted(g.ticket.number for g in offered) == list(range(len(scores)))
    for group in offered:
        (sample, *_) = memory.reissue(group, 100).samples()
        chance = expected[len(scores) - 1 - group.ticket.number]
        weight = (len(scores) * chance) ** -importance / largest
        np.testing.assert_allclose(sample.rl_token_weights, [0.0, weight], rtol=1e-5)
        assert np.array_equal(sample.advantages, group.samples()[0].advantages)


def test_groups_are_drawn_as_often_as_their_chances_say_and_without_replacement():
    groups = [scored(number, number / 9) for number in range(10)]
    memory = memory_of(groups, sharpness=2.0, seed=3)
    chances = dict(zip(reversed(range(10)), memory.probabilities(), strict=True))
    draws = 4000
    first, second = Counter(), Counter()
    for version in range(draws):
        memory._is_fresh = lambda group, version: True  # so that one memory can be asked at thousands of versions
        one, two = (group.ticket.number for group in memory.choose(version, 4))
        assert one != two
        first[one] += 1
        second[one, two] += 1
    squares = sum((first[n] - draws * p) ** 2 / (draws * p) for n, p in chances.items())
    assert squares < 9 + 5 * np.sqrt(18)  # chi-squared with 9 degrees of freedom
    assert max(chances.values()) / min(chances.values()) > 4  # so that equal chances would fail
    pairs = {(a, b): draws * p * q / (1 - p) for a, p in chances.items() for b, q in chances.items() if a != b}
    assert sum((second[pair] - mean) ** 2 / mean for pair, mean in pairs.items()) < 89 + 5 * np.sqrt(2 * 89)


def test_a_choice_depends_on_the_seed_the_version_and_the_groups_alone():
    groups = [scored(number, number % 3) for number in range(30)]

    def chosen(memory: Memory, version: int) -> list[int]:
        return [group.ticket.number for group in memory.choose(version, 12)]

    unbroken, other = memory_of(groups), memory_of(groups, seed=1)
    first = chosen(unbroken, 6)
    assert first != sorted(first, reverse=True)
    resumed = memory_of([scored(99, 0.0)])
    resumed.load(unbroken.state())
    assert chosen(resumed, 7) == chosen(unbroken, 7) != first
    assert chosen(other, 7) != chosen(unbroken, 7)
    assert chosen(unbroken, 8) == []  # too old


def test_a_score_is_made_of_the_named_parts_of_the_rubric_or_of_the_reward():
    c = PriorityConfig(metrics={"format": 1.0, "correct": 3.0})
    parts = {"format": 1.0, "correct": 0.2, "other": 9.0}
    assert group_priority(scored(0, 0.0, metrics=parts), c) == pytest.approx(1 - (1.0 + 0.6) / 4)
    assert group_priority(scored(0, 0.25), c) == 0.75  # no such metrics: the reward
    assert group_priority(scored(0, 0.25, metrics={"format": 1.0, "correct": float("nan")}), c) == 0.0
    assert group_priority(scored(0, 1.5, 0.5), PriorityConfig(best=2.0)) == 0.5
    assert group_priority(scored(0, None), PriorityConfig()) == 0.0
    assert group_priority(scored(0, 1.0, size=-2.5), PriorityConfig(by="advantage")) == 2.5
    assert group_priority(scored(0, 1.0, size=float("nan")), PriorityConfig(by="advantage")) == 0.0
    bare = scored(0, 1.0)
    bare.rollouts[0].samples = [bare.samples()[0].with_streams(advantages=None)]
    assert group_priority(bare, PriorityConfig(by="advantage")) == 0.0


def test_metrics_that_no_rollout_has_are_told_once():
    told: list[str] = []
    memory = memory_of([scored(0, 1.0, metrics={"format": 1.0})], warn=told.append, metrics={"formt": 1.0})
    memory.remember([scored(1, 1.0, metrics={"format": 1.0})])
    assert told == ["replay.priority.metrics: no rollout of `a` has `formt`, so its reward stands in; it has `format`"]


class Graded(CoinFlips):
    """Rewards that tell nothing and a rubric's part that does: every third row is formatted badly."""

    async def play(self, example, seats):
        outcome = await super().play(example, seats)
        return type(outcome)(outcome.rewards, {"format": float(example["row"] % 3 != 0)})


def test_a_run_replays_what_the_rubric_scores_low(tmp_path):
    """The same groups are sampled in both runs; which of them train again differs."""
    shares = {}
    for name, priority in (("newest", "newest"), ("rubric", PriorityConfig(metrics={"format": 1.0}, sharpness=20.0))):
        _, log, _ = conduct(
            tmp_path / name,
            Graded(),
            steps=20,
            batch_size=32,
            max_inflight=8,
            staleness=4,
            filters=EVERYTHING,
            replay=ReplayConfig(share=0.125, priority=priority),
        )
        row = {r["number"]: r["row"] for r in log.records}
        bad = [row[number] % 3 == 0 for number in replays(log)]
        shares[name] = sum(bad) / len(bad)
        told = [m for m in log.metrics if "replay/priority" in m]
        assert bool(told) == (name == "rubric")
        if told:
            assert all(0 <= m["replay/priority"] <= 1 for m in told)
            means = [np.mean([m[key] for m in told]) for key in ("replay/priority", "replay/remembered_priority")]
            assert means[0] > means[1] + 0.2
        assert all(m["replay/remembered"] >= m["replay/groups"] for m in log.metrics)
        assert max(m["replay/remembered_age"] for m in log.metrics) <= 4
    assert shares["newest"] < 0.6 < 0.9 < shares["rubric"]


@pytest.mark.filterwarnings("ignore::paceline.config.ConfigWarning")
def test_wrong_settings_of_priority_are_sentences():
    with pytest.warns(ConfigWarning, match="replay.priority has no effect at replay.share = 0"):
        RunConfig(replay=ReplayConfig(priority="rubric"))
    with pytest.raises(ValueError, match="the weight of the metric `a` must be above 0"):
        PriorityConfig(metrics={"a": 0.0})
    with pytest.raises(ValueError, match='leave metrics out, or write by = "failure"'):
        PriorityConfig(by="advantage", metrics={"a": 1.0})
