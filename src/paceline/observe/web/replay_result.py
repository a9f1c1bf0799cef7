"""Summarises a replayed step for the page, and lists the settings of the loss that a page may try.

A large step has millions of tokens. The page gets sums for each sample and the tokens of those it opens.

Names of settings come from the config's models and values are checked against them: nothing a page sends becomes a
command line as it stands. A loss of the user's own is not among them, for it would name code to run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import orjson
from fastapi import HTTPException
from numpy.typing import NDArray
from pydantic import BaseModel

from paceline.config import ConfigError, load
from paceline.config.fields import SchemaNode
from paceline.config.trainer import KLConfig, ProximalConfig, TrainerConfig

MOST_TOKENS, MOST_SAMPLES = 60, 500
"""Tokens and samples that are listed."""


class ReplayResult:
    """The output of `paceline replay --json`."""

    def __init__(self, data: bytes, step: int, changes: dict[str, Any]) -> None:
        self.step, self.changes = step, changes
        self.about: dict[str, Any] = orjson.loads(data)
        self.samples: list[dict[str, Any]] = self.about.pop("samples")
        self._totals: dict[str, list[NDArray]] = {}

    def shares(self, component: str) -> list[NDArray]:
        """The loss shares of the trained tokens by sample: of one component, or with "" their sum."""
        if component not in self._totals:
            self._totals[component] = [_token_shares(sample["trained"], component) for sample in self.samples]
        return self._totals[component]

    def bound_rule(self, sample: int, token: int) -> str:
        """Which bounds held a token back."""
        held_back = self.samples[sample]["trained"]["held_back"]
        return "; ".join(one["rule"] for one in held_back if one["token"] == token)


def result_summary(one: ReplayResult, other: ReplayResult | None, component: str) -> dict[str, Any]:
    """The loss, the samples by what they weigh, and the weightiest tokens; beside another by what differs."""
    _check_same_samples(one, other)
    mine = one.shares(component)
    theirs = mine if other is None else other.shares(component)
    weights = mine if other is None else [b - a for a, b in zip(mine, theirs, strict=True)]
    sums = np.array([values.sum() for values in weights])
    order = np.argsort(-np.abs(sums), kind="stable")[:MOST_SAMPLES]
    return {
        "about": one.about,
        "changes": one.changes,
        "other": None if other is None else {"about": other.about, "changes": other.changes},
        "count": len(one.samples),
        "tokens": sum(len(values) for values in mine),
        "held_back": sum(map(_held_back_count, one.samples)),
        "other_held_back": None if other is None else sum(map(_held_back_count, other.samples)),
        "largest": max((float(np.abs(values).max()) for values in weights if len(values)), default=0.0),
        "samples": [
            {name: one.samples[at][name] for name in ("env", "ticket", "member", "rollout", "number")}
            | {
                "sample": at,
                "length": len(one.samples[at]["ids"]),
                "trained": len(mine[at]),
                "share": float(mine[at].sum()),
                "other": None if other is None else float(theirs[at].sum()),
                "held_back": _held_back_count(one.samples[at]),
                "skipped": bool((one.samples[at]["trained"] or {}).get("skipped")),
            }
            for at in order.tolist()
        ],
        "top": [
            _token_view(one, number, token)
            | {"share": mine[number][token]}
            | ({} if other is None else {"other": theirs[number][token], "other_rule": other.bound_rule(number, token)})
            for number, token in _largest_tokens(weights)
        ],
    }


def sample_view(one: ReplayResult, other: ReplayResult | None, number: int) -> dict[str, Any]:
    if not 0 <= number < len(one.samples):
        raise HTTPException(404, f"there is no sample {number}: the step has {len(one.samples)}")
    _check_same_samples(one, other)
    theirs = None if other is None else other.samples[number]["trained"]
    return one.samples[number] | {"sample": number, "other": theirs}


def _token_shares(trained: dict[str, Any] | None, component: str) -> NDArray:
    if trained is None:
        return np.zeros(0)
    shares = [values for name, values in trained["share"].items() if component in ("", name)]
    return sum((np.array([value or 0.0 for value in values]) for values in shares), np.zeros(len(trained["places"])))


def _largest_tokens(weights: Sequence[NDArray]) -> Iterator[tuple[int, int]]:
    """Sample and token of the largest absolute weights, largest first."""
    lengths = [len(values) for values in weights]
    if not sum(lengths):
        return
    flat = np.abs(np.concatenate(weights))
    ends = np.cumsum(lengths)
    best = np.argpartition(-flat, min(MOST_TOKENS, len(flat)) - 1)[:MOST_TOKENS]
    for place in best[np.argsort(-flat[best], kind="stable")]:
        if not flat[place]:
            return
        number = int(np.searchsorted(ends, place, side="right"))
        yield number, int(place - ends[number] + lengths[number])


def _token_view(result: ReplayResult, number: int, token: int) -> dict[str, Any]:
    sample = result.samples[number]
    trained, place = sample["trained"], sample["trained"]["places"][token]
    return {
        "sample": number,
        "token": token,
        "place": place,
        "id": sample["ids"][place],
        "text": None if sample["text"] is None else sample["text"][place],
        "rollout": sample["rollout"],
        "number": sample["number"],
        "rule": result.bound_rule(number, token),
    } | {name: trained[name][token] for name in ("ratio", "advantage", "logprob")}


def _held_back_count(sample: dict[str, Any]) -> int:
    """Tokens of a sample that a bound held back."""
    return len({one["token"] for one in sample["trained"]["held_back"]}) if sample["trained"] else 0


def _check_same_samples(*results: ReplayResult | None) -> None:
    """After a roll-back the same step has other samples."""
    tokens = [[(s["ids"], s["trained"] and s["trained"]["places"]) for s in one.samples] for one in results if one]
    if tokens[0] != tokens[-1]:
        why = "the two were replayed on different samples, since the run went on: replay the step again"
        raise HTTPException(409, why)


TRAINER_KEYS = ("normalise", "fixed_length", "entropy_coef", "clip_skip_threshold")
CUSTOM_LOSS = "custom"

Value = str | int | float | bool | None
Kind = Literal["choice", "number", "integer", "flag"]
KINDS: dict[Any, Kind] = {bool: "flag", int: "integer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    key: str
    kind: Kind
    options: Sequence[str] = ()
    optional: bool = False
    value: Value = None
    """The run's value; where it had another loss, the default."""
    help: str = ""
    of: str = ""
    """The loss it belongs to; empty for all."""


