"""The books under any interleaving: the real gate, ledger, dispatcher, group assembly and checkpoints, driven by hand.

Hypothesis decides which episode ends next and how, when the trainer is done, and at which await the process dies. What
it must never find: a ticket lost, trained or credited twice, a gate overdrawn, a token trained too late, or a run
directory that tells of more than one lineage.
"""

import asyncio
import json
import random
import shutil
import tempfile
from collections import Counter, deque
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.algorithms import Algorithm
from paceline.algorithms.base import broadcast
from paceline.algorithms.grpo import GRPO
from paceline.clients import Pool
from paceline.config import BreakerConfig, CheckpointConfig, EvalConfig, FiltersConfig, ReplayConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.data import State, Ticket
from paceline.data.sampler import Curriculum
from paceline.engine import Completion
from paceline.envs import Environment, Outcome
from paceline.observe.monitor import RunPlan, RunRecorder, read_jsonl
from paceline.orchestrator import Checkpoints, Gate, Orchestrator, OrchestratorParts, build_train_envs
from paceline.orchestrator.saved_groups import read_groups
from paceline.rollout import Group, SamplingClient
from paceline.trainer import StepReport
from paceline.weights.update import WeightUpdate
from scripted_run import CoinFlips, Renderer, ScriptedEngine, conduct, states
from simulator.engine import VirtualClock, VirtualLoop

GROUP = 2


class Engine(ScriptedEngine):
    """Answers at once, with the version of the moment."""

    def __init__(self) -> None:
        super().__init__(0)

    async def generate(self, request) -> Completion:
        return Completion(token_ids=[1], logprobs=[-0.5], versions=[self.version], finish="stop")


class Stage(Environment):
    """Episodes that go on when they are told to, and end as they are told."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.waiting: list[asyncio.Future[str]] = []

    def examples(self, split):
        return [{"row": i} for i in range(self._rows)] if split == "train" else []

    async def play(self, example, seats):
        prompt = [0, 1]
        while True:
            await seats["policy"].complete(prompt)
            prompt = [*prompt, 1, 0]
            cue: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self.waiting.append(cue)
            match await cue:
                case "fails":
                    raise ValueError("as told")
                case "is dropped":
                    return None
                case "wins" | "loses" as how:
                    return Outcome.solo(float(how == "wins"))


class Slow:
    """A trainer that finishes when it is told to, and refuses what is too old or has trained before."""

    def __init__(self, staleness: int, lineage: list[set[Ticket]]) -> None:
        self.version = 0
        self.working: asyncio.Future[None] | None = None
        self._staleness = staleness
        self._lineage = lineage
        """Tickets of each batch, up to the weights there are now."""

    async def step(self, batch) -> StepReport:
        ages = [self.version - v for s in batch for v, rl in zip(s.versions, s.rl_token_weights, strict=True) if rl]
        assert max(ages, default=0) <= self._staleness
        tickets = {sample.ticket for sample in batch}
        assert not any(tickets & earlier for earlier in self._lineage)
        await self._work()
        self._lineage.append(tickets)
        self.version += 1
        return StepReport({"loss": 0.0})

    async def _work(self) -> None:
        self.working = asyncio.get_running_loop().create_future()
        await self.working
        self.working = None

    async def weights(self) -> WeightUpdate:
        return WeightUpdate(self.version, {})

    async def save(self, folder: Path) -> None:
        version = self.version
        await self._work()
        (folder / "version").write_text(str(version))

    async def load(self, folder: Path) -> None:
        self.version = int((folder / "version").read_text())
        del self._lineage[self.version :]


class Once(Algorithm):
    """A moving baseline that must not see a group twice, and says so."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self._baseline = 0.0

    def assign(self, group: Group) -> None:
        assert group.ticket.number not in self.seen, "credited twice"
        self.seen.add(group.ticket.number)
        for rollout in group.rollouts:
            broadcast(rollout, (rollout.reward or 0.0) - self._baseline)
            self._baseline = 0.9 * self._baseline + 0.1 * (rollout.reward or 0.0)

    def state(self) -> dict:
        return {"seen": sorted(self.seen), "baseline": self._baseline}

    def load(self, state: dict) -> None:
        self.seen, self._baseline = set(state["seen"]), state["baseline"]


