"""Computes the metrics of one batch, under their public names."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from statistics import fmean, pstdev

from paceline.clients.pool import Pool
from paceline.data import Mixture, Sample
from paceline.errors import EngineError
from paceline.orchestrator.admission import Tally, reward_before_penalty
from paceline.orchestrator.episodes import TrainEnv
from paceline.orchestrator.gate import staleness
from paceline.orchestrator.replay import ReplayedGroup
from paceline.rollout import Group, Rollout
from paceline.rollout.assemble import count_rewritten_turns
from paceline.util.deadlines import Clock, named_wait, record_progress

COUNTED = ("steps", "tokens", "prompt_tokens", "cached_tokens", "preempted")
STATS_SECONDS = 1.0
PHASES = ("sample", "score", "train", "publish")
DOING = {
    "sample": ("sampling a batch", ("an episode", "the preparation")),
    "score": ("scoring the batch", ()),
    "train": ("training on the batch", ()),
    "publish": ("publishing the weights", ()),
    "eval": ("evaluating", ()),
}
"""How a phase is called among the waits, and the waits that must end before it can. In "score" the algorithms finish
the batch: baselines over all of it, a teacher's log probabilities."""


class Stopwatch:
    """Times the phases of a step, and how much of the training time the engine also decoded in."""

    def __init__(self, clock: Clock, engine_busy: Callable[[], float]) -> None:
        self._clock, self._engine_busy = clock, engine_busy
        self._seconds: dict[str, float] = defaultdict(float)
        self._busy_in: dict[str, float] = defaultdict(float)
        self._inner = (0.0, 0.0)
        """Seconds, and seconds of the engine, in phases within the one under way."""
        self._spans: list[tuple[str, float, float]] = []
        self.restart()

    def restart(self) -> None:
        self._start, self._busy_start = self._clock.now(), self._engine_busy()
        self._seconds.clear()
        self._busy_in.clear()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time spent in a phase within this one counts there alone. To the watchdog a phase is what the run waits for,
        and the beginning of one is progress."""
        what, on = DOING.get(name, (name, ()))
        record_progress()
        with named_wait(what, on):
            outer, self._inner = self._inner, (0.0, 0.0)
            start, busy = self._clock.now(), self._engine_busy()
            try:
                yield
            finally:
                end = self._clock.now()
                seconds, engine = end - start, self._busy_since(busy)
                self._spans.append((name, start, end))
                self._seconds[name] += seconds - self._inner[0]
                self._busy_in[name] += max(0.0, engine - self._inner[1])
                self._inner = (outer[0] + seconds, outer[1] + engine)

    def _busy_since(self, then: float) -> float:
        """A server that was started again counts from zero: what it did before is not known any more."""
        return max(0.0, self._engine_busy() - then)

    def seconds(self, phase: str) -> float:
        return self._seconds[phase]

    def take_spans(self) -> list[tuple[str, float, float]]:
        """The phases that ended since this was last asked, by the clock's time."""
        spans, self._spans = self._spans, []
        return spans

    def lap(self, sampled_tokens: int) -> dict[str, float]:
        """The metrics of the step so far, evaluation not yet included. `wait_time_ratio` is the trainer's waiting over
        its waiting and training; `overlap_ratio` the share of its training in which the engine decoded."""
        total = max(self._clock.now() - self._start, 1e-9)
        wait, train = self._seconds["sample"], self._seconds["train"]
        return {
            **{f"time/{name}": self._seconds[name] for name in PHASES},
            "time/step": total,
            "tokens/s": sampled_tokens / total,
            "wait_time_ratio": wait / max(wait + train, 1e-9),
            "overlap_ratio": min(1.0, self._busy_in["train"] / max(train, 1e-9)),
            "busy/trainer": train / total,
            "busy/sampler": min(1.0, self._busy_since(self._busy_start) / total),
        }


class EngineLoad:
    """What all engines did since the last step, by their own counters."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    async def lap(self, pool: Pool) -> dict[str, float]:
        """Nothing of a step at whose end an engine does not say, or had begun to count anew."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                stats = await pool.stats()
        except (EngineError, TimeoutError):
            return {}
        counts = Counter({name: sum(getattr(one, name) for one in stats) for name in COUNTED})
        before, self._counts = self._counts, counts
        steps, tokens, prompt, shared, preempted = (counts[name] - before[name] for name in COUNTED)
        if steps <= 0 or min(tokens, prompt, shared, preempted) < 0:
            return {}
        return {
            "engine/batch": tokens / steps,
            "engine/shared_prompts": shared / max(1, prompt),
            "engine/preempted": float(preempted),
            "engine/waiting": float(sum(one.waiting for one in stats)),
            "engine/cache_used": max(one.cache_used for one in stats),
        }


