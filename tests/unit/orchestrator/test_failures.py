"""Every fault has its end: tried again, given up, or the end of the run, with what went wrong first as a sentence.

Most of it in virtual time: outages of minutes pass in a moment, and what was told while they lasted can be dated.
"""

import asyncio
import errno
import itertools
import json
import logging
import os
import re
import resource
import signal
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms import AlgorithmError
from paceline.algorithms.reference_scorer import ReferenceScorer
from paceline.clients import HttpEngine, NoEngineLeft, Pool
from paceline.config import BreakerConfig, CheckpointConfig, EvalConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.filters import FailureHandling, FailuresConfig
from paceline.config.inference import SamplingConfig
from paceline.data import Sample, State, Ticket
from paceline.engine import Completion, EngineLimits, EngineStats, GenerateRequest
from paceline.envs import Environment, JudgeFailed, Outcome
from paceline.envs.workers import WorkerFailed, Workers
from paceline.errors import EngineError, Overloaded, RequestError, Unreachable
from paceline.observe.monitor import Monitor, RunRecorder, read_jsonl
from paceline.orchestrator import (
    CheckpointError,
    Checkpoints,
    Orchestrator,
    OrchestratorParts,
    RunStopped,
    build_train_envs,
)
from paceline.orchestrator.episodes import RolloutRunner
from paceline.orchestrator.failures import failure_kind
from paceline.rollout import Group, Rollout, SamplingClient
from paceline.selfplay import Actor, Arena, ArenaEnvironment, Artifact, EpisodeRequest, Rubric, SingleTurnEpisode
from paceline.trainer import StepReport
from paceline.util.deadlines import DeadlineError
from paceline.weights.update import ServedPolicy, WeightUpdate
from paceline.weights.weight_store import WeightStore
from simulator.engine import VirtualClock, run_virtual

TICKET = Ticket(4, "coins", 0, 0, 0)


# --- a small world


class Mute:
    end_tokens = frozenset({1})

    def reply(self, ids):
        return " ".join(map(str, ids))


class Near:
    """An engine of this process: its tokens depend on the noise alone."""

    busy_seconds = 0.0
    version = 0

    def __init__(self, error: Exception | None = None, dead: bool = False) -> None:
        self.error, self.dead = error, dead
        self.asked: list[GenerateRequest] = []

    async def generate(self, request):
        self.asked.append(request)
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error
        ids = [2 + request.noise % 97, 1]
        return Completion(token_ids=ids, logprobs=[-1.0] * 2, versions=[self.version] * 2, finish="stop")

    async def load_weights(self, update):
        self.version = update.version
        return 0.0

    async def policy(self):
        if self.dead:
            raise EngineError("the engine's thread ended: CUDA out of memory")
        return ServedPolicy(self.version, "")

    async def limits(self):
        return EngineLimits(512, 100)

    async def stats(self):
        return EngineStats(capacity=4)


class Far(Near):
    """An engine somewhere else, which is away for a while."""

    name = "http://far:1"

    def __init__(self, leaves: float, returns: float) -> None:
        super().__init__()
        self.leaves, self.returns = leaves, returns

    def _here(self):
        if self.leaves <= asyncio.get_running_loop().time() < self.returns:
            raise Unreachable("http://far:1 does not answer: All connection attempts failed")

    async def generate(self, request):
        self._here()
        answer = await super().generate(request)
        self._here()
        return answer

    async def load_weights(self, update):
        self._here()
        return await super().load_weights(update)

    async def policy(self):
        self._here()
        return await super().policy()

    async def limits(self):
        self._here()
        return await super().limits()

    async def store_update(self, update):
        return update


class Coins(Environment):
    """The n-th episode of row r meets `trouble(r, n)`; otherwise the parity of a token pays."""

    def __init__(self, trouble=lambda row, time: None, rows: int = 40) -> None:
        self.trouble, self.rows = trouble, rows
        self.played: Counter[int] = Counter()

    def examples(self, split):
        return [{"row": row} for row in range(self.rows)] if split == "train" else []

    async def play(self, example, seats):
        self.played[example["row"]] += 1
        reply = await seats["policy"].complete([0, 1])
        found = self.trouble(example["row"], self.played[example["row"]])
        if isinstance(found, BaseException):
            raise found
        return await found if found is not None else Outcome.solo(float(int(reply.text.split()[0]) % 2))