class InOrder(Curriculum):
    """Every row once, one after the other; counts how often it hears of each."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, 0, "in order")
        self.told: Counter[int] = Counter()

    def draw(self) -> tuple[int, int, int]:
        self.draws += 1
        return (self.draws - 1) // self.rows, self.draws - 1, (self.draws - 1) % self.rows

    def update(self, row, rewards) -> None:
        self.told[row] += 1

    def state(self) -> dict:
        return {"draws": self.draws, "told": list(self.told.items())}

    def load(self, state: dict) -> None:
        self.draws, self.told = state["draws"], Counter(dict(state["told"]))


class Life(RuleBasedStateMachine):
    """One run, from its first ticket to its last, however often it is killed."""

    @initialize(
        rows=st.integers(5, 16),
        batch=st.sampled_from([4, 6]),
        staleness=st.integers(0, 2),
        on_stale=st.sampled_from(["drop", "mask"]),
        inflight=st.sampled_from([4, None]),
        share=st.sampled_from([0.0, 0.5]),
        every=st.sampled_from([1, 2]),
        zero=st.booleans(),
        repeatable=st.booleans(),
        oversample=st.sampled_from([0.0, 0.5, 1.0]),
        cancel=st.booleans(),
    )
    def begin(self, rows, batch, staleness, on_stale, inflight, share, every, zero, repeatable, oversample, cancel):
        self.loop = VirtualLoop()  # what a thread would do is done at once: nothing hangs on how fast the machine is
        self.folder = Path(tempfile.mkdtemp(prefix="books-"))
        self.lineage: list[set[Ticket]] = []
        self.rows = rows
        self.config = RunConfig(
            batch_size=batch,
            group_size=GROUP,
            epochs=1,
            steps=None,
            staleness=staleness,
            deterministic=repeatable,
            on_stale=on_stale,
            oversample=0.0 if repeatable else oversample,
            cancel_stale=cancel and on_stale == "drop",
            max_inflight=inflight,
            replay=ReplayConfig(share=share if staleness else 0.0, times=2),
            filters=FiltersConfig(zero_advantage=zero),
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=every),
            breaker=BreakerConfig(consecutive=10**6, window=10**6),
            env=[CustomEnvConfig(name="stage", import_path="x:y", min_group_size=1)],
        )
        self.start()

    def start(self) -> None:
        """What `train` does, with or without something to go on from."""
        checkpoints = Checkpoints(self.folder / "checkpoints", keep=2)
        resume = "latest" if checkpoints.all() else None
        start = checkpoints.find(resume)[1]["step"] if resume else 0
        if not resume:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            self.lineage.clear()
        self.stage, self.trainer = Stage(self.rows), Slow(self.config.staleness, self.lineage)
        config = self.config.model_copy(update={"resume": resume})
        pool = Pool([Engine()])
        client = SamplingClient(pool, Renderer(), SamplingConfig(), frozenset({1}))
        self.courses = build_train_envs(config, {"stage": self.stage})
        self.courses["stage"].algorithm = Once()
        self.courses["stage"].cursor = InOrder(self.rows)
        recorder = RunRecorder(self.folder)
        recorder.begin(RunPlan("books", self.folder, None, start, {}, ("stage",), "cpu", 0))
        parts = OrchestratorParts(
            pool, self.trainer, client, client, self.courses, recorder, checkpoints, VirtualClock(self.loop)
        )
        self.conductor = Orchestrator(config, parts)
        self.run = self.loop.create_task(self.conductor.run())
        self.stopped = False
        self.settle()

    def settle(self) -> None:
        """Until every task waits for another."""

        async def turns() -> None:
            for _ in range(60):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        self.stage.waiting = [cue for cue in self.stage.waiting if not cue.done()]  # what was called off is done too
        if self.run.done():
            self.run.result()

    @property
    def alive(self) -> bool:
        return not self.run.done()

    @precondition(lambda self: self.alive and self.stage.waiting)
    @rule(
        which=st.integers(0, 40),
        cue=st.sampled_from(["wins", "wins", "loses", "loses", "speaks", "fails", "is dropped"]),
    )
    def an_episode_goes_on(self, which, cue):
        self.stage.waiting[which % len(self.stage.waiting)].set_result(cue)
        self.settle()

    @precondition(lambda self: self.alive and self.stage.waiting)
    @rule(cues=st.lists(st.sampled_from(["wins", "loses"]), min_size=2, max_size=8))
    def several_end_at_once(self, cues):
        for future, cue in zip(list(self.stage.waiting), cues, strict=False):
            future.set_result(cue)
        self.settle()

    @precondition(lambda self: self.alive and len(self.stage.waiting) > 1)
    @rule(left=st.integers(1, 2), cue=st.sampled_from(["wins", "loses"]))
    def all_but_the_first_end(self, left, cue):
        """Stragglers, which others overtake."""
        for number, future in enumerate(self.stage.waiting[left:]):
            future.set_result(cue if number % 3 else "wins")
        self.settle()

    @precondition(lambda self: self.alive and self.trainer.working)
    @rule()
    def the_trainer_is_done(self):
        self.trainer.working.set_result(None)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(how=st.sampled_from(["not now", "not now", "stopped", "killed"]))
    def it_may_end(self, how):
        """By a signal, after the step under way; or at whatever await it is, a checkpoint's half-way included."""
        if how == "killed":
            self.kill()
            self.start()
        elif how == "stopped" and not self.stopped:
            self.conductor.stop()
            self.stopped = True
            self.settle()

    @precondition(lambda self: not self.alive)
    @rule()
    def it_goes_on(self):
        self.start()

    def kill(self) -> None:
        self.run.cancel()
        self.loop.run_until_complete(asyncio.wait([self.run]))

    @invariant()
    def the_gate_is_not_overdrawn(self):
        gate, buffer = self.conductor._gate, self.conductor._dispatcher._buffered_groups()
        ledger, batch = self.conductor._ledger, self.config.batch_size
        if not self.alive:
            return
        assert 0 <= gate.running <= gate.max_inflight
        assert gate.accepted + gate.running <= (gate.staleness + gate.version + 1) * batch + self.config.extra_rollouts
        assert gate.running == GROUP * ledger.count(State.IN_FLIGHT)
        in_hand = ledger.count(State.BUFFERED) - len(buffer)
        ahead = sum(group.size for group in [*buffer, *self.conductor._dispatcher._replays])
        assert gate.accepted == (gate.version + (in_hand > 0)) * batch + ahead
        if not self.config.staleness and in_hand:
            assert gate.capacity == 0
            if self.config.on_stale == "drop":
                assert gate.running == ahead == 0  # nothing is sampled that could only come too late
        assert {group.ticket.number for group in buffer} <= self.courses["stage"].algorithm.seen

    @invariant()
    def every_ticket_is_in_the_books_once(self):
        ledger = self.conductor._ledger
        still_open = sum(ledger.count(state) for state in (State.WAITING, State.IN_FLIGHT, State.BUFFERED))
        assert ledger.drawn == ledger.trained + ledger.dropped.total() + still_open
        assert ledger.count(State.WAITING) == len(ledger.waiting)
        assert ledger.drawn - ledger.replayed == self.courses["stage"].cursor.draws

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        try:
            self.play_to_the_end()
            self.the_directory_tells_of_one_lineage()
        finally:
            self.kill()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            shutil.rmtree(self.folder)

    def play_to_the_end(self) -> None:
        dice = random.Random(self.rows)
        for _ in range(2000):
            if not self.alive:
                if not self.stopped:
                    return
                self.start()
            for cue in list(self.stage.waiting):
                cue.set_result(dice.choice(["wins", "loses"]))
            if self.trainer.working:
                self.trainer.working.set_result(None)
            self.settle()
            self.the_gate_is_not_overdrawn()
        raise AssertionError("the run does not come to its end")

    def the_directory_tells_of_one_lineage(self) -> None:
        records = read_jsonl(self.folder / "tickets.jsonl")
        steps = [line["step"] for line in read_jsonl(self.folder / "metrics.jsonl")]
        assert steps == list(range(1, len(self.lineage) + 1))
        ends = {"trained": 1, "dropped": 1}
        ended = Counter(r["number"] for r in records if r["state"] in ends)
        assert ended == Counter(range(self.conductor._ledger.drawn))
        lives: dict[int, list[str]] = {}
        for record in records:
            lives.setdefault(record["number"], []).append(record["state"])
        for life in lives.values():
            # A group in flight at a checkpoint is played again; a finished one never is.
            assert life.count("buffered") <= 1
            assert "in flight" not in life[life.index("buffered") :] if "buffered" in life else True
        replays = {r["number"] for r in records if "replays" in r}
        rows = Counter(r["row"] for r in records if r["state"] in ends and r["number"] not in replays)
        assert rows == Counter(range(self.rows))
        assert [r["since"] for r in records] == sorted(r["since"] for r in records)
        trained = [r for r in records if r["state"] == "trained"]
        for step, tickets in enumerate(self.lineage, start=1):
            assert {ticket.number for ticket in tickets} <= {r["number"] for r in trained if r["step"] == step}
        told = self.courses["stage"].cursor.told
        assert set(told.values()) <= {1}
        assert {r["row"] for r in trained} <= told.keys()


