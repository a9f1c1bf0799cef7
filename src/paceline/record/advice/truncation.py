"""Replies cut off at the limit: their reward blames what they never came to say."""

import numpy as np

from paceline.record.advice.advisory import Advisory
from paceline.record.advice.measures import clustered
from paceline.record.advice.sight import Sight

LEAST = 64
"""Rollouts below which nothing is said."""


def look(sight: Sight, env: str) -> Advisory | None:
    """The share of cut-off rollouts; an error in which the tries of one row stand together."""
    places = sight.places(env)
    if len(places) < LEAST or sight.trained < 5:
        return None
    rows = sight.rows[places]
    cut = rows["finish"] == sight.number("finish", "length")
    found = clustered(cut.astype(float), rows["ticket"])
    if found.low <= sight.advice.truncation:
        return None
    limit = int(sight.get("sampling.max_tokens", 256))
    whole = f", the others {rows['reward'][~cut].mean():.3f}" if not cut.all() else ""
    knobs = [sight.knob("sampling.max_tokens", 2 * limit, "room to come to an end")]
    if not sight.get("length.mask_truncated"):
        knobs.append(sight.knob("length.mask_truncated", True, "what was cut off is not blamed for it"))
    return Advisory(
        rule="truncation",
        env=env,
        title=f"Replies of `{env}` are cut off",
        seen=f"{cut.sum()} of {len(cut)} rollouts ended at `sampling.max_tokens` = {limit}. They got "
        f"{rows['reward'][cut].mean():.3f} on average{whole}.",
        sure=f"share {found.value:.3f} ± {found.error:.3f} (error over rows, not rollouts), limit "
        f"{sight.advice.truncation:g}; {len(np.unique(rows['ticket']))} rows of {sight.trained} steps",
        steps=sight.steps,
        knobs=knobs,
        rollouts=sight.numbers(places[cut][::-1]),
        metrics=["truncated_ratio", "length"],
    )
