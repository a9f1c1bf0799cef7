"""Encodes short rollouts of one turn as they are.

A step may hold hundreds of them, and looking for what could be left out would cost more than it saves. Their numbers go
into the file as msgpack's own, their streams as bytes.
"""

from typing import Any

import msgspec
from numpy.typing import NDArray

from paceline.data.sample import STREAM_DTYPES, Ended
from paceline.record.body import RolloutLike, TurnLike
from paceline.record.sanitize import REFUSED, encoder

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