class Counting:
    """A trainer that only counts."""

    version = 0

    def __init__(self) -> None:
        self.trained: list[Sample] = []

    async def step(self, batch):
        self.trained += batch
        self.version += 1
        return StepReport({"loss": 0.0})

    async def weights(self):
        return WeightUpdate(self.version, {})

    async def save(self, folder: Path): ...
    async def load(self, folder: Path): ...


def configured(**more) -> RunConfig:
    return RunConfig(
        **{
            "batch_size": 8,
            "group_size": 2,
            "steps": 3,
            "eval": EvalConfig(every=0),
            "checkpoint": CheckpointConfig(every=0),
            "env": [CustomEnvConfig(name="coins", import_path="x:y", group_size=2)],
        }
        | more
    )


def conduct(tmp_path, environment, engine=None, trainer=None, monitor=None, **more):
    """One run in virtual time: its trainer, its conductor, and what it ended with, if that was an error."""
    config, trainer = configured(**more), trainer or Counting()

    async def run():
        pool = Pool([engine or Near()], jitter=lambda: 0.0)
        client = SamplingClient(pool, Mute(), SamplingConfig(), frozenset({1}))
        clock = VirtualClock(asyncio.get_running_loop())
        store = Checkpoints(tmp_path / "ckpt", 100)
        courses = build_train_envs(config, {"coins": environment})
        conductor = Orchestrator(
            config, OrchestratorParts(pool, trainer, client, client, courses, monitor or Monitor(), store, clock)
        )
        error = None
        try:
            async with asyncio.timeout(10_000):
                await conductor.run()
        except Exception as failure:
            error = failure
        pool.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        return conductor, error, clock.now(), [task for task in others if task.get_name().startswith("ticket")]

    conductor, error, seconds, left = run_virtual(run())
    assert left == [], "no episode plays on after the end"
    return trainer, conductor, error, seconds


class Told(Monitor):
    """Keeps every step's metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def step(self, step, metrics) -> None:
        self.steps.append(dict(metrics))

    def total(self, name: str) -> float:
        return sum(value for metrics in self.steps for key, value in metrics.items() if key.startswith(name))


def group(environment, engine=None, **more) -> tuple[Group, RolloutRunner, float]:
    """One group of two in virtual time, and how long it took."""
    config = configured(**more)

    async def run():
        client = SamplingClient(Pool([engine or Near()], jitter=lambda: 0.0), Mute(), SamplingConfig(), frozenset({1}))
        player = RolloutRunner(client, VirtualClock(asyncio.get_running_loop()), seed=0)
        done = await player.run_group(build_train_envs(config, {"coins": environment})["coins"], TICKET)
        return done, player, asyncio.get_running_loop().time()

    return run_virtual(run())


def tokens(done: Group) -> list[list[int]]:
    return [turn.completion_ids for rollout in done.rollouts for turn in rollout.turns]


class Words(logging.Handler):
    """Warnings with the virtual time at which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, str]] = []

    def emit(self, record):
        self.told.append((asyncio.get_running_loop().time(), record.getMessage()))


@pytest.fixture
def words():
    handler = Words()
    logging.getLogger("paceline").addHandler(handler)
    yield handler.told
    logging.getLogger("paceline").removeHandler(handler)


# --- of which kind a failure is

UNGRATEFUL = KeyError("choices")
UNGRATEFUL.__cause__ = Unreachable("gone")
LOOP = ValueError("a")
LOOP.__cause__ = ValueError("b")
LOOP.__cause__.__cause__ = LOOP


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("mine"), "episode"),
        (TimeoutError("a client's own"), "episode"),
        (DeadlineError("an episode took longer"), "timeout"),
        (RequestError("too long"), "request"),
        (Overloaded("full"), "engine"),
        (UNGRATEFUL, "engine"),
        (ExceptionGroup("both", [Unreachable("gone"), ValueError("after that")]), "engine"),
        (WorkerFailed("exited", "was killed by SIGKILL"), "worker"),
        (WorkerFailed("timed_out", "timed out after 5 s"), "timeout"),
        (WorkerFailed("raised", "raised ValueError"), "episode"),
        (JudgeFailed("no verdict"), "judge"),
        (LOOP, "episode"),
    ],
)
def test_an_error_is_of_the_kind_of_what_caused_it(error, kind):
    assert failure_kind(error) == kind


# --- retry, drop, fail

