"""Advisories on what the policy writes: entropy, length, truncation, and reward for form alone."""

import re
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.advice.measures import (
    SURE,
    Advisory,
    Finding,
    clustered_mean,
    jackknife,
    series_mean,
    trend,
    unmeasured,
)
from paceline.observe.record.advice.window import AdviceWindow, MetricTable

FORM = re.compile(
    r"format|syntax|pars(e|ed|able|ing)|well.?formed|template|(^|[/_])tags?($|[/_])|boxed|schema|json|xml|markdown",
    re.IGNORECASE,
)
LEAST_FORMAT = 20
"""Groups with differing rewards below which nothing is said."""


def check_format(window: AdviceWindow, env: str) -> Finding:
    """Share of within-group variance by metrics of form (R²), and what others add; errors by leaving groups out."""
    table = window.table(env)
    rewards = table.center_by_group(table.rewards) if len(table.rewards) else table.rewards
    names = _informative_metrics(table)
    form = [name for name in names if FORM.search(name)]
    other = [name for name in names if not FORM.search(name)]
    differing = np.unique(table.groups[np.abs(rewards) > 1e-9])
    if not form:
        return unmeasured("no metric of form")
    if len(differing) < LEAST_FORMAT or window.trained < 5:
        return unmeasured(f"fewer than {LEAST_FORMAT} groups whose rewards differ")
    columns = np.column_stack([rewards, *(table.center_by_group(table.columns[name]) for name in [*form, *other])])
    products = (columns[:, :, None] * columns[:, None, :]).reshape(len(columns), -1)
    sums = np.zeros((int(table.groups.max()) + 1, products.shape[1]))
    np.add.at(sums, table.groups, products)  # one row a group
    parts = sums[differing]
    by_form = jackknife(parts, lambda sums: r_squared(sums, len(form)))
    added = jackknife(parts, lambda sums: max(0.0, r_squared(sums, len(names)) - r_squared(sums, len(form))))
    if by_form.low <= window.advice.format or added.high >= 1 - window.advice.format:
        return Finding(by_form.value)
    paid = sum(table.center_by_group(table.columns[name]) for name in form) + table.center_by_group(table.rewards)
    advisory = Advisory(
        title=f"The reward of `{env}` follows form, not content",
        seen=f"Within groups, {_list(form)} explain{'s' if len(form) == 1 else ''} {by_form.value:.0%} of the "
        f"differences in reward; {_list(other) + ' add' if other else 'nothing else is reported, and adds'} "
        f"{added.value:.0%}.",
        basis=f"R² {by_form.value:.2f} ± {by_form.error:.2f}, added {added.value:.2f} ± {added.error:.2f} (least "
        f"squares within groups, errors by leaving each group out); {len(differing)} groups of {window.trained} steps",
        caution="This says what the reward moves with, not what it is made of. Which metric is one of form is guessed "
        "from its name, and what the environment does not report cannot be seen: let it report whether "
        "the answer is right.",
        fix="Let the reward pay for the right answer, and for its form only a little, or as a condition.",
        knobs=window.pause_knobs("format", "draw nothing from it until its reward is mended"),
        rollouts=window.numbers(table.places, by=-paid),
        metrics=[f"metric/{env}/{name}" for name in [*form, *other]][:6],
    )
    return Finding(by_form.value, advisory)


def r_squared(sums: NDArray[Any], count: int) -> float:
    """R² of the first column on the next `count` ones, from the matrix of their products."""
    products = sums.reshape(int(len(sums) ** 0.5), -1)
    total, inner, outer = products[0, 0], products[1 : count + 1, 1 : count + 1], products[0, 1 : count + 1]
    if total <= 0 or not count:
        return 0.0
    return float(np.clip(outer @ np.linalg.pinv(inner, rcond=1e-9) @ outer / total, 0.0, 1.0))


def _informative_metrics(table: MetricTable) -> list[str]:
    """Metrics that every rollout has and that differ within groups; not the reward itself under another name."""
    found = []
    for name, values in table.columns.items():
        if not np.isfinite(values).all() or name.startswith("length/"):
            continue
        is_reward = name.lower() in ("reward", "score", "total") and np.allclose(values, table.rewards, atol=1e-9)
        if not is_reward and np.abs(table.center_by_group(values)).max() > 1e-9:
            found.append(name)
    return found


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


LEAST_TRUNCATION = 64
"""Rollouts below which nothing is said."""


