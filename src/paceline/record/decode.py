"""Decodes a body: every turn in full, every sample as it shipped, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import STREAM_DTYPES, Sample, Ticket
from paceline.record.body import SAID, RolloutRecord, TurnTokens, as_said, spoken
from paceline.record.short_codec import BriefSample, BriefTurn, ShortRolloutRecord
from paceline.record.streams import read_floats, read_ids, unfold

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