def replay_refusal(config: Mapping[str, Any]) -> str:
    """Why a run may not be replayed from a page: a folder from elsewhere could name code of its own. Empty: it may."""
    model, trainer = _subtable(config, "model"), _subtable(config, "trainer")
    named = "model.trust_remote_code" if model.get("trust_remote_code") else ""
    if _subtable(trainer, "loss").get("type") == CUSTOM_LOSS:
        named = "trainer.loss.import_path"
    why = f"`{named}` lets this run's file name code to run, so it is replayed only where you type the command yourself"
    return why if named else ""


def form_fields(config: Mapping[str, Any]) -> list[FormField]:
    """The settings that may be changed, with the run's values."""
    trainer = _subtable(config, "trainer")
    loss = _subtable(trainer, "loss")
    sections = SchemaNode.of_field(TrainerConfig.model_fields["loss"]).sections
    types = [name for name in sections if name != CUSTOM_LOSS]
    chosen = loss.get("type", types[0])
    found = [FormField(key="trainer.loss.type", kind="choice", options=types, value=chosen)]
    for name in types:
        found += _section_fields("trainer.loss", sections[name], loss if chosen == name else {}, of=name)
    found += _section_fields("trainer", TrainerConfig, trainer, only=TRAINER_KEYS)
    if trainer.get("proximal"):
        found += _section_fields("trainer.proximal", ProximalConfig, trainer["proximal"])
    if _subtable(trainer, "kl").get("how") == "loss":
        found += _section_fields("trainer.kl", KLConfig, trainer["kl"], only=("coef", "kind"))
    return found


def change_flags(file: Path, config: Mapping[str, Any], changes: Mapping[str, Value]) -> list[str]:
    """The changes as command-line flags; raises HTTPException for an unknown key or invalid value."""
    known = form_fields(config)
    loss = changes.get("trainer.loss.type", known[0].value)
    allowed = {setting.key: setting for setting in known if setting.of in ("", loss)}
    arguments = []
    for key, value in changes.items():
        if key not in allowed:
            raise HTTPException(400, f"`{key}` cannot be changed here: choose among {', '.join(allowed)}")
        arguments.append(_change_flag(allowed[key], value))
    try:
        load(file, arguments)
    except ConfigError as error:
        raise HTTPException(400, "; ".join(error.problems).replace("command line: --", "")) from None
    return arguments


def _change_flag(setting: FormField, value: Value) -> str:
    fits = {
        "choice": lambda: value in setting.options,
        "flag": lambda: isinstance(value, bool),
        "integer": lambda: isinstance(value, int) and not isinstance(value, bool),
        "number": lambda: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    }
    if value is None and setting.optional:
        return f"--no-{setting.key}"
    if not fits[setting.kind]():
        expected = f"one of {', '.join(setting.options)}" if setting.options else f"a {setting.kind}"
        raise HTTPException(400, f"`{setting.key}` must be {expected}")
    return f"--{setting.key}={str(value).lower() if isinstance(value, bool) else value}"


def _section_fields(
    above: str, section: type[BaseModel], given: Mapping[str, Any], only: tuple[str, ...] = (), of: str = ""
) -> Iterator[FormField]:
    for name, field in section.model_fields.items():
        if name == "type" or (only and name not in only):
            continue
        spot = SchemaNode.of_field(field)
        options = list(get_args(spot.annotation)) if get_origin(spot.annotation) is Literal else []
        yield FormField(
            key=f"{above}.{name}",
            kind="choice" if options else KINDS.get(spot.annotation, "number"),
            options=options,
            optional=spot.optional,
            value=given.get(name) if name in given or spot.optional else spot.default,
            help=spot.help,
            of=of,
        )


def _subtable(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = table.get(key)
    return found if isinstance(found, Mapping) else {}
