"""No episode delays the others: the real conductor on a virtual clock, where episodes last as long as they are told to.

A run in which every task waits and no timer is set ends with `SimulationDeadlock`, so no test here can hang.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clients import Pool
from paceline.config import BreakerConfig, CheckpointConfig, EvalConfig, FiltersConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.config.run import ConfigWarning
from paceline.engine import Completion, EngineStats, GenerateRequest
from paceline.envs import Environment, Outcome
from paceline.orchestrator import Checkpoints, Orchestrator, OrchestratorParts, RunStopped, TrainEnv, build_train_envs
from paceline.rollout import SamplingClient
from paceline.trainer import StepReport
from paceline.weights.update import ServedPolicy, WeightUpdate
from scripted_run import Log, Renderer
from simulator.cost import Lengths
from simulator.engine import SimulatedEngine, VirtualClock, run_virtual

GROUP, BATCH = 2, 8


class Engine:
    """Takes as long as the prompt says. The first token is sampled when a request comes, the last when it is done."""

    busy_seconds = 0.0

    def __init__(self) -> None:
        self.version = 0
        self.running = self.cancelled = 0
        self.cancelled_at: list[int] = []
        """Versions after they came."""
        self.noise: list[int] = []

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.noise.append(request.noise)
        first, token = self.version, 1 + request.noise % 50
        self.running += 1
        try:
            await asyncio.sleep(request.prompt_ids[0])
        except asyncio.CancelledError:
            self.cancelled += 1
            self.cancelled_at.append(self.version - first)
            raise
        finally:
            self.running -= 1
        return Completion(
            token_ids=[token, 1], logprobs=[-token / 50, -0.5], versions=[first, self.version], finish="stop"
        )

    async def load_weights(self, update: WeightUpdate) -> float:
        self.version = update.version
        return 0.0

    async def policy(self) -> ServedPolicy:
        return ServedPolicy(self.version, "")

    def start(self) -> None: ...
    def close(self) -> None: ...


class Timed(Environment):
    """Episodes that last as their draw says. Rewards tell the rollouts of a group apart, unless they must not."""

    def __init__(self, seconds: Callable[[int], float], rows: int = 10_000, pays: bool = True, held_out: int = 0):
        self._seconds, self._rows, self.pays, self._held_out = seconds, rows, pays, held_out
        self.started: list[float] = []
        self.reward = 1.0
        """For everybody, where they must not."""

    def examples(self, split):
        return [{"row": i} for i in range(self._rows if split == "train" else self._held_out)]

    async def assign(self, row, draw, dice):
        return row | {"seconds": self._seconds(draw)}

    async def play(self, example, seats):
        self.started.append(asyncio.get_running_loop().time())
        await seats["policy"].complete([int(example.get("seconds", 5)), 1])
        token = seats["policy"].turns[0].completion_ids[0]
        return Outcome.solo(float(token) if self.pays else self.reward)


class Trainer:
    """Takes its time, and refuses what is too old."""

    def __init__(self, seconds: float, staleness: int, engine: Engine) -> None:
        self.version = 0
        self.done: list[float] = []
        self.idle_engine: list[bool] = []
        self._seconds, self._staleness, self._engine = seconds, staleness, engine

    async def step(self, batch) -> StepReport:
        ages = [
            self.version - int(v) for s in batch for v, rl in zip(s.versions, s.rl_token_weights, strict=True) if rl
        ]
        assert max(ages) <= self._staleness
        await asyncio.sleep(self._seconds)
        self.idle_engine.append(self._engine.running == 0)
        self.version += 1
        self.done.append(asyncio.get_running_loop().time())
        loss = float(np.mean([(s.advantages * s.logprobs)[s.loss_mask].sum() for s in batch]))
        return StepReport({"loss": loss})

    async def weights(self) -> WeightUpdate:
        return WeightUpdate(self.version, {})

    async def save(self, folder: Path) -> None:
        (folder / "version").write_text(str(self.version))

    async def load(self, folder: Path) -> None:
        self.version = int((folder / "version").read_text())


@dataclass
class Played:
    """What a run left behind."""

    log: Log
    trainer: Trainer
    engine: Engine
    config: RunConfig
    courses: dict[str, TrainEnv]

    def tickets(self, state: str, **like) -> list[dict]:
        return [r for r in self.log.records if r["state"] == state and like.items() <= r.items()]

    @property
    def reasons(self) -> Counter[str]:
        return Counter(record["reason"] for record in self.tickets("dropped"))


def lead(tmp_path: Path, environments: dict[str, Environment], training: float = 1.0, stop_at: float = 0, **keys):
    """One run in virtual time."""
    weights, from_frozen_model = keys.pop("weights", {}), keys.pop("from_frozen_model", False)
    skipped_draws = keys.pop("skipped_draws", frozenset())
    settings_ = {
        "batch_size": BATCH,
        "group_size": GROUP,
        "eval": EvalConfig(every=0),
        "checkpoint": CheckpointConfig(every=0),
        "breaker": BreakerConfig(consecutive=1000, window=1000),
        "filters": FiltersConfig(zero_advantage=not all(env.pays for env in environments.values())),
        "env": [
            CustomEnvConfig(name=name, import_path="x:y", timeout=1e6, weight=weights.get(name, 1.0))
            for name in environments
        ],
    } | keys
    config = RunConfig(**settings_)
    engine, log = Engine(), Log()
    trainer = Trainer(training, config.staleness, engine)
    pool = Pool([engine])
    client = SamplingClient(pool, Renderer(), SamplingConfig(), frozenset({1}))
    courses = build_train_envs(config, dict(environments))
    for course in courses.values():
        course.algorithm.frozen_sampler = client if from_frozen_model else None

    async def run() -> None:
        loop = asyncio.get_running_loop()
        checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
        parts = OrchestratorParts(pool, trainer, client, client, courses, log, checkpoints, VirtualClock(loop))
        conductor = Orchestrator(config, parts, skipped_draws)
        if stop_at:
            loop.call_later(stop_at, conductor.stop)
        await conductor.run()
        assert engine.running == 0

    run_virtual(run())
    return Played(log, trainer, engine, config, courses)


def one_in(n: int, slow: float, fast: float = 1.0) -> Callable[[int], float]:
    return lambda draw: slow if draw % n == 0 else fast


# -- environments of different speed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"staleness": 0},
        {"staleness": 1},
        {"staleness": 1, "cancel_stale": True},
        {"staleness": 4, "oversample": 0.5},
        {"staleness": 0, "oversample": 0.25},
    ],
)
def test_environments_of_very_different_speed_share_what_trains_by_weight(tmp_path, keys):
    fast, slow = Timed(lambda draw: 1), Timed(lambda draw: 60)
    run = lead(tmp_path, {"fast": fast, "slow": slow}, steps=160, weights={"fast": 3.0}, **keys)
    trained = [r["env"] for r in run.tickets("trained")]
    assert len(trained) == 160 * BATCH // GROUP
    # But for what is under way, and was when the slow ones last came too late.
    under_way = (keys["staleness"] + 1) * BATCH + run.config.extra_rollouts
    assert abs(trained.count("fast") - 0.75 * len(trained)) <= 2 * under_way // GROUP
    if keys == {"staleness": 1}:
        assert run.reasons["stale"] > 0  # the slow ones did come too late at times, and drew again


def test_what_a_slow_environment_has_lost_is_known_after_a_resume(tmp_path):
    keys = {"steps": 40, "weights": {"fast": 3.0}, "staleness": 1}
    environments = {"fast": Timed(lambda draw: 1), "slow": Timed(lambda draw: 60)}
    first = lead(tmp_path, environments, **keys)
    again = lead(tmp_path, environments, resume="latest", **keys)
    late = [{name: course.late_groups for name, course in run.courses.items()} for run in (first, again)]
    assert late[0] == late[1] == {"fast": 0, "slow": first.reasons["stale"]}


def test_an_environment_without_a_signal_does_not_keep_the_others_waiting(tmp_path):
    environments = {"dull": Timed(lambda draw: 1, pays=False), "alive": Timed(lambda draw: 1)}
    run = lead(tmp_path, environments, steps=20)
    assert {r["env"] for r in run.tickets("trained")} == {"alive"}
    assert run.trainer.version == 20


# -- long episodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "held"),
    [
        ({"staleness": 0}, True),
        ({"staleness": 0, "oversample": 0.5}, False),
        ({"staleness": 1}, True),  # each of them keeps its places to its end, and in time they keep all
        ({"staleness": 1, "cancel_stale": True}, False),
        ({"staleness": 1, "cancel_stale": True, "oversample": 0.5}, False),
    ],
)
def test_an_episode_of_a_thousand_seconds_in_each_batch_holds_no_step(tmp_path, keys, held):
    run = lead(tmp_path, {"task": Timed(one_in(6, slow=1000))}, steps=30, **keys)
    steps = np.diff([0.0, *run.trainer.done])
    if "oversample" not in keys:
        steps = steps[:-1]  # the last batch has no other to wait for
    assert (max(steps) > 900) == held
    if not held:
        assert max(steps) <= 4
    if keys == {"staleness": 1}:
        assert max(steps[:4]) <= 4  # for a while late use is enough


def test_what_is_sampled_beyond_a_batch_is_used_late_if_it_may_be(tmp_path):
    """Up to the limit, and no more is lost than was sampled beyond."""
    for staleness in (1, 2):
        environment = Timed(lambda draw: 10 + draw % 3)
        run = lead(tmp_path, {"task": environment}, training=0, steps=40, staleness=staleness, oversample=0.5)
        trained = [r["number"] for r in run.tickets("trained")]
        assert len(trained) == len(set(trained)) == 40 * BATCH // GROUP
        assert max(metrics["staleness/max"] for metrics in run.log.metrics) == staleness
        assert set(run.reasons) <= {"stale"}
        assert run.reasons.total() <= 40 * run.config.extra_rollouts // GROUP


def test_at_staleness_zero_what_is_left_over_leaves_the_books_and_the_engine(tmp_path):
    """Also groups that finished in the same moment as the last one that fitted."""
    run = lead(tmp_path, {"task": Timed(lambda draw: 1 + draw % 5)}, steps=12, staleness=0, oversample=1.0)
    assert run.trainer.idle_engine == [True] * 12
    assert run.reasons == {"oversampled": 12 * BATCH // GROUP}
    started = Counter(r["number"] for r in run.tickets("in flight"))
    ended = Counter(r["number"] for r in [*run.tickets("trained"), *run.tickets("dropped")])
    assert started == ended
    buffered = {r["number"] for r in run.tickets("buffered")}
    dropped = {r["number"] for r in run.tickets("dropped")}
    assert dropped & buffered  # finished, and not needed
    assert dropped - buffered  # cancelled
    assert sum(metrics["dropped/oversampled"] for metrics in run.log.metrics) == len(dropped)


def test_at_staleness_zero_what_may_still_train_is_kept(tmp_path):
    """What a frozen model samples for the policy never goes stale, and a mask leaves what the new weights said."""
    keys = {"steps": 6, "staleness": 0, "oversample": 1.0}
    for more in ({"from_frozen_model": True}, {"on_stale": "mask"}):
        run = lead(tmp_path / next(iter(more)), {"task": Timed(lambda draw: 1 + draw % 5)}, **keys, **more)
        assert len(run.trainer.done) == 6
        assert "oversampled" not in run.reasons
        first = {r["number"] for r in run.tickets("in flight")[: 2 * BATCH // GROUP]}
        late = {r["number"] for r in run.tickets("trained") if r["step"] > 1}
        assert "from_frozen_model" in more or first & late


def test_a_cancelled_request_leaves_a_simulated_engine():
    """So that simulations tell what over-sampling costs."""

    async def ask() -> float:
        engine = SimulatedEngine(1, lambda running: 1.0, Lengths(median=100, spread=0.0, longest=1000))
        requests = [GenerateRequest(prompt_ids=[1], max_tokens=1000, noise=n, order=n) for n in range(2)]
        first, second = (asyncio.ensure_future(engine.generate(request)) for request in requests)
        await asyncio.sleep(30)
        first.cancel()
        await second
        return asyncio.get_running_loop().time()

    assert run_virtual(ask()) == pytest.approx(130)


def test_what_started_too_long_ago_is_cancelled_if_the_user_says_so(tmp_path):
    run = lead(tmp_path, {"task": Timed(one_in(6, slow=1000))}, steps=30, staleness=2, cancel_stale=True)
    gone = {r["number"] for r in run.tickets("dropped")}
    assert run.reasons == {"stale": len(gone)}
    assert set(run.engine.cancelled_at[: GROUP * len(gone)]) == {3}  # the rest when the run is over
    assert not gone & {r["number"] for r in run.tickets("buffered")}
    assert gone == {n for n in range(max(gone) + 1) if n % 6 == 0}
    kept = lead(tmp_path / "kept", {"task": Timed(one_in(6, slow=9))}, steps=30, staleness=2)
    lengths = [metrics["stale_length"] for metrics in kept.log.metrics if metrics["dropped/stale_samples"]]
    assert lengths
    assert set(lengths) == {2.0}


def test_groups_in_flight_of_a_frozen_model_never_go_stale(tmp_path):
    slow = Timed(one_in(6, slow=20), rows=30)
    keys = {"epochs": 1, "staleness": 1, "cancel_stale": True}
    assert lead(tmp_path, {"task": slow}, **keys).engine.cancelled > 0
    assert lead(tmp_path, {"task": slow}, from_frozen_model=True, **keys).engine.cancelled == 0


# -- flow -------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2), st.sampled_from([0.0, 0.5]), st.integers(5, 40))
def test_a_slow_trainer_is_neither_run_away_from_nor_kept_waiting(tmp_path_factory, staleness, oversample, training):
    """Backpressure: only so many are begun before the next version is there. Refill: they are begun while it trains."""
    environment = Timed(lambda draw: 1 + draw % 4)
    keys = {"steps": 6, "staleness": staleness, "oversample": oversample}
    run = lead(tmp_path_factory.mktemp("run"), {"task": environment}, training=training, **keys)
    extra = run.config.extra_rollouts
    for version, done in enumerate(run.trainer.done[:-2]):
        late = (version + 1) * extra  # as many may be dropped and drawn again at each version
        begun = sum(at < done for at in environment.started)
        assert begun <= min(6, staleness + version + 1) * BATCH + extra + late
        if staleness:
            assert begun >= min(6, staleness + version + 1) * BATCH
            assert not version or np.isclose(done - run.trainer.done[version - 1], training)


def test_the_trainer_waits_less_the_more_versions_sampling_may_be_ahead(tmp_path):
    waits, steps, training = [], 8, 4.0
    for staleness in (0, 1, 2):
        environment = Timed(lambda draw: 12 if draw % 9 == 0 else 3)
        run = lead(
            tmp_path / str(staleness), {"task": environment}, training=training, steps=steps, staleness=staleness
        )
        waits.append(run.trainer.done[-1] - steps * training)
    assert waits[0] > waits[1] > waits[2] > 0


@pytest.mark.parametrize("keys", [{}, {"staleness": 0}, {"oversample": 0.5}, {"cancel_stale": True}])
def test_the_last_batch_may_be_short_and_every_row_comes_to_its_end(tmp_path, keys):
    run = lead(tmp_path, {"task": Timed(lambda draw: 1, rows=10)}, epochs=1, **keys)
    ended = [*run.tickets("trained"), *run.tickets("dropped")]
    assert sorted(r["row"] for r in ended) == list(range(10))
    full, left = divmod(GROUP * (10 - len(run.tickets("dropped"))), BATCH)
    assert [metrics["batch/rollouts"] for metrics in run.log.metrics] == [BATCH] * full + [left] * bool(left)
    assert run.reasons == ({"stale": 2} if "oversample" in keys else {})


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_reward_that_never_varies_ends_the_run_with_its_evidence(tmp_path, reward):
    """After twenty batches' worth of groups, and never before a hundred."""
    for batch, groups in ((BATCH, 100), (10 * GROUP, 200)):
        dull = Timed(lambda draw: 1, pays=False)
        dull.reward = reward
        with pytest.raises(RunStopped) as stopped:
            lead(tmp_path, {"task": dull}, steps=5, stop_at=1000, breaker=BreakerConfig(), batch_size=batch)
        said = f"every reward of the last {groups} groups ({groups * GROUP} rollouts) was {reward:g}"
        assert str(stopped.value).startswith(said)
        assert "breaker.no_signal = 0" in str(stopped.value)
        assert ("solves the task already" in str(stopped.value)) == bool(reward)


