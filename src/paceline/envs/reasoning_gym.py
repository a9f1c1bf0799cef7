"""Tasks of the `reasoning-gym` package."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.env import ReasoningGymConfig as Config
from paceline.data import DatasetUri, Row
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split, import_extra, parse_reward, row_seeds
from paceline.envs.offloop import run_user_code
from paceline.rollout import Message, Seat

PROMPT = (
    "Think about the problem, then write your final answer between <answer> and </answer>. "
    "Follow the format the question asks for, and put nothing but the answer between the tags."
)
UNSCORABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
"""Errors that a task's rule raises over an answer it cannot read; any other fails the episode."""
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(Environment):
    """Questions of one task, or of several by weight. Reward is what the task's own `score_answer` says."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._gym = import_extra("reasoning_gym")
        unknown = config.weights.keys() - self._gym.factory.DATASETS.keys()
        if unknown:
            raise EnvError(f"reasoning-gym has no task {sorted(unknown)}: `reasoning_gym.factory.DATASETS` lists them")
        self._scorers = {task: self._dataset(task, size=1, seed=0) for task in config.weights}

    def examples(self, split: Split) -> Sequence[Row]:
        seeds = row_seeds(self._config, split)
        return [
            self._row(task, entry)
            for task, count in split_by_weight(self._config.weights, len(seeds)).items()
            for entry in (self._dataset(task, count, seeds.start) if count else ())
        ]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].chat(example["messages"])
        task, given = example["task"], self.read(reply.content)
        metrics = {"answered": float(given is not None), "unscorable": 0.0}
        try:
            score = self._scorers[task].score_answer
            advice = self._config.raise_hint("score_timeout")
            said = await run_user_code(
                score, given, example["entry"], timeout=self._config.score_timeout, advice=advice
            )
            reward = parse_reward(said, f"reasoning-gym task `{task}`")
        except UNSCORABLE:
            # Some rules trip over answers that are no answers. To drop those episodes would spare the policy its worst.
            reward, metrics["unscorable"] = 0.0, 1.0
        # Some rules pay a little for an answer somewhere in the text; solved is solved.
        return Outcome.solo(reward, **metrics, solved=float(reward >= 1), **{f"score/{task}": reward})

    def read(self, said: str) -> str | None:
        """The answer in a reply; None if there is none."""
        if self._config.answer == "text":
            return said.strip()
        found = _TAGS.findall(said)
        return found[-1].strip() if found else None

    def _row(self, task: str, entry: dict[str, Any]) -> Row:
        question: Message = {"role": "user", "content": entry["question"]}
        system = self._config.system_prompt
        if system is None and self._config.answer == "tags":
            system = PROMPT
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return {"messages": [*opening, question], "answer": entry["answer"], "task": task, "entry": entry}

    def _dataset(self, task: str, size: int, seed: int) -> Any:
        try:
            return self._gym.create_dataset(task, size=size, seed=seed, **self._config.args_of(task))
        except (TypeError, ValueError, AssertionError) as error:  # how its tasks refuse a setting
            raise EnvError(f"reasoning-gym task `{task}` refuses its args: {error}") from error


def reasoning_gym_rows(address: DatasetUri) -> list[Row]:
    """The rows of `reasoning-gym:chain_sum?size=100&seed=7`, for environments that judge answers themselves."""
    size, seed = address.integer("size", default=1000), address.integer("seed", default=0, least=0)
    assert size is not None
    assert seed is not None
    config = Config(task=address.name, size=size, seed=seed, answer="text")
    rows = ReasoningGym(config).examples("train")
    return [{"messages": row["messages"], "answer": row["answer"]} for row in rows]


def split_by_weight(weights: Mapping[str, float], size: int) -> dict[str, int]:
    """Split `size` by weight into whole numbers, by the largest remainders.

    >>> split_by_weight({"gcd": 1.0, "chain_sum": 2.0}, 10)
    {'gcd': 3, 'chain_sum': 7}
    """
    total = sum(weights.values())
    exact = {name: size * weight / total for name, weight in weights.items()}
    whole = {name: int(share) for name, share in exact.items()}
    first = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in first[: size - sum(whole.values())]:
        whole[name] += 1
    return whole
