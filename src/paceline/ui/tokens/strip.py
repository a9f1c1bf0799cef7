"""One token sequence of a rollout with its streams: a sample as it shipped, or a turn that no sample was made of."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.data import Sample
from paceline.record import Query, RunFolder, Told, ToldTurn
from paceline.ui.answers import refuse
from paceline.ui.tokens.fate import TRAINS, fate
from paceline.ui.tokens.share import place_of
from paceline.ui.tokens.text import lexicon_of

BARE = "No tokens were kept of this rollout, only what its row says."
READABLE = "This run keeps readable conversations alone (record.all = false): there are no tokens to look at."

CREDIT = {"trainer", "env", "algo", "length", "filters", "staleness", "on_stale", "batch_size", "group_size"}
"""Keys of the run file that say how a token trains."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The token sequence that the page shows."""

    kind: str
    """`sample` or `turn`."""
    number: int
    ids: NDArray
    streams: dict[str, NDArray]
    spans: list[tuple[int, int]]
    """The ranges that the policy sampled, turn by turn."""
    ended: str
    weights: dict[int, str] = field(default_factory=dict)
    """The fingerprint of each version's weights, where the engine told it."""
    sample: Sample | None = None


def strip_of(told: Told, sample: int | None, turn: int | None) -> Strip | None:
    """The sequence that is asked for; where none is, the first sample, or else the first turn, if there is one."""
    prints = {version: mark for one in told.turns for version, mark in one.weights.items()}
    if turn is None and (told.samples or sample is not None):
        number = sample or 0
        _within(number, len(told.samples), "sample")
        one = told.samples[number]
        streams = {name: stream for name, stream in one.streams().items() if name != "token_ids"}
        return Strip("sample", number, one.token_ids, streams, list(one.spans), one.ended, prints, one)
    if not told.turns and turn is None:
        return None
    number = turn or 0
    _within(number, len(told.turns), "turn")
    return _turn(told.turns[number], number, prints)


def _turn(turn: ToldTurn, number: int, prints: dict[int, str]) -> Strip:
    start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
    streams = {
        "loss_mask": np.arange(end) >= start,
        "versions": _after(start, turn.versions, -1, np.int32),
        "logprobs": _after(start, turn.logprobs, 0.0, np.float32),
        "temperatures": np.full(end, turn.temperature, np.float32),
    }
    if turn.log_z is not None:
        streams["log_z"] = _after(start, turn.log_z, 0.0, np.float32)
    whole = {name: stream for name, stream in streams.items() if len(stream) == end}
    return Strip("turn", number, turn.full_ids, whole, [(start, end)], turn.finish, prints)


def _after(start: int, values: NDArray, before: float, dtype: type) -> NDArray:
    return np.concatenate([np.full(start, before, dtype), np.asarray(values, dtype)])


def _within(number: int, count: int, what: str) -> None:
    if not 0 <= number < count:
        raise refuse(404, f"there is no {what} {number}: the rollout has {count}, counted from 0")


def trained_by(strip: Strip) -> dict[str, NDArray]:
    """The weight of each loss component on each token of a sample; empty for a turn."""
    sample = strip.sample
    if sample is None:
        return {}
    nothing = np.zeros(len(sample), np.float32)
    ce = nothing if sample.ce_weights is None else sample.ce_weights
    pull = nothing if sample.ref_kl_weights is None else np.where(sample.loss_mask, sample.ref_kl_weights, 0)
    return {"rl": sample.rl, "ce": ce, "ref_kl": pull}


def newest(run: RunFolder) -> int | None:
    """The rollout to begin with: the last that trained, or else the last of all."""
    for query in (Query(state=TRAINS, limit=1), Query(limit=1)):
        if rows := run.rollouts.find(query).rows:
            return rows[0].index
    return None


def settings_of(run: RunFolder) -> RunConfig | None:
    """The run file, if this version understands what credit and loss are made of. Other sections may be another
    version's; but what is missing is not filled in with defaults."""
    known = {key: value for key, value in run.config().items() if key in CREDIT}
    if not {"trainer", "env"} <= known.keys():
        return None
    try:
        return RunConfig.model_validate(known)
    except ValueError:
        return None


def page_of(run: RunFolder, told: Told, strip: Strip | None) -> dict[str, Any]:
    """Everything that the page shows before a token is chosen."""
    row = told.row
    mates = [asdict(run.rollouts.row(index)) for index in run.rollouts.mates(row.index)]
    head = {
        "rollout": asdict(row) | {"fate": fate(row.state), "error_text": told.error},
        "count": run.rollouts.count,
        "mates": [{key: one[key] for key in _MATE} for one in mates],
        "samples": len(told.samples),
        "turns": len(told.turns),
    }
    if strip is None:
        return head | {"nothing": BARE if run.rollouts.kept else READABLE}
    lexicon, source = lexicon_of(run)
    spoken = lexicon.read(strip.ids.tolist()) if lexicon is not None else None
    return head | {
        "kind": strip.kind,
        "number": strip.number,
        "ended": strip.ended,
        "spans": strip.spans,
        "weights": {str(version): mark for version, mark in strip.weights.items()},
        "ids": strip.ids,
        "texts": spoken.texts if spoken else None,
        "parts": {str(place): part for place, part in spoken.parts.items()} if spoken else {},
        "tokenizer": source,
        "streams": strip.streams,
        "trained": trained_by(strip) if row.domain == "training" else {},
        "trains": row.state in TRAINS,
        "place": place_of(run, told, strip.number) if strip.kind == "sample" else None,
    }


_MATE = ("index", "member", "actor", "reward", "advantage", "tokens", "state", "error")
