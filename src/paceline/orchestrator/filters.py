"""Applies the user's filters to finished groups, before and after credit is assigned.

length penalty -> credit -> truncated rollouts masked -> (no signal: dropped) -> the user's own filter
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.config import RunConfig
from paceline.config.filters import LengthConfig
from paceline.data import Sample
from paceline.errors import PacelineError
from paceline.rollout import Group, Rollout
from paceline.util.importing import import_object
from paceline.util.user_code import user_code

FINE = "length/penalty"
"""The metric of a rollout that says what its length cost it: `reward` is what is left."""
USERS = "group_filter"
"""Why a group was dropped that the user's filter does not keep."""


class FilterError(PacelineError):
    """A user's filter that cannot be used, as a sentence for the user."""


class Filters:
    """The length rules and the user's own filter. They do not depend on the algorithm."""

    def __init__(self, config: RunConfig) -> None:
        self._hook = config.filters.group
        self._length, self._max_tokens = config.length, config.sampling.max_tokens
        self._users: Callable[..., Any] | None = import_object(self._hook.import_path) if self._hook else None
        if self._hook and not callable(self._users):
            raise FilterError(f"filters.group: {self._hook.import_path} is no function: name one `fn(group, **kwargs)`")

    def before_credit(self, group: Group) -> None:
        """Take what length costs off the rewards."""
        if self._length.buffer:
            for rollout in group.rollouts:
                fine(rollout, self._length, self._max_tokens)

    def after_credit(self, group: Group) -> None:
        """Silence what must not train."""
        if self._length.mask_truncated:
            for rollout in group.rollouts:
                silence_if_cut(rollout)

    def keeps(self, group: Group) -> bool:
        """The user's own judgement."""
        if self._users is None or self._hook is None:
            return True
        where = f"filters.group: {self._hook.import_path}, env `{group.ticket.env}`, ticket {group.ticket.number}"
        with user_code(where):
            kept = self._users(group, **self._hook.kwargs)
        if not isinstance(kept, bool | np.bool_):
            raise FilterError(f"{where}: gave {kept!r}: answer True to keep the group, False to drop it")
        return bool(kept)


def fine(rollout: Rollout, rule: LengthConfig, max_tokens: int) -> None:
    """The soft over-long penalty of DAPO (arXiv 2503.14476): with n the rollout's longest reply,

        0 for n <= max_tokens - buffer, then penalty * (n - (max_tokens - buffer)) / buffer, up to the whole penalty.

    A limit alone fines the token that crosses it and says nothing of those before; the slope says it early.
    """
    longest = max((len(turn.completion_ids) for turn in rollout.turns), default=0)
    share = min(1.0, max(0.0, (longest - (max_tokens - rule.buffer)) / rule.buffer))
    rollout.metrics = rollout.metrics | {FINE: rule.penalty * share}
    rollout.reward = (rollout.reward or 0.0) - rule.penalty * share


def unfined(rollout: Rollout) -> float:
    """The environment's reward, before the length penalty."""
    return (rollout.reward or 0.0) + rollout.metrics.get(FINE, 0.0)


def silence_if_cut(rollout: Rollout) -> None:
    """A reply that was cut off may have been right so far: its reward blames tokens that did nothing wrong. So nothing
    it said trains; what it was told may."""
    if any(sample.ended == "truncated" for sample in rollout.samples):
        rollout.samples = [_silent(sample) for sample in rollout.samples]


def _silent(sample: Sample) -> Sample:
    told = None if sample.ce_weights is None else np.where(sample.loss_mask, np.float32(0), sample.ce_weights)
    nothing = np.zeros(len(sample), np.float32)
    return sample.with_streams(
        rl_weights=nothing, ref_kl_weights=None, ce_weights=told if told is not None and told.any() else None
    )