RAISED = {
    "episode": lambda: ValueError("the dice fell off the table"),
    "worker": lambda: WorkerFailed("exited", "was killed by SIGKILL"),
    "engine": lambda: Overloaded("the queue is full"),
    "request": lambda: RequestError("longer than the context"),
    "judge": lambda: JudgeFailed("the judge said 'hm'"),
}


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(RAISED)), st.sampled_from(["retry", "drop", "fail"]), st.integers(1, 4), st.integers(0, 5)
)
def test_what_becomes_of_a_failure_is_what_the_run_file_says_of_its_kind(kind, choice, tries, failures):
    """Both episodes of a group meet `failures` failures before they play to their end."""
    environment = Coins(lambda row, time: RAISED[kind]() if time <= 2 * failures else None)
    play = partial(group, environment, failures=FailuresConfig(**{kind: choice}, tries=tries))
    if choice == "fail" and failures:
        with pytest.raises(RunStopped, match=rf'coins: .*\(failures\.{kind} = "fail"\)'):
            play()
        return
    done, player, seconds = play()
    allowed = tries if choice == "retry" else 1
    plays = min(failures + 1, allowed)
    assert environment.played == {0: 2 * plays}
    assert player.retry_counts == Counter({kind: 2 * (plays - 1)} if plays > 1 else {})
    assert seconds == pytest.approx(plays + sum(FailureHandling.pause(n) for n in range(1, plays)))
    if failures < allowed:
        assert done.failed == []
        assert player.failure_counts == Counter()
        assert tokens(done) == tokens(group(Coins())[0]), "the same noise, so the same tokens"
    else:
        assert done.rollouts == []
        assert player.failure_counts == {kind: 2}
        assert all(f"failures.{kind} = " in rollout.error for rollout in done.failed)


def test_the_words_of_a_run_file_stand_for_small_values():
    policies = [FailureHandling(word, 4) for word in ("retry", "drop", "fail")]
    assert [str(policy) for policy in policies] == ['"retry", 4 tries', '"drop"', '"fail"']
    assert [policy.retries(3) for policy in policies] == [True, False, False]
    assert not policies[0].retries(4)
    assert max(FailureHandling.pause(failed) for failed in range(1, 2000)) <= 30


def test_what_went_wrong_first_is_told_whatever_came_after_it():
    def trouble(row, time):
        return Overloaded("the queue is full") if time <= 2 else ValueError("and then it fell apart")

    done, player, _ = group(Coins(trouble))
    first, last = done.failed[0].error.split("; at last: ")
    assert first == 'coins: the queue is full (failures.engine = "retry", 3 tries)'
    assert last.startswith("coins: ValueError: and then it fell apart, at ")
    assert player.failure_counts == {"engine": 2}


def test_a_failing_preparation_is_tried_again_too():
    class Late(Coins):
        prepared = 0

        async def prepare(self, example):
            self.prepared += 1
            if self.prepared < 3:
                raise JudgeFailed("the question is not written yet")
            return example

    environment = Late()
    assert group(environment)[0].failed == []
    assert environment.prepared == 3
    done, _, _ = group(Late(), failures=FailuresConfig(judge="drop"))
    assert [rollout.error for rollout in done.failed] == [
        'coins: the question is not written yet (failures.judge = "drop")'
    ]


def test_the_breaker_counts_only_what_was_lost_in_the_end(tmp_path):
    """Every episode fails once, which is far more than the breaker allows."""
    seen: set[int] = set()

    def once(row, time):
        key = row * 2 + (time - 1) % 2
        return None if key in seen else seen.add(key) or Overloaded("the queue is full")

    trainer, _, error, _ = conduct(tmp_path, Coins(once), breaker=BreakerConfig(consecutive=2))
    assert error is None
    assert trainer.version == 3


def test_a_run_stopped_by_a_failure_leaves_no_episode_playing(tmp_path):
    endings = iter(range(100))

    def trouble(row, time):
        lost = next(endings) == 7
        return ValueError("the dice fell off the table") if lost else asyncio.sleep(50, Outcome.solo(1.0))

    _, _, error, seconds = conduct(tmp_path, Coins(trouble), failures=FailuresConfig(episode="fail"))
    assert isinstance(error, RunStopped)
    said, end = "coins: ValueError: the dice fell off the table, at ", ": mend that, or let the run drop or retry"
    assert str(error).startswith(said)
    assert str(error).endswith(f', in play (failures.episode = "fail"){end}')
    assert seconds < 5


