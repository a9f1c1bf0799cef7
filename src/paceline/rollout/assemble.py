"""Assembles a rollout's turns into samples; turns that extend one another exactly share one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.data import Sample
from paceline.data.rollout import (
    PackedTurn,
    Rollout,
    Turn,
    all_equal,
    expand_versions,
    pack_floats,
    pack_ids,
    pack_versions,
)


def assemble(rollout: Rollout) -> list[Sample]:
    """Samples that hold every sampled token exactly once as trained; in later branches it is only context."""
    return [_sample(thread, rollout) for thread in threads(rollout.turns)]


@dataclass(slots=True)
class Thread:
    """Turns that extend one another, and all their tokens."""

    tokens: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.tokens += turn.prompt_ids[len(self.tokens) :]
        start = len(self.tokens)
        self.tokens += turn.completion_ids
        self.turns.append(turn)
        self.spans.append((start, len(self.tokens)))


def threads(turns: Sequence[Turn]) -> list[Thread]:
    """Each turn joins the longest thread whose tokens its prompt repeats from the first to the last. Of two turns that
    go on from the same place the later one starts anew: there the common past is context and trains no second time."""
    threads: list[Thread] = []
    for turn in turns:
        fitting = [thread for thread in threads if _starts_with(turn.prompt_ids, thread.tokens)]
        thread = max(fitting, key=lambda thread: len(thread.tokens)) if fitting else None
        if thread is None:
            threads.append(thread := Thread())
        thread.add(turn)
    return threads


def count_rewritten_turns(turns: Sequence[Turn]) -> int:
    """Turns that go on from something said before while their prompt does not repeat its tokens: the chat template, or
    the code that wrote the prompt, changed the past, and a new sample had to be started.

    A turn that goes on exactly from any turn before it is a branch, and one that goes on from none is a new
    conversation; both start samples too, and neither rewrites anything.
    """
    if len(turns) < 2:
        return 0
    return sum(_rewrites_history(turn, turns[:place]) for place, turn in enumerate(turns) if place)


def _rewrites_history(turn: Turn, earlier: Sequence[Turn]) -> bool:
    """Whether a turn claims to go on from one of the earlier ones, and exactly from none."""
    prompt, claims = turn.prompt_ids, False
    for past in reversed(earlier):
        length = len(past.prompt_ids)
        if len(prompt) > length and prompt[:length] == past.prompt_ids:
            completion = past.completion_ids
            if prompt[length : length + len(completion)] == completion:
                return False
            claims = True
    return claims or (turn.messages is not None and _count_replies(turn) > _count_replies(earlier[0]))


def _count_replies(turn: Turn) -> int:
    """Messages of the assistant in a prompt; the first prompt's are all the environment's."""
    return sum(message.get("role") == "assistant" for message in turn.messages or ())


def _starts_with(prompt: list[int], tokens: list[int]) -> bool:
    """Whether the prompt begins with these tokens. Most that do not differ at the end already."""
    length = len(tokens)
    return prompt[length - 1 : length] == tokens[-1:] and prompt[:length] == tokens


def _sample(thread: Thread, rollout: Rollout) -> Sample:
    """Most tokens are context, which is the same for all: only what was sampled is written one by one."""
    length, turn_spans = len(thread.tokens), list(zip(thread.turns, thread.spans, strict=True))
    mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
    versions, temperatures = np.empty(length, np.int32), np.empty(length, np.float32)
    versions.fill(-1)
    temperatures.fill(1.0)
    mixed = False
    for turn, (start, end) in turn_spans:
        mask[start:end] = True
        temperatures[start:end] = turn.temperature or 1.0
    try:
        packed = pack_ids(thread.tokens)
        tokens = np.frombuffer(packed, np.int32).astype(np.int64)
        for turn, (start, end) in turn_spans:
            logprob_bytes, version_bytes = pack_floats(turn.logprobs), pack_versions(turn.versions)
            logprobs[start:end] = np.frombuffer(logprob_bytes, np.float32)
            versions[start:end] = np.frombuffer(expand_versions(version_bytes, len(turn.versions)), np.int32)
            turn.pack(PackedTurn(packed, start, end, logprob_bytes, version_bytes, (tokens, logprobs, temperatures)))
            mixed |= type(version_bytes) is bytes
    except (OverflowError, TypeError):  # numbers of an engine of the user's own, which numpy may still take
        tokens, mixed = np.array(thread.tokens, np.int64), True
        for turn, (start, end) in turn_spans:
            logprobs[start:end] = turn.logprobs
            versions[start:end] = turn.versions
    for stream in (tokens, logprobs, temperatures):
        stream.flags.writeable = False
    kv_kept = None
    for turn, (start, end) in turn_spans if mixed else ():
        # The weights changed under it, and its cache stayed as it was.
        if not turn.recomputed and start < end and not all_equal(turn.versions):
            kv_kept = np.zeros(length, np.bool_) if kv_kept is None else kv_kept
            kv_kept[start:end] = versions[start:end] != versions[start]
    return Sample(
        token_ids=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        temperatures=temperatures,
        kv_kept=kv_kept,
        ended="truncated" if thread.turns[-1].finish == "length" else "terminated",
        env=rollout.env,
        ticket=rollout.ticket,
        rollout=rollout.member,
        spans=tuple(thread.spans),
    )
