"""A run in one line: what the table of runs shows, from its metrics, status and run file."""

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.record import RunFolder

SPARKS = 48
"""Points of the small curve in the table."""
UNTOLD = ("seed", "name", "runs", "resume", "schema_version")
"""Keys in which two tries of one experiment may differ."""

Curve = list[tuple[float, float]]


def vitals(name: str, run: RunFolder, problems: list[str]) -> dict[str, Any]:
    """State, step, reward, evaluation, age and tags of a run, and what could not be read of it. Never fails."""
    columns, config, status = run.metrics(), run.config(), run.status()
    rewards = curves(columns, "reward/", "/mean")
    held_out = curves(columns, "eval/", "/exact") or curves(columns, "eval/", "/reward")
    reward = mean_curve(list(rewards.values()))
    evaluated = mean_curve(list(held_out.values()))
    seen = [value for value in columns.get("time", []) if value is not None]
    return {
        "name": name,
        "state": status.state,
        "alive": status.alive,
        "step": status.step,
        "total_steps": status.total_steps,
        "began": status.began,
        "ended": status.ended,
        "seen": max([*seen[-1:], status.began or 0.0, status.ended or 0.0]) or None,
        "message": status.message,
        "reward": ends(reward),
        "eval": ends(evaluated),
        "eval_kind": "exact" if curves(columns, "eval/", "/exact") else "reward",
        "spark": thinned([value for _, value in reward]),
        "tags": tags(config),
        "seed": config.get("seed"),
        "family": family(config),
        "problems": problems,
    }


def curves(columns: Mapping[str, Sequence[float | None]], start: str, end: str) -> dict[str, Curve]:
    """The curves `start<environment>end`, without those of single actors (`reward/<environment>/<actor>/mean`)."""
    steps = columns.get("step", [])
    found = {}
    for name, values in columns.items():
        inner = name.removeprefix(start).removesuffix(end)
        if name == f"{start}{inner}{end}" and inner and "/" not in inner:
            pairs = zip(steps, values, strict=False)
            found[inner] = [(s, v) for s, v in pairs if s is not None and v is not None and math.isfinite(v)]
    return {name: curve for name, curve in found.items() if curve}


def mean_curve(all_curves: list[Curve]) -> Curve:
    """The mean over environments, at the steps where each of those that have a value has one."""
    by_step: dict[float, list[float]] = {}
    for curve in all_curves:
        for step, value in curve:
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]


def ends(curve: Curve) -> dict[str, float] | None:
    """Where a curve began and where it is; the mean of a few steps, since one step is mostly noise."""
    if not curve:
        return None
    few = max(1, min(5, len(curve) // 4))
    values = [value for _, value in curve]
    return {"first": statistics.fmean(values[:few]), "last": statistics.fmean(values[-few:]), "points": len(values)}


def thinned(values: list[float]) -> list[float]:
    """At most SPARKS values: means of neighbours."""
    if len(values) <= SPARKS:
        return values
    cuts = [round(index * len(values) / SPARKS) for index in range(SPARKS + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(cuts)]


def tags(config: Mapping[str, Any]) -> list[str]:
    """Names of the run's environments, algorithms and model."""
    found: list[str] = []
    envs = config.get("env")
    for env in envs if isinstance(envs, list) else []:
        if isinstance(env, dict):
            found += [str(env.get("name") or env.get("type") or ""), _type(env.get("algo"))]
    found.append(_type(config.get("algo")) if not envs else "")
    model = config.get("model")
    if isinstance(model, dict):
        found.append(str(model.get("name", "")).rstrip("/").rpartition("/")[2].removeprefix("paceline:"))
        found.append("lora" if model.get("lora") else "")
    return [tag for tag in dict.fromkeys(found) if tag][:8]


def family(config: Mapping[str, Any]) -> str:
    """The same for runs that differ only in their seed; empty where there is no run file to tell."""
    if not config:
        return ""
    rest = {key: value for key, value in config.items() if key not in UNTOLD}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _type(section: Any) -> str:
    return str(section.get("type", "")) if isinstance(section, dict) else ""
