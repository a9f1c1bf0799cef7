"""Runs with a planted defect, told step by step: to the memory of a run that lives, or to a run directory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunConfig, dump
from paceline.config.env import RewardEnvConfig
from paceline.config.filters import AdviceConfig
from paceline.config.trainer import TrainerConfig
from paceline.data import Sample, Ticket
from paceline.observe.monitor import RunDirectory, RunOutcome, RunPlan, RunRecorder
from paceline.observe.record import RolloutRecorder
from paceline.observe.record.advice import AdviceMemory, AdviceWindow
from paceline.rollout import Rollout, Turn

STEPS, GROUPS, GROUP = 20, 10, 4
Rng = np.random.Generator
SAMPLE = Sample(
    token_ids=np.array([1, 2]),
    loss_mask=np.array([False, True]),
    logprobs=np.array([0.0, -0.5]),
    versions=np.array([-1, 0]),
    temperatures=np.ones(2),
    advantages=np.array([0.0, 1.0]),
)


@dataclass(slots=True)
class Try:
    """What one rollout came to."""

    reward: float
    tokens: int = 20
    finish: str = "stop"
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    dropped: bool = False
    prompt: str = ""
    """Which stands in the prompt beside the number of the row."""
    said: str = "so"


def healthy(rng: Rng, step: int, luck: float) -> Try:
    """Right more and more often; the right form pays a little."""
    right = float(rng.random() < luck + 0.02 * step)
    form = float(rng.random() < 0.9)
    judges = {f"judge/{name}": right + 0.1 * rng.standard_normal() for name in "ab"}
    metrics = {"correct": right, "format": form, **judges}
    return Try(0.9 * right + 0.1 * form, int(rng.poisson(20)) + 1, "length" if rng.random() < 0.02 else "stop", metrics)


def calm(rng: Rng, step: int) -> dict[str, float]:
    """Metrics of a step that no rollout tells of."""
    right = 0.4 + 0.02 * step
    return {
        "entropy": 0.5 * np.exp(-0.03 * step) + 0.02 * rng.standard_normal(),
        "mismatch_kl": abs(1e-3 * rng.standard_normal()),
        "busy/trainer": 0.6 + 0.1 * rng.standard_normal(),
        "busy/sampler": 0.8 + 0.05 * rng.standard_normal(),
        **{"time/sample": 0.5, "time/score": 0.02, "time/train": 0.4, "time/publish": 0.02, "time/step": 1.0},
        "drop_ratio": 0.1,
        "wait_time_ratio": 0.2,
        "staleness/mean": 1.0,
        "sampler_kl": 2e-3 + 2e-4 * rng.random(),
        "mismatch/staleness": 2e-3 + 2e-4 * rng.random(),
        "mismatch/template": 0.0,
        "clip_fraction": 0.01 * rng.random(),
        "grad_norm": 0.4 + 0.1 * rng.random(),
        **({"eval/words/reward": right - 0.05 + 0.03 * rng.standard_normal()} if step % 2 == 0 else {}),
    }


@dataclass
class Plot:
    """A run: what each environment's rollouts come to, and what else is measured."""

    plays: dict[str, Callable[[Rng, int, float], Try]] = field(default_factory=lambda: {"words": healthy})
    more: Callable[[Rng, int], dict[str, float]] = lambda rng, step: {}
    flat: float = 0.05
    """Share of groups whose members all do the same."""
    steps: int = STEPS
    seed: int = 0
    distinct: int = 50
    """Prompts among the 50 rows."""
    entropy_coef: float = 0.0
    notes: Sequence[str] = ()
    same_tokens: bool = False
    """Whether all prompts have the same tokens."""
    target: str = ""
    """The answer that all rows expect."""

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            name="told",
            batch_size=GROUP * GROUPS,
            group_size=GROUP,
            env=[RewardEnvConfig(name=name, import_path="m:f", dataset="rows.jsonl") for name in self.plays],
            advice=AdviceConfig(steps=STEPS),
            trainer=TrainerConfig(entropy_coef=self.entropy_coef),
        )

    def told(self) -> Iterator[tuple[int, dict[str, float], Sequence[Rollout]]]:
        rng = np.random.default_rng(self.seed)
        ticket = 0
        for step in range(1, self.steps + 1):
            played: list[Rollout] = []
            for name, play in self.plays.items():
                for _ in range(GROUPS):
                    ticket += 1
                    luck = rng.uniform(0.1, 0.6)
                    tries = [play(rng, step, luck) for _ in range(GROUP)]
                    if rng.random() < self.flat:
                        tries = [tries[0]] * GROUP
                    row = ticket % 50
                    prompt = f"row {row % self.distinct}"
                    played += [
                        _rollout(ticket, name, step, (member, row), prompt, one, self.target, self.same_tokens)
                        for member, one in enumerate(tries)
                    ]
            metrics = {
                "batch/rollouts": float(len(played)),
                "length": float(np.mean([rollout.completion_length for rollout in played])),
                "truncated_ratio": float(np.mean([rollout.truncated for rollout in played])),
                **calm(rng, step),
            }
            for name in self.plays:
                rewards = [rollout.reward for rollout in played if rollout.env == name and rollout.reward is not None]
                metrics |= {
                    f"reward/{name}/mean": np.mean(rewards).item(),
                    f"reward/{name}/std": np.std(rewards).item(),
                }
            yield step, metrics | self.more(rng, step), played

    def remembered(self) -> AdviceWindow:
        memory = AdviceMemory(self.config.model_dump())
        for step, metrics, played in self.told():
            memory.take(step, metrics, [("trained", played)])
        return replace(memory.window(), notes=self.notes)

    def written(self, runs: Path, name: str = "told") -> Path:
        """The same as a run directory, by the real recorder and keeper."""
        path = runs / name
        with RunDirectory.claim(path) as directory:
            directory.begin(dump(self.config))
            keepers = (RunRecorder(path), RolloutRecorder(path))
            for keeper in keepers:
                keeper.begin(RunPlan(name, path, self.steps, 0, {}, tuple(self.plays), "cpu", 1))
            for step, metrics, played in self.told():
                for keeper in keepers:
                    keeper.step(step, metrics)
                    keeper.finished_rollouts(step, "trained", played)
            for keeper in keepers:
                keeper.end(RunOutcome("finished", self.steps))
        return path


