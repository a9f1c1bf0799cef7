"""Encodes a replayed step as one JSON object: the loss by component, and each token's share of it."""

from collections import Counter
from collections.abc import Callable
from functools import cache
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

SUM_TOLERANCE = 1e-4
"""Relative error up to which the float32 shares of a component count as adding up to its loss."""

TokenDecoder = Callable[[int], str]


def as_json(run: Path, result: ReplayedStep, config: RunConfig) -> bytes:
    """See `paceline replay --json`. Numbers that are not finite become null."""
    decode_token, remarks = _token_decoder(config)
    ids, numbers = _rollout_indices(run, result.step), Counter()
    samples = []
    for at, sample in enumerate(result.samples):
        owner = None if sample.ticket is None else (sample.ticket.number, sample.rollout)
        shown = _sample_json(sample, result.tokens.get(at), result.optimizer_steps, decode_token)
        samples.append(shown | {"rollout": ids.get(owner), "number": numbers[owner]})
        numbers[owner] += owner is not None
    components = list(dict.fromkeys(name for tokens in result.tokens.values() for name in tokens.shares))
    document = {
        "step": result.step,
        "weights": {"from": result.weights, "exact": result.exact},
        "samples_from": result.source,
        "settings": config.trainer.model_dump(mode="json", exclude={"optimizer", "parallel"}),
        "optimizer_steps": result.optimizer_steps,
        "components": components,
        "loss": {
            name: {"recorded": result.recorded.get(name), "replayed": value} for name, value in result.replayed.items()
        },
        "remarks": [*result.remarks, *remarks, *_sum_remarks(result, components)],
        "samples": samples,
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _sample_json(
    sample: Sample, tokens: RecordedTokens | None, steps: int, decode_token: TokenDecoder | None
) -> dict[str, Any]:
    ids = sample.token_ids.tolist()
    shown: dict[str, Any] = {
        "env": sample.env,
        "ticket": None if sample.ticket is None else sample.ticket.number,
        "member": sample.rollout,
        "ids": ids,
        "text": None if decode_token is None else [decode_token(token) for token in ids],
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
            "held_back": [{"token": at, "component": name, "rule": rule} for at, name, rule in tokens.held_back],
            "skipped": tokens.skipped,
        }
    }


def _sum_remarks(result: ReplayedStep, components: list[str]) -> list[str]:
    """A remark for each component whose shares do not add up to its loss, as in a bad step."""
    remarks = []
    for name in components:
        shares = [tokens.shares[name] for tokens in result.tokens.values() if name in tokens.shares]
        values = np.concatenate(shares).astype(np.float64) / result.optimizer_steps
        loss = result.replayed.get(f"loss/{name}")
        if loss is not None and not abs(values.sum() - loss) <= SUM_TOLERANCE * max(1e-6, float(np.abs(values).sum())):
            remarks.append(
                f"the shares of `{name}` add up to {values.sum():.6g}, and its loss is {loss:.6g}: a step was bad"
            )
    return remarks


def _rollout_indices(run: Path, step: int) -> dict[tuple[int, int] | None, int]:
    """The number in the record of each rollout of the step, by ticket and member."""
    rollouts = open_run(run).rollouts
    if not rollouts.keeps_all:
        return {}
    rows = rollouts.find(Query(step=(step, step), domain="training", limit=None)).rows
    return {(row.ticket, row.member): row.index for row in rows}


def _token_decoder(config: RunConfig) -> tuple[TokenDecoder | None, list[str]]:
    """A function that decodes one token, where the tokenizer is at hand; else None and a remark."""
    try:
        tokenizer = load_tokenizer(config.model)
    except PacelineError as error:
        return None, [f"tokens are shown by their numbers: {error}"]

    @cache
    def decode_token(token: int) -> str:
        text, raw = str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token))
        # SentencePiece drops the space before what it takes for the first word.
        return f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text

    return decode_token, []
