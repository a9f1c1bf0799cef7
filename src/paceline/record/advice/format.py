"""Reward that comes from form alone: within a group, whoever has the right form gets more, whatever they say.

The reward is centred in each group, since that is what trains a policy, and so are the metrics the environment reports
of each rollout. Least squares says which share of the reward's variance metrics of form explain, and which share is
added by all others. What the environment does not report cannot be seen.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.record.advice.advisory import Advisory
from paceline.record.advice.measures import jackknife
from paceline.record.advice.sight import Sight, Table

FORM = re.compile(
    r"format|syntax|pars(e|ed|able|ing)|well.?formed|template|(^|[/_])tags?($|[/_])|boxed|schema|json|xml|markdown",
    re.IGNORECASE,
)
LEAST = 20
"""Groups with differing rewards below which nothing is said."""


def look(sight: Sight, env: str) -> Advisory | None:
    """Share of within-group variance by metrics of form (R²), and what others add; errors by leaving groups out."""
    table = sight.table(env)
    rewards = table.within(table.rewards) if len(table.rewards) else table.rewards
    names = _telling(table)
    form = [name for name in names if FORM.search(name)]
    other = [name for name in names if not FORM.search(name)]
    differing = np.unique(table.groups[np.abs(rewards) > 1e-9])
    if not form or len(differing) < LEAST or sight.trained < 5:
        return None
    columns = np.column_stack([rewards, *(table.within(table.columns[name]) for name in [*form, *other])])
    parts = _products(columns, table.groups)[differing]
    by_form = jackknife(parts, lambda sums: explained(sums, len(form)))
    added = jackknife(parts, lambda sums: max(0.0, explained(sums, len(names)) - explained(sums, len(form))))
    if by_form.low <= sight.advice.format or added.high >= 1 - sight.advice.format:
        return None
    return Advisory(
        rule="format",
        env=env,
        title=f"The reward of `{env}` follows form, not content",
        seen=f"Within groups, {_list(form)} explain{'s' if len(form) == 1 else ''} {by_form.value:.0%} of the "
        f"differences in reward; {_list(other) + ' add' if other else 'nothing else is reported, and adds'} "
        f"{added.value:.0%}.",
        sure=f"R² {by_form.value:.2f} ± {by_form.error:.2f}, added {added.value:.2f} ± {added.error:.2f} (least "
        f"squares within groups, errors by leaving each group out); {len(differing)} groups of {sight.trained} steps",
        caution="This says what the reward moves with, not what it is made of. Which metric is one of form is guessed "
        "from its name, and what the environment does not report cannot be seen: let it report whether "
        "the answer is right.",
        steps=sight.steps,
        knobs=[sight.knob("advice.pause", ["format"], "draw nothing from it until its reward is mended")],
        rollouts=_paid_for_form(sight, table, form),
        metrics=[f"metric/{env}/{name}" for name in [*form, *other]][:6],
    )


def explained(sums: NDArray[Any], count: int) -> float:
    """R² of the first column on the next `count` ones, from the matrix of their products."""
    products = sums.reshape(int(len(sums) ** 0.5), -1)
    total, inner, outer = products[0, 0], products[1 : count + 1, 1 : count + 1], products[0, 1 : count + 1]
    if total <= 0 or not count:
        return 0.0
    return float(np.clip(outer @ np.linalg.pinv(inner, rcond=1e-9) @ outer / total, 0.0, 1.0))


def _telling(table: Table) -> list[str]:
    """Metrics that every rollout has and that differ within groups; not the reward itself under another name."""
    found = []
    for name, values in table.columns.items():
        if not np.isfinite(values).all() or name.startswith("length/"):
            continue
        same = len(values) and np.allclose(values, table.rewards, atol=1e-9) and not FORM.search(name)
        if not (same and name.lower() in ("reward", "score", "total")) and np.abs(table.within(values)).max() > 1e-9:
            found.append(name)
    return found


def _products(columns: NDArray[Any], groups: NDArray[Any]) -> NDArray[Any]:
    """One row a group: the sums of products of each two columns."""
    products = (columns[:, :, None] * columns[:, None, :]).reshape(len(columns), -1)
    sums = np.zeros((int(groups.max()) + 1, products.shape[1]))
    np.add.at(sums, groups, products)
    return sums


def _paid_for_form(sight: Sight, table: Table, form: list[str]) -> list[int]:
    """The best paid, newest first."""
    score = sum(table.within(table.columns[name]) for name in form) + table.within(table.rewards)
    return sight.numbers(table.places[np.argsort(-score, kind="stable")])


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
