"""Trainer or sampler with nothing to do, in a run in which they need not take turns."""

import numpy as np

from paceline.record.advice.advisory import Advisory, Knob
from paceline.record.advice.measures import Mean, average
from paceline.record.advice.sight import Sight

WARMING = 3
"""The first steps compile and load."""
LEAST = 8


def look(sight: Sight, env: str) -> Advisory | None:
    """The mean share of time in which each has nothing to do. At staleness 0 they take turns, and that was chosen."""
    if not sight.get("staleness", 1) or sight.get("deterministic"):
        return None
    since = max(WARMING + 1, sight.steps[0])
    trainer, sampler = (average(1 - sight.series(f"busy/{part}", since)[1]) for part in ("trainer", "sampler"))
    idle = [
        (part, found)
        for part, found in (("trainer", trainer), ("sampler", sampler))
        if found.count >= LEAST and found.low > sight.advice.idle
    ]
    if not idle:
        return None
    names = " and ".join(part for part, _ in idle)
    dropped = average(sight.series("drop_ratio")[1]).value
    filtered = f" {dropped:.0%} of the groups that were sampled never trained." if dropped > 0.5 else ""
    return Advisory(
        rule="idle",
        title=f"The {names} {'has' if len(idle) == 1 else 'have'} nothing to do most of the time",
        seen="Idle: " + ", ".join(f"the {part} {found.value:.0%}" for part, found in idle) + " of a step."
        f" {_longest_phase(sight)}{filtered}",
        sure="; ".join(f"{part} {found.value:.2f} ± {found.error:.2f}" for part, found in idle)
        + f" (means over {idle[0][1].count} steps, errors widened for autocorrelation), limit {sight.advice.idle:g}",
        caution="Where nothing can be made faster, an idle part is no fault: it is what the other one costs.",
        steps=sight.steps,
        knobs=_knobs(sight, dict(idle), dropped),
        rollouts=_in_vain(sight) if filtered else [],
        metrics=["busy/trainer", "busy/sampler", "time/step", "time/sample", "time/train"],
    )


def _longest_phase(sight: Sight) -> str:
    phases = ("sample", "score", "train", "publish")
    seconds = {phase: average(sight.series(f"time/{phase}")[1]).value for phase in phases}
    longest = max(seconds, key=lambda phase: seconds[phase])
    return f"Of a step's parts `time/{longest}` is the longest, {seconds[longest]:.2f} s."


def _in_vain(sight: Sight) -> list[int]:
    """The newest that were sampled and taught nothing."""
    return sight.numbers(np.flatnonzero(sight.rows["state"] == sight.number("state", "dropped:zero_advantage"))[::-1])


def _knobs(sight: Sight, idle: dict[str, Mean], dropped: float) -> list[Knob]:
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
