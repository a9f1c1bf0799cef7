"""Advisories on the signal (flat groups, judges, overfitting, mismatch) and on time (starving and idle parts)."""

import re
from itertools import pairwise
from math import hypot, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.advice.measures import (
    SURE,
    Advisory,
    Finding,
    Knob,
    Mean,
    jackknife,
    series_mean,
    trend,
    unmeasured,
    wilson_share,
)
from paceline.observe.record.advice.window import AdviceWindow
from paceline.observe.record.layout import EVALUATION

METRIC = "mismatch_kl"
LEAST_MISMATCH = 8
GROWN = 5.0
"""Times the value of the run's first quarter."""


def check_mismatch(window: AdviceWindow, env: str) -> Finding:
    """Its mean over the window lies above the limit; or above a fifth of it, and it grows."""
    steps, values = window.series(METRIC)
    line = trend(steps, values)
    if len(values) < LEAST_MISMATCH or line is None:
        return unmeasured(f"fewer than {LEAST_MISMATCH} steps that measured it")
    now, whole = series_mean(values), window.full_series(METRIC)
    before = float(whole[: max(LEAST_MISMATCH // 2, len(whole) // 4)].mean())
    limit = window.advice.mismatch
    grows = line.t > SURE and line.last > GROWN * max(0.0, before) and line.last > limit / GROWN
    if not grows and now.low <= limit:
        return Finding(now.value)
    mean = f"mean {now.value:.2g} ± {now.error:.1g}"
    figure = f"slope {line.slope:+.2g} ± {line.error:.1g} a step" if grows else mean
    rows = window.rows  # the longest replies of the last step: where rounding has had most time to add up
    last = np.flatnonzero((rows["step"] == window.steps[1]) & (rows["state"] == window.number("state", "trained")))
    knobs = []
    if not window.get("model.fp32_head"):
        knobs.append(window.knob("model.fp32_head", True, "both compute the last layer in float32"))
    if window.get("engine.on_swap", "keep") == "keep" and window.get("staleness", 1):
        knobs.append(window.knob("engine.on_swap", "recompute", "no reply goes on from what older weights computed"))
    knobs = knobs or [window.knob("model.dtype", "float32", "the same sums in another order differ less")]
    advisory = Advisory(
        title="Engine and trainer disagree" + (" more and more" if grows else ""),
        seen=f"`{METRIC}` is {now.value:.2g} nats a token, {line.first:.2g} at the beginning of these steps and "
        f"{line.last:.2g} at their end; early in the run it was {before:.2g}.",
        basis=f"{figure} (least squares, errors widened for autocorrelation), limit {limit:g}; {len(values)} steps",
        caution="It compares tokens whose weights are the trainer's own, so staleness is no part of it.",
        knobs=knobs,
        rollouts=window.numbers(last, by=-rows["tokens"][last]),
        metrics=[METRIC, "mismatch/numerics", "mismatch/staleness", "mismatch/mask"],
    )
    return Finding(now.value, advisory)


EVALUATIONS = 24
"""The last ones that are looked at."""
LEAST_OVERFITTING = 6


def check_overfitting(window: AdviceWindow, env: str) -> Finding:
    """How far the gap (training less held-out) has opened from the earlier half of the evaluations to the later one.
    Training must be ahead and held-out must not rise: one at its ceiling, which training catches up with, is none."""
    steps, held_out = window.series(f"eval/{env}/reward", since=1)
    at, rewards = window.series(f"reward/{env}/mean", since=1)
    steps, held_out = steps[-EVALUATIONS:], held_out[-EVALUATIONS:]
    if len(steps) < LEAST_OVERFITTING or not len(at):
        return unmeasured(f"fewer than {LEAST_OVERFITTING} evaluations")
    bounds = np.searchsorted(at, np.r_[steps[0] - (steps[1] - steps[0]), steps], side="right")
    training = np.array([rewards[low:high].mean() for low, high in pairwise(bounds) if high > low])
    _, spreads = window.series(f"reward/{env}/std", since=int(steps[0]))
    scale = float(spreads.mean()) if len(spreads) else 0.0
    if len(training) < len(steps) - 1 or scale <= 0:
        return unmeasured("no training between two evaluations" if scale else "no spread of the reward")
    trained, evaluated = _halves(training), _halves(held_out)
    rows, places = window.rows, window.finished_rows(env, EVALUATION)
    places = places[rows["step"][places] == rows["step"][places].max(initial=-1)]  # the last evaluation alone
    groups = len(at) / 2 * max(1.0, int(window.get("batch_size", 128)) / int(window.get("group_size", 8)))
    error = scale / sqrt(len(places) or int(window.env(env).get("eval_examples") or 100))
    both = hypot(error, scale * sqrt(2 / groups))
    opened = min(trained[1] - evaluated[1], trained[1] - trained[0] - evaluated[1] + evaluated[0])
    limit = window.advice.overfitting
    if opened - SURE * both <= limit * scale or evaluated[1] > evaluated[0] + error:
        return Finding(opened / scale)
    lr = float(window.get("trainer.optimizer.lr", 1e-5))
    best = int(steps[int(np.argmax(held_out))])
    knobs = [window.knob("trainer.optimizer.lr", lr / 2, f"and go back: held-out reward was best at step {best}")]
    if not window.env(env).get("contamination"):
        knobs.append(window.env_knob(env, "contamination", True, "rows too close to held-out ones are left out"))
    drawn = len(np.unique(rows["row"][window.finished_rows(env, untrained=True)]))
    advisory = Advisory(
        title=f"`{env}` is learnt by heart: held-out reward does not follow",
        seen=f"From the earlier to the later half of {len(steps)} evaluations training went from {trained[0]:.3f} to "
        f"{trained[1]:.3f}, held-out from {evaluated[0]:.3f} to {evaluated[1]:.3f}. Held-out was best at step {best} "
        f"({held_out.max():.3f}). The last {window.trained} steps drew {drawn} different rows.",
        basis=f"the gap opened by {opened / scale:.2f} ± {both / scale:.2f} standard deviations of the reward, limit "
        f"{limit:g}; {len(steps)} evaluations",
        fix="Train on more rows, and see that what a row expects follows from its prompt. Or stop at the best step, "
        f"and export it if its checkpoint is kept (`paceline export RUN@{best}`).",
        caution="The reward may also be one that can be had without the task, on rows that training has seen often.",
        steps=(int(steps[0]), int(steps[-1])),
        knobs=knobs,
        rollouts=window.numbers(places, by=rows["reward"][places]),
        metrics=[f"reward/{env}/mean", f"eval/{env}/reward"],
    )
    return Finding(opened / scale, advisory)


def _halves(values: NDArray[Any]) -> tuple[float, float]:
    half = len(values) // 2
    return float(values[:half].mean()), float(values[-half:].mean())


JUDGE = re.compile(r"judge|grader|rater|verdict", re.I)
TRUTH = re.compile(r"(^|[/_])(exact|correct|correctness|accuracy|solved|passed)($|[/_])", re.I)
LEAST_JUDGES = 40
"""Rollouts below which nothing is said."""


def check_judges(window: AdviceWindow, env: str) -> Finding:
    """Krippendorff's alpha over interval data, of judges by their names; of a single one and a check of the truth."""
    table = window.table(env)
    names = [name for name in table.columns if JUDGE.search(name)]
    if len(names) == 1:
        names += [name for name in table.columns if TRUTH.search(name) and name not in names][:1]
    if len(names) < 2 or window.trained < 5:
        return unmeasured("no two judges")
    scores = np.column_stack([table.columns[name] for name in names])
    there = np.isfinite(scores).all(axis=1)
    scores, groups = scores[there], table.groups[there]
    if len(scores) < LEAST_JUDGES or np.ptp(scores) == 0:
        return unmeasured(f"fewer than {LEAST_JUDGES} rollouts that all judges graded")
    within = ((scores - scores.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    sums = np.column_stack([within, scores.sum(axis=1), (scores**2).sum(axis=1), np.ones(len(scores))])
    parts = np.zeros((int(groups.max()) + 1, 4))
    np.add.at(parts, groups, sums)
    agreed = jackknife(parts[parts[:, 3] > 0], lambda sums: alpha(sums, len(names)))
    if agreed.high >= window.advice.judges:
        return Finding(agreed.value)
    apart = np.ptp(scores, axis=1)
    advisory = Advisory(
        title=f"Judges of `{env}` disagree",
        seen=f"{', '.join(f'`{name}`' for name in names)} differ by {apart.mean():.2f} on average over {len(scores)} "
        f"rollouts, on scores from {scores.min():g} to {scores.max():g}.",
        basis=f"Krippendorff's alpha {agreed.value:.2f} ± {agreed.error:.2f} (interval data, error by leaving "
        f"each group out), limit {window.advice.judges:g}; 1 is agreement, 0 is chance",
        caution="Who is a judge is guessed from the names of metrics. Judges that are meant to look at different "
        "things need not agree.",
        fix="Let them grade the rollouts below by hand: mend the rubric of the one that is wrong, or leave it out.",
        knobs=window.pause_knobs("judges", "draw nothing from it until its judges are mended"),
        rollouts=window.numbers(table.places[there], by=-apart),
        metrics=[f"metric/{env}/{name}" for name in names],
    )
    return Finding(agreed.value, advisory)


def alpha(sums: NDArray, judges: int) -> float:
    """1 - observed / expected disagreement, from sums over all scores: their squares within a rollout, themselves,
    their squares, and how many rollouts."""
    within, total, squares, rollouts = (float(value) for value in sums)
    count = rollouts * judges
    observed = within / (rollouts * (judges - 1)) if rollouts else 0.0
    expected = (squares - total**2 / count) / (count - 1) if count > 1 else 0.0
    return 1.0 - observed / expected if expected > 0 else 1.0


LEAST_FLAT_GROUPS = 24
"""Groups below which nothing is said."""
UNTRAINED_FLAT_GROUPS = 96
"""The same where no step was trained yet: a run of several batches' worth of groups, of which none gave one."""
SAME = 1e-9
COLD = 0.5
"""Temperature below which most tries of a row say the same."""


def check_flat_groups(window: AdviceWindow, env: str) -> Finding:
    """The share of flat groups among those that have something left to learn (Wilson's interval)."""
    begun, algo = window.trained > 0, window.env(env).get("algo") or window.get("algo", {})
    groups, needed = window.groups(env, untrained=not begun), LEAST_FLAT_GROUPS if begun else UNTRAINED_FLAT_GROUPS
    relative = algo.get("type", "grpo") in ("grpo", "echo", "max_rl", "hierarchical")
    if not relative or algo.get("baseline", "group") != "group":
        return unmeasured("its algorithm compares no group")  # so that a flat one has a gradient too
    if len(groups.first) < needed or 0 < window.trained < 5:
        return unmeasured(f"fewer than {needed} groups or 5 steps")
    flat = groups.high - groups.low <= SAME
    lowest, highest = float(groups.low.min()), float(groups.high.max())
    if highest - lowest <= SAME:
        return unmeasured("all rewards are one number")
    top = max(highest, float(np.max(window.full_series(f"reward/{env}/mean"), initial=-np.inf)))
    mastered = flat & (groups.high >= top - SAME)
    left, dull = ~mastered, flat & ~mastered
    found = wilson_share(int(dull.sum()), int(left.sum()))
    share = float(dull.sum() / max(1, left.sum()))
    if left.sum() < LEAST_FLAT_GROUPS or found.low <= window.advice.flat_groups:
        return Finding(share)
    done = f" {mastered.sum()} more do as well as any ever did; those are not counted." if mastered.any() else ""
    worst = float((dull & (groups.high <= lowest + SAME)).sum() / dull.sum())
    now = int(window.env(env).get("group_size") or window.get("group_size", 8))
    batch, knobs = int(window.get("batch_size", 128)), []
    if float(window.get("sampling.temperature", 1.0)) < COLD:
        knobs.append(window.knob("sampling.temperature", 1.0, "so cold, the tries of a row are copies of one another"))
    if 2 * now <= batch and batch % (2 * now) == 0:
        knobs.append(window.env_knob(env, "group_size", 2 * now, "more tries of a row find the rare one that differs"))
    if not window.env(env).get("curriculum"):
        knobs.append(window.env_knob(env, "curriculum", True, "rows that are neither hopeless nor mastered come first"))
    advisory = Advisory(
        title=f"Most groups of `{env}` teach nothing",
        seen=f"In {dull.sum()} of {left.sum()} groups all members got the same reward, {worst:.0%} "
        f"of them all at the lowest.{done}",
        basis=f"{share:.0%} of groups, surely more than {found.low:.0%} (Wilson's interval of three "
        f"standard errors), limit {window.advice.flat_groups:g}; {left.sum()} groups of {window.trained} steps",
        knobs=knobs,
        rollouts=window.numbers(groups.first[dull][::-1]),
        metrics=[f"reward/{env}/std", f"reward/{env}/mean", "dropped/zero_advantage"],
    )
    return Finding(share, advisory)


WARMING = 3
"""The first steps compile and load."""
LEAST_IDLE = 8


def check_idle(window: AdviceWindow, env: str) -> Finding:
    """The mean share of time in which each has nothing to do. At staleness 0 they take turns, and that was chosen."""
    if not window.get("staleness", 1) or window.get("deterministic"):
        return unmeasured("trainer and sampler take turns")
    since = max(WARMING + 1, window.steps[0])
    # Demonstrations are not sampled from the policy, so the sampler is idle by design.
    offline = all((window.env(name).get("algo") or window.get("algo", {})).get("type") == "sft" for name in window.envs)
    parts = ("trainer",) if offline else ("trainer", "sampler")
    others = [window.series(f"time/{part}", since)[1] for part in ("score", "publish", "step")]
    shares = {part: series_mean(1 - _busy(window.series(f"busy/{part}", since)[1], part, *others)) for part in parts}
    if min(found.count for found in shares.values()) < LEAST_IDLE:
        return unmeasured(f"fewer than {LEAST_IDLE} steps")
    most = max(found.value for found in shares.values())
    idle = {part: found for part, found in shares.items() if found.low > window.advice.idle}
    if not idle:
        return Finding(most)
    phases = {p: series_mean(window.series(f"time/{p}")[1]).value for p in ("sample", "score", "train", "publish")}
    longest = max(phases, key=lambda phase: phases[phase])
    steps = next(iter(idle.values())).count
    in_vain = np.flatnonzero(window.rows["state"] == window.number("state", "dropped:zero_advantage"))
    dropped = series_mean(window.series("drop_ratio")[1]).value
    filtered = f" {dropped:.0%} of the groups that were sampled never trained." if dropped > 0.5 else ""
    advisory = Advisory(
        title=f"The {' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} nothing to do most of the time",
        seen="Idle: " + ", ".join(f"the {part} {found.value:.0%}" for part, found in idle.items()) + " of a step."
        f" Of a step's parts `time/{longest}` is the longest, {phases[longest]:.2f} s.{filtered}",
        basis="; ".join(f"{part} {found.value:.2f} ± {found.error:.2f}" for part, found in idle.items())
        + f" (means over {steps} steps, errors widened for autocorrelation), limit {window.advice.idle:g}",
        caution="Where nothing can be made faster, an idle part is no fault: it is what the other one costs.",
        knobs=_idle_knobs(window, idle, dropped),
        rollouts=window.numbers(in_vain[::-1]) if filtered else [],
        metrics=["busy/trainer", "busy/sampler", "time/step", "time/sample", "time/train"],
    )
    return Finding(most, advisory)


def _busy(
    shares: NDArray[Any], part: str, score: NDArray[Any], publish: NDArray[Any], step: NDArray[Any]
) -> NDArray[Any]:
    """A batch that is scored or published is in the trainer's hands too."""
    if part != "trainer" or not len(shares) == len(score) == len(publish) == len(step):
        return shares
    return np.minimum(1.0, shares + (score + publish) / np.maximum(step, 1e-9))


def _idle_knobs(window: AdviceWindow, idle: dict[str, Mean], dropped: float) -> list[Knob]:
    if "sampler" in idle and "trainer" in idle:
        running = int(window.get("max_inflight") or 2 * int(window.get("batch_size", 128)))
        return [window.knob("max_inflight", 2 * running, "environments are waited for: play more episodes at once")]
    if "sampler" in idle:
        return [window.knob("staleness", int(window.get("staleness", 1)) + 1, "it may ride further ahead")]
    knobs = []
    if dropped > 0.5 and (env := next((name for name in window.envs if not window.env(name).get("curriculum")), None)):
        knobs.append(window.env_knob(env, "curriculum", True, "fewer groups are sampled in vain"))
    if window.get("placement") == "ray":
        engines = int(window.get("cluster.engines", 1))
        return [*knobs, window.knob("cluster.engines", engines + 1, "more of what it waits for")]
    running = int(window.get("engine.max_running", 128))
    return [*knobs, window.knob("engine.max_running", 2 * running, "decode more at once")]


LEAST_STARVING = 6
"""Steps needed in which rollouts finished."""
LATE = ("dropped:stale", "dropped:oversampled")


class _EnvShare(NamedTuple):
    env: str
    share: Mean
    """Of the gradient, relative to what its weight asks for."""
    late: float
    """Share of its rollouts that came too late."""
    length: float


def check_starving(window: AdviceWindow, env: str) -> Finding:
    """The environment's share in the gradient, step by step, is what others lack. What a filter dropped is counted as
    if it had trained: to have no signal is another matter (`flat_groups`)."""
    if len(window.envs) < 2 or window.trained < LEAST_STARVING:
        return unmeasured("one environment alone" if len(window.envs) < 2 else f"fewer than {LEAST_STARVING} steps")
    fed = _env_shares(window)
    hungry = [one for one in fed if one.share.high < window.advice.starving]
    fullest = max(fed, key=lambda one: one.share.value, default=None)
    worst = min(fed, key=lambda one: one.share.value, default=None)
    if fullest is None or worst is None:
        return unmeasured("an environment without rollouts")
    if fullest.env != env or not hungry:
        return Finding(worst.share.value)
    worst = min(hungry, key=lambda one: one.share.value)
    if worst.late > 0.5:
        why = f"{worst.late:.0%} of its rollouts came too late for a batch"
        later = int(window.get("staleness", 1)) + 1
        knobs = [window.knob("staleness", later, f"`{worst.env}` has one more batch to come in time for")]
    else:
        why, weight = "its replies are short", float(window.env(worst.env).get("weight", 1.0))
        knobs = [
            window.knob("trainer.normalise", "sample", "every sample counts alike, however long it is"),
            window.env_knob(worst.env, "weight", round(2 * weight, 3), "or draw it more often"),
        ]
    places = window.finished_rows(env)[-512:]
    advisory = Advisory(
        title=f"`{env}` leaves little to {', '.join(f'`{one.env}`' for one in hungry)}",
        seen=f"`{worst.env}` has {worst.share.value:.0%} of the place in the gradient that its weight asks for: {why}. "
        f"Mean length: {', '.join(f'`{one.env}` {one.length:.0f}' for one in fed)} tokens.",
        basis=f"{worst.share.value:.3f} ± {worst.share.error:.3f} of its due (mean over steps), limit "
        f"{window.advice.starving:g}; {worst.share.count} steps",
        knobs=knobs,
        rollouts=window.numbers(places, by=-window.rows["tokens"][places]),
        metrics=[f"reward_trained/{one.env}/mean" for one in fed] + ["dropped/stale"],
    )
    return Finding(worst.share.value, advisory)


def _env_shares(window: AdviceWindow) -> list[_EnvShare]:
    """Every environment, or none as long as one of them is not there."""
    late = [window.number("state", state) for state in LATE]
    steps = np.arange(window.steps[0], window.steps[1] + 1)
    by_token = window.get("trainer.normalise", "token") == "token"
    taken, lateness, lengths = [], [], []
    for env in window.envs:
        rows = window.rows[window.finished_rows(env)]
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
    due = np.array([float(window.env(env).get("weight", 1.0)) for env in window.envs])
    shares = per_step / per_step.sum(axis=0) / (due / due.sum())[:, None]
    return [_EnvShare(*row) for row in zip(window.envs, map(series_mean, shares), lateness, lengths, strict=True)]
