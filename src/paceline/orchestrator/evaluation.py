"""Evaluation on held-out rows. It bypasses the gate and touches no training state."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from math import comb

from paceline.config import Eval
from paceline.data import Row, Ticket
from paceline.envs import POLICY
from paceline.orchestrator.breaker import RunStopped
from paceline.orchestrator.course import Course
from paceline.orchestrator.episodes import EpisodeLost, Player
from paceline.rollout import Rollout

PASS = 0.5
"""A reward of at least this counts as a pass."""


async def evaluate(
    courses: dict[str, Course],
    player: Player,
    config: Eval,
    progress: Callable[[str], None],
    played: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
) -> dict[str, float]:
    """Metrics `eval/<env>/...` of every environment that has held-out rows; `played` is told of all their rollouts.

    Each row keeps its own noise from one evaluation to the next, so two evaluations differ by the weights alone.
    """
    metrics: dict[str, float] = {}
    for course in courses.values():
        if course.eval_rows:
            metrics |= await _course(course, player, config, progress, played)
    return metrics


async def _course(
    course: Course,
    player: Player,
    config: Eval,
    progress: Callable[[str], None],
    told: Callable[[Sequence[Rollout]], None],
) -> dict[str, float]:
    rows = course.eval_rows[: config.examples]
    places = asyncio.Semaphore(config.concurrency)
    done = 0

    async def tries(index: int) -> list[Rollout]:
        """All episodes on one row, which is prepared once for all of them."""
        ticket = Ticket(index, course.name, 0, index, index)
        try:
            async with places:  # bounded: each episode before it has a timeout
                row = await player.prepare(course, rows[index])
        except EpisodeLost as lost:
            return [Rollout(ticket=ticket, member=k, actor=mine, error=str(lost)) for k in range(config.samples)]
        played = await asyncio.gather(*(one(row, ticket, member) for member in range(config.samples)))
        return [rollout for rollouts in played for rollout in rollouts]

    async def one(row: Row, ticket: Ticket, member: int) -> list[Rollout]:
        nonlocal done
        async with places:  # bounded: each episode before it has a timeout
            played = await player.episode(course, row, ticket, member, -1)
        done += 1
        progress(f"evaluating {course.name} {done}/{len(rows) * config.samples}")
        return played

    actors = list(course.environment.actors)
    mine = actors[0] if actors else POLICY
    by_actor: dict[str, list[Rollout]] = {}
    tried = await asyncio.gather(*map(tries, range(len(rows))))
    told([rollout for played in tried for rollout in played])
    for rollout in (rollout for played in tried for rollout in played):
        by_actor.setdefault(rollout.actor, []).append(rollout)
    if lost := _all_lost(by_actor):
        raise RunStopped(f"every evaluation episode failed; the first cause: {lost}")
    metrics: dict[str, float] = {}
    for actor, rollouts in by_actor.items():
        # Whoever an episode opens a seat for besides the environment's one actor is told apart by name.
        prefix = f"eval/{course.name}" if actors == [actor] else f"eval/{course.name}/{actor}"
        metrics |= {f"{prefix}/{key}": value for key, value in _summary(rollouts, config.samples).items()}
    return metrics


def _all_lost(by_actor: dict[str, list[Rollout]]) -> str | None:
    """The first cause, if no episode of any actor was finished."""
    rollouts = [rollout for played in by_actor.values() for rollout in played]
    return rollouts[0].error if all(rollout.reward is None for rollout in rollouts) else None


def _summary(rollouts: list[Rollout], samples: int) -> dict[str, float]:
    finished = [r for r in rollouts if r.reward is not None]
    if not finished:
        return {"failed": float(len(rollouts))}
    out = {"reward": _mean([r.reward or 0.0 for r in finished]), "failed": float(len(rollouts) - len(finished))}
    for name in sorted({name for r in finished for name in r.metrics}):
        out[name] = _mean([r.metrics[name] for r in finished if name in r.metrics])
    out["length"] = _mean([float(r.completion_length) for r in finished])
    out["truncated_ratio"] = _mean([float(r.truncated) for r in finished])
    if samples > 1:
        tries = Counter(rollout.ticket for rollout in rollouts)
        passes = Counter(rollout.ticket for rollout in rollouts if (rollout.reward or 0.0) >= PASS)
        for k in sorted({1, samples} | {2**i for i in range(1, samples.bit_length()) if 2**i < samples}):
            # An actor may sit in several seats of one episode, and then has more tries than there are samples.
            out[f"pass@{k}"] = _mean([pass_at(max(samples, n), passes[ticket], k) for ticket, n in tries.items()])
    return out


def pass_at(n: int, correct: int, k: int) -> float:
    """Chance that k of n tries hold a correct one, unbiased (arXiv 2107.03374).

    >>> pass_at(4, 1, 2)
    0.5
    """
    return 1.0 if n - correct < k else 1.0 - comb(n - correct, k) / comb(n, k)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
