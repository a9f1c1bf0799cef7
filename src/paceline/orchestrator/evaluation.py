"""Evaluation on held-out rows. It bypasses the gate and touches no training state."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import comb, sqrt
from statistics import fmean

from paceline.config import EvalConfig
from paceline.data import Row, Ticket
from paceline.data.rollout import copy_value
from paceline.envs import POLICY
from paceline.orchestrator.episodes import RolloutRunner, TrainEnv
from paceline.orchestrator.failures import EpisodeLost, stop_error
from paceline.rollout import Rollout

Z_95 = 1.96
PASS_REWARD = 0.5


async def evaluate(
    envs: dict[str, TrainEnv],
    runner: RolloutRunner,
    config: EvalConfig,
    progress: Callable[[str], None],
    played: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
) -> dict[str, float]:
    """Metrics `eval/<env>/...` of every environment that has held-out rows; `played` is told of all their rollouts.

    Each row keeps its own noise from one evaluation to the next, so two evaluations differ by the weights alone.
    """
    metrics: dict[str, float] = {}
    for env in envs.values():
        if not env.eval_rows:
            continue
        rollouts = await _play_rows(env, runner, config, progress)
        played(rollouts)
        if all(rollout.reward is None for rollout in rollouts):
            first = rollouts[0]
            raise stop_error(f"every evaluation episode failed; the first cause: {first.error}", first.cause)
        metrics |= {
            f"eval/{name}/{key}": value
            for name, own in group_by_actor(env, rollouts).items()
            for key, value in summarise(own, config.samples).items()
        }
    return metrics


async def _play_rows(
    env: TrainEnv, runner: RolloutRunner, config: EvalConfig, progress: Callable[[str], None]
) -> list[Rollout]:
    rows = env.eval_rows[: config.examples]
    semaphore = asyncio.Semaphore(config.concurrency)
    mine = next(iter(env.environment.actors), POLICY)
    done = 0

    async def tries(index: int) -> list[Rollout]:
        ticket, source = Ticket(index, env.name, 0, index, index), rows[index]
        try:
            async with semaphore:  # bounded: each episode before it has a timeout
                row = await runner.prepare(env, lambda: env.environment.prepare(copy_value(source)))
        except EpisodeLost as lost:
            lost_rollout = partial(Rollout, ticket=ticket, actor=mine, error=str(lost), cause=lost.__cause__)
            return [lost_rollout(member=member) for member in range(config.samples)]
        played = await asyncio.gather(*(one(row, ticket, member) for member in range(config.samples)))
        return list(chain.from_iterable(played))

    async def one(row: Row, ticket: Ticket, member: int) -> list[Rollout]:
        nonlocal done
        async with semaphore:  # bounded: each episode before it has a timeout
            played = await runner.run_episode(env, row, ticket, member, -1)
        done += 1
        progress(f"evaluating {env.name} {done}/{len(rows) * config.samples}")
        return played

    return list(chain.from_iterable(await asyncio.gather(*map(tries, range(len(rows))))))


def group_by_actor(env: TrainEnv, rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Rollouts of an environment under its name, or under `name/actor` for actors beside its only one."""
    actors, found = list(env.environment.actors), {}
    for rollout in rollouts:
        name = env.name if actors == [rollout.actor] else f"{env.name}/{rollout.actor}"
        found.setdefault(name, []).append(rollout)
    return found


def summarise(rollouts: Sequence[Rollout], samples: int) -> dict[str, float]:
    finished = [r for r in rollouts if r.reward is not None]
    if not finished:
        return {"failed": float(len(rollouts))}
    out = {"reward": fmean([r.reward or 0.0 for r in finished]), "failed": float(len(rollouts) - len(finished))}
    for name in sorted({name for r in finished for name in r.metrics}):
        out[name] = fmean([r.metrics[name] for r in finished if name in r.metrics])
    out["length"] = fmean([float(r.completion_length) for r in finished])
    out["truncated_ratio"] = fmean([float(r.truncated) for r in finished])
    return out | {name: fmean(values) for name, values in _pass_rates(rollouts, samples).items()}


def _pass_rates(rollouts: Sequence[Rollout], samples: int) -> dict[str, list[float]]:
    """pass@k of each row, where rows are tried more than once."""
    if samples == 1:
        return {}
    tries = Counter(rollout.ticket for rollout in rollouts)
    passes = Counter(rollout.ticket for rollout in rollouts if (rollout.reward or 0.0) >= PASS_REWARD)
    # An actor may sit in several seats of one episode, and then has more tries than there are samples.
    return {
        f"pass@{k}": [pass_at_k(max(samples, n), passes[ticket], k) for ticket, n in tries.items()]
        for k in sorted({1, samples} | {2**i for i in range(1, samples.bit_length()) if 2**i < samples})
    }


def confidence_intervals(rollouts: Sequence[Rollout], samples: int) -> dict[str, tuple[float, float]]:
    """95% intervals of an evaluation's means, over rows: tries of one row are no independent evidence."""
    values: dict[str, dict[Ticket, list[float]]] = {}
    for r in (r for r in rollouts if r.reward is not None):
        own = {"reward": r.reward or 0.0, "length": float(r.completion_length), "truncated_ratio": float(r.truncated)}
        for name, value in (r.metrics | own).items():
            values.setdefault(name, {}).setdefault(r.ticket, []).append(value)
    rows = {name: [fmean(tried) for tried in found.values()] for name, found in values.items()}
    return {name: _confidence_interval(found) for name, found in (rows | _pass_rates(rollouts, samples)).items()}


def _confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of a mean: Wilson's for shares, which stays honest where all rows agree; else the normal one."""
    n, mean = len(values), fmean(values)
    if all(value in (0.0, 1.0) for value in values):
        centre, spread = mean + Z_95**2 / (2 * n), Z_95 * sqrt(mean * (1 - mean) / n + (Z_95 / (2 * n)) ** 2)
        return max(0.0, (centre - spread) / (1 + Z_95**2 / n)), min(1.0, (centre + spread) / (1 + Z_95**2 / n))
    half = Z_95 * sqrt(sum((value - mean) ** 2 for value in values) / (n * max(1, n - 1)))
    return mean - half, mean + half


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n tries hold a correct one, unbiased (arXiv 2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 if n - correct < k else 1.0 - comb(n - correct, k) / comb(n, k)
