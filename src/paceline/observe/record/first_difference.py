"""Finds the first difference between two runs, in the order in which one thing leads to the next.

    settings | step by step: for each rollout in order of tickets its row, prompt, weights, tokens with their log
    probabilities, reward, credit; which rollouts there are; the loss, the gradient, and all else that was measured;
    then what was played to evaluate the new weights

Whatever differs further down may be a mere consequence, so only the first is named. Times and speeds are not compared.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.folder import RunFolder
from paceline.observe.record.rows import Query, Row, StoredRollout, StoredTurn

IDENTITY_SETTINGS = ("name", "runs", "resume")
"""Settings that say which run this is, not what it does."""
MACHINE_METRICS = ("time", "busy/", "engine/", "memory/", "wait", "overlap_ratio")
"""Metrics that begin so tell of the machine, and so does what is counted by the second."""
GRADIENT_METRICS = ("grad_norm", "lr")
GROUP_RESULTS = ("sample", "fate")
"""Results of a rollout that depend on its whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first difference: what it is, where, and both sides of it."""

    kind: str
    """What differs: `row`, `prompt`, `weights`, `version`, `token`, `logprob`, `finish`, `reward`, `metric`, `error`,
    `sample`, `fate`, `ticket`, `loss`, `gradient`, `measure` or `length`."""
    what: str
    one: Any = None
    other: Any = None
    step: int = 0
    env: str = ""
    ticket: int | None = None
    member: int | None = None
    actor: str = ""
    turn: int | None = None
    token: int | None = None
    """Index into the turn's prompt or completion, or into the sample."""
    stream: str = ""
    sample: int | None = None
    """Which of the rollout's samples, where `token` is an index into one."""
    indices: tuple[int | None, int | None] = (None, None)
    """The rollout's place in each record."""

    @property
    def where(self) -> str:
        places = [("step", self.step), (self.env, ""), ("ticket", self.ticket), ("member", self.member)]
        places += [(self.actor, ""), ("turn", self.turn), ("token", self.token)]
        return ", ".join(f"{name} {value}".strip() for name, value in places if name and value is not None)


@dataclass(frozen=True, slots=True)
class RunComparison:
    settings: list[tuple[str, Any, Any]]
    """Keys of the run file that differ; MISSING on a side that lacks one."""
    first: FirstDifference | None
    steps: int
    rollouts: int
    """Both counted until the first difference."""
    expected: list[str] = field(default_factory=list)
    """Why bit differences are expected between the two; empty where they are not."""
    remarks: list[str] = field(default_factory=list)
    """Reasons why the comparison is incomplete."""

    def as_json(self) -> dict[str, Any]:
        settings = [{"key": key, "one": one, "other": other} for key, one, other in self.settings]
        first = None if self.first is None else asdict(self.first) | {"where": self.first.where}
        return asdict(self) | {"settings": settings, "first": first}


MISSING = "(not set)"