def test_a_run_that_has_solved_its_task_finishes_and_says_so(tmp_path):
    """It learned, and then all tries of all rows get the highest reward there is."""

    class Solved(Timed):
        async def play(self, example, seats):
            said = (await super().play(example, seats)).rewards["policy"]
            return Outcome.solo(1.0 if len(self.started) > 60 or said % 2 else 0.0)

    run = lead(tmp_path, {"task": Solved(lambda draw: 1)}, steps=500, stop_at=1000, filters=FiltersConfig())
    assert 0 < run.trainer.version < 20
    assert re.match(r"solved: in \d+% of the last 100 groups every reward is 1, the highest", run.log.notes[-1])


@pytest.mark.parametrize("keys", [{}, {"staleness": 0, "oversample": 0.5}])
def test_where_every_group_is_filtered_the_run_goes_on_and_says_so(tmp_path, keys):
    dull, keys = Timed(lambda draw: 1, pays=False), keys | {"breaker": BreakerConfig(no_signal=0)}
    run = lead(tmp_path, {"task": dull}, steps=5, stop_at=100, **keys)
    assert run.trainer.version == 0
    assert len(dull.started) > 600
    assert "groups were all dropped (zero_advantage), so nothing trains" in run.log.notes[0]
    assert len(run.log.notes) < 10  # ever more seldom
    run = lead(tmp_path, {"task": Timed(lambda draw: 1, rows=30, pays=False)}, epochs=1, **keys)
    assert run.reasons == {"zero_advantage": 30}


