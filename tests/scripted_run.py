"""An orchestrator's run with an engine whose tokens take random time and a trainer that only counts."""

import asyncio
import random
from pathlib import Path

import numpy as np

from paceline.clients import Pool
from paceline.config import BreakerConfig, CheckpointConfig, EvalConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.data import Sample
from paceline.data.sample import TOKEN_SCORE, TokenScores
from paceline.engine import Completion, EngineStats, GenerateRequest
from paceline.envs import Environment, Outcome
from paceline.observe.monitor import Monitor
from paceline.orchestrator import (
    Checkpoints,
    Clock,
    Orchestrator,
    OrchestratorParts,
    build_train_envs,
)
from paceline.rollout import SamplingClient
from paceline.trainer import StepReport
from paceline.weights.update import ServedPolicy, WeightUpdate


class ScriptedEngine:
    """Answers after a random number of turns of the event loop, one token at a time, at the version of that moment."""

    def __init__(self, seed: int, patience: int = 6) -> None:
        self.version = 0
        self.busy_seconds = 0.0
        self._rng = random.Random(seed)
        self._patience = patience

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def generate(self, request: GenerateRequest) -> Completion:
        versions = []
        for _ in range(self._rng.randrange(1, 4)):
            for _ in range(self._rng.randrange(self._patience)):
                await asyncio.sleep(0)
            versions.append(self.version)
        count = len(versions)
        return Completion(token_ids=[1] * count, logprobs=[-1.0] * count, versions=versions, finish="stop")

    async def score(self, sequences, temperature=1.0, model=""):
        return [[0.0] * len(s) for s in sequences]

    async def load_weights(self, update: WeightUpdate) -> float:
        self.version = update.version
        return 0.0

    async def policy(self) -> ServedPolicy:
        return ServedPolicy(self.version, "")

    def start(self) -> None: ...
    def close(self) -> None: ...


class CountingTrainer:
    """Takes a random number of turns for a batch and remembers what it trained at which version."""

    def __init__(self, seed: int) -> None:
        self.version = 0
        self.trained: list[tuple[int, list[Sample]]] = []
        self._rng = random.Random(seed)

    async def step(self, batch) -> StepReport:
        for _ in range(self._rng.randrange(12)):
            await asyncio.sleep(0)
        self.trained.append((self.version, list(batch)))
        self.version += 1
        names = [[(sample.ticket.number, sample.rollout, 0)] for sample in batch]  # as its scores
        scores = TokenScores.of({place: np.array(name, TOKEN_SCORE) for place, name in enumerate(names)})
        return StepReport({"loss": 0.0}, scores=scores)

    async def weights(self) -> WeightUpdate:
        return WeightUpdate(self.version, {})

    async def save(self, folder: Path) -> None:
        (folder / "version").write_text(str(self.version))

    async def load(self, folder: Path) -> None:
        self.version = int((folder / "version").read_text())

    async def export(self, folder: Path) -> None: ...
    def close(self) -> None: ...


class Renderer:
    def reply(self, ids):
        return ""


class CoinFlips(Environment):
    """Rewards by a hash of who asks, so that some groups carry a signal and some do not; sometimes it fails."""

    def __init__(self, rows: int = 40, failing: float = 0.0) -> None:
        self._rows = rows
        self._failing = failing
        self._played = 0

    def examples(self, split):
        return [{"row": i} for i in range(self._rows)] if split == "train" else []

    async def play(self, example, seats):
        rng = random.Random(example["row"] * 31 + len(seats["policy"].turns))
        await seats["policy"].complete([0, 1])
        self._played += 1
        dice = random.Random(f"{example['row']} {self._played % 97}")
        if dice.random() < self._failing:
            raise ValueError("the dice fell off the table")
        return Outcome.solo(float(dice.random() < rng.random()))


class Log(Monitor):
    def __init__(self) -> None:
        self.metrics: list[dict] = []
        self.records: list[dict] = []
        self.notes: list[str] = []
        self.scores: dict[int, TokenScores] = {}
        self.shipped: dict[int, list[Sample]] = {}
        """The samples of each step's batch, in the order in which its rollouts are reported."""

    def token_scores(self, step, scores):
        self.scores[step] = scores

    def finished_rollouts(self, step, state, rollouts):
        if state in ("trained", "replayed"):
            self.shipped.setdefault(step, []).extend(sample for rollout in rollouts for sample in rollout.samples)

    def step(self, step, metrics):
        self.metrics.append({"step": step, **metrics})

    def tickets(self, records):
        self.records.extend(records)

    def note(self, text):
        self.notes.append(text)


def conduct(
    tmp_path: Path,
    environment: Environment,
    seed: int = 0,
    also: dict | None = None,
    parts: dict | None = None,
    **settings,
):
    """One run; answers with the trainer, the log and the conductor."""
    config = RunConfig(
        **{
            "batch_size": 8,
            "group_size": 2,
            "eval": EvalConfig(every=0),
            "checkpoint": CheckpointConfig(every=0),
            "breaker": BreakerConfig(consecutive=1000, window=1000),
            "env": [CustomEnvConfig(name="coins", import_path="x:y")],
        }
        | settings
    )
    trainer, log = CountingTrainer(seed), Log()
    pool = Pool([ScriptedEngine(seed)])
    client = SamplingClient(pool, Renderer(), SamplingConfig(), frozenset({1}))
    courses = build_train_envs(config, {"coins": environment, **(also or {})})
    checkpoints = Checkpoints(tmp_path / "ckpt", 100)
    given = OrchestratorParts(pool, trainer, client, client, courses, log, checkpoints, Clock(), **(parts or {}))
    conductor = Orchestrator(config, given)
    asyncio.run(asyncio.wait_for(conductor.run(), 240))
    return trainer, log, conductor


def states(log: Log, state: str) -> list[int]:
    return [record["number"] for record in log.records if record["state"] == state]
