"""Advisories on the size of updates: a learning rate too high or too low, weights too old, groups dropped in vain."""

from math import exp, inf, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.advice.measures import SURE, Advisory, Finding, Mean, series_mean, unmeasured
from paceline.observe.record.advice.output_rules import is_stuck
from paceline.observe.record.advice.window import AdviceWindow

FAR = {"sampler_kl": 0.1, "mismatch/staleness": 0.1, "clip_fraction": 0.2}
"""Values of one step from which the policy has moved too far: nats a token, and the share of tokens clipped."""
OLD = 2.0
"""Versions from which samples count as old: what one version explains is the size of a step."""
JUMP = 2.5
"""Or the entropy of a step over that of the first ones, or the gradient norm over four times that."""
ENDS = 3
"""Steps over which the start and the best reward are averaged."""
LAST, LEAST_AFTER = 6, 3
"""Steps at the end of a run that are its present: as many as there are, but no fewer than these."""
LEAST_UNTRAINED = 64
"""Rollouts that came after the last step, where groups no longer train, that count as one more."""
RECOVERED = 0.4
"""Share of a loss below which what is left of it does not count."""
BROKEN = 1.0
"""Nats a token between two versions after which what a policy learns, it learns anew: no recovery."""
BROKEN_STEPS = 3
"""So far apart in so many steps, and a policy has broken: how sure the loss of reward is does not matter then."""
SETTLED = 0.05
"""A reward whose whole range is smaller counts as unmoved."""