def test_skipped_draws_are_dropped_and_not_played(tmp_path):
    skipped_draws = frozenset({("task", 1), ("task", 2)})
    run = lead(tmp_path, {"task": Timed(lambda draw: 1, rows=10)}, epochs=1, skipped_draws=skipped_draws)
    assert run.reasons == {"skipped_draw": 2}
    assert [r["draw"] for r in run.tickets("trained")] == [0, 3, 4, 5, 6, 7, 8, 9]
    assert len(run.engine.noise) == 8 * GROUP


def test_evaluation_changes_nothing_of_training(tmp_path):
    """Same tickets, noise, batches and losses, though episodes of evaluation run in between."""
    runs = []
    for every in (0, 1):
        environment = Timed(lambda draw: 1 + draw % 7, held_out=5)
        keys = {"steps": 8, "staleness": 0, "deterministic": True, "eval": EvalConfig(every=every, samples=2)}
        runs.append(lead(tmp_path / str(every), {"task": environment}, **keys))
    without, beside = runs

    def of_training(run: Played) -> list[dict]:
        lines = [metrics for metrics in run.log.metrics if metrics["step"]]
        timed = ("eval/", "time/", "memory/", "tokens/s", "wait_time", "overlap", "busy")
        return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]

    assert [line for line in beside.log.metrics if any(key.startswith("eval/task/") for key in line)]
    assert of_training(beside) == of_training(without)
    assert beside.log.records == without.log.records
    trained = set(without.engine.noise)
    assert [noise for noise in beside.engine.noise if noise in trained] == without.engine.noise
    assert len(beside.engine.noise) == len(without.engine.noise) + 9 * 5 * 2


# -- the run file -----------------------------------------------------------------------------------------------------


def test_what_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="the first to finish decide what trains: leave it out where deterministic"):
        RunConfig(oversample=0.5, deterministic=True)
    with pytest.raises(ValueError, match='cancel_stale cancels what would be dropped, and on_stale = "mask" trains it'):
        RunConfig(cancel_stale=True, on_stale="mask")
    with pytest.warns(ConfigWarning, match="oversample = 0.01 has no effect: of a batch of 128 that is less than one"):
        assert RunConfig(oversample=0.01).extra_rollouts == 0
    with pytest.warns(
        ConfigWarning, match="oversample = 0.5 at staleness 0 drops the groups that finish late, and with `epoch"
    ):
        RunConfig(oversample=0.5, staleness=0, epochs=1)
    assert RunConfig(oversample=0.25, staleness=0).max_inflight == 128 + 32
    assert RunConfig(batch_size=100, group_size=1, oversample=0.29, algo={"type": "reward"}).extra_rollouts == 29
