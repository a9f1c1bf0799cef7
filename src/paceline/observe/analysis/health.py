"""Judges whether a run learns, from its own metrics: a verdict beside its state, and the figures behind it.

Verdicts, the first that holds:

  too early to say   fewer than `LEAST_STEPS` steps trained, and the run lives or was stopped
  diverged           loss or gradient norm is not finite, or policy and sampler are `DIVERGED` nats a token apart, or
                     were `BROKEN` apart for `BEST` steps
  collapsed          an environment's training or held-out reward is down to `COLLAPSED` of its best
  reward-hacked      training reward rose, and a metric of right answers lost `LOST` of what it was
  memorising         training reward rose, and held-out reward over `LEAST_EVALUATIONS` evaluations did not
  starved            `LEAST_ROLLOUTS` rollouts ended and no step trained, or `DROPPED` of the groups never train and
                     the trainer waits for the rest
  learning slowly    no reward rose by more than the noise of its steps, nor is one near the best it may have
  healthy            none of these

Advisories (`observe.record.advice`) name causes and read rollouts. This reads metrics alone, so that a table of a
thousand runs can show it.
"""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.observe.analysis.timeline import Columns
from paceline.observe.record.advice.learning_rules import TRUTH
from paceline.observe.record.advice.window import SELF_PLAY
from paceline.observe.record.folder import RunFolder