def called_off(environment, seconds: float) -> tuple[float, RolloutRunner]:
    """When a group is really gone that is called off after so many seconds."""

    async def run():
        client = SamplingClient(Pool([Near()], jitter=lambda: 0.0), Mute(), SamplingConfig(), frozenset({1}))
        player = RolloutRunner(client, VirtualClock(asyncio.get_running_loop()), seed=0)
        course = build_train_envs(configured(failures=FailuresConfig(episode="retry")), {"coins": environment})["coins"]
        task = asyncio.ensure_future(player.run_group(course, TICKET))
        asyncio.get_running_loop().call_later(seconds, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time(), player

    return run_virtual(run())


def test_a_group_that_is_called_off_waits_for_all_of_its_episodes():
    times = iter([3, 6])

    async def tidy():
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(next(times))
            raise

    seconds, _ = called_off(Coins(lambda row, time: tidy()), 10)
    assert seconds == 16


def test_an_environment_that_makes_a_failure_of_its_cancellation_is_not_played_again():
    async def excuse():
        try:
            await forever()
        except asyncio.CancelledError:
            raise ValueError("interrupted") from None

    environment = Coins(lambda row, time: excuse())
    seconds, player = called_off(environment, 10)
    assert (seconds, environment.played, player.retry_counts) == (10, {0: 2}, {})


def test_what_an_agent_makes_of_a_lost_engine_is_the_engines_failure():
    """It knows a URL only, and hears of it as an HTTP error."""

    class Agent(Coins):
        async def play(self, example, seats):
            try:
                async with asyncio.timeout(30):
                    return await super().play(example, seats)
            except TimeoutError:
                raise OSError("the server answered 503") from None

    done, _, _ = group(Agent(), Far(0, 1e6), failures=FailuresConfig(engine="drop"))
    (lost, _) = done.failed
    assert re.search(r"OSError: the server answered 503, at .*, and no engine is left: http://far:1", lost.error)
    assert "failures.engine" in lost.error


# --- episodes

FOREVER = (
    "coins: an episode of `coins` took longer than 120 s: raise env.0.timeout (now 120) if it needs longer "
    '(failures.timeout = "drop")'
)


async def forever():
    await asyncio.Event().wait()


async def garbage():
    return "seven"


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        (lambda row, time: KeyError("answer"), "coins: KeyError: 'answer', at "),
        (lambda row, time: SystemExit(3), "coins: SystemExit: 3, at "),
        (lambda row, time: KeyboardInterrupt(), "coins: KeyboardInterrupt, at "),
        (lambda row, time: GeneratorExit(), "coins: GeneratorExit, at "),
        (lambda row, time: pytest.fail.Exception("no"), "coins: Failed: no, at "),
        (
            lambda row, time: asyncio.CancelledError(),
            "coins: something the environment awaited was cancelled (CancelledError, at ",
        ),
        (lambda row, time: forever(), FOREVER),
        (lambda row, time: garbage(), "coins: the episode ended with 'seven': return an Outcome"),
        (lambda row, time: WorkerFailed("exited", "was killed by SIGKILL"), "coins: a worker process was killed by"),
        (lambda row, time: RequestError("a prompt of 600 tokens"), "coins: a prompt of 600 tokens (failures.request"),
        (
            lambda row, time: JudgeFailed("the judge said 'hm'"),
            "coins: the judge said 'hm' (failures.judge = \"retry\"",
        ),
    ],
)
def test_whatever_all_episodes_meet_stops_the_run_with_its_sentence(tmp_path, trouble, sentence):
    _, _, error, seconds = conduct(tmp_path, Coins(trouble))
    assert isinstance(error, RunStopped)
    assert f"5 rollouts failed in a row; the first cause: {sentence}" in str(error)
    assert seconds < 130


def test_a_row_that_the_engine_refuses_costs_its_group_and_not_the_run(tmp_path):
    """A large group fails as a whole, of one cause."""
    env = CustomEnvConfig(name="coins", import_path="x:y", group_size=8)
    refused = Coins(lambda row, time: RequestError("a prompt of 600 tokens") if row % 10 == 3 else None, rows=20)
    monitor = Told()
    trainer, _, error, _ = conduct(tmp_path, refused, monitor=monitor, env=[env], batch_size=16, steps=16)
    assert error is None
    assert len(trainer.trained) == 16 * 16
    assert refused.played[3] == refused.played[13] == 16, "they were drawn in both epochs"
    assert monitor.total("dropped/failed_rollouts") >= 4 * 8
    config = {"env": [env], "batch_size": 16}
    _, _, error, _ = conduct(tmp_path, Coins(lambda row, time: RequestError("a prompt of 600 tokens")), **config)
    assert "5 rollouts failed in a row; the first cause: coins: a prompt of 600 tokens" in str(error)


