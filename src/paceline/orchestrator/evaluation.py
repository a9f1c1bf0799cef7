"""Evaluation on held-out rows. It bypasses the gate and touches no training state."""

import asyncio
from collections.abc import Callable
from math import comb

from paceline.config import Eval
from paceline.data import Ticket
from paceline.orchestrator.breaker import RunStopped
from paceline.orchestrator.course import Course
from paceline.orchestrator.episodes import Player
from paceline.rollout import Rollout

PASS = 0.5
"""A reward of at least this counts as a pass."""


async def evaluate(
    courses: dict[str, Course], player: Player, config: Eval, progress: Callable[[str], None]
) -> dict[str, float]:
    """Metrics `eval/<env>/...` of every environment that has held-out rows.

    Each row keeps its own noise from one evaluation to the next, so two evaluations differ by the weights alone.
    """
    metrics: dict[str, float] = {}
    for course in courses.values():
        if course.eval_rows:
            metrics |= await _course(course, player, config, progress)
    return metrics


async def _course(course: Course, player: Player, config: Eval, progress: Callable[[str], None]) -> dict[str, float]:
    rows = course.eval_rows[: config.examples]
    places = asyncio.Semaphore(config.concurrency)
    done = 0

    async def one(index: int, member: int) -> Rollout:
        nonlocal done
        async with places:
            rollout = await player.episode(course, rows[index], Ticket(index, course.name, 0, index, index), member, -1)
        done += 1
        progress(f"evaluating {course.name} {done}/{len(rows) * config.samples}")
        return rollout

    jobs = [one(i, k) for i in range(len(rows)) for k in range(config.samples)]
    rollouts = await asyncio.gather(*jobs)
    return {f"eval/{course.name}/{key}": value for key, value in _summary(rollouts, config.samples).items()}


def _summary(rollouts: list[Rollout], samples: int) -> dict[str, float]:
    finished = [r for r in rollouts if r.reward is not None]
    if not finished:
        raise RunStopped(f"every evaluation episode failed; the first cause: {rollouts[0].error}")
    out = {"reward": _mean([r.reward or 0.0 for r in finished]), "failed": float(len(rollouts) - len(finished))}
    for name in sorted({name for r in finished for name in r.metrics}):
        out[name] = _mean([r.metrics[name] for r in finished if name in r.metrics])
    out["length"] = _mean([float(r.completion_length) for r in finished])
    out["truncated_ratio"] = _mean([float(r.truncated) for r in finished])
    if samples > 1:
        groups = [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]
        passes = [sum(1 for r in group if (r.reward or 0.0) >= PASS) for group in groups]
        for k in sorted({1, samples} | {2**i for i in range(1, samples.bit_length()) if 2**i < samples}):
            out[f"pass@{k}"] = _mean([pass_at(samples, c, k) for c in passes])
    return out


def pass_at(n: int, correct: int, k: int) -> float:
    """Chance that k of n tries hold a correct one, unbiased (arXiv 2107.03374).

    >>> pass_at(4, 1, 2)
    0.5
    """
    return 1.0 if n - correct < k else 1.0 - comb(n - correct, k) / comb(n, k)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
