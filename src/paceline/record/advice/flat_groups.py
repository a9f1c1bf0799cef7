"""Groups whose members all get the same reward: they cost as much as others and teach nothing."""

import numpy as np

from paceline.record.advice.advisory import Advisory, Knob
from paceline.record.advice.measures import share
from paceline.record.advice.sight import Groups, Sight

LEAST = 24
"""Groups below which nothing is said."""
SAME = 1e-9


def look(sight: Sight, env: str) -> Advisory | None:
    """The share of flat groups among those that have something left to learn (Wilson's interval)."""
    groups = sight.groups(env)
    if not compares(sight, env) or len(groups.size) < LEAST or sight.trained < 5:
        return None
    flat = groups.high - groups.low <= SAME
    always = _constant(sight, env, groups)
    mastered = flat & (groups.high >= _top(sight, env, groups) - SAME) & (always is None)
    left, dull = ~mastered, flat & ~mastered
    found = share(int(dull.sum()), int(left.sum()))
    if left.sum() < LEAST or found.low <= sight.advice.flat_groups:
        return None
    done = f" {mastered.sum()} more do as well as any ever did; those are not counted." if mastered.any() else ""
    worst = float((dull & (groups.high <= groups.low.min() + SAME)).sum() / dull.sum())
    how = f"every reward was exactly {always:g}" if always is not None else f"{worst:.0%} of them all at the lowest"
    return Advisory(
        rule="flat_groups",
        env=env,
        title=f"Most groups of `{env}` teach nothing",
        seen=f"In {dull.sum()} of {left.sum()} groups all members got the same reward, {how}.{done}",
        sure=f"{dull.sum() / left.sum():.0%} of groups, surely more than {found.low:.0%} (Wilson's interval of three "
        f"standard errors), limit {sight.advice.flat_groups:g}; {left.sum()} groups of {sight.trained} steps",
        caution=""
        if always is None
        else "A reward that never changes is more often a fault of the reward than a task "
        "too hard: read one of the rollouts first.",
        steps=sight.steps,
        knobs=_knobs(sight, env),
        rollouts=sight.numbers(groups.first[dull][::-1]),
        metrics=[f"reward/{env}/std", f"reward/{env}/mean", "dropped/zero_advantage"],
    )


def compares(sight: Sight, env: str) -> bool:
    """Whether a group is compared with itself here, so that a flat one has no gradient."""
    algo = sight.env(env).get("algo") or sight.get("algo", {})
    relative = algo.get("type", "grpo") in ("grpo", "echo", "max_rl", "hierarchical")
    return relative and algo.get("baseline", "group") == "group"


def _constant(sight: Sight, env: str, groups: Groups) -> float | None:
    """The one reward this run ever saw, if there is only one."""
    spread = sight.all(f"reward/{env}/std")
    one = float(groups.low.min())
    return one if groups.high.max() - one <= SAME and (spread <= SAME).all() else None


def _top(sight: Sight, env: str, groups: Groups) -> float:
    """As well as anybody did, now or on average earlier."""
    return max(float(groups.high.max()), float(np.max(sight.all(f"reward/{env}/mean"), initial=-np.inf)))


def _knobs(sight: Sight, env: str) -> list[Knob]:
    now, batch = int(sight.env(env).get("group_size") or sight.get("group_size", 8)), int(sight.get("batch_size", 128))
    knobs = []
    if 2 * now <= batch and batch % (2 * now) == 0:
        knobs.append(sight.env_knob(env, "group_size", 2 * now, "more tries of a row find the rare one that differs"))
    if not sight.env(env).get("curriculum"):
        knobs.append(sight.env_knob(env, "curriculum", True, "rows that are neither hopeless nor mastered come first"))
    return knobs