def test_an_episode_that_swallows_its_cancellation_is_abandoned_and_the_run_goes_on(tmp_path):
    over = []

    async def swallows(seat):
        while not over:
            try:
                await asyncio.sleep(1)
                await seat.complete([0, 1])
            except BaseException:
                continue
        return Outcome.solo(1.0)

    class Deaf(Coins):
        async def play(self, example, seats):
            first.append(example["row"])
            outcome = await super().play(example, seats)
            return await swallows(seats["policy"]) if example["row"] == first[0] else outcome

    class Over(Monitor):
        def step(self, step, metrics):
            failed.append(metrics.get("failed/timeout", 0))
            over.extend([True] * (step == 3))

    failed: list[float] = []
    first: list[int] = []
    _, conductor, error, _ = conduct(tmp_path, Deaf(), monitor=Over(), trainer=Slow())
    assert error is None
    assert conductor.step == 3
    assert sum(failed) == 2, "both of its group, counted as failures"
    assert not conductor._ledger.first(State.IN_FLIGHT)


class Slow(Counting):
    """Waits for the slowest before its second step."""

    async def step(self, batch):
        await asyncio.sleep(200 * (self.version == 1))
        return await super().step(batch)


@pytest.mark.parametrize(
    ("rest", "advice"), [(0, "the environment dropped every episode"), (1, "the environment dropped so many episodes")]
)
def test_rewards_that_are_always_none_end_the_run_with_the_right_advice(tmp_path, rest, advice):
    async def none():
        return None

    notes: list[str] = []

    class Notes(Monitor):
        def note(self, text):
            notes.append(text)

    turns = itertools.count()
    environment = Coins(lambda row, time: none() if next(turns) % 2 >= rest else None, rows=10_000)
    pairs = CustomEnvConfig(name="coins", import_path="x:y", group_size=2, min_group_size=2)
    _, _, error, _ = conduct(tmp_path, environment, monitor=Notes(), env=[pairs])
    assert isinstance(error, RunStopped)
    assert str(error).startswith(advice)
    assert "return a reward for" in str(error)
    assert "An environment drops an episode by returning None" in notes[0]
    assert "easier" not in notes[0]


# --- workers