def _rollout(
    ticket: int, env: str, step: int, place: tuple[int, int], prompt: str, one: Try, target: str, same: bool
) -> Rollout:
    (member, row), ended = place, one.error is None
    turn: dict[str, Any] = {
        "prompt_ids": [1, *([] if same else map(ord, prompt))],
        "logprobs": [-0.5] * one.tokens,
        "versions": [step] * one.tokens,
    }
    messages = [{"role": "user", "content": f"{prompt} {one.prompt}"}]
    said = Turn(
        completion_ids=[1] * one.tokens, finish=one.finish, temperature=1.0, text=one.said, messages=messages, **turn
    )
    made: dict[str, Any] = (
        {"target": target, "reward": one.reward, "samples": [SAMPLE]}
        if ended
        else {"error": one.error, "dropped": one.dropped}
    )
    drawn = Ticket(ticket, env, 0, ticket, row)
    return Rollout(ticket=drawn, member=member, turns=[said], metrics=one.metrics, **made)


# -- defects ----------------------------------------------------------------------------------------------------------


def _but(**changes: Callable[[Rng, int, Try], Any]) -> Callable[[Rng, int, float], Try]:
    """Healthy rollouts, some of whose values are others'."""

    def play(rng: Rng, step: int, luck: float) -> Try:
        one = healthy(rng, 0, luck)
        for name, change in changes.items():
            setattr(one, name, change(rng, step, one))
        return one

    return play


def _falls(rng: Rng, step: int, luck: float) -> Try:
    """Right for two steps, and hardly ever after."""
    one = healthy(rng, 0, luck + 0.2)
    return one if step <= 2 or rng.random() < 0.1 else replace(one, reward=0.0)


