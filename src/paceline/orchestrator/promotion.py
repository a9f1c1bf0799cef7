"""Gates between a trained version and its promotion: held-out reward, and KL divergence from a reference.

    version -> held-out evaluation -> reward and KL within bounds -> checkpoint -> `promoted` points at it
                                   -> out of bounds               -> `promoted` stays where it is

The KL divergence needs no second model. A reference is its own held-out replies with the log probabilities that it gave
their tokens; the version under test gives the same tokens its own, in one forward pass of the engine that serves it.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from paceline.clients import Pool
from paceline.config.run import PromotionConfig
from paceline.data import Sample, WireError, decode, encode
from paceline.errors import RunStopped
from paceline.orchestrator.checkpoint import CheckpointError
from paceline.orchestrator.episodes import TrainEnv
from paceline.orchestrator.replay import ReplayedGroup
from paceline.rollout import Group, Rollout, threads
from paceline.trainer.terms import k3
from paceline.util.deadlines import gather_or_cancel

PROMOTION_FILE = "promotion.msgpack"
SECONDS = 120.0
"""How long the engine may take for the log probabilities of one reply."""


@dataclass(slots=True)
class PromotedVersion:
    """What a checkpoint keeps of the last version that passed."""

    step: int
    rewards: dict[str, float]
    """Held-out reward by environment, or by environment and actor."""


class PromotionGate:
    """Decides whether a version may be promoted, and remembers the last one that was. Without `[promotion]` in the run
    file no version is ever due, and it remembers nothing."""

    def __init__(
        self, config: PromotionConfig | None, pool: Pool, envs: Mapping[str, TrainEnv], concurrency: int
    ) -> None:
        self._config, self._pool = config, pool
        self._slots = asyncio.Semaphore(concurrency)
        self._names = [
            name for env in envs.values() for name in (env.name, *(f"{env.name}/{a}" for a in env.environment.actors))
        ]
        if config is not None and not any(len(env.eval_rows) for env in envs.values()):
            raise RunStopped(
                "[promotion] compares versions on held-out rows, and no environment has any: add eval_dataset (or "
                "eval_size) to an [[env]], or leave [promotion] out"
            )
        self.promoted: PromotedVersion | None = None
        self._checked_step = -1
        """Step of the last version that was compared."""
        self.draws: set[tuple[str, int]] = set()
        """Draws trained since the promoted version, where a roll-back is to skip them."""
        self._reference: list[Sample] = []
        self._replies: list[Sample] = []
        """Held-out replies of the version that was evaluated last."""

    @property
    def lacks_version(self) -> bool:
        """Nothing is promoted yet, and something is to be."""
        return self._config is not None and self.promoted is None

    def is_due(self, step: int, total_steps: int | None) -> bool:
        return self._config is not None and (step % self._config.every == 0 or step == total_steps)

    def is_unchecked(self, step: int) -> bool:
        return self._config is not None and self._checked_step < step

    def clear_replies(self) -> None:
        """An evaluation begins."""
        self._replies = []

    def add_replies(self, rollouts: Iterable[Rollout]) -> None:
        """Take held-out rollouts of the version that is being evaluated."""
        if self._config is not None:
            self._replies += [reply for rollout in rollouts for reply in _replies(rollout)]

    def add_trained(self, batch: Iterable[Group]) -> None:
        """Note the draws of a trained batch."""
        if self._config is not None and self._config.on_fail == "roll_back":
            fresh = [group.ticket for group in batch if not isinstance(group, ReplayedGroup)]
            self.draws |= {(ticket.env, ticket.draw) for ticket in fresh}

    async def compare(self, step: int, evaluation: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Metrics of the evaluated version against the promoted one, and a reason for each gate that it fails."""
        assert self._config is not None
        assert self.promoted is not None
        self._checked_step, c = step, self._config
        rewards, before = self._rewards(evaluation), self.promoted.rewards
        kl = kl_divergence(self._reference, await self._logprobs(self._reference))
        reasons = []
        if c.max_kl is not None and not kl <= c.max_kl:
            than = "the run's first weights" if c.reference == "start" else f"step {self.promoted.step}"
            reasons.append(f"its KL divergence from {than} is {kl:.3g} nats a token (promotion.max_kl = {c.max_kl:g})")
        for name, reward in before.items():
            if name in self._names and not rewards.get(name, nan) >= reward - c.max_drop:
                now = f"{rewards[name]:.3f}" if name in rewards else "unknown, since no episode of it has one"
                reasons.append(
                    f"the held-out reward of `{name}` is {now}, and {reward:.3f} at step {self.promoted.step} "
                    f"(promotion.max_drop = {c.max_drop:g})"
                )
        metrics = {
            "promotion/kl": kl,
            "promotion/reward": fmean(rewards.values()),
            "promotion/passed": float(not reasons),
        }
        return metrics, sorted(reasons)

    async def promote(self, step: int, evaluation: Mapping[str, float]) -> None:
        """The evaluated version is the promoted one from now on."""
        assert self._config is not None
        if self._config.reference == "promoted" or not self._reference:
            scored = zip(self._replies, await self._logprobs(self._replies), strict=True)
            self._reference = [reply.with_streams(kl_ref_logprobs=logprobs) for reply, logprobs in scored]
        self.promoted, self._checked_step = PromotedVersion(step, self._rewards(evaluation)), step
        self.draws.clear()

    def state(self) -> dict[str, Any]:
        if self.promoted is None:
            return {}
        return {"step": self.promoted.step, "rewards": self.promoted.rewards, "draws": sorted(self.draws)}

    def save(self, folder: Path) -> None:
        if self._config is not None:
            (folder / PROMOTION_FILE).write_bytes(encode(self._reference))

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Back to a checkpoint's state; one without any has no promoted version."""
        self.promoted, self._reference = None, []
        if self._config is None or not state:
            return
        try:
            self._reference = decode((folder / PROMOTION_FILE).read_bytes())
        except (OSError, WireError) as error:
            raise CheckpointError(
                f"{folder / PROMOTION_FILE} cannot be read ({error}): resume from an older checkpoint"
            ) from error
        self.promoted = PromotedVersion(state["step"], dict(state["rewards"]))
        self.draws = {(env, draw) for env, draw in state["draws"]}

    def _rewards(self, evaluation: Mapping[str, float]) -> dict[str, float]:
        return {name: evaluation[key] for name in self._names if (key := f"eval/{name}/reward") in evaluation}

    async def _logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log probabilities that the served version gives all tokens, at temperature 1."""

        async def score(sample: Sample) -> np.ndarray:
            async with self._slots:  # bounded: each score before it has a deadline
                (scores,) = await self._pool.score([sample.token_ids.tolist()], deadline=SECONDS)
            return np.array(scores, np.float32)

        return await gather_or_cancel([score(sample) for sample in samples])


def kl_divergence(reference: Sequence[Sample], logprobs: Sequence[np.ndarray]) -> float:
    """Mean of r - log r - 1 over the sampled tokens of replies, r the probability a version gives a token over that of
    the reference which sampled it: an unbiased estimate of KL(reference || version) that is never below 0 (Schulman's
    k3). 0 without any token."""
    terms = []
    for sample, scores in zip(reference, logprobs, strict=True):
        assert sample.kl_ref_logprobs is not None
        mask = sample.loss_mask
        terms.append(k3(sample.kl_ref_logprobs[mask].astype(np.float64), scores[mask].astype(np.float64)))
    values = np.concatenate([[], *terms])
    return float(values.mean()) if len(values) else 0.0


def _replies(rollout: Rollout) -> list[Sample]:
    """A rollout's tokens, those marked that the policy sampled: at whatever temperature, also 0."""
    found = []
    for thread in threads(rollout.turns) if rollout.error is None else ():
        mask = np.zeros(len(thread.tokens), np.bool_)
        for start, end in thread.spans:
            mask[max(1, start) : end] = True
        if mask.any():
            sample = Sample.as_sampled(thread.tokens)
            found.append(replace(sample, loss_mask=mask, versions=np.where(mask, 0, -1), env=rollout.env))
    return found
