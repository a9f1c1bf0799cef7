"""Reads one token sequence of a rollout, a sample or a turn: its streams and the text of each token.

Token ids become text byte for byte, by the `tokenizer.json` of the run's model. That needs no tokenizer library: a
vocabulary is a table.
"""

import contextlib
import importlib.resources
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastapi import HTTPException
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.config.model import QUICKSTART
from paceline.data import Sample
from paceline.data.sample import CLIPPED, SKIPPED, trained_mask
from paceline.observe.record import Query, Row, RunFolder, StoredRollout, StoredTurn
from paceline.observe.web.rollouts import TRAINED_STATES, state_text

MOST_BYTES = 256 << 20
"""Bytes of a tokenizer.json that is read."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PLAIN)
_LETTER_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The letters that GPT-2's vocabulary writes bytes with: printable ones stand for themselves, the rest follow."""


class VocabularyIndex:
    """Maps token ids to bytes and text."""

    def __init__(self, spec: dict[str, Any]) -> None:
        vocabulary = spec["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], n) for n, e in enumerate(vocabulary))
        self._tokens = {number: token for token, number in pairs}
        self._added = {token["id"]: token["content"] for token in spec.get("added_tokens") or ()}
        kinds = {*_stage_types(spec.get("decoder")), *_stage_types(spec.get("pre_tokenizer"))}
        self._bytewise = "ByteLevel" in kinds
        self._spaced = bool(kinds & {"Metaspace", "Replace"})

    def decode(self, ids: Sequence[int]) -> tuple[list[str | None], dict[int, dict[str, str]]]:
        """The text of each token; None where its bytes are no whole characters. Of those, by place: the token's
        `bytes`, and the text they are part `of`, if it is known."""
        pieces = [self.bytes_of(number) for number in ids]
        texts = [None if one is None else _decode_or_none(one) for one in pieces]
        parts: dict[int, dict[str, str]] = {}
        for is_gap, places in groupby(enumerate(pieces), lambda item: texts[item[0]] is None):
            if is_gap:
                gap = [(place, one) for place, one in places if one is not None]
                of = b"".join(one for _, one in gap).decode(errors="replace")
                parts |= {place: {"bytes": one.hex(" ").upper(), "of": of} for place, one in gap}
        return texts, parts

    def bytes_of(self, number: int) -> bytes | None:
        if (added := self._added.get(number)) is not None:
            return added.encode(errors="replace")
        token = self._tokens.get(number)
        if token is None:
            return None
        if self._bytewise:
            letters = (_LETTER_BYTES.get(char, char) for char in token)
            return b"".join(bytes([c]) if isinstance(c, int) else c.encode(errors="replace") for c in letters)
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        return (token.replace(_SPACE, " ") if self._spaced else token).encode(errors="replace")


def vocabulary_of(run: RunFolder) -> tuple[VocabularyIndex | None, str]:
    """The vocabulary of the run's model, and where it was found or why it was not."""
    tried = []
    for path in _tokenizer_paths(run):
        tried.append(str(path))
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            status = path.stat()
            if status.st_size <= MOST_BYTES:
                return _load_vocabulary(path, status.st_mtime_ns, status.st_size), str(path)
    where = ", ".join(tried) or "nowhere, since config.toml names no model"
    return None, f"Token ids are shown, since no tokenizer.json that can be read was found (looked at {where})."


def _tokenizer_paths(run: RunFolder) -> Iterator[Path]:
    """Paths where the tokenizer may be: with the model, in the hub's cache, or in what the run exported."""
    model = run.config().get("model")
    name = (model.get("tokenizer") or model.get("name")) if isinstance(model, dict) else None
    if name == QUICKSTART:
        yield Path(str(importlib.resources.files("paceline") / "quickstart" / "tokenizer.json"))
    elif isinstance(name, str) and name:
        yield Path(name).expanduser() / "tokenizer.json"
        from huggingface_hub import try_to_load_from_cache  # a second to import, and seldom needed

        with contextlib.suppress(ValueError):  # a path is no name of the hub
            if isinstance(cached := try_to_load_from_cache(name, "tokenizer.json"), str):
                yield Path(cached)
    yield run.path / "export" / "tokenizer.json"


@lru_cache(maxsize=4)
def _load_vocabulary(path: Path, changed: int, size: int) -> VocabularyIndex:
    return VocabularyIndex(orjson.loads(path.read_bytes()))


def _stage_types(stage: Any) -> Iterator[str]:
    """The types of a tokenizer's stage and of all those inside it."""
    if isinstance(stage, dict):
        yield str(stage.get("type"))
        for part in (*(stage.get("decoders") or ()), *(stage.get("pretokenizers") or ())):
            yield from _stage_types(part)


def _decode_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


NO_TOKENS = "No tokens were kept of this rollout, only what its row says."
NO_RECORD = "This run keeps readable conversations alone (record.all = false): there are no tokens to look at."

CREDIT_KEYS = {"trainer", "env", "algo", "length", "filters", "staleness", "on_stale", "batch_size", "group_size"}
"""Keys of the run file that say how a token trains."""


@dataclass(frozen=True, slots=True)
class TokenStrip:
    """The token sequence that the page shows."""

    kind: str
    """`sample` or `turn`."""
    number: int
    ids: NDArray
    streams: dict[str, NDArray]
    spans: list[tuple[int, int]]
    """The ranges that the policy sampled, turn by turn."""
    ended: str
    weights: dict[int, str]
    """The fingerprint of each version's weights, where the engine reported it."""
    sample: Sample | None = None


def select_strip(rollout: StoredRollout, sample: int | None, turn: int | None) -> TokenStrip | None:
    """The requested sample or turn; by default the first sample, or else the first turn, if any."""
    fingerprints = {version: mark for one in rollout.turns for version, mark in one.weights.items()}
    if turn is None and (rollout.samples or sample is not None):
        number, one = _pick_part(rollout.samples, sample, "sample")
        streams = {name: stream for name, stream in one.streams().items() if name != "token_ids"}
        return TokenStrip("sample", number, one.token_ids, streams, list(one.spans), one.ended, fingerprints, one)
    if not rollout.turns and turn is None:
        return None
    return _turn_strip(*_pick_part(rollout.turns, turn, "turn"), fingerprints)


def _pick_part(parts: Sequence[Any], number: int | None, what: str) -> tuple[int, Any]:
    """The number that is asked for, or 0, and the part it names."""
    number = number or 0
    if not 0 <= number < len(parts):
        raise HTTPException(404, f"there is no {what} {number}: the rollout has {len(parts)}, counted from 0")
    return number, parts[number]


def _turn_strip(number: int, turn: StoredTurn, fingerprints: dict[int, str]) -> TokenStrip:
    start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)

    def sampled(values: NDArray, before: float, dtype: type) -> NDArray:
        return np.concatenate([np.full(start, before, dtype), np.asarray(values, dtype)])

    streams = {
        "loss_mask": np.arange(end) >= start,
        "versions": sampled(turn.versions, -1, np.int32),
        "logprobs": sampled(turn.logprobs, 0.0, np.float32),
        "temperatures": np.full(end, turn.temperature, np.float32),
    }
    if turn.log_z is not None:
        streams["log_z"] = sampled(turn.log_z, 0.0, np.float32)
    aligned = {name: stream for name, stream in streams.items() if len(stream) == end}
    return TokenStrip("turn", number, turn.full_ids, aligned, [(start, end)], turn.finish, fingerprints)