def batch_metrics(batch: Sequence[Group], samples: Sequence[Sample], tally: Tally, version: int) -> dict[str, float]:
    """Metrics of a batch as sampled, filtered and shipped. `reward/*` is before filters, `reward_trained/*` after; both
    are what the environment paid, whatever length then cost."""
    sampled = [rollout for group in tally.resolved for rollout in group.rollouts]
    trained = [rollout for group in batch for rollout in group.rollouts]
    ages = [staleness(sample, version) for sample in samples] or [0]
    metrics = {
        **_rewards("reward", sampled or trained, spread=True),
        **_rewards("reward_trained", trained, spread=False),
        **_lengths(sampled or trained),
        **_mismatch(trained),
        "staleness/min": float(min(ages)),
        "staleness/mean": fmean(ages),
        "staleness/max": float(max(ages)),
        "batch/rollouts": float(len(trained)),
        "batch/samples": float(len(samples)),
        "batch/tokens": float(sum(map(len, samples))),
        "dropped/failed_rollouts": float(tally.failed_rollouts),
        "dropped/stale_samples": float(tally.stale_samples),
    }
    if tally.stale_samples:  # to be seen beside `length`
        metrics["stale_length"] = tally.stale_tokens / tally.stale_samples
    reasons = dict.fromkeys(("zero_advantage", "group_too_small", "stale", *sorted(tally.dropped)))
    counts = {**{reason: tally.dropped[reason] for reason in reasons}, **tally.lost_samples}
    metrics |= {f"dropped/{reason}": float(count) for reason, count in counts.items()}
    fresh, dropped = sum(not isinstance(group, ReplayedGroup) for group in batch), tally.dropped.total()
    return metrics | {"drop_ratio": dropped / (dropped + fresh)}


def row_metrics(envs: Iterable[TrainEnv], groups: Sequence[Group]) -> dict[str, float]:
    """How each environment's rows are drawn: what its curriculum knows, and by part of a mixture the share of the
    groups that finished and their mean reward."""
    metrics: dict[str, float] = {}
    for env in envs:
        metrics |= {f"curriculum/{env.name}/{name}": value for name, value in env.cursor.metrics().items()}
        own = [group for group in groups if group.ticket.env == env.name]
        if not isinstance(env.rows, Mixture) or not own:
            continue
        parts: dict[int, list[Group]] = {}
        for group in own:
            parts.setdefault(env.rows.locate(group.ticket.row)[0], []).append(group)
        for part, label in enumerate(env.rows.labels):
            some = parts.get(part, [])
            metrics[f"mixture/{env.name}/{label}/share"] = len(some) / len(own)
            if rewards := [reward_before_penalty(rollout) for group in some for rollout in group.rollouts]:
                metrics[f"mixture/{env.name}/{label}/reward"] = fmean(rewards)
    return metrics


def _rewards(prefix: str, rollouts: Sequence[Rollout], spread: bool) -> dict[str, float]:
    out: dict[str, float] = {}
    for env in dict.fromkeys(rollout.env for rollout in rollouts):
        of_env = [rollout for rollout in rollouts if rollout.env == env]
        rewards = [reward_before_penalty(rollout) for rollout in of_env]
        out[f"{prefix}/{env}/mean"] = fmean(rewards)
        actors = dict.fromkeys(rollout.actor for rollout in of_env)
        for actor in actors if len(actors) > 1 else ():
            out[f"{prefix}/{env}/{actor}/mean"] = fmean(reward_before_penalty(r) for r in of_env if r.actor == actor)
        if spread:
            out[f"{prefix}/{env}/std"] = pstdev(rewards)
            for name in sorted({name for rollout in of_env for name in rollout.metrics}):
                out[f"metric/{env}/{name}"] = fmean(r.metrics[name] for r in of_env if name in r.metrics)
    return out


def _mismatch(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mismatch of sampler and trainer that is known before any number is compared, over all rollouts of the batch.

    `mask`: top-p and top-k sample from q = p / Z on the tokens they keep, the trainer computes p over all; the mean of
    -log Z is KL(q || p). `template`: the share of turns whose prompt rewrote recorded text (`count_rewritten_turns`).
    """
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    cut = sum(-sum(turn.log_z) for turn in turns if turn.log_z)
    tokens = sum(len(turn.completion_ids) for turn in turns) if cut else 1
    # Where all turns are in one sample, as mostly, each went on from the one before.
    apart = (r.turns for r in rollouts if len(r.samples) != 1 or len(r.samples[0].spans) != len(r.turns))
    changed = sum(count_rewritten_turns(some) for some in apart)
    return {"mismatch/mask": cut / max(1, tokens), "mismatch/template": changed / max(1, len(turns))}


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    log_z = [value for r in rollouts for t in r.turns for value in t.log_z or ()]
    out = {
        "length": fmean(r.completion_length for r in rollouts),
        "trajectory_length": fmean(r.trajectory_length for r in rollouts),
        "truncated_ratio": fmean(r.truncated for r in rollouts),
        "turns": fmean(len(r.turns) for r in rollouts),
    }
    return out | ({"sampling/log_z": fmean(log_z)} if log_z else {})
