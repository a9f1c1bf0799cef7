"""Who else takes part: an environment whose rows differ in difficulty, and a trainer that takes its time."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.data import Row, Sample
from paceline.envs import Environment, Outcome
from paceline.envs.base import Split
from paceline.model.weights import WeightUpdate
from paceline.rollout import Seat
from paceline.simulate.cost import Learner
from paceline.trainer import StepReport


class Task(Environment):
    """Rows that are solved with a probability of their own, from 0 to 1. So the real filter has something to do: of
    groups of eight, two in nine are all right or all wrong, and are dropped."""

    def __init__(self, prompt: int, rows: int = 4096, seed: int = 0) -> None:
        self._prompt, self._rows = prompt, rows
        self._dice = random.Random(seed)

    def examples(self, split: Split) -> Sequence[Row]:
        rows = self._rows if split == "train" else 0
        return [{"prompt": self._prompt, "solved": (row + 0.5) / rows} for row in range(rows)]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome:
        # One token whose id says how many it stands for, as in the replies.
        await seats["policy"].complete([example["prompt"]])
        return Outcome.solo(float(self._dice.random() < example["solved"]))


class Mute:
    """A renderer: token ids that are counts have no text."""

    def reply(self, token_ids: Sequence[int]) -> str:
        return ""


class SimulatedTrainer:
    """Takes as long for a batch as the tokens that its ids stand for would."""

    def __init__(self, learner: Learner, bundle: int) -> None:
        self.version = 0
        self.tokens = 0
        self._learner, self._bundle = learner, bundle

    async def feed(self, samples: Sequence[Sample]) -> None: ...

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        tokens = self._bundle * sum(int(sample.token_ids.sum()) for sample in batch)
        await asyncio.sleep(self._learner.step_seconds(tokens))
        self.version += 1
        self.tokens += tokens
        return StepReport({"simulated/tokens": float(tokens)})

    async def weights(self) -> WeightUpdate:
        return WeightUpdate(self.version, {})

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path, tokenizer: object = None) -> None: ...

    def close(self) -> None: ...