def trainer_streams(run: RunFolder, rollout: StoredRollout, strip: TokenStrip) -> dict[str, NDArray]:
    """What the trainer computed when the sample trained: `trainer_logprobs`, `ratio` to the sampler and `entropy`, NaN
    where nothing trains, and `clipped` and `skipped`, 1 where a bound held the token or its sequence back. Empty where
    it was not recorded."""
    if strip.sample is None or (place := batch_position(run, rollout, strip.number)) is None:
        return {}
    scores, positions = run.token_scores(rollout.row.step, place), np.flatnonzero(trained_mask(strip.sample))
    if scores is None or len(scores) > len(positions):
        return {}
    positions = positions[: len(scores)]  # the trainer may have cut the sample

    def spread(values: NDArray) -> NDArray:
        stream = np.full(len(strip.ids), np.nan, np.float32)
        stream[positions] = values
        return stream

    found = {"trainer_logprobs": spread(scores["logprob"])}
    if (sampler := strip.streams.get("logprobs")) is not None:
        sampled = np.where(strip.streams["loss_mask"], sampler, np.nan)
        found["ratio"] = np.exp(found["trainer_logprobs"] - sampled)
    found["entropy"] = spread(scores["entropy"])
    for name, flag in (("clipped", CLIPPED), ("skipped", SKIPPED)):
        found[name] = spread((scores["flags"] & flag) != 0)
    return found