def check_truncation(window: AdviceWindow, env: str) -> Finding:
    """The share of cut-off rollouts; an error in which the tries of one row stand together."""
    places = window.finished_rows(env)
    if len(places) < LEAST_TRUNCATION or window.trained < 5:
        return unmeasured(f"fewer than {LEAST_TRUNCATION} rollouts or 5 steps")
    rows = window.rows[places]
    cut = rows["finish"] == window.number("finish", "length")
    found = clustered_mean(cut.astype(float), rows["ticket"])
    limit = int(window.get("sampling.max_tokens", 256))
    if found.low <= window.advice.truncation or _is_by_design(rows, cut, limit):
        return Finding(found.value)
    whole = f", the others {rows['reward'][~cut].mean():.3f}" if not cut.all() else ""
    most = found.value > MOST_CUT
    knobs = [window.knob("sampling.max_tokens", (4 if most else 2) * limit, "room to come to an end")]
    if not most and not window.get("length.mask_truncated"):
        knobs.append(window.knob("length.mask_truncated", True, "what was cut off is not blamed for it"))
    advisory = Advisory(
        title=f"Replies of `{env}` are cut off",
        seen=f"{cut.sum()} of {len(cut)} rollouts ended at `sampling.max_tokens` = {limit}. They got "
        f"{rows['reward'][cut].mean():.3f} on average{whole}.",
        basis=f"share {found.value:.3f} ± {found.error:.3f} (error over rows, not rollouts), limit "
        f"{window.advice.truncation:g}; {len(np.unique(rows['ticket']))} rows of {window.trained} steps",
        knobs=knobs,
        rollouts=window.numbers(places[cut][::-1], by=rows["reward"][cut][::-1]),
        metrics=["truncated_ratio", "length"],
    )
    return Finding(found.value, advisory)


MOST_CUT = 0.5
"""Share of cut replies above which twice the room may not do, and nearly nothing would be left to train on if those
were masked."""
BY_DESIGN = 2
"""Tokens of a limit at which every reply is meant to end: a move, a letter, a choice."""
EARNED = 0.5
"""Share of the best reward that replies at the limit must earn on average to be called whole."""


def _is_by_design(rows: NDArray[Any], cut: NDArray[Any], limit: int) -> bool:
    """Whether the limit costs nothing: it is tiny and so set on purpose, or replies that end there earn as well as
    others, and well."""
    if limit <= BY_DESIGN or cut.all():
        return limit <= BY_DESIGN
    there, others = (clustered_mean(rows["reward"][some], rows["ticket"][some]) for some in (cut, ~cut))
    return there.value >= max(others.value, EARNED * float(rows["reward"].max()))


LEAST_LENGTH = 10
"""Steps below which a line through them says little."""


