"""Advisories on time and shares: starving environments, idle trainer or sampler."""

from dataclasses import dataclass

import numpy as np

from paceline.observe.record.advice.measures import Advisory, Knob, Mean, average
from paceline.observe.record.advice.window import AdviceWindow

WARMING = 3
"""The first steps compile and load."""
LEAST_IDLE = 8


def check_idle(sight: AdviceWindow, env: str) -> Advisory | None:
    """The mean share of time in which each has nothing to do. At staleness 0 they take turns, and that was chosen."""
    if not sight.get("staleness", 1) or sight.get("deterministic"):
        return None
    since = max(WARMING + 1, sight.steps[0])
    trainer, sampler = (average(1 - sight.series(f"busy/{part}", since)[1]) for part in ("trainer", "sampler"))
    idle = [
        (part, found)
        for part, found in (("trainer", trainer), ("sampler", sampler))
        if found.count >= LEAST_IDLE and found.low > sight.advice.idle
    ]
    if not idle:
        return None
    names = " and ".join(part for part, _ in idle)
    dropped = average(sight.series("drop_ratio")[1]).value
    filtered = f" {dropped:.0%} of the groups that were sampled never trained." if dropped > 0.5 else ""
    return Advisory(
        title=f"The {names} {'has' if len(idle) == 1 else 'have'} nothing to do most of the time",
        seen="Idle: " + ", ".join(f"the {part} {found.value:.0%}" for part, found in idle) + " of a step."
        f" {_longest_phase(sight)}{filtered}",
        sure="; ".join(f"{part} {found.value:.2f} ± {found.error:.2f}" for part, found in idle)
        + f" (means over {idle[0][1].count} steps, errors widened for autocorrelation), limit {sight.advice.idle:g}",
        caution="Where nothing can be made faster, an idle part is no fault: it is what the other one costs.",
        knobs=_idle_knobs(sight, dict(idle), dropped),
        rollouts=_in_vain(sight) if filtered else [],
        metrics=["busy/trainer", "busy/sampler", "time/step", "time/sample", "time/train"],
    )


def _longest_phase(sight: AdviceWindow) -> str:
    phases = ("sample", "score", "train", "publish")
    seconds = {phase: average(sight.series(f"time/{phase}")[1]).value for phase in phases}
    longest = max(seconds, key=lambda phase: seconds[phase])
    return f"Of a step's parts `time/{longest}` is the longest, {seconds[longest]:.2f} s."


def _in_vain(sight: AdviceWindow) -> list[int]:
    """The newest that were sampled and taught nothing."""
    return sight.numbers(np.flatnonzero(sight.rows["state"] == sight.number("state", "dropped:zero_advantage"))[::-1])


def _idle_knobs(sight: AdviceWindow, idle: dict[str, Mean], dropped: float) -> list[Knob]:
    if "sampler" in idle and "trainer" in idle:
        running = int(sight.get("max_inflight") or 2 * int(sight.get("batch_size", 128)))
        return [sight.knob("max_inflight", 2 * running, "environments are waited for: play more episodes at once")]
    if "sampler" in idle:
        return [sight.knob("staleness", int(sight.get("staleness", 1)) + 1, "it may ride further ahead")]
    knobs = []
    if dropped > 0.5 and (env := next((name for name in sight.envs if not sight.env(name).get("curriculum")), None)):
        knobs.append(sight.env_knob(env, "curriculum", True, "fewer groups are sampled in vain"))
    if sight.get("placement") == "ray":
        engines = int(sight.get("cluster.engines", 1))
        knobs.append(sight.knob("cluster.engines", engines + 1, "more of what it waits for"))
    else:
        running = int(sight.get("engine.max_running", 128))
        knobs.append(sight.knob("engine.max_running", 2 * running, "decode more at once"))
    return knobs


LEAST_STARVING = 6
"""Steps needed in which rollouts finished."""
LATE = ("dropped:stale", "dropped:oversampled")


@dataclass(frozen=True, slots=True)
class _Fed:
    """An environment's share, relative to what its weight asks for."""

    env: str
    share: Mean
    late: float
    """Share of its rollouts that came too late."""
    length: float


def check_starving(sight: AdviceWindow, env: str) -> Advisory | None:
    """The environment's share in the gradient, step by step, is what others lack. What a filter dropped is counted as
    if it had trained: to have no signal is another matter (`flat_groups`)."""
    if len(sight.envs) < 2 or sight.trained < LEAST_STARVING:
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
        title=f"`{env}` leaves little to {', '.join(f'`{one.env}`' for one in hungry)}",
        seen=f"`{worst.env}` has {worst.share.value:.0%} of the place in the gradient that its weight asks for: {why}. "
        f"Mean length: {', '.join(f'`{one.env}` {one.length:.0f}' for one in fed)} tokens.",
        sure=f"{worst.share.value:.3f} ± {worst.share.error:.3f} of its due (mean over steps), limit "
        f"{sight.advice.starving:g}; {worst.share.count} steps",
        knobs=_starving_knobs(sight, worst, slow),
        rollouts=sight.numbers(places[-512:][np.argsort(-sight.rows["tokens"][places[-512:]], kind="stable")]),
        metrics=[f"reward_trained/{one.env}/mean" for one in fed] + ["dropped/stale"],
    )


def _fed(sight: AdviceWindow) -> list[_Fed]:
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
    if per_step.shape[1] < LEAST_STARVING:
        return []
    due = np.array([float(sight.env(env).get("weight", 1.0)) for env in sight.envs])
    shares = per_step / per_step.sum(axis=0) / (due / due.sum())[:, None]
    return [
        _Fed(env, average(row), late, length)
        for env, row, late, length in zip(sight.envs, shares, lateness, lengths, strict=True)
    ]


def _starving_knobs(sight: AdviceWindow, worst: _Fed, slow: bool) -> list[Knob]:
    if slow:
        staleness = int(sight.get("staleness", 1))
        return [sight.knob("staleness", staleness + 1, f"`{worst.env}` has one more batch to come in time for")]
    return [
        sight.knob("trainer.normalise", "sample", "every sample counts alike, however long it is"),
        sight.env_knob(
            worst.env, "weight", round(float(sight.env(worst.env).get("weight", 1.0)) * 2, 3), "or draw it more often"
        ),
    ]
