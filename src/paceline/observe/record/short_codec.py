"""Encodes short rollouts of one turn as they are.

A step may hold hundreds of them, and looking for what could be left out would cost more than it saves. Their numbers go
into the file as msgpack's own, their streams as bytes.

Decodes a body: every turn in full, every sample as it shipped, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import STREAM_DTYPES, Ended, Sample, Ticket
from paceline.data.streams import read_floats, read_ids, unfold
from paceline.observe.record.body import SAID, RolloutLike, RolloutRecord, TurnLike, TurnTokens, as_said, spoken
from paceline.observe.record.lines import REFUSED, encoder

_REST = tuple(name for name in STREAM_DTYPES if name != "token_ids")
SHORT = 40
"""Tokens, prompt and reply, up to which nothing is looked for."""


class BriefTurn(msgspec.Struct, array_like=True, gc=False):
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[int]
    log_z: list[float] | None
    finish: str
    temperature: float
    recomputed: bool
    weights: dict[int, str]
    messages: list[Any] | None
    tools: list[Any] | None
    text: str
    said: Any


class BriefSample(msgspec.Struct, array_like=True, gc=False):
    streams: dict[str, bytes]
    """Without `token_ids` where they are the turn's."""
    ended: Ended
    rollout: int
    spans: tuple[tuple[int, int], ...]
    ticketed: bool


class ShortRolloutRecord(msgspec.Struct, array_like=True, tag=2, gc=False):
    """A short rollout as `rollouts.data` holds it. New fields come last, with a default."""

    ticket: tuple[int, str, int, int, int]
    member: int
    actor: str
    kind: str
    parent: str
    reward: float | None
    metrics: dict[str, Any]
    error: str | None
    turn: BriefTurn
    sample: BriefSample | None


def brief(rollout: RolloutLike) -> bytes | None:
    """The rollout as bytes; None where it is long, has several turns, or holds what msgpack does not take."""
    if len(rollout.turns) != 1 or len(rollout.samples) > 1:
        return None
    turn, sample = rollout.turns[0], None
    if len(turn.prompt_ids) + len(turn.completion_ids) > SHORT:
        return None
    for given in rollout.samples:
        streams = {name: stream.tobytes() for name in _REST if (stream := getattr(given, name)) is not None}
        if not _are_all(given.token_ids, turn):
            streams = {"token_ids": given.token_ids.tobytes()} | streams
        sample = BriefSample(streams, given.ended, given.rollout, given.spans, given.ticket is not None)
    try:
        return encoder.encode(
            ShortRolloutRecord(
                rollout.ticket,
                rollout.member,
                rollout.actor,
                rollout.kind,
                rollout.parent,
                rollout.reward,
                rollout.metrics,
                rollout.error,
                BriefTurn(
                    turn.prompt_ids,
                    turn.completion_ids,
                    turn.logprobs,
                    turn.versions,
                    turn.log_z,
                    turn.finish,
                    turn.temperature,
                    turn.recomputed,
                    turn.weights,
                    turn.messages,
                    turn.tools,
                    turn.text,
                    turn.said,
                ),
                sample,
            )
        )
    except REFUSED:
        return None


def _are_all(tokens: NDArray, turn: TurnLike) -> bool:
    """Whether they are the turn's, prompt and reply."""
    packed = turn.packed
    if packed is not None and tokens is packed.made[0] and packed.end == len(tokens):
        return True
    return tokens.tolist() == [*turn.prompt_ids, *turn.completion_ids]