def compare(
    one: RunFolder, other: RunFolder, tolerance: float = 0.0, seen: Counter[str] | None = None
) -> RunComparison:
    """Find the first difference. Numbers that are `tolerance` apart, of 1 or of their own size, count as the same.
    `seen` counts the `steps` and `rollouts` that are done, for a caller that shows progress."""
    seen = Counter() if seen is None else seen
    first = next(_differences(one, other, tolerance, seen), None)
    remarks = [f"{run.name}: {problem}" for run in (one, other) for problem in run.problems()]
    if seen["bare"]:
        remarks.append(
            f"{seen['bare']} rollouts were kept without their tokens in one of the runs: only their rows were compared"
        )
    if lacking := [run.name for run in (one, other) if not run.rollouts.keeps_all]:
        remarks.append(f"{' and '.join(lacking)} kept no record of all rollouts: only what was measured was compared")
    settings = list(differing_settings(one.config(), other.config()))
    return RunComparison(settings, first, seen["steps"], seen["rollouts"], expected_differences(one, other), remarks)


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys of two run files that differ, and both values; names and places of the runs are left out."""
    mine, theirs = dict(_flatten(one)), dict(_flatten(other))
    for key in sorted(mine.keys() | theirs.keys()):
        pair = mine.get(key, MISSING), theirs.get(key, MISSING)
        if pair[0] != pair[1] and key not in IDENTITY_SETTINGS:
            yield key, *pair


def expected_differences(one: RunFolder, other: RunFolder) -> list[str]:
    """Why two runs differ in bits even where their settings are the same; empty where they should not."""
    configs = {run.name: run.config() for run in (one, other)}
    reasons = []
    if free := [name for name, config in configs.items() if config.get("deterministic") is not True]:
        reasons.append(f"`deterministic = false` in {' and '.join(free)}")
    if stale := [name for name, config in configs.items() if config.get("staleness") != 0]:
        reasons.append(f"`staleness` above 0 in {' and '.join(stale)}: new weights arrive when they are ready")
    devices = [run.status().device for run in (one, other)]
    if devices[0] != devices[1] and all(devices):
        reasons.append(f"{one.name} ran on {devices[0]}, {other.name} on {devices[1]}")
    return reasons


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flatten(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for at, item in enumerate(value):
            yield from _flatten(item, f"{key}.{at}")
    else:
        yield key, value


def _differences(one: RunFolder, other: RunFolder, tolerance: float, seen: Counter[str]) -> Iterator[FirstDifference]:
    mine, theirs = (_by_step(run.metrics()) for run in (one, other))
    kept = one.rollouts.keeps_all and other.rollouts.keeps_all
    for step in sorted(mine.keys() | theirs.keys()):
        if step not in mine or step not in theirs:
            shorter = one if step not in mine else other
            yield FirstDifference(kind="length", what=f"{shorter.name} ends before step {step}", step=step)
            return
        for training in (True, False):  # an evaluation is played with the weights that this step made
            if kept:
                yield from _step(one, other, step, training, tolerance, seen)
            yield from _measures(step, mine[step], theirs[step], not training, tolerance)
        seen["steps"] += 1


def _by_step(columns: Mapping[str, Sequence[Any]]) -> dict[int, dict[str, Any]]:
    rows = (zip(columns, values, strict=True) for values in zip(*columns.values(), strict=True))
    known = ({name: value for name, value in row if value is not None} for row in rows)
    return {int(row["step"]): row for row in known if "step" in row}


def _step(
    one: RunFolder, other: RunFolder, step: int, training: bool, tolerance: float, seen: Counter[str]
) -> Iterator[FirstDifference]:
    mine, theirs = (_step_rollouts(run, step, training) for run in (one, other))
    judged: list[FirstDifference] = []
    for key in (key for key in mine if key in theirs):
        seen["rollouts"] += 1
        for details in _details((one, other), mine[key], theirs[key], tolerance, seen):
            found = _location(mine[key], (mine[key].index, theirs[key].index), **details)
            if found.kind not in GROUP_RESULTS:
                yield found
            judged.append(found)
    yield from judged[:1]  # credit looks at the whole group: whatever its members said comes before
    for run, rows, against in ((one, mine, theirs), (other, theirs, mine)):
        for row in (row for key, row in rows.items() if key not in against):
            where = (row.index, None) if run is one else (None, row.index)
            what = f"only {run.name} has this rollout in step {step} ({row.state})"
            yield _location(row, where, kind="ticket", what=what)


def _step_rollouts(run: RunFolder, step: int, training: bool) -> dict[tuple, Row]:
    """A step's rollouts in order of tickets: those of its batch, or those that were only to be looked at after it. The
    same seat may have played a ticket more than once."""
    rows = run.rollouts.find(Query(step=(step, step), sort="ticket", limit=None)).rows
    rows = [row for row in rows if (row.domain == "training") == training]
    known: Counter[tuple] = Counter()
    found = {}
    for row in sorted(rows, key=lambda row: (row.domain, row.ticket, row.member, row.index)):
        seat = (row.domain, row.env, row.ticket, row.member, row.actor)
        found[(*seat, known[seat])] = row
        known[seat] += 1
    return found


def _location(row: Row, indices: tuple[int | None, int | None], **details: Any) -> FirstDifference:
    place = {name: getattr(row, name) for name in ("step", "env", "ticket", "member", "actor")}
    return FirstDifference(**place, indices=indices, **details)


def _details(
    runs: tuple[RunFolder, RunFolder], mine: Row, theirs: Row, tolerance: float, seen: Counter[str]
) -> Iterator[dict[str, Any]]:
    yield from _values("row", "the ticket drew another row of the data", mine.row, theirs.row)
    pairs = zip(runs, (mine, theirs), strict=True)
    one, other = (run.rollouts.get_or_none(row.index) if row.whole else None for run, row in pairs)
    if one is not None and other is not None:
        yield from _bodies(one, other, tolerance)
    else:
        seen["bare"] += 1
    yield from _values("reward", "the reward", mine.reward, theirs.reward, tolerance)
    yield from _values("fate", "the state of the rollout", mine.state, theirs.state)


def _values(kind: str, what: str, one: Any, other: Any, tolerance: float = 0.0) -> Iterator[dict[str, Any]]:
    if not _is_same(one, other, tolerance):
        yield {"kind": kind, "what": what, "one": one, "other": other}


def _bodies(mine: StoredRollout, theirs: StoredRollout, tolerance: float) -> Iterator[dict[str, Any]]:
    for number, (one, other) in enumerate(zip(mine.turns, theirs.turns, strict=False)):
        for details in _turns(one, other, tolerance):
            yield {"turn": number, **details}
    if len(mine.turns) != len(theirs.turns):
        yield from _values("length", "how many turns there are", len(mine.turns), len(theirs.turns))
        return
    yield from _values("reward", "the reward", mine.reward, theirs.reward, tolerance)
    yield from _values("error", "the error", mine.error, theirs.error)
    for name in sorted(mine.metrics.keys() | theirs.metrics.keys()):
        yield from _values("metric", f"metric `{name}`", mine.metrics.get(name), theirs.metrics.get(name), tolerance)
    for number, pair in enumerate(zip(mine.samples, theirs.samples, strict=False)):
        one, other = (sample.streams() for sample in pair)
        for name in one | other:
            for details in _stream(one.get(name), other.get(name), tolerance):
                place = {"what": f"`{name}` of sample {number}", "stream": name, "sample": number}
                yield {"kind": "sample", **place, **details}
    yield from _values("sample", "how many samples it makes", len(mine.samples), len(theirs.samples))


def _turns(mine: StoredTurn, theirs: StoredTurn, tolerance: float) -> Iterator[dict[str, Any]]:
    for details in _stream(mine.prompt_ids, theirs.prompt_ids):
        yield {"kind": "prompt", "what": "a token of the prompt", **details}
    for version in sorted(mine.weights.keys() & theirs.weights.keys()):
        what = f"the fingerprint of the weights of version {version}"
        yield from _values("weights", what, mine.weights[version], theirs.weights[version])
    found = [
        {"kind": kind, "what": what, "stream": stream, **details}
        for kind, what, stream in (
            ("version", "the version that sampled a token", "versions"),
            ("token", "a sampled token", "completion_ids"),
            ("logprob", "a sampled token's log probability", "logprobs"),
        )
        for details in _stream(getattr(mine, stream), getattr(theirs, stream), tolerance)
    ]
    yield from sorted(found, key=lambda details: details["token"])  # whichever came first; a token before its scores
    yield from _values("finish", "why it ended", mine.finish, theirs.finish)


def _stream(mine: NDArray | None, theirs: NDArray | None, tolerance: float = 0.0) -> Iterator[dict[str, Any]]:
    """The first place at which two streams differ."""
    if mine is None or theirs is None:
        if mine is not theirs:
            sides = ["absent" if stream is None else "there" for stream in (mine, theirs)]
            yield {"token": 0, "one": sides[0], "other": sides[1]}
        return
    common = min(len(mine), len(theirs))
    one, other = mine[:common], theirs[:common]
    differ = one != other
    if mine.dtype.kind == "f":
        wide, other = one.astype(np.float64), other.astype(np.float64)
        with np.errstate(invalid="ignore"):
            differ &= ~(np.abs(wide - other) <= tolerance * np.maximum(1.0, np.abs(wide)))
        differ &= ~(np.isnan(wide) & np.isnan(other))
    apart = int(np.argmax(differ)) if differ.any() else common
    if apart < max(len(mine), len(theirs)):
        sides = [stream[apart].item() if apart < len(stream) else "(ended)" for stream in (mine, theirs)]
        yield {"token": apart, "one": sides[0], "other": sides[1]}


def _measures(
    step: int, mine: Mapping[str, Any], theirs: Mapping[str, Any], evaluation: bool, tolerance: float
) -> Iterator[FirstDifference]:
    names = (mine.keys() | theirs.keys()) - {"step"}
    ranked = ((0 if name.startswith("loss") else 1 if name in GRADIENT_METRICS else 2, name) for name in names)
    for rank, name in sorted(ranked):
        timed = name.startswith(MACHINE_METRICS) or name.endswith("/s")
        if name.startswith("eval/") == evaluation and not timed:
            kind = ("loss", "gradient", "measure")[rank]
            for details in _values(kind, f"`{name}`", mine.get(name), theirs.get(name), tolerance):
                yield FirstDifference(**details, step=step)


def _is_same(mine: Any, theirs: Any, tolerance: float) -> bool:
    if isinstance(mine, (int, float)) and isinstance(theirs, (int, float)):
        both_nan = math.isnan(mine) and math.isnan(theirs)
        return both_nan or mine == theirs or abs(mine - theirs) <= tolerance * max(1.0, abs(mine))
    return mine == theirs
