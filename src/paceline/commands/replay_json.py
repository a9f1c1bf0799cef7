"""A replayed step as one JSON object: the loss by component, and every token's share of it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from paceline.commands.replay import RecordedTokens, ReplayedStep
from paceline.config import RunConfig
from paceline.data import Sample
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.observe.record import Query, open_run

NEAR = 1e-4
"""Shares that add up to the loss but for this much of their own sizes are said to add up: float32 sums."""

Piece = Callable[[int], str]


def as_json(run: Path, result: ReplayedStep, config: RunConfig) -> bytes:
    """See `paceline replay --json`. Numbers that are not finite become null."""
    piece, remarks = _pieces(config)
    ids, numbers = _ids(run, result.step), Counter()
    samples = []
    for at, sample in enumerate(result.samples):
        owner = None if sample.ticket is None else (sample.ticket.number, sample.rollout)
        shown = _sample(sample, result.tokens.get(at), result.optimizer_steps, piece)
        samples.append(shown | {"rollout": ids.get(owner), "number": numbers[owner]})
        numbers[owner] += owner is not None
    components = list(dict.fromkeys(name for tokens in result.tokens.values() for name in tokens.shares))
    whole = {
        "step": result.step,
        "weights": {"from": result.weights, "exact": result.exact},
        "samples_from": result.source,
        "settings": config.trainer.model_dump(mode="json", exclude={"optimizer", "parallel"}),
        "optimizer_steps": result.optimizer_steps,
        "components": components,
        "loss": {
            name: {"recorded": result.recorded.get(name), "replayed": value} for name, value in result.now.items()
        },
        "remarks": [*result.remarks, *remarks, *_sums(result, components)],
        "samples": samples,
    }
    return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _sample(sample: Sample, tokens: RecordedTokens | None, steps: int, piece: Piece | None) -> dict[str, Any]:
    ids = sample.token_ids.tolist()
    shown: dict[str, Any] = {
        "env": sample.env,
        "ticket": None if sample.ticket is None else sample.ticket.number,
        "member": sample.rollout,
        "ids": ids,
        "text": None if piece is None else [piece(token) for token in ids],
    }
    if tokens is None:
        return shown | {"trained": None}
    return shown | {
        "trained": {
            "places": tokens.places,
            "logprob": tokens.logprobs,
            "sampler": tokens.sampler,
            "ratio": tokens.ratio,
            "advantage": tokens.advantages,
            "entropy": tokens.entropy,
            "share": {name: np.ascontiguousarray(values / steps, np.float32) for name, values in tokens.shares.items()},
            "held_back": [{"token": at, "component": name, "rule": rule} for at, name, rule in tokens.left],
            "skipped": tokens.skipped,
        }
    }


def _sums(result: ReplayedStep, components: list[str]) -> list[str]:
    """A sentence for each component whose shares are not its loss: a bad step counts in one of them alone."""
    said = []
    for name in components:
        shares = [tokens.shares[name] for tokens in result.tokens.values() if name in tokens.shares]
        values = np.concatenate(shares).astype(np.float64) / result.optimizer_steps
        loss = result.now.get(f"loss/{name}")
        if loss is not None and not abs(values.sum() - loss) <= NEAR * max(1e-6, float(np.abs(values).sum())):
            said.append(
                f"the shares of `{name}` add up to {values.sum():.6g}, and its loss is {loss:.6g}: a step was bad"
            )
    return said


def _ids(run: Path, step: int) -> dict[tuple[int, int] | None, int]:
    """The number in the record of each rollout of the step, by ticket and member."""
    rollouts = open_run(run).rollouts
    if not rollouts.kept:
        return {}
    rows = rollouts.find(Query(step=(step, step), domain="training", limit=None)).rows
    return {(row.ticket, row.member): row.index for row in rows}


def _pieces(config: RunConfig) -> tuple[Piece | None, list[str]]:
    """A function that decodes one token, where the tokenizer is at hand; else None and a remark."""
    try:
        tokenizer = load_tokenizer(config.model)
    except PacelineError as error:
        return None, [f"tokens are shown by their numbers: {error}"]
    known: dict[int, str] = {}

    def piece(token: int) -> str:
        if token not in known:
            text, raw = str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token))
            # SentencePiece drops the space before what it takes for the first word.
            known[token] = f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text
        return known[token]

    return piece, []
