"""Replies that grow or shrink for nothing: length is the first thing a policy finds to change."""

import numpy as np

from paceline.record.advice.advisory import Advisory, Knob
from paceline.record.advice.measures import SURE, trend
from paceline.record.advice.sight import Sight

LEAST = 10
"""Steps below which a line through them says little."""


def look(sight: Sight, env: str) -> Advisory | None:
    """A line through the mean length of each step, and one through the mean reward. Longer replies that earn more are
    what was asked for."""
    places = sight.places(env)
    steps, lengths = sight.by_step(env, sight.rows["tokens"][places].astype(float))
    _, rewards = sight.by_step(env, sight.rows["reward"][places])
    line, pay = trend(steps, lengths), trend(steps, rewards)
    if line is None or pay is None or len(steps) < LEAST or line.first <= 0 or abs(line.t) <= SURE:
        return None
    change = (line.last - line.first) / line.first
    if pay.may_rise or abs(change) - SURE * line.error * np.ptp(steps) / line.first <= sight.advice.length:
        return None
    grows = change > 0
    order = np.argsort(sight.rows["tokens"][places][-512:], kind="stable")
    return Advisory(
        rule="length",
        env=env,
        title=f"Replies of `{env}` {'grow' if grows else 'shrink'}, and the reward does not rise",
        seen=f"The mean length went from {line.first:.1f} to {line.last:.1f} tokens ({change:+.0%}); the mean reward "
        f"from {pay.first:.3f} to {pay.last:.3f}.",
        sure=f"slope {line.slope:+.3g} ± {line.error:.2g} tokens a step, reward {pay.slope:+.2g} ± {pay.error:.2g} "
        f"(least squares, errors widened for autocorrelation); {len(steps)} steps",
        steps=sight.steps,
        knobs=_knobs(sight, grows),
        rollouts=sight.numbers(places[-512:][order[::-1] if grows else order]),
        metrics=["length", f"reward/{env}/mean", "truncated_ratio"],
    )


def _knobs(sight: Sight, grows: bool) -> list[Knob]:
    limit, lr = int(sight.get("sampling.max_tokens", 256)), float(sight.get("trainer.optimizer.lr", 1e-5))
    if grows and not sight.get("length.buffer") and limit >= 4:
        return [sight.knob("length.buffer", limit // 4, "the last tokens before the limit cost reward")]
    return [
        sight.knob("trainer.kl.coef", 0.05, "stay near the model it began with"),
        sight.knob("trainer.optimizer.lr", lr / 2, "go there more slowly"),
    ]