def _fresh_series(window: AdviceWindow, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """A metric of distance, 0 in steps whose samples are far away by their age."""
    ages = dict(zip(*window.series("staleness/mean", since=1), strict=True))
    steps, values = window.series(name, since=1)
    return steps, np.where([ages.get(step, 0.0) < OLD for step in steps], values, 0.0)


def signs_of_large_steps(window: AdviceWindow) -> list[tuple[float, str, str]]:
    """Step, metric and words of whatever exploded, the first first."""
    found = []
    for name, limit in FAR.items():
        steps, values = _fresh_series(window, name)
        if (beyond := values > limit).any():
            at = int(np.argmax(beyond))
            found.append((steps[at], name, f"`{name}` reached {values.max():.2g} (limit {limit:g})"))
    for name, factor in (("entropy", JUMP), ("grad_norm", 4 * JUMP)):
        steps, values = window.series(name, since=1)
        start = float(values[0]) if len(values) else 0.0
        if start > 0 and (beyond := values > factor * start).any():
            at = int(np.argmax(beyond))
            found.append((steps[at], name, f"`{name}` rose to {values.max() / start:.1f} times its start"))
    return sorted(found, key=lambda sign: sign[0])


class RewardLoss(NamedTuple):
    share: Mean
    """Of the best reward, at the start or over a few steps."""
    best: float
    worst: float
    now: float
    """Each a mean over a few steps."""
    step: int
    """Where the worst begins."""


def lost_reward(window: AdviceWindow, env: str) -> RewardLoss | None:
    """What was lost and has not come back, or not to the policy that it was; None where too little is known or where
    there was little to lose."""
    if window.is_self_play(env):
        return None
    rewards = window.series(f"reward/{env}/mean", since=1)[1]
    places = window.finished_rows(env, untrained=True)
    untrained = window.rows["reward"][places[window.rows["step"][places] > window.steps[1]]]
    if len(untrained) >= LEAST_UNTRAINED:
        rewards = np.r_[rewards, untrained.mean()]
    start = min(1 + int(window.get("staleness", 1)), max(1, len(rewards) - LAST))  # sampled before the first update
    after = rewards[start:]
    if len(after) < LEAST_AFTER:
        return None
    size = min(LAST, len(after))
    means = np.convolve(after, np.ones(size) / size, "valid")
    worst = start + int(np.argmin(means))
    before = rewards[: max(start, worst)]
    few = np.convolve(before, np.ones(ENDS) / ENDS, "valid") if len(before) >= ENDS else before[:0]
    best, low = max([float(before[:start].mean()), *few.tolist()]), min(0.0, float(rewards.min()))
    recovered = best - means[-1] < RECOVERED * (best - means[worst - start])
    if best - low < SETTLED or (recovered and window.series("sampler_kl", since=1)[1].max(initial=0.0) < BROKEN):
        return None
    spreads, groups = (
        window.full_series(f"reward/{env}/std"),
        int(window.get("batch_size", 128)) / int(window.get("group_size", 8)),
    )
    noise = float(spreads.mean()) * sqrt((1 / size + 1 / ENDS) / max(1.0, groups)) if len(spreads) else inf
    low_point, step = float(means[worst - start]), int(window.series(f"reward/{env}/mean", since=1)[0][worst])
    share = Mean((best - low_point) / (best - low), noise / (best - low), size)
    return RewardLoss(share, best, low_point, float(means[-1]), step)


def check_learning_rate_high(window: AdviceWindow, env: str) -> Finding:
    """The reward falls below the best it had, after updates that moved the policy far at once."""
    lost = lost_reward(window, env)
    if lost is None:
        return unmeasured("too few steps, or a reward near 0 from the beginning")
    signs = signs_of_large_steps(window)
    share, has_broken = lost.share, (_fresh_series(window, "sampler_kl")[1] > BROKEN).sum() >= BROKEN_STEPS
    if share.value <= window.advice.learning_rate_high or (share.low <= 0 and not has_broken) or not signs:
        return Finding(share.value)
    steps, _ = window.series(f"reward/{env}/mean", since=1)
    first, metric, _ = signs[0]
    lr = float(window.get("trainer.optimizer.lr", 1e-5))
    knobs = [window.knob("trainer.optimizer.lr", lr / 10, "smaller steps")]
    if window.get("trainer.kl") is None:
        knobs.append(window.knob("trainer.kl.coef", 0.05, "stay near the model it began with"))
    places = window.finished_rows(env)
    since = places[np.argsort(np.abs(window.rows["step"][places] - lost.step), kind="stable")]
    again = f", and what is learnt since (now {lost.now:.3f}) is learnt anew" if lost.now > lost.worst + SETTLED else ""
    return Finding(
        share.value,
        Advisory(
            title="The learning rate is too high: the policy broke",
            seen=f"The reward of `{env}` fell from {lost.best:.3f} to {lost.worst:.3f} from step {lost.step} on{again}"
            f". At step {int(first)}: {'; '.join(words for _, _, words in signs[:3])}. `lr` is {lr:g}.",
            fix=f"Set `trainer.optimizer.lr` to {lr / 10:g} or less, and begin again from the first weights, or from a "
            "checkpoint before the fall.",
            basis=f"{share.value:.2f} ± {share.error:.2f} of the best reward was lost (means of {share.count} and "
            f"{ENDS} steps; the error is that of their groups), limit {window.advice.learning_rate_high:g}",
            caution="Weights that broke seldom recover: what follows, such as long replies or lost entropy, is its "
            "effect.",
            steps=(int(steps[0]), int(steps[-1])),
            knobs=knobs,
            rollouts=window.numbers(since),
            metrics=[f"reward/{env}/mean", *dict.fromkeys([metric, "grad_norm", "entropy"])],
        ),
    )


LEAST_STILL = 10
"""Steps below which nothing is said."""
STILL = 2e-6
"""Sum of the rates of all steps below which no weight can have moved by more than rounding: AdamW moves a weight by
about the rate, and weights are of the order of 0.02."""


def check_learning_rate_low(window: AdviceWindow, env: str) -> Finding:
    """The policy that trains does not leave the one that sampled, and no reward rises."""
    ages, distance = window.series("staleness/mean")[1], window.series("sampler_kl")[1]
    gradients, rates = window.series("grad_norm")[1], window.series("lr", since=1)[1]
    lr, limit = float(window.get("trainer.optimizer.lr", 1e-5)), window.advice.learning_rate_low
    old = ages >= 0.5
    if len(ages) == len(distance) and old.sum() >= LEAST_STILL:
        moved = series_mean(np.abs(distance[old]) / ages[old] ** 2)
        seen = f"In one version the policy moves {moved.value:.1g} nats a token"
        basis = f"`sampler_kl` over the square of the staleness {moved.value:.1g} ± {moved.error:.1g}"
    elif len(rates) >= LEAST_STILL:
        # Samples are the trainer's own, so no distance is measured. What the rates allow is known all the same.
        moved = Mean(0.0 if rates.sum() < STILL else inf, 0.0, len(rates))
        seen = f"In {len(rates)} steps no weight can move by more than about {rates.sum():.1g}, the sum of the rates"
        basis = f"sum of `lr` {rates.sum():.1g} ± 0, of which {STILL:g} is lost in rounding"
    else:
        return unmeasured(f"fewer than {LEAST_STILL} steps")
    value = moved.value if np.isfinite(moved.value) else None
    stuck = [name for name in window.envs if is_stuck(window, name, SURE)]
    ends = len(rates) > 0 and rates[-1] < 0.5 * lr  # its schedule ends there
    if moved.high >= limit or ends or len(stuck) < len(window.envs) or not stuck or not (gradients > 0).any():
        return Finding(value, missing="" if value is not None else "samples are as new as the weights")
    higher = min(1e-2, lr * float(min(1e4, max(10.0, np.sqrt(100 * limit / max(moved.value, 1e-12)))))) or 1e-5
    return Finding(
        value,
        Advisory(
            title="The learning rate is too low: nothing moves",
            seen=f"{seen}, and rewards stand still: "
            + ", ".join(f"`{name}` at {window.series(f'reward/{name}/mean')[1].mean():.3f}" for name in stuck)
            + f". There are gradients (norm {gradients.mean():.2g}), and `lr` is {lr:g}.",
            basis=f"{basis}, limit {limit:g}; no reward rises for sure over {moved.count} steps",
            knobs=[window.knob("trainer.optimizer.lr", float(f"{higher:.1g}"), "larger steps")],
            metrics=["sampler_kl", *(f"reward/{name}/mean" for name in stuck), "lr"],
        ),
    )


def check_stale_weights(window: AdviceWindow, env: str) -> Finding:
    """The part of the mismatch that is due to the age of the weights that sampled."""
    far, ages = (window.series(name)[1] for name in ("mismatch/staleness", "staleness/mean"))
    if len(far) != len(ages) or (old := ages >= OLD).sum() < 5:
        return unmeasured(f"fewer than 5 steps whose samples are {OLD:g} versions old")
    limit, age = window.advice.stale_weights, float(ages[old].mean())
    logs = series_mean(np.log(np.maximum(far[old], 1e-12)))  # most are small, a few are very large
    found = Mean(exp(logs.value), exp(logs.value) * logs.error, logs.count)
    if exp(logs.low) <= limit:
        return Finding(found.value)
    allowed = int(window.get("staleness", 1))
    knobs = [window.knob("staleness", allowed // 4, "train on newer samples")]
    if window.get("on_stale", "drop") != "drop":
        knobs.append(window.knob("on_stale", "drop", "or drop what is too old"))
    knobs.append(
        window.knob("trainer.optimizer.lr", float(window.get("trainer.optimizer.lr", 1e-5)) / 4, "or move less")
    )
    return Finding(
        found.value,
        Advisory(
            title="Samples are too old for the steps that are taken",
            seen=f"Samples are {age:.1f} versions old on average ({allowed} allowed), and the policy has moved "
            f"{found.value:.2g} nats a token meanwhile.",
            basis=f"geometric mean of `mismatch/staleness` {found.value:.2g} ± {found.error:.1g}, limit {limit:g}; "
            f"{found.count} steps",
            knobs=knobs,
            metrics=["mismatch/staleness", "staleness/mean", "clip_fraction"],
        ),
    )


WAITING = 0.5
"""Share of its time that the trainer waits."""


def check_dropped_groups(window: AdviceWindow, env: str) -> Finding:
    """Most of what is sampled never trains, and the trainer waits for the rest."""
    dropped, waits = (series_mean(window.series(name)[1]) for name in ("drop_ratio", "wait_time_ratio"))
    if dropped.count < 8:
        return unmeasured("fewer than 8 steps")
    if dropped.low <= window.advice.dropped_groups or waits.low <= WAITING:
        return Finding(dropped.value)
    reasons = {name: float(window.series(name)[1].sum()) for name in window.columns if name.startswith("dropped/")}
    reason = max(reasons, key=lambda name: reasons[name], default="dropped/zero_advantage").removeprefix("dropped/")
    rewards = {name: float(window.series(f"reward/{name}/mean")[1].mean()) for name in window.envs}
    knobs = []
    for name in window.envs:
        if reason == "zero_advantage" and not window.env(name).get("curriculum"):
            knobs.append(
                window.env_knob(name, "curriculum", True, "rows that are neither hopeless nor mastered come first")
            )
    if reason == "stale":
        knobs.append(window.knob("staleness", int(window.get("staleness", 1)) + 1, "what comes late still trains"))
    state = window.number("state", f"dropped:{reason}")
    return Finding(
        dropped.value,
        Advisory(
            title="Most groups are dropped, and the trainer waits for the rest",
            seen=f"{dropped.value:.0%} of the groups never train, mostly for `{reason}`, and the trainer waits "
            f"{waits.value:.0%} of its time. Mean reward: "
            + ", ".join(f"`{name}` {value:.3f}" for name, value in rewards.items())
            + ".",
            basis=f"share dropped {dropped.value:.2f} ± {dropped.error:.2f}, limit {window.advice.dropped_groups:g}; "
            "waiting "
            f"{waits.value:.2f} ± {waits.error:.2f}, limit {WAITING:g}; {dropped.count} steps",
            caution="Where the reward is near its best the task is mastered: harder rows, or the end of the run, are "
            "due.",
            knobs=knobs,
            rollouts=window.numbers(np.flatnonzero(window.rows["state"] == state)[::-1]),
            metrics=["drop_ratio", "wait_time_ratio", f"dropped/{reason}"],
        ),
    )