TestLife = Life.TestCase
# Without shrinking: a failure is told at once, and its steps can be read.
TestLife.settings = settings(max_examples=20, stateful_step_count=60, deadline=None, phases=[Phase.generate])


def test_over_thousands_of_schedules_the_gate_alone_keeps_within_the_limit():
    """Trained in the order they started, whatever finishes first, fails or is given back: no rollout is trained more
    than S versions after it started, though no code looks at its age."""
    oldest = 0
    for seed in range(3000):
        dice = random.Random(seed)
        size, batch = dice.choice([(1, 4), (2, 8), (4, 8), (2, 6)])
        staleness = dice.randrange(5)
        gate = Gate(batch, staleness, dice.choice([batch, 3 * batch, 1000]), dice.choice([None, 9]))
        queue: deque[list] = deque()  # [started at, finished]
        for _ in range(dice.randrange(40, 120)):
            running = [entry for entry in queue if not entry[1]]
            match dice.choice(["start", "start", "finish", "finish", "finish", "fail", "give back", "train"]):
                case "start" if gate.capacity >= size:
                    gate.start(size)
                    queue.append([gate.version, False])
                case "finish" if running:
                    dice.choice(running)[1] = True
                    gate.accept(size)
                case "fail" if running:
                    queue.remove(dice.choice(running))
                    gate.reject(size)
                case "give back" if len(running) < len(queue):
                    queue.remove(dice.choice([entry for entry in queue if entry[1]]))
                    gate.release(size)
                case "train":
                    ready = [entry for entry, _ in zip(queue, range(batch // size), strict=False)]
                    if len(ready) * size == batch and all(finished for _, finished in ready):
                        ages = [gate.version - queue.popleft()[0] for _ in ready]
                        oldest = max(oldest, *ages)
                        assert max(ages) <= staleness
                        gate.open_for(gate.version + 1)
            assert gate.accepted + gate.running <= (staleness + gate.version + 1) * batch
            assert gate.accepted + gate.running == gate.version * batch + size * len(queue)
    assert oldest == 4  # the limit is reached, so it is a limit


# -- going back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "left"), [(0, [-1]), (2, [-1, 0]), (4, [-1, 0, 2, 2])])
def test_going_back_takes_out_what_came_since(tmp_path, step, left):
    recorder = RunRecorder(tmp_path)
    recorder.tickets([{"number": n, "state": "dropped", "since": since} for n, since in enumerate([-1, 0, 2, 2, 4])])
    recorder.begin(RunPlan("back", tmp_path, None, step, {}, (), "cpu", 0))
    assert [record["since"] for record in read_jsonl(tmp_path / "tickets.jsonl")] == left


def test_what_is_half_removed_is_no_checkpoint_and_nothing_names_it(tmp_path, monkeypatch):
    """The process dies between the rename and the removal, at each of them."""

    async def write(folder: Path) -> None:
        (folder / "weights").touch()

    store = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3):
        asyncio.run(store.save(step, f'{{"step": {step}}}', write))
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    store.delete_after(1)
    assert [path.name for path in store.all()] == ["step-000001"]
    assert (tmp_path / "latest").readlink() == Path("step-000001")
    monkeypatch.undo()
    store.delete_after(1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "latest"}


@pytest.mark.parametrize(
    "changed", [{"group_size": 4}, {"batch_size": 4}, {"staleness": 0}, {"staleness": 1, "on_stale": "mask"}]
)
def test_a_run_file_may_change_between_two_lives(tmp_path, changed):
    """What no longer fits is played again or dropped as stale; all is counted once, and nothing old trains."""
    plain = {"staleness": 3, "filters": FiltersConfig(zero_advantage=False), "checkpoint": CheckpointConfig(every=1)}
    conduct(tmp_path, CoinFlips(), steps=9, **plain)
    kept = next(path for path in sorted((tmp_path / "ckpt").glob("step-*")) if len(read_groups(path).buffered) > 2)
    books = json.loads((kept / "state.json").read_text())
    after = plain | changed | {"checkpoint": CheckpointConfig(every=0)}
    trainer, log, conductor = conduct(tmp_path, CoinFlips(), steps=books["step"] + 6, resume=str(kept), **after)
    assert len(trainer.trained) == 6
    for version, batch in trainer.trained:
        assert (
            max(version - s.versions[t] for s in batch for t in range(len(s)) if s.rl_token_weights[t])
            <= after["staleness"]
        )
    ends = states(log, "trained") + states(log, "dropped")
    ledger = conductor._ledger
    left = [ticket.number for ticket in ledger._open]
    assert sorted(ends + left) == sorted(
        [fields[0] for fields in books["ledger"]["open"]] + list(range(books["ledger"]["drawn"], ledger.drawn))
    )
    assert any("played again" in note for note in log.notes)


def test_where_a_run_must_repeat_itself_credit_goes_by_ticket(tmp_path, monkeypatch):
    order: list[int] = []
    assign = GRPO.assign
    monkeypatch.setattr(GRPO, "assign", lambda self, group: order.append(group.ticket.number) or assign(self, group))
    conduct(tmp_path / "any", CoinFlips(), steps=6, staleness=2)
    assert order != sorted(order)
    order.clear()
    conduct(tmp_path / "same", CoinFlips(failing=0.2), steps=6, staleness=2, deterministic=True)
    assert order == sorted(order)
