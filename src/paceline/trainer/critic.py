"""The critic: a value model that turns rewards into advantages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample
from paceline.data.packing import flatten_bins, restrict_bins
from paceline.trainer.backend import DUMMY_PACK, Batch, PolicyBackend, ValueTargets, score_samples, training
from paceline.trainer.terms import clip, maximum, square
from paceline.weights.update import Array

if TYPE_CHECKING:
    from paceline.trainer.backend import ValueModel


def action_rewards(sample: Sample) -> NDArray:
    """Each sampled token's reward: the rewards from it up to the next one, so that none on a tool's answer is lost.

    A sample cut off at its length earns what its rewards say and nothing beyond: running out of room is an outcome.
    """
    actions = sample.loss_mask.nonzero()[0]
    assert sample.rewards is not None
    return np.add.reduceat(sample.rewards.astype(np.float64), actions) if len(actions) else np.zeros(0)


def gae(rewards: NDArray, values: NDArray, gamma: float, lam: float) -> NDArray:
    """A_i = delta_i + gamma * lam * A_(i+1) with delta_i = r_i + gamma * V_(i+1) - V_i, and V = 0 after the end.

    What the policy did not choose, a prompt or a tool's answer, is part of the environment: it takes no time.

    >>> gae(np.array([0.0, 1.0]), np.array([0.5, 0.5]), gamma=1.0, lam=1.0).tolist()
    [0.5, 0.5]
    """
    advantages = np.zeros(len(rewards))
    following, later = 0.0, 0.0
    for i in range(len(rewards) - 1, -1, -1):
        later = rewards[i] + gamma * following - values[i] + gamma * lam * later
        advantages[i], following = later, float(values[i])
    return advantages


class Critic:
    """Values, advantages and the value model's own optimizer. The model is made when first needed."""

    def __init__(self, c: config.TrainerConfig, policy: PolicyBackend, total_steps: int | None) -> None:
        assert c.critic is not None
        self._trainer, self._config, self._policy = c, c.critic, policy
        self._total = total_steps * c.minibatches if total_steps else None
        self._model: ValueModel | None = None
        self.batches = 0

    @property
    def is_warming_up(self) -> bool:
        """The policy is held while the critic learns what it is worth."""
        return self.batches < self._config.freeze_steps

    def lacking_advantages(self, samples: Sequence[Sample]) -> list[int]:
        """Samples that bring rewards instead of advantages."""
        return [
            i
            for i, s in enumerate(samples)
            if s.advantages is None and s.rewards is not None and s.rl_token_weights.any()
        ]

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with advantages for this rank's samples that bring rewards instead, and with their targets; and
        metrics of all ranks, none where no sample brings rewards."""
        lacking = frozenset(self.lacking_advantages(batch.samples))
        if not lacking:
            return batch, {}
        bins = restrict_bins(batch.step_bins, lacking)[batch.rank]
        values = score_samples(self.make().values, batch.samples, bins)
        targets = {i: self._targets_of(batch.samples[i], values[i].astype(np.float64)) for i in flatten_bins(bins)}
        advantages = [one.returns - one.values for one in targets.values()]
        metrics = self._explained_variance(targets.values())
        if self._config.whiten:
            advantages = self._whiten([one.sample for one in targets.values()], advantages)
        samples = list(batch.samples)
        for i, stream in zip(targets, advantages, strict=True):
            samples[i] = samples[i].with_streams(advantages=stream)
        return replace(batch, samples=samples, value_targets=targets, valued=lacking), metrics

    def update(self, packs: Sequence[MicroBatch], targets: Mapping[int, ValueTargets]) -> dict[str, float]:
        """One step on all ranks' targets, unless the gradient is not finite. Every rank brings equally many packs."""
        optimizer = self.make().optimizer
        loss, norm = self._gradient(packs, targets)
        while not np.isfinite(norm) and optimizer.schedule.lower_scale(bool(np.isfinite(loss))):
            optimizer.zero()
            loss, norm = self._gradient(packs, targets)
        optimizer.step() if np.isfinite([loss, norm]).all() else optimizer.zero()
        return {"critic/loss": loss, "critic/grad_norm": norm}

    def _gradient(self, packs: Sequence[MicroBatch], targets: Mapping[int, ValueTargets]) -> tuple[float, float]:
        """All ranks' gradient, clipped: the loss, and the norm it had."""
        model = self.make()

        def loss_of(values: Array, old: Array, returns: Array, scales: Array) -> Array:
            return (value_loss(values, old, returns, self._config.value_clip) * scales).sum()

        with training(model):
            losses: list[Array] = [model.backward(one, *self._targets(one, targets), loss_of) for one in packs]
        return model.clip(losses)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Array]:
        return {} if self._model is None else dict(self._model.optimizer.tensors())

    def state(self) -> dict[str, float]:
        if self._model is None:
            return {"batches": self.batches}
        schedule = self._model.optimizer.schedule
        counters = {"batches": self.batches, "optimizer_steps": schedule.steps, "loss_scale": schedule.scale}
        return counters | self._model.state()

    def load(self, tensors: Mapping[str, Array], state: Mapping) -> None:
        self.batches = state.get("batches", 0)
        if not tensors:
            self._model = None  # saved before there was one: it is made anew when needed
        else:
            self.make().optimizer.load(tensors, state["optimizer_steps"], state.get("loss_scale"))
            self.make().restore(state)

    # -- inside -----------------------------------------------------------------------------------------------------

    def make(self) -> "ValueModel":
        """The value model, made with all the memory it takes when it is first asked for."""
        if self._model is None:
            c = self._trainer.optimizer
            rate = c.lr if self._config.lr is None else self._config.lr
            self._model = self._policy.value_model(c.model_copy(update={"lr": rate}), self._total)
        return self._model

    def _targets_of(self, sample: Sample, values: NDArray) -> ValueTargets:
        mask, returns = sample.loss_mask, np.zeros(len(sample))
        advantages = gae(action_rewards(sample), values[mask], self._config.gamma, self._config.lam)
        returns[mask] = advantages + values[mask]
        return ValueTargets(sample, values, returns)

    def _targets(self, micro_batch: MicroBatch, targets: Mapping[int, ValueTargets]) -> tuple[NDArray, list[NDArray]]:
        """Places of a micro-batch that train, and of each its value at the batch's start, its return and its scale."""
        positions = micro_batch.regulariser_scale.nonzero()[0]
        own = [] if micro_batch is DUMMY_PACK else [targets[i] for i in micro_batch.members]
        old, returns = _concatenate(x.values for x in own), _concatenate(x.returns for x in own)
        scales = micro_batch.regulariser_scale
        return positions, [stream[positions].astype(np.float32) for stream in (old, returns, scales)]

    def _explained_variance(self, targets: Collection[ValueTargets]) -> dict[str, float]:
        """How much of the returns' variance the values foresaw: 1 is all, 0 no better than a constant."""
        returns = _concatenate(x.returns[x.sample.loss_mask] for x in targets)
        values = _concatenate(x.values[x.sample.loss_mask] for x in targets)
        mean, spread = self._moments(returns)
        _, left = self._moments(returns - values)
        value, _ = self._moments(values)
        explained = {"critic/explained_variance": 1 - left / spread} if spread > 0 else {}
        return {"critic/return": mean, "critic/value": value} | explained

    def _whiten(self, samples: Sequence[Sample], advantages: Sequence[NDArray]) -> list[NDArray]:
        """Mean 0 and variance 1 over the rl tokens of all ranks: the step's size no longer hangs on the rewards'."""
        members = [s.rl_token_weights != 0 for s in samples]
        mean, variance = self._moments(_concatenate(a[m] for a, m in zip(advantages, members, strict=True)))
        return [
            np.where(s.loss_mask, (a - mean) / np.sqrt(variance + 1e-8), 0.0)
            for s, a in zip(samples, advantages, strict=True)
        ]

    def _moments(self, values: NDArray) -> tuple[float, float]:
        n, total = self._policy.sum(np.array([len(values), values.sum()])).tolist()
        mean = total / max(1.0, n)
        (squares,) = self._policy.sum(np.array([((values - mean) ** 2).sum()])).tolist()
        return mean, squares / max(1.0, n)


def value_loss(values: Array, old: Array, returns: Array, bound: float) -> Array:
    """max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2 per token, as in the implementation that came with arXiv
    1707.06347: like the policy's clip, a value that has moved far enough towards its return stops there."""
    wrong = square(values - returns)
    if bound:
        near = old + clip(values - old, -bound, bound)
        wrong = maximum(wrong, square(near - returns))
    return wrong / 2


def _concatenate(parts: Iterable[NDArray]) -> NDArray:
    return np.concatenate([*parts, np.zeros(0)])
