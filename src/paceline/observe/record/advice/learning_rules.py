"""Advisories on the signal: flat groups, disagreeing judges, overfitting, engine and trainer that differ."""

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.advice.measures import SURE, Advisory, Knob, average, jackknife, share, trend
from paceline.observe.record.advice.window import AdviceWindow, Groups, MetricTable

METRIC = "mismatch_kl"
LEAST_MISMATCH = 8
GROWN = 5.0
"""Times the value of the run's first quarter."""


def check_mismatch(sight: AdviceWindow, env: str) -> Advisory | None:
    """Its mean over the window lies above the limit; or above a fifth of it, and it grows."""
    steps, values = sight.series(METRIC)
    line = trend(steps, values)
    if len(values) < LEAST_MISMATCH or line is None:
        return None
    now, whole = average(values), sight.all(METRIC)
    before = float(whole[: max(LEAST_MISMATCH // 2, len(whole) // 4)].mean())
    grows = line.t > SURE and line.last > GROWN * max(0.0, before) and line.last > sight.advice.mismatch / GROWN
    if not grows and now.low <= sight.advice.mismatch:
        return None
    return Advisory(
        title="Engine and trainer disagree" + (" more and more" if grows else ""),
        seen=f"`{METRIC}` is {now.value:.2g} nats a token, {line.first:.2g} at the beginning of these steps and "
        f"{line.last:.2g} at their end; early in the run it was {before:.2g}.",
        sure=(
            f"slope {line.slope:+.2g} ± {line.error:.1g} a step" if grows else f"mean {now.value:.2g} ± {now.error:.1g}"
        )
        + f" (least squares, errors widened for autocorrelation), limit {sight.advice.mismatch:g}; {len(values)} steps",
        caution="It compares tokens whose weights are the trainer's own, so staleness is no part of it.",
        knobs=_mismatch_knobs(sight),
        rollouts=_longest(sight),
        metrics=[METRIC, "mismatch/numerics", "mismatch/staleness", "mismatch/mask"],
    )


def _mismatch_knobs(sight: AdviceWindow) -> list[Knob]:
    knobs = []
    if not sight.get("model.fp32_head"):
        knobs.append(sight.knob("model.fp32_head", True, "both compute the last layer in float32"))
    if sight.get("engine.on_swap", "keep") == "keep" and sight.get("staleness", 1):
        knobs.append(sight.knob("engine.on_swap", "recompute", "no reply goes on from what older weights computed"))
    return knobs or [sight.knob("model.dtype", "float32", "the same sums in another order differ less")]


def _longest(sight: AdviceWindow) -> list[int]:
    """Of the last step: where rounding has had most time to add up."""
    last = np.flatnonzero(
        (sight.rows["step"] == sight.steps[1]) & (sight.rows["state"] == sight.number("state", "trained"))
    )
    return sight.numbers(last[np.argsort(-sight.rows["tokens"][last], kind="stable")])


EVALUATIONS = 12
"""The last ones that are looked at."""
LEAST_PARTING = 6


def check_parting(sight: AdviceWindow, env: str) -> Advisory | None:
    """A line through the gap (training less held-out) at each evaluation. It must open, training must rise and be
    ahead, and held-out must not rise: one at its ceiling, which training catches up with, is no parting."""
    steps, held_out = sight.series(f"eval/{env}/reward", since=1)
    at, rewards = sight.series(f"reward/{env}/mean", since=1)
    steps, held_out = steps[-EVALUATIONS:], held_out[-EVALUATIONS:]
    if len(steps) < LEAST_PARTING or not len(at):
        return None
    bounds = np.searchsorted(at, np.r_[steps[0] - (steps[1] - steps[0]), steps], side="right")
    if (np.diff(bounds) == 0).any():
        return None
    training = np.array([rewards[low:high].mean() for low, high in pairwise(bounds)])
    gap, up, other = (trend(steps, ys) for ys in (training - held_out, training, held_out))
    _, spreads = sight.series(f"reward/{env}/std", since=int(steps[0]))
    scale = float(spreads.mean()) if len(spreads) else 0.0
    if gap is None or up is None or other is None or scale <= 0:
        return None
    if (
        not (gap.rises and up.rises and not other.may_rise)
        or min(gap.last, gap.last - gap.first) / scale <= sight.advice.parting
    ):
        return None
    lr = float(sight.get("trainer.optimizer.lr", 1e-5))
    best = int(steps[int(np.argmax(held_out))])
    places = sight.evaluated(env)
    worst = places[np.argsort(sight.rows["reward"][places], kind="stable")]
    knobs = [sight.knob("trainer.optimizer.lr", lr / 2, f"and go back: held-out reward was best at step {best}")]
    if not sight.env(env).get("contamination"):
        knobs.append(sight.env_knob(env, "contamination", True, "rows too close to held-out ones are left out"))
    return Advisory(
        title=f"Training reward of `{env}` leaves held-out reward behind",
        seen=f"Since step {int(steps[0])} training went from {up.first:.3f} to {up.last:.3f}, held-out from "
        f"{other.first:.3f} to {other.last:.3f}. Held-out was best at step {best} ({held_out.max():.3f}).",
        sure=f"gap {gap.slope:+.3g} ± {gap.error:.2g} a step, held-out {other.slope:+.2g} ± {other.error:.2g} (least "
        f"squares, errors widened for autocorrelation); {len(steps)} evaluations",
        caution="The reward may also be one that can be had without the task, on rows that training has seen often.",
        steps=(int(steps[0]), int(steps[-1])),
        knobs=knobs,
        rollouts=sight.numbers(worst),
        metrics=[f"reward/{env}/mean", f"eval/{env}/reward"],
    )


JUDGE = re.compile(r"judge|grader|rater|verdict", re.I)
TRUTH = re.compile(r"(^|[/_])(exact|correct|correctness|accuracy|solved|passed)($|[/_])", re.I)
LEAST_JUDGES = 40
"""Rollouts below which nothing is said."""


def check_judges(sight: AdviceWindow, env: str) -> Advisory | None:
    """Krippendorff's alpha over interval data, of judges by their names; of a single one and a check of the truth."""
    table = sight.table(env)
    names = raters(table)
    if len(names) < 2 or sight.trained < 5:
        return None
    scores = np.column_stack([table.columns[name] for name in names])
    there = np.isfinite(scores).all(axis=1)
    scores, groups = scores[there], table.groups[there]
    if len(scores) < LEAST_JUDGES or np.ptp(scores) == 0:
        return None
    parts = np.zeros((int(groups.max()) + 1, 4))
    np.add.at(parts, groups, _sums(scores))
    agreed = jackknife(parts[parts[:, 3] > 0], lambda sums: alpha(sums, len(names)))
    if agreed.high >= sight.advice.judges:
        return None
    apart = np.ptp(scores, axis=1)
    return Advisory(
        title=f"Judges of `{env}` disagree",
        seen=f"{', '.join(f'`{name}`' for name in names)} differ by {apart.mean():.2f} on average over {len(scores)} "
        f"rollouts, on scores from {scores.min():g} to {scores.max():g}.",
        sure=f"Krippendorff's alpha {agreed.value:.2f} ± {agreed.error:.2f} (interval data, error by leaving "
        f"each group out), limit {sight.advice.judges:g}; 1 is agreement, 0 is chance",
        caution="Who is a judge is guessed from the names of metrics. Judges that are meant to look at different "
        "things need not agree.",
        knobs=[sight.knob("advice.pause", ["judges"], "draw nothing from it until its judges are mended")],
        rollouts=sight.numbers(table.places[there][np.argsort(-apart, kind="stable")]),
        metrics=[f"metric/{env}/{name}" for name in names],
    )


def raters(table: MetricTable) -> list[str]:
    """Metrics of judges; of a single one and what is known to be true."""
    judges = [name for name in table.columns if JUDGE.search(name)]
    truths = [name for name in table.columns if TRUTH.search(name) and name not in judges]
    return judges if len(judges) != 1 else judges + truths[:1]


def alpha(sums: NDArray, judges: int) -> float:
    """1 - observed / expected disagreement, from sums over all scores: their squares within a rollout, themselves,
    their squares, and how many rollouts."""
    within, total, squares, rollouts = (float(value) for value in sums)
    count = rollouts * judges
    observed = within / (rollouts * (judges - 1)) if rollouts else 0.0
    expected = (squares - total**2 / count) / (count - 1) if count > 1 else 0.0
    return 1.0 - observed / expected if expected > 0 else 1.0


def _sums(scores: NDArray) -> NDArray:
    inner = ((scores - scores.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    return np.column_stack([inner, scores.sum(axis=1), (scores**2).sum(axis=1), np.ones(len(scores))])


LEAST_FLAT_GROUPS = 24
"""Groups below which nothing is said."""
SAME = 1e-9


def check_flat_groups(sight: AdviceWindow, env: str) -> Advisory | None:
    """The share of flat groups among those that have something left to learn (Wilson's interval)."""
    groups = sight.groups(env)
    if not compares(sight, env) or len(groups.size) < LEAST_FLAT_GROUPS or sight.trained < 5:
        return None
    flat = groups.high - groups.low <= SAME
    always = _constant(sight, env, groups)
    mastered = flat & (groups.high >= _top(sight, env, groups) - SAME) & (always is None)
    left, dull = ~mastered, flat & ~mastered
    found = share(int(dull.sum()), int(left.sum()))
    if left.sum() < LEAST_FLAT_GROUPS or found.low <= sight.advice.flat_groups:
        return None
    done = f" {mastered.sum()} more do as well as any ever did; those are not counted." if mastered.any() else ""
    worst = float((dull & (groups.high <= groups.low.min() + SAME)).sum() / dull.sum())
    how = f"every reward was exactly {always:g}" if always is not None else f"{worst:.0%} of them all at the lowest"
    return Advisory(
        title=f"Most groups of `{env}` teach nothing",
        seen=f"In {dull.sum()} of {left.sum()} groups all members got the same reward, {how}.{done}",
        sure=f"{dull.sum() / left.sum():.0%} of groups, surely more than {found.low:.0%} (Wilson's interval of three "
        f"standard errors), limit {sight.advice.flat_groups:g}; {left.sum()} groups of {sight.trained} steps",
        caution=""
        if always is None
        else "A reward that never changes is more often a fault of the reward than a task "
        "too hard: read one of the rollouts first.",
        knobs=_flat_groups_knobs(sight, env),
        rollouts=sight.numbers(groups.first[dull][::-1]),
        metrics=[f"reward/{env}/std", f"reward/{env}/mean", "dropped/zero_advantage"],
    )


def compares(sight: AdviceWindow, env: str) -> bool:
    """Whether a group is compared with itself here, so that a flat one has no gradient."""
    algo = sight.env(env).get("algo") or sight.get("algo", {})
    relative = algo.get("type", "grpo") in ("grpo", "echo", "max_rl", "hierarchical")
    return relative and algo.get("baseline", "group") == "group"


def _constant(sight: AdviceWindow, env: str, groups: Groups) -> float | None:
    """The one reward this run ever saw, if there is only one."""
    spread = sight.all(f"reward/{env}/std")
    one = float(groups.low.min())
    return one if groups.high.max() - one <= SAME and (spread <= SAME).all() else None


def _top(sight: AdviceWindow, env: str, groups: Groups) -> float:
    """The best reward of a rollout now, or the best mean of an earlier step."""
    return max(float(groups.high.max()), float(np.max(sight.all(f"reward/{env}/mean"), initial=-np.inf)))


def _flat_groups_knobs(sight: AdviceWindow, env: str) -> list[Knob]:
    now, batch = int(sight.env(env).get("group_size") or sight.get("group_size", 8)), int(sight.get("batch_size", 128))
    knobs = []
    if 2 * now <= batch and batch % (2 * now) == 0:
        knobs.append(sight.env_knob(env, "group_size", 2 * now, "more tries of a row find the rare one that differs"))
    if not sight.env(env).get("curriculum"):
        knobs.append(sight.env_knob(env, "curriculum", True, "rows that are neither hopeless nor mastered come first"))
    return knobs
