"""Judges that do not agree: whatever they pay for, at least one of them does not know it."""

import re

import numpy as np
from numpy.typing import NDArray

from paceline.record.advice.advisory import Advisory
from paceline.record.advice.measures import jackknife
from paceline.record.advice.sight import Sight, Table

JUDGE = re.compile(r"judge|grader|rater|verdict", re.I)
TRUTH = re.compile(r"(^|[/_])(exact|correct|correctness|accuracy|solved|passed)($|[/_])", re.I)
LEAST = 40
"""Rollouts below which nothing is said."""


def look(sight: Sight, env: str) -> Advisory | None:
    """Krippendorff's alpha over interval data, of judges by their names; of a single one and a check of the truth."""
    table = sight.table(env)
    names = raters(table)
    if len(names) < 2 or sight.trained < 5:
        return None
    scores = np.column_stack([table.columns[name] for name in names])
    there = np.isfinite(scores).all(axis=1)
    scores, groups = scores[there], table.groups[there]
    if len(scores) < LEAST or np.ptp(scores) == 0:
        return None
    parts = np.zeros((int(groups.max()) + 1, 4))
    np.add.at(parts, groups, _sums(scores))
    agreed = jackknife(parts[parts[:, 3] > 0], lambda sums: alpha(sums, len(names)))
    if agreed.high >= sight.advice.judges:
        return None
    apart = np.ptp(scores, axis=1)
    return Advisory(
        rule="judges",
        env=env,
        title=f"Judges of `{env}` disagree",
        seen=f"{', '.join(f'`{name}`' for name in names)} differ by {apart.mean():.2f} on average over {len(scores)} "
        f"rollouts, on scores from {scores.min():g} to {scores.max():g}.",
        sure=f"Krippendorff's alpha {agreed.value:.2f} ± {agreed.error:.2f} (interval data, error by leaving "
        f"each group out), limit {sight.advice.judges:g}; 1 is agreement, 0 is chance",
        caution="Who is a judge is guessed from the names of metrics. Judges that are meant to look at different "
        "things need not agree.",
        steps=sight.steps,
        knobs=[sight.knob("advice.pause", ["judges"], "draw nothing from it until its judges are mended")],
        rollouts=sight.numbers(table.places[there][np.argsort(-apart, kind="stable")]),
        metrics=[f"metric/{env}/{name}" for name in names],
    )


def raters(table: Table) -> list[str]:
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