Verdict = Literal[
    "healthy",
    "learning slowly",
    "collapsed",
    "diverged",
    "starved",
    "reward-hacked",
    "memorising",
    "too early to say",
]
UNHEALTHY = ("collapsed", "diverged", "starved", "reward-hacked", "memorising")
LEAST_STEPS, LEAST_EVALUATIONS, LEAST_ROLLOUTS = 10, 4, 128
ENDS = 5
"""Steps at either end of a run whose means are compared."""
BEST = 3
"""Steps over which the best reward is averaged."""
DIVERGED, COLLAPSED, LOST, DROPPED, WAITING = 0.5, 0.5, 0.3, 0.8, 0.5
BROKEN, OLD = 1.0, 2.0
"""Nats a token in one version, of samples that are younger than this, after which a policy is another one."""
SMALLEST = 0.05
"""A best reward below which nothing can be said to be lost."""
MASTERED = 0.9
"""Reward, as a share of 1 or of the best step's, that leaves little to learn."""
SPREAD = 0.35
"""Standard deviation of the rewards, as a share of their mean, that a mastered task stays below."""
NOISE = 2.0
"""Standard errors within which a rise is noise."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    verdict: Verdict
    reason: str
    """One sentence with the figures it rests on."""

    @property
    def is_bad(self) -> bool:
        return self.verdict in UNHEALTHY


def run_health(run: RunFolder, columns: Columns, over: bool) -> RunHealth:
    """Also of a run that never trained, whose rollouts are all there is."""
    health = judge_health(columns, run.config(), over)
    if over and not _steps(columns) and (count := run.rollouts.count) >= LEAST_ROLLOUTS:
        return RunHealth("starved", f"{count} rollouts have ended, and no step has trained.")
    return health


def judge_health(columns: Columns, config: Mapping[str, Any], over: bool) -> RunHealth:
    """Of a run that is `over` or goes on."""
    steps = _steps(columns)
    if steps < (BEST if over else BEST + 2):
        return RunHealth("too early to say", f"{steps} steps have trained, {LEAST_STEPS} are needed.")
    reasons = (
        ("diverged", _divergence(columns)),
        ("collapsed", next(_falls(columns, config), "")),
        ("reward-hacked", next(_hacked(columns), "")),
        ("memorising", next(_memorised(columns), "")),
        ("starved", _starvation(columns)),
    )
    for verdict, reason in reasons:
        if reason:
            return RunHealth(verdict, reason)
    if steps < LEAST_STEPS:
        return RunHealth("too early to say", f"{steps} steps have trained, {LEAST_STEPS} are needed.")
    slow = _slowness(columns, config)
    return RunHealth("learning slowly", slow) if slow else RunHealth("healthy", _progress(columns))


def _steps(columns: Columns) -> int:
    return len(_values(columns, "batch/rollouts") or _values(columns, "loss"))


def _values(columns: Columns, name: str) -> list[float]:
    return [value for value in columns.get(name, ()) if value is not None]


def _pairs(columns: Columns, one: str, other: str) -> list[tuple[float, float]]:
    rows = zip(columns.get(one, ()), columns.get(other, ()), strict=False)
    return [(left, right) for left, right in rows if left is not None and right is not None]


def _envs(columns: Columns) -> list[str]:
    found = (re.fullmatch(r"reward/([^/]+)/mean", name) for name in columns)
    return [match[1] for match in found if match]


def _self_play(config: Mapping[str, Any]) -> set[str]:
    """Environments whose training reward is that of both sides together, and says nothing of progress."""
    envs = [env for env in config.get("env", ()) if isinstance(env, dict)]
    return {str(env.get("name") or env.get("type")) for env in envs if env.get("type") in SELF_PLAY}


def _ends(values: Sequence[float]) -> tuple[float, float]:
    few = max(1, min(ENDS, len(values) // 2))
    return statistics.fmean(values[:few]), statistics.fmean(values[-few:])


def _best(values: Sequence[float]) -> float:
    """The best mean of a few neighbours; the first value may be all there was before the fall."""
    means = (statistics.fmean(values[at : at + BEST]) for at in range(max(1, len(values) - BEST + 1)))
    return max([statistics.fmean(values[:2]), *means])


def _divergence(columns: Columns) -> str:
    for name in ("loss", "grad_norm"):
        last = [value for value in columns.get(name, ()) if value is not None][-ENDS:]
        if any(not math.isfinite(value) for value in last):
            return f"`{name}` is not finite."
    fresh = [abs(kl) for kl, age in _pairs(columns, "sampler_kl", "staleness/mean") if age < OLD]
    if sum(kl > BROKEN for kl in fresh) >= BEST:
        return f"Updates moved the policy by up to {max(fresh):.2g} nats a token: what it learns since, it learns anew."
    ages = _values(columns, "staleness/mean")[-ENDS:]
    for name in ("sampler_kl", "mismatch_kl"):
        last = _values(columns, name)[-ENDS:]
        if len(last) == ENDS and statistics.median(last) > DIVERGED * max(1.0, statistics.fmean(ages or [1.0])):
            return f"`{name}` is {statistics.median(last):.2g} nats a token over the last {ENDS} steps."
    return ""


def _falls(columns: Columns, config: Mapping[str, Any]) -> Iterator[str]:
    for env in _envs(columns):
        curves = [(f"held-out reward of `{env}`", _values(columns, f"eval/{env}/reward"))]
        if env not in _self_play(config):
            curves.insert(0, (f"reward of `{env}`", _values(columns, f"reward/{env}/mean")))
        for what, values in curves:
            if len(values) < 2:
                continue
            evaluated = what.startswith("held")
            best = max(values) if evaluated else _best(values)
            now = values[-1] if evaluated else statistics.fmean(values[-min(ENDS, len(values) - 1) :])
            scale = max(abs(best), *(_values(columns, f"reward/{env}/std") or [0.0])) if best <= 0 else best
            if abs(best) >= SMALLEST and best - now > (1 - COLLAPSED) * scale:
                yield f"The {what} fell from {best:.3f} at its best to {now:.3f}."


def _rise(columns: Columns, env: str) -> tuple[float, float, float]:
    """The reward at both ends, and the noise of the difference: steps are means of groups, which are independent."""
    values, spreads = _values(columns, f"reward/{env}/mean"), _values(columns, f"reward/{env}/std")
    first, last = _ends(values)
    tries = statistics.fmean(_values(columns, "batch/rollouts") or [128.0]) / 8
    spread = statistics.fmean(spreads) if spreads else 0.0
    return first, last, spread * math.sqrt(2 / max(1.0, tries * min(ENDS, len(values) // 2)))


def _hacked(columns: Columns) -> Iterator[str]:
    for env in _envs(columns):
        first, last, noise = _rise(columns, env)
        for name in columns:
            own = name.startswith(f"metric/{env}/") and TRUTH.search(name.removeprefix(f"metric/{env}/"))
            values = _values(columns, name) if own or name == f"eval/{env}/exact" else []
            if len(values) < 2 or last - first <= NOISE * noise:
                continue
            before, now = (values[0], values[-1]) if name.startswith("eval/") else _ends(values)
            if before > SMALLEST and now < (1 - LOST) * before:
                yield (
                    f"The reward of `{env}` rose from {first:.3f} to {last:.3f}, "
                    f"and `{name}` fell from {before:.3f} to {now:.3f}."
                )


def _memorised(columns: Columns) -> Iterator[str]:
    for env in _envs(columns):
        first, last, noise = _rise(columns, env)
        held_out = _values(columns, f"eval/{env}/reward")
        if len(held_out) < LEAST_EVALUATIONS or last - first <= NOISE * noise:
            continue
        half = len(held_out) // 2
        before, now = statistics.fmean(held_out[:half]), statistics.fmean(held_out[-half:])
        if now <= before and now < MASTERED and last - now > NOISE * noise:
            yield (
                f"The reward of `{env}` rose from {first:.3f} to {last:.3f} in training, "
                f"and on held-out rows it went from {before:.3f} to {now:.3f}."
            )


def _starvation(columns: Columns) -> str:
    dropped, waits = (_values(columns, name)[-LEAST_STEPS:] for name in ("drop_ratio", "wait_time_ratio"))
    if not dropped or not waits:
        return ""
    share, wait = statistics.fmean(dropped), statistics.fmean(waits)
    if share <= DROPPED or wait <= WAITING or all(_is_mastered(columns, env) for env in _envs(columns)):
        return ""
    return f"{share:.0%} of the groups never train, and the trainer waits {wait:.0%} of its time."


def _is_mastered(columns: Columns, env: str) -> bool:
    values, spreads = _values(columns, f"reward/{env}/mean"), _values(columns, f"reward/{env}/std") or [0.0]
    last = _ends(values)[1]
    return last >= MASTERED * max(1.0, *values) and _ends(spreads)[1] < SPREAD * last


def _slowness(columns: Columns, config: Mapping[str, Any]) -> str:
    envs = [env for env in _envs(columns) if env not in _self_play(config)]
    if not envs:
        return ""
    found = []
    for env in envs:
        first, last, noise = _rise(columns, env)
        if last - first > NOISE * noise or _is_mastered(columns, env):
            return ""
        found.append(f"`{env}` went from {first:.3f} to {last:.3f} (noise {noise:.3f})")
    return f"No reward rises: {', '.join(found)}."


def _progress(columns: Columns) -> str:
    ends = ((env, *_ends(_values(columns, f"reward/{env}/mean"))) for env in _envs(columns))
    words = ", ".join(f"`{env}` from {first:.3f} to {last:.3f}" for env, first, last in ends)
    return f"Nothing speaks against it; reward of {words}." if words else "Nothing speaks against it."