def check_length(window: AdviceWindow, env: str) -> Finding:
    """A line through the mean length of each step, and one through the mean reward. Longer replies that earn more are
    what was asked for."""
    places = window.finished_rows(env)
    steps, lengths = window.by_step(env, window.rows["tokens"][places].astype(float))
    _, rewards = window.by_step(env, window.rows["reward"][places])
    line, pay = trend(steps, lengths), trend(steps, rewards)
    if window.is_self_play(env):
        return unmeasured("its reward is that of both sides")
    if line is None or pay is None or len(steps) < LEAST_LENGTH or line.first <= 0:
        return unmeasured(f"fewer than {LEAST_LENGTH} steps")
    change = (line.last - line.first) / line.first
    if (
        abs(line.t) <= SURE
        or pay.may_rise
        or abs(change) - SURE * line.error * np.ptp(steps) / line.first <= window.advice.length
    ):
        return Finding(abs(change))
    grows = change > 0
    order = np.argsort(window.rows["tokens"][places][-512:], kind="stable")
    limit, lr = int(window.get("sampling.max_tokens", 256)), float(window.get("trainer.optimizer.lr", 1e-5))
    if grows and not window.get("length.buffer") and limit >= 4:
        knobs = [window.knob("length.buffer", limit // 4, "the last tokens before the limit cost reward")]
    else:
        knobs = [
            window.knob("trainer.kl.coef", 0.05, "stay near the model it began with"),
            window.knob("trainer.optimizer.lr", lr / 2, "go there more slowly"),
        ]
    advisory = Advisory(
        title=f"Replies of `{env}` {'grow' if grows else 'shrink'}, and the reward does not rise",
        seen=f"The mean length went from {line.first:.1f} to {line.last:.1f} tokens ({change:+.0%}); the mean reward "
        f"from {pay.first:.3f} to {pay.last:.3f}.",
        basis=f"slope {line.slope:+.3g} ± {line.error:.2g} tokens a step, reward {pay.slope:+.2g} ± {pay.error:.2g} "
        f"(least squares, errors widened for autocorrelation); {len(steps)} steps",
        knobs=knobs,
        rollouts=window.numbers(places[-512:][order[::-1] if grows else order]),
        metrics=["length", f"reward/{env}/mean", "truncated_ratio"],
    )
    return Finding(abs(change), advisory)


FEW = 5
"""Steps at either end of the run that are compared."""
LEAST_ENTROPY = 15
MASTERED = 0.9
"""Of the way from the lowest to the highest reward: entropy falls by itself when a task is done."""


def check_entropy(window: AdviceWindow, env: str) -> Finding:
    """The entropy of the last steps against that of the first, where no environment is mastered or still rises. Where
    it has bought some reward, it may be down to a quarter of the limit."""
    values = window.full_series("entropy")
    if len(values) < LEAST_ENTROPY or (start := float(values[:FEW].mean())) <= 0:
        return unmeasured(f"fewer than {LEAST_ENTROPY} steps")
    now = series_mean(values[-2 * FEW :])
    stuck = [name for name in window.envs if is_stuck(window, name)]
    limit = window.advice.entropy * start / (4 if any(_has_risen(window, name) for name in window.envs) else 1)
    if now.high >= limit or not stuck or len(stuck) < len(window.envs):
        return Finding(now.value / start)
    flat = np.concatenate([window.groups(name).first[::-1][:4] for name in stuck])
    paid, temperature = float(window.get("trainer.entropy_coef", 0.0)), float(window.get("sampling.temperature", 1.0))
    advisory = Advisory(
        title="Entropy has collapsed, and the task is not learnt",
        seen=f"It fell from {start:.3g} in the first {FEW} steps to {now.value:.3g} nats a token, "
        f"{now.value / start:.0%} of it, and rewards stand still: "
        + ", ".join(f"`{name}` at {_reward(window, name):.3f}" for name in stuck)
        + ".",
        basis=f"last {2 * FEW} steps {now.value:.3g} ± {now.error:.2g}, limit {limit:.2g}; no reward rises by as much "
        f"as a standard error over {window.trained} steps",
        knobs=[
            window.knob("trainer.entropy_coef", max(1e-3, 2 * paid), "pay for it"),
            window.knob("sampling.temperature", round(1.2 * temperature, 2), "try more"),
        ],
        rollouts=window.numbers(flat),
        metrics=["entropy", *(f"reward/{name}/mean" for name in stuck)],
    )
    return Finding(now.value / start, advisory)


def _has_risen(window: AdviceWindow, env: str) -> bool:
    """The reward is higher than when the run began."""
    rewards, spreads = (window.full_series(f"reward/{env}/{name}") for name in ("mean", "std"))
    groups = int(window.get("batch_size", 128)) / int(window.get("group_size", 8))
    noise = float(spreads.mean()) * sqrt(2 / (FEW * max(1.0, groups))) if len(spreads) else 0.0
    return len(rewards) < 2 * FEW or float(rewards[-FEW:].mean() - rewards[:FEW].mean()) > 2 * noise


def check_entropy_high(window: AdviceWindow, env: str) -> Finding:
    """The entropy of the last steps over that of the first, where the loss pays for it and no reward rises."""
    values, paid = window.full_series("entropy"), float(window.get("trainer.entropy_coef", 0.0))
    if not paid:
        return unmeasured("nothing pays for entropy")
    if len(values) < LEAST_ENTROPY or (start := float(values[:FEW].mean())) <= 0:
        return unmeasured(f"fewer than {LEAST_ENTROPY} steps")
    last, limit = values[-FEW:], window.advice.entropy_high
    stuck = [name for name in window.envs if is_stuck(window, name)]
    if last.min() <= limit * start or not stuck or len(stuck) < len(window.envs):
        return Finding(last.mean() / start)
    advisory = Advisory(
        title="The entropy bonus outweighs the reward",
        seen=f"Entropy went from {start:.3g} in the first {FEW} steps to {last.mean():.3g} nats a token with "
        f"`trainer.entropy_coef` = {paid:g}, and no reward rises: "
        + ", ".join(f"`{name}` at {_reward(window, name):.3f}" for name in stuck)
        + ".",
        basis=f"lowest of the last {FEW} steps {last.min():.2g} ± 0, limit {limit * start:.2g} ({limit:g} times the "
        f"first {FEW}); {len(values)} steps",
        knobs=[window.knob("trainer.entropy_coef", paid / 10, "pay less for it")],
        rollouts=window.numbers(window.finished_rows(stuck[0])[::-1]),
        metrics=["entropy", *(f"reward/{name}/mean" for name in stuck)],
    )
    return Finding(last.mean() / start, advisory)


def is_stuck(window: AdviceWindow, env: str, most: float = 1.0) -> bool:
    """Rewards stand still below the best that a rollout has earned: they rise by no more than so many standard
    errors. Of self-play that cannot be told."""
    if window.is_self_play(env):
        return False
    steps, rewards = window.series(f"reward/{env}/mean")
    line = trend(steps, rewards)
    paid = window.rows["reward"][window.finished_rows(env)]
    if line is None or line.t > most or not len(paid):
        return False
    low = min(0.0, float(paid.min()))
    high = max(float(paid.max()), float(window.full_series(f"reward/{env}/mean").max()))
    return high <= low or (_reward(window, env) - low) / (high - low) < MASTERED


def _reward(window: AdviceWindow, env: str) -> float:
    return float(window.series(f"reward/{env}/mean")[1][-FEW:].mean())
