"""Views of a replayed step for the page: summary, heaviest tokens, one sample; alone or beside another step.

A large step has millions of tokens. The page gets sums for each sample and the tokens of those it opens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from paceline.ui.answers import refuse

TOP = 60
"""Tokens that are listed."""
ROWS = 500
"""Samples that are listed."""


class ReplayResult:
    """The output of `paceline replay --json`."""

    def __init__(self, data: bytes, step: int, changes: dict[str, Any]) -> None:
        told = orjson.loads(data)
        self.step, self.changes = step, changes
        self.samples: list[dict[str, Any]] = told.pop("samples")
        self.about: dict[str, Any] = told
        self._totals: dict[str, list[NDArray]] = {}

    @property
    def components(self) -> list[str]:
        return self.about["components"]

    def shares(self, component: str) -> list[NDArray]:
        """Of each sample the shares of its trained tokens: of one component, or with "" of all of them."""
        if component not in self._totals:
            self._totals[component] = [_shares(sample["trained"], component) for sample in self.samples]
        return self._totals[component]

    def rule(self, sample: int, token: int) -> str:
        held = self.samples[sample]["trained"]["held_back"]
        return "; ".join(one["rule"] for one in held if one["token"] == token)


def summary(one: ReplayResult, other: ReplayResult | None, component: str) -> dict[str, Any]:
    """The loss, the samples by what they weigh, and the weightiest tokens; beside another by what differs."""
    if other is not None:
        _check(one, other)
    mine = one.shares(component)
    theirs = mine if other is None else other.shares(component)
    weights = mine if other is None else [b - a for a, b in zip(mine, theirs, strict=True)]
    sums = np.array([values.sum() for values in weights])
    order = np.argsort(-np.abs(sums), kind="stable")[:ROWS]
    return {
        "about": one.about,
        "changes": one.changes,
        "other": None if other is None else {"about": other.about, "changes": other.changes},
        "count": len(one.samples),
        "tokens": sum(len(values) for values in mine),
        "held_back": _held(one),
        "other_held_back": None if other is None else _held(other),
        "largest": max((float(np.abs(values).max()) for values in weights if len(values)), default=0.0),
        "samples": [_row(one, int(at), mine[at], theirs[at] if other else None) for at in order],
        "top": _top(one, other, mine, theirs, weights),
    }


def sample(one: ReplayResult, other: ReplayResult | None, number: int) -> dict[str, Any]:
    """One sample with all its tokens."""
    if not 0 <= number < len(one.samples):
        raise refuse(404, f"there is no sample {number}: the step has {len(one.samples)}")
    if other is not None:
        _check(one, other)
    told = one.samples[number]
    return told | {"sample": number, "other": None if other is None else other.samples[number]["trained"]}


def _shares(trained: dict[str, Any] | None, component: str) -> NDArray:
    if trained is None:
        return np.zeros(0)
    total = np.zeros(len(trained["places"]))
    for name, values in trained["share"].items():
        if component in ("", name):
            total += np.array([0.0 if value is None else value for value in values])
    return total


def _row(result: ReplayResult, at: int, mine: NDArray, theirs: NDArray | None) -> dict[str, Any]:
    told = result.samples[at]
    trained = told["trained"]
    return {name: told[name] for name in ("env", "ticket", "member", "rollout", "number")} | {
        "sample": at,
        "length": len(told["ids"]),
        "trained": len(mine),
        "share": float(mine.sum()),
        "other": None if theirs is None else float(theirs.sum()),
        "held_back": len({one["token"] for one in trained["held_back"]}) if trained else 0,
        "skipped": bool(trained and trained["skipped"]),
    }


def _top(
    one: ReplayResult,
    other: ReplayResult | None,
    mine: Sequence[NDArray],
    theirs: Sequence[NDArray],
    weights: Sequence[NDArray],
) -> list[dict[str, Any]]:
    lengths = [len(values) for values in weights]
    if not sum(lengths):
        return []
    flat = np.abs(np.concatenate(weights))
    owners = np.repeat(np.arange(len(weights)), lengths)
    starts = np.cumsum(lengths) - lengths
    best = np.argpartition(-flat, min(TOP, len(flat)) - 1)[:TOP]
    found = []
    for place in best[np.argsort(-flat[best], kind="stable")]:
        if not flat[place]:
            break
        number = int(owners[place])
        token = int(place - starts[number])
        found.append(
            _token(one, number, token)
            | {"share": float(mine[number][token])}
            | (
                {}
                if other is None
                else {"other": float(theirs[number][token]), "other_rule": other.rule(number, token)}
            )
        )
    return found


def _token(result: ReplayResult, number: int, token: int) -> dict[str, Any]:
    told, trained = result.samples[number], result.samples[number]["trained"]
    place = trained["places"][token]
    return {
        "sample": number,
        "token": token,
        "place": place,
        "id": told["ids"][place],
        "text": None if told["text"] is None else told["text"][place],
        "rollout": told["rollout"],
        "number": told["number"],
        "rule": result.rule(number, token),
    } | {name: trained[name][token] for name in ("ratio", "advantage", "logprob")}


def _held(result: ReplayResult) -> int:
    """Tokens that a bound held back."""
    return sum(
        len({one["token"] for one in told["trained"]["held_back"]}) for told in result.samples if told["trained"]
    )


def _check(one: ReplayResult, other: ReplayResult) -> None:
    """A run that went back in between has other samples under the same step."""
    same = len(one.samples) == len(other.samples) and all(
        mine["ids"] == theirs["ids"] and _places(mine) == _places(theirs)
        for mine, theirs in zip(one.samples, other.samples, strict=True)
    )
    if not same:
        raise refuse(409, "the two were replayed on different samples, since the run went on: replay the step again")


def _places(told: dict[str, Any]) -> list[int] | None:
    return told["trained"] and told["trained"]["places"]