def loss_weights(strip: TokenStrip) -> dict[str, NDArray]:
    """The weight of each loss component on each token of a sample; empty for a turn."""
    sample = strip.sample
    if sample is None:
        return {}
    nothing = np.zeros(len(sample), np.float32)
    ce = nothing if sample.ce_weights is None else sample.ce_weights
    pull = nothing if sample.teacher_kl_weights is None else np.where(sample.loss_mask, sample.teacher_kl_weights, 0)
    return {"rl": sample.rl_token_weights, "ce": ce, "teacher_kl": pull}


def alternatives(run: RunFolder, rollout: StoredRollout, strip: TokenStrip, at: int) -> list[dict[str, Any]]:
    """The most likely tokens where this one was sampled, the likeliest first; none where the run did not keep them
    (`record.top_logprobs`)."""
    span = next(((start, end) for start, end in strip.spans if start <= at < end), None)
    if span is None:
        return []
    start, end = span
    for turn in rollout.turns:
        said = turn.completion_ids[: end - start]
        if turn.top and len(turn.prompt_ids) == start and np.array_equal(said, strip.ids[start:end]):
            break
    else:
        return []
    ranked, vocabulary = turn.top[at - start], vocabulary_of(run)[0]
    texts, parts = vocabulary.decode([token for token, _ in ranked]) if vocabulary else ([None] * len(ranked), {})
    return [
        {"id": token, "logprob": logprob, "text": text, "bytes": parts.get(place, {}).get("bytes")}
        for place, ((token, logprob), text) in enumerate(zip(ranked, texts, strict=True))
    ]


SHIPPED_STATES = ("trained", "replayed", "skipped")
"""States of rollouts that were part of a batch."""


def shipped_rows(run: RunFolder, step: int) -> list[Row]:
    """The rollouts of a step's batch, in the order they shipped in."""
    return run.rollouts.find(Query(step=(step, step), state=SHIPPED_STATES, sort="step", limit=None)).rows


def batch_position(run: RunFolder, rollout: StoredRollout, number: int) -> int | None:
    """The sample's position in its step's batch; None where it did not train."""
    rows = shipped_rows(run, rollout.row.step) if rollout.row.state in SHIPPED_STATES else []
    return sum(row.samples for row in rows if row.index < rollout.row.index) + number if rows else None


def newest_rollout(run: RunFolder) -> int | None:
    """The rollout shown by default: the last that trained, or else the last of all."""
    for query in (Query(state=TRAINED_STATES, limit=1), Query(limit=1)):
        if rows := run.rollouts.find(query).rows:
            return rows[0].index
    return None


def credit_config(run: RunFolder) -> RunConfig | None:
    """The run file, if this version understands what credit and loss are made of. Other sections may be another
    version's; but what is missing is not filled in with defaults."""
    known = {key: value for key, value in run.config().items() if key in CREDIT_KEYS}
    try:
        return RunConfig.model_validate(known) if {"trainer", "env"} <= known.keys() else None
    except ValueError:
        return None


def token_page(run: RunFolder, rollout: StoredRollout, strip: TokenStrip | None) -> dict[str, Any]:
    """Everything that the page shows before a token is chosen."""
    row = rollout.row
    mates = [run.rollouts.row(index) for index in run.rollouts.group_members(row.index)]
    columns = ("index", "member", "actor", "reward", "advantage", "tokens", "state", "error")
    head = {
        "rollout": asdict(row) | {"fate": state_text(row.state), "error_text": rollout.error},
        "count": run.rollouts.count,
        "mates": [{key: getattr(one, key) for key in columns} for one in mates],
        "samples": len(rollout.samples),
        "turns": len(rollout.turns),
    }
    if strip is None:
        return head | {"nothing": NO_TOKENS if run.rollouts.keeps_all else NO_RECORD}
    vocabulary, source = vocabulary_of(run)
    texts, parts = vocabulary.decode(strip.ids.tolist()) if vocabulary is not None else (None, {})
    return head | {
        "kind": strip.kind,
        "number": strip.number,
        "ended": strip.ended,
        "spans": strip.spans,
        "weights": strip.weights,
        "ids": strip.ids,
        "texts": texts,
        "parts": parts,
        "tokenizer": source,
        "streams": strip.streams | trainer_streams(run, rollout, strip),
        "trained": loss_weights(strip) if row.domain == "training" else {},
        "trains": row.state in TRAINED_STATES,
        "place": batch_position(run, rollout, strip.number) if strip.kind == "sample" else None,
    }