_decoder = msgspec.msgpack.Decoder(RolloutRecord | ShortRolloutRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldTurn:
    """One engine call, exactly as it happened."""

    prompt_ids: NDArray
    completion_ids: NDArray
    logprobs: NDArray
    versions: NDArray
    log_z: NDArray | None = None
    finish: str = ""
    temperature: float = 1.0
    recomputed: bool = False
    weights: dict[int, str] = field(default_factory=dict)
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    text: str = ""
    said: Any = None

    @property
    def message(self) -> Any:
        return self.said or {"role": "assistant", "content": self.text}

    @property
    def full_ids(self) -> NDArray:
        """The prompt and what was sampled after it."""
        return np.concatenate([self.prompt_ids, self.completion_ids])


def decode(data: bytes) -> RolloutRecord | ShortRolloutRecord:
    """The body; garbage raises `ValueError`."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a rollout: {error}") from error


def told_turns(body: RolloutRecord | ShortRolloutRecord) -> list[ToldTurn]:
    """Every turn whole again."""
    if isinstance(body, ShortRolloutRecord):
        return [_brief_turn(body.turn)]
    turns: list[ToldTurn] = []
    for kept in body.turns:
        past = turns[kept.like] if kept.like >= 0 else None
        prompt, sampled = read_ids(kept.prompt), read_ids(kept.sampled)
        messages, tools = kept.messages, kept.tools
        if past is not None:
            prompt = np.concatenate([past.full_ids[: kept.shared], prompt])
            if kept.kept:
                messages = [*(past.messages or ()), past.message][: kept.kept] + (messages or [])
            if tools is True:
                tools = past.tools
        turns.append(
            ToldTurn(
                prompt_ids=prompt,
                completion_ids=sampled,
                logprobs=read_floats(kept.logprobs),
                versions=np.full(len(sampled), kept.versions, "<i4")
                if isinstance(kept.versions, int)
                else read_ids(kept.versions),
                log_z=None if kept.log_z is None else read_floats(kept.log_z),
                finish=kept.finish,
                temperature=kept.temperature,
                recomputed=kept.recomputed,
                weights=kept.weights,
                messages=messages,
                tools=tools if isinstance(tools, list) else None,
                text=kept.text,
                said=kept.said,
            )
        )
    return turns


def told_samples(body: RolloutRecord | ShortRolloutRecord, turns: Sequence[ToldTurn]) -> list[Sample]:
    """The samples as they shipped, bit for bit."""
    ticket = Ticket(*body.ticket)
    if isinstance(body, ShortRolloutRecord):
        return [] if body.sample is None else [_brief_sample(body.sample, turns[0], ticket)]
    samples = []
    for kept in body.samples:
        streams: dict[str, NDArray] = {}
        if kept.turn >= 0:
            streams["token_ids"] = turns[kept.turn].full_ids[: kept.length].astype(np.int64)
        if kept.said:
            heard = [TurnTokens(turn.logprobs.tobytes(), turn.versions.tobytes(), turn.temperature) for turn in turns]
            said = as_said(kept.length, kept.spans, spoken(kept.spans, heard, kept.turn))
            for bit, name in enumerate(SAID):
                if said is not None and kept.said >> bit & 1:
                    streams[name] = np.frombuffer(said[bit], STREAM_DTYPES[name])
        for name, stream in kept.streams.items():
            streams[name] = unfold(stream, np.dtype(STREAM_DTYPES[name]), kept.length, kept.spans)
        samples.append(
            Sample(
                **streams,
                ended=kept.ended,
                env=ticket.env,
                ticket=ticket if kept.ticketed else None,
                rollout=kept.rollout,
                spans=kept.spans,
            )
        )
    return samples


def _brief_turn(kept: BriefTurn) -> ToldTurn:
    return ToldTurn(
        prompt_ids=np.array(kept.prompt, "<i4"),
        completion_ids=np.array(kept.sampled, "<i4"),
        logprobs=np.array(kept.logprobs, "<f4"),
        versions=np.array(kept.versions, "<i4"),
        log_z=None if kept.log_z is None else np.array(kept.log_z, "<f4"),
        finish=kept.finish,
        temperature=kept.temperature,
        recomputed=kept.recomputed,
        weights=kept.weights,
        messages=kept.messages,
        tools=kept.tools,
        text=kept.text,
        said=kept.said,
    )


def _brief_sample(kept: BriefSample, turn: ToldTurn, ticket: Ticket) -> Sample:
    streams = {name: np.frombuffer(data, STREAM_DTYPES[name]) for name, data in kept.streams.items()}
    return Sample(
        **({"token_ids": turn.full_ids.astype(np.int64)} | streams),
        ended=kept.ended,
        env=ticket.env,
        ticket=ticket if kept.ticketed else None,
        rollout=kept.rollout,
        spans=kept.spans,
    )
