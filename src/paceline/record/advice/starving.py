"""One environment takes what the weights give to others: by replies so long that the rest hardly count, or by filling
batches while the slow ones come too late."""

from dataclasses import dataclass

import numpy as np

from paceline.record.advice.advisory import Advisory, Knob
from paceline.record.advice.measures import Mean, average
from paceline.record.advice.sight import Sight

LEAST = 6
"""Steps in which somebody of each environment came to an end."""
LATE = ("dropped:stale", "dropped:oversampled")


@dataclass(frozen=True, slots=True)
class _Fed:
    """What an environment gets, relative to what its weight asks for."""

    env: str
    share: Mean
    late: float
    """Share of its rollouts that came too late."""
    length: float


def look(sight: Sight, env: str) -> Advisory | None:
    """The environment's share in the gradient, step by step, is what others lack. What a filter dropped is counted as
    if it had trained: to have no signal is another matter (`flat_groups`)."""
    if len(sight.envs) < 2 or sight.trained < LEAST:
        return None
    fed = _fed(sight)
    hungry = [one for one in fed if one.share.high < sight.advice.starving]
    fullest = max(fed, key=lambda one: one.share.value, default=None)
    if fullest is None or fullest.env != env or not hungry:
        return None
    worst = min(hungry, key=lambda one: one.share.value)
    slow = worst.late > 0.5
    why = f"{worst.late:.0%} of its rollouts came too late for a batch" if slow else "its replies are short"
    places = sight.places(env)
    return Advisory(
        rule="starving",
        env=env,
        title=f"`{env}` leaves little to {', '.join(f'`{one.env}`' for one in hungry)}",
        seen=f"`{worst.env}` has {worst.share.value:.0%} of the place in the gradient that its weight asks for: {why}. "
        f"Mean length: {', '.join(f'`{one.env}` {one.length:.0f}' for one in fed)} tokens.",
        sure=f"{worst.share.value:.3f} ± {worst.share.error:.3f} of its due (mean over steps), limit "
        f"{sight.advice.starving:g}; {worst.share.count} steps",
        steps=sight.steps,
        knobs=_knobs(sight, worst, slow),
        rollouts=sight.numbers(places[-512:][np.argsort(-sight.rows["tokens"][places[-512:]], kind="stable")]),
        metrics=[f"reward_trained/{one.env}/mean" for one in fed] + ["dropped/stale"],
    )


def _fed(sight: Sight) -> list[_Fed]:
    """Every environment, or none as long as one of them is not there."""
    late = [sight.number("state", state) for state in LATE]
    steps = np.arange(sight.steps[0], sight.steps[1] + 1)
    by_token = sight.get("trainer.normalise", "token") == "token"
    taken, lateness, lengths = [], [], []
    for env in sight.envs:
        rows = sight.rows[sight.places(env)]
        if not len(rows):
            return []
        in_time = ~np.isin(rows["state"], late)
        weights = np.where(in_time, rows["tokens"] if by_token else 1, 0).astype(float)
        taken.append(np.bincount(rows["step"] - steps[0], weights, len(steps)))
        lateness.append(float(1 - in_time.mean()))
        lengths.append(float(rows["tokens"].mean()))
    per_step = np.array(taken)
    per_step = per_step[:, per_step.sum(axis=0) > 0]
    if per_step.shape[1] < LEAST:
        return []
    due = np.array([float(sight.env(env).get("weight", 1.0)) for env in sight.envs])
    shares = per_step / per_step.sum(axis=0) / (due / due.sum())[:, None]
    return [
        _Fed(env, average(row), late, length)
        for env, row, late, length in zip(sight.envs, shares, lateness, lengths, strict=True)
    ]


def _knobs(sight: Sight, worst: _Fed, slow: bool) -> list[Knob]:
    if slow:
        staleness = int(sight.get("staleness", 1))
        return [sight.knob("staleness", staleness + 1, f"`{worst.env}` has one more batch to come in time for")]
    return [
        sight.knob("trainer.normalise", "sample", "every sample counts alike, however long it is"),
        sight.env_knob(
            worst.env, "weight", round(float(sight.env(worst.env).get("weight", 1.0)) * 2, 3), "or draw it more often"
        ),
    ]