DEFECTS: dict[str, Plot] = {
    "unreachable": Plot(
        notes=["waiting for `teacher` at http://t since 90 s: 0 of 8 samples are scored: no engine is left"]
    ),
    "failures": Plot(
        {"words": _but(error=lambda rng, step, one: "the grader is gone" if rng.random() < 0.4 else None)}
    ),
    "chat_template": Plot(more=lambda rng, step: {"mismatch/template": 0.5 + 0.01 * rng.random()}),
    "strict_grader": Plot(
        {
            "words": _but(
                said=lambda rng, step, one: "Yes." if one.metrics["correct"] else "no",
                reward=lambda rng, step, one: 0.0 if one.metrics["correct"] else one.metrics["format"],
            )
        },
        target="yes",
    ),
    "constant_reward": Plot({"words": _but(reward=lambda rng, step, one: 0.25)}),
    "entropy_high": Plot({"words": _but()}, lambda rng, step: {"entropy": 0.5 * 1.1**step}, entropy_coef=0.1),
    "learning_rate_high": Plot(
        {"words": _falls}, lambda rng, step: {"sampler_kl": 4.0 / step, "clip_fraction": 0.6 / step} if step > 2 else {}
    ),
    "stop_token": Plot({"words": _but(finish=lambda rng, step, one: "length")}),
    "leaked_answer": Plot(
        {"words": _but(prompt=lambda rng, step, one: "answer: 42.", said=lambda rng, step, one: "42")},
    ),
    "duplicate_rows": Plot(distinct=6),
    "stale_weights": Plot(
        more=lambda rng, step: {
            "staleness/mean": 6.0,
            "sampler_kl": 0.2,
            "mismatch/staleness": 0.2 + 0.01 * rng.random(),
        }
    ),
    "mismatch": Plot(more=lambda rng, step: {"mismatch_kl": 0.002 * step + 1e-3 * rng.random()}),
    "format": Plot({"words": _but(reward=lambda rng, step, one: one.metrics["format"])}),
    "judges": Plot(
        {"words": _but(metrics=lambda rng, step, one: one.metrics | {"judge/a": rng.random(), "judge/b": rng.random()})}
    ),
    "reward_hacking": Plot(
        more=lambda rng, step: {"metric/words/correct": 0.4 * 0.8**step, "reward/words/mean": 0.1 + 0.04 * step}
    ),
    "overfitting": Plot(
        more=lambda rng, step: (
            {"reward/words/mean": 0.1 + 0.04 * step + 0.01 * rng.random()}
            | ({} if step % 2 else {"eval/words/reward": 0.5 - 0.01 * step})
        )
    ),
    "entropy": Plot({"words": _but()}, more=lambda rng, step: {"entropy": 0.5 * np.exp(-0.4 * step)}),
    "truncation": Plot(
        {
            "words": _but(
                finish=lambda rng, step, one: "length" if rng.random() < 0.3 else "stop",
                reward=lambda rng, step, one: one.reward if one.finish == "stop" else 0.0,
            )
        }
    ),
    "length": Plot({"words": _but(tokens=lambda rng, step, one: int(rng.poisson(20 + 3 * step)))}),
    "flat_groups": Plot({"words": _but(reward=lambda rng, step, one: float(rng.random() < 0.01))}),
    "dropped_groups": Plot(more=lambda rng, step: {"drop_ratio": 0.9, "wait_time_ratio": 0.74 + 0.01 * rng.random()}),
    "learning_rate_low": Plot({"words": _but()}, more=lambda rng, step: {"sampler_kl": 1e-9 * rng.random()}),
    "starving": Plot({"words": healthy, "essays": _but(tokens=lambda rng, step, one: int(rng.poisson(400)))}),
    "slow_environment": Plot(more=lambda rng, step: {"busy/trainer": 0.1, "busy/sampler": 0.2 + 0.02 * rng.random()}),
    "idle": Plot(more=lambda rng, step: {"busy/trainer": 0.1 + 0.02 * rng.random()}),
}
WHOLE_RUN = (
    "unreachable", "chat_template", "entropy_high", "stale_weights", "mismatch", "entropy", "dropped_groups",
    "learning_rate_low", "slow_environment", "idle",
)  # fmt: skip
SPEAKS_OF = dict.fromkeys(WHOLE_RUN, "") | {"starving": "essays"}
"""The environment that an advisory names where it is not `words`."""