MURDERED = """
import os, signal, time

def hold(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    return "held"

def fatal():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_costs_its_call_nothing_but_a_poisonous_one_is_given_up(tmp_path):
    (tmp_path / "tricks.py").write_text(MURDERED)
    held = tmp_path / "held"
    held.mkdir()

    async def run():
        workers = Workers(1)
        call = asyncio.create_task(workers.call(f"{tmp_path / 'tricks.py'}:hold", [str(held)], 60))
        while not (pids := os.listdir(held)):  # noqa: ASYNC110, PTH208
            await asyncio.sleep(0.01)
        os.kill(int(pids[0]), signal.SIGKILL)
        assert await call == "held"
        with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
            await workers.call(f"{tmp_path / 'tricks.py'}:fatal", [], 60)

    asyncio.run(run())


# --- engines


def test_an_only_engine_that_comes_back_costs_time_and_no_rollout(tmp_path, words):
    told = Told()
    trainer, _, error, seconds = conduct(tmp_path, Coins(), Far(leaves=1.5, returns=300), monitor=told)
    assert error is None
    assert trainer.version == 3
    assert seconds > 300
    assert told.total("failed/") == 0
    assert told.total("retried/engine") > 0
    assert words[0][1].startswith("http://far:1 is set aside: http://far:1 does not answer")
    waiting = [text for _, text in words if "wait for an engine to come back" in text]
    assert any(text.endswith("no engine is left: http://far:1: " + AWAY) for text in waiting)
    quiet = np.diff([0, *(at for at, _ in words if at < 300), 300])
    assert quiet.max() <= 60
    assert len(words) < 60, "and not a word for each request"


AWAY = "http://far:1 does not answer: All connection attempts failed"


def test_an_only_engine_that_stays_away_stops_the_run_with_its_name(tmp_path):
    _, _, error, seconds = conduct(tmp_path, Coins(), Far(leaves=1.5, returns=1e9))
    assert isinstance(error, RunStopped)
    assert (
        "5 rollouts failed in a row; the first cause: coins: an episode of `coins` took longer than 120 s, "
        f'and no engine is left: http://far:1: {AWAY} (failures.engine = "retry", 3 tries)'
    ) in str(error)
    assert seconds < 3 * 125


def test_an_engine_of_this_process_that_died_stops_the_run_at_once(tmp_path):
    """It cannot be brought back, so no code tries to."""
    died = EngineError("the engine's thread ended: CUDA out of memory")
    _, _, error, seconds = conduct(tmp_path, Coins(), Near(died, dead=True))
    assert isinstance(error, NoEngineLeft)
    assert str(error) == str(died)
    assert seconds < 5


def test_requests_that_find_no_room_say_so(words):
    async def run():
        with pytest.raises(Overloaded):
            await Pool([Near(Overloaded("4 requests wait already"))]).generate(
                GenerateRequest(prompt_ids=(1,), max_tokens=1)
            )

    run_virtual(run())
    assert words[0][0] <= 60
    assert "because there is no room: 4 requests wait already" in words[0][1]


def test_a_restart_inside_the_patience_of_an_episode_repeats_nothing():
    environment = Coins()
    done, player, _ = group(environment, Far(leaves=0.5, returns=60))
    assert done.failed == []
    assert player.retry_counts == Counter()
    assert environment.played == {0: 2}


def answer(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size + body


CHOICE = b'{"token_ids": [1, 2], "token_logprobs": [0.5], "versions": [0, 0], "finish_reason": "stop", '
CHOICE += b'"recomputed": false, "cached_tokens": 0}'
GARBAGE = [
    pytest.param(answer(b"<html>welcome</html>"), "answered 200, but not as a Paceline server does", id="a page"),
    pytest.param(answer(b'{"choices": [{"token_ids": [1,'), "not as a Paceline server does", id="cut short"),
    pytest.param(answer(b'{"hello": "world"}'), "answered what cannot be read", id="something else"),
    pytest.param(answer(b'{"choices": [%s]}' % CHOICE), "2 tokens with 1 log probabilities", id="misshapen"),
    pytest.param(answer(b"[]"), "answered what cannot be read", id="a list"),
    pytest.param(answer(b'{"choices": ', 500), "does not answer", id="a connection cut"),
    pytest.param(b"", "does not answer", id="hung up"),
    pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer", id="another protocol"),
]


@contextmanager
def asyncio_server(data: bytes | None):
    """What a test runs beside a server that answers everything alike, or never when `data` is None."""

    async def speak(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if data is None:
            await reader.read()
        else:
            writer.write(data)
        writer.close()

    async def beside(work):
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        engine = HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        pool = Pool([engine], jitter=lambda: 0.9)
        try:
            return await work(pool)
        finally:
            pool.close()
            await engine.aclose()
            server.close()

    yield lambda work: asyncio.run(beside(work))


@pytest.mark.parametrize(("data", "sentence"), GARBAGE)
def test_an_engine_that_answers_garbage_is_an_engine_that_failed(data, sentence):
    """Not an environment that did: the code that asked is not blamed. A slow machine may need longer to hear it."""

    async def ask(pool):
        for seconds in (0.3, 3.0, 60.0):
            with pytest.raises(EngineError) as caught:
                await pool.generate(GenerateRequest(prompt_ids=(1, 2), max_tokens=4), deadline=seconds)
            if not str(caught.value).startswith(f"no completion within {seconds} s:"):  # else it has heard nothing yet
                break
        return caught.value

    with asyncio_server(data) as beside:
        error = beside(ask)
    assert re.search(sentence, str(error))
    assert failure_kind(error) == "engine"
    assert "http://127.0.0.1:" in str(error)


def test_an_engine_that_never_answers_is_given_up_at_the_deadline():
    async def ask(pool):
        with pytest.raises(EngineError, match=r"no completion within 0\.05 s"):
            await pool.generate(GenerateRequest(prompt_ids=(1, 2), max_tokens=4), deadline=0.05)

    with asyncio_server(None) as beside:
        beside(ask)


# --- judges


class Verdict(SingleTurnEpisode):
    episode_type = "essay"

    @property
    def rubric(self):
        async def judged(state, arena):
            return {"writer": await arena.ask_judge(state, [{"role": "user", "content": "grade it"}], read=float)}

        return Rubric([judged])

    def get_initial_prompt(self, arena, artifact, state):
        return "write"


class School(Arena):
    def __init__(self) -> None:
        super().__init__()
        self.add_actor(Actor("writer"))
        self.add_episode(Verdict())

    def requests(self, split):
        return [EpisodeRequest("essay", Artifact(0))] if split == "train" else []


class Grader(Near):
    """Says what it is told to when it is asked to grade: an error, or words."""

    def __init__(self, renderer, *grades) -> None:
        super().__init__()
        self.renderer, self.grades = renderer, list(grades)

    async def generate(self, request):
        self.asked.append(request)
        said = "an essay"
        if "grade it" in self.renderer.tokenizer.decode(request.prompt_ids):
            said = self.grades.pop(0) if len(self.grades) > 1 else self.grades[0]
        if isinstance(said, Exception):
            raise said
        ids = [*self.renderer.encode(said), min(self.renderer.end_tokens)]
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish="stop")


def school(renderer, *grades):
    """A group of one essay, and who was asked what."""
    engine = Grader(renderer, *grades)
    section = CustomEnvConfig(name="coins", import_path="x:y", group_size=1, algo={"type": "rae"})
    config = configured(group_size=1, env=[section])

    async def run():
        client = SamplingClient(
            Pool([engine], jitter=lambda: 0.0), renderer, SamplingConfig(max_tokens=8), renderer.end_tokens
        )
        player = RolloutRunner(client, VirtualClock(asyncio.get_running_loop()), seed=0)
        course = build_train_envs(config, {"coins": ArenaEnvironment(School())})["coins"]
        return await player.run_group(course, TICKET), player

    return *run_virtual(run()), engine


@pytest.fixture(scope="module")
def renderer():
    from paceline.config.model import ModelConfig
    from paceline.model import load_tokenizer
    from paceline.rollout import Renderer

    tokenizer = load_tokenizer(ModelConfig())
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def test_a_judge_that_speaks_nonsense_is_asked_anew_with_other_noise(renderer):
    done, player, engine = school(renderer, "hm", "well", "0.5")
    assert [rollout.reward for rollout in done.rollouts] == [0.5]
    assert player.retry_counts == Counter()
    assert len(engine.asked) == len({request.noise for request in engine.asked}) == 4


def test_a_judge_that_never_makes_sense_loses_the_episode_with_its_words(renderer):
    done, player, engine = school(renderer, "hm")
    (lost,) = done.failed
    assert lost.error == (
        "coins: the judge gave no verdict that can be read in 3 answers; the first: 'hm' (could not convert string to "
        "float: 'hm') (failures.judge = \"retry\", 3 tries)"
    )
    assert len(engine.asked) == 3 * (1 + 3)
    assert player.retry_counts == {"judge": 2}


def test_a_judge_that_cannot_be_reached_is_tried_again(renderer):
    done, player, _ = school(renderer, EngineError("502 from the gateway"), "1.0")
    assert [rollout.reward for rollout in done.rollouts] == [1.0]
    assert player.retry_counts == {"judge": 1}
    done, _, _ = school(renderer, EngineError("502 from the gateway"))
    assert done.failed[0].error.startswith("coins: the judge could not answer: 502 from the gateway (failures.judge")


# --- teachers


class Teacher(Near):
    """Scores after `seconds`; its first `bad` answers are an error, or not numbers."""

    def __init__(self, bad: int = 0, how: object = None, seconds: float = 1.0) -> None:
        super().__init__()
        self.bad, self.how, self.seconds, self.scored = bad, how, seconds, 0

    async def score(self, sequences, temperature=1.0, model=""):
        await asyncio.sleep(self.seconds)
        self.scored += 1
        if self.scored <= self.bad:
            if isinstance(self.how, Exception):
                raise self.how
            return [[float("nan")] * len(ids) for ids in sequences]
        return [[-0.5] * len(ids) for ids in sequences]


def taught(teacher, policy=FailureHandling(), samples: int = 4):  # noqa: B008
    """The samples that are left of a batch, and what was lost."""
    ones = np.ones(3, np.float32)
    sample = Sample(
        token_ids=[5, 6, 7],
        loss_mask=[False, True, True],
        versions=[-1, 0, 0],
        temperatures=ones,
        logprobs=-ones,
        teacher_kl_weights=[0.0, 1.0, 1.0],
    )
    rollouts = [Rollout(ticket=TICKET, member=n, samples=[sample]) for n in range(samples)]
    batch = Group(ticket=TICKET, rollouts=rollouts, size=samples)

    async def run():
        reference = ReferenceScorer(Pool([teacher]), "`teacher` at http://far:2/v1", policy)
        return await reference.add_logprobs([batch]), asyncio.get_running_loop().time()

    lost, seconds = run_virtual(run())
    assert all(sample.teacher_logprobs is not None for sample in batch.samples())
    return len(batch.samples()), lost, seconds


@pytest.mark.parametrize("how", [EngineError("http://far:2/v1/score answered 500"), "not numbers"])
def test_a_teacher_that_fails_for_a_moment_is_asked_again(how):
    assert taught(Teacher(2, how))[:2] == (4, {})
    assert taught(Teacher(2, how), FailureHandling("drop"))[:2] == (2, {"teacher_failed": 2})
    with pytest.raises(
        AlgorithmError, match=r"`teacher` at http://far:2/v1 could not score .*failures.teacher = \"fail"
    ):
        taught(Teacher(2, how), FailureHandling("fail"))


def test_what_a_teacher_will_never_score_is_not_asked_again(words):
    teacher = Teacher(100, RequestError("longer than the context"))
    assert taught(teacher)[:2] == (0, {"teacher_failed": 4})
    assert teacher.scored == 4
    assert words[-1][1].endswith("left 4 of 4 samples without a score: longer than the context")


def test_a_slow_teacher_is_not_waited_for_in_silence(words):
    kept, lost, seconds = taught(Teacher(seconds=100.0), samples=2)
    assert (kept, lost, seconds) == (2, {}, 100.0)
    assert [at for at, _ in words] == [30, 60, 90]
    assert words[0][1] == (
        "waiting for `teacher` at http://far:2/v1 since 30 s: 0 of 2 samples are scored: no answer yet"
    )
    kept, lost, seconds = taught(Teacher(seconds=1e9))
    assert (kept, lost, seconds) == (0, {"teacher_failed": 4}, 120.0)


# --- trainers and disks


def test_a_trainer_that_raises_ends_the_run_with_its_own_error(tmp_path):
    class Failing(Counting):
        async def step(self, batch):
            if self.version == 2:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return await super().step(batch)

    trainer, conductor, error, _ = conduct(tmp_path, Coins(), trainer=Failing())
    assert (type(error), str(error)) == (RuntimeError, "CUDA error: an illegal memory access was encountered")
    assert conductor.step == trainer.version == 2


@contextmanager
def small_files(size: int):
    """Every write beyond `size` bytes of a file is refused, as by a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_a_checkpoint_costs_what_came_after_the_last_one(tmp_path):
    class Large(Counting):
        async def save(self, folder):
            with small_files(1000 if self.version == 2 else 1 << 30):
                (folder / "trainer").write_bytes(b"x" * 5000)

    _, _, error, _ = conduct(tmp_path, Coins(), trainer=Large(), checkpoint=CheckpointConfig(every=1))
    assert isinstance(error, CheckpointError)
    for part in ("step-000002 could not be written", "File too large", "make room", "--resume latest", "step-000001"):
        assert part in str(error)
    assert {path.name for path in (tmp_path / "ckpt").iterdir()} == {"step-000001", "latest"}


def test_a_disk_that_is_full_at_the_metrics_ends_the_run_and_tears_no_line(tmp_path):
    class Full(RunRecorder):
        def step(self, step, metrics):
            with small_files((tmp_path / "metrics.jsonl").stat().st_size + 20 if step == 2 else 1 << 30):
                super().step(step, metrics)

    _, _, error, _ = conduct(tmp_path, Coins(), monitor=Full(tmp_path))
    assert isinstance(error, OSError)
    assert error.errno == errno.EFBIG
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_disk_that_is_full_at_the_shelf_keeps_the_weights_before(tmp_path):
    import torch

    shelf = WeightStore(tmp_path)

    async def run():
        first = await shelf.store_update(WeightUpdate(1, {"w": torch.zeros(10)}))
        with (
            small_files(1000),
            pytest.raises(EngineError, match=rf"weights cannot be written to {tmp_path}.*too large"),
        ):
            await shelf.store_update(WeightUpdate(2, {"w": torch.zeros(10_000)}))
        return first

    first = asyncio.run(run())
    assert list(tmp_path.iterdir()) == list(first.tensors.files)
