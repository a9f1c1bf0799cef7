"""Explains one token: which losses train it, by which formula, with which numbers, and what is not known."""

from dataclasses import asdict
from typing import Any

import numpy as np

from paceline.config import RunConfig
from paceline.config import algorithm as algorithms
from paceline.record import Query, Row, RunFolder, Told
from paceline.ui.tokens.credit import CardLine, Peer, advantage, figure
from paceline.ui.tokens.fate import TRAINS, fate
from paceline.ui.tokens.loss import Token, bound, kl_line, ref_kl_line, rl_line
from paceline.ui.tokens.share import Share, share_of
from paceline.ui.tokens.strip import Strip, settings_of, trained_by

STRANGE = "This version of Paceline does not understand the run's config, so it cannot say which formulas it used."
PARTS = ("rl", "ce", "ref_kl")


def card_of(run: RunFolder, told: Told, strip: Strip, at: int) -> dict[str, Any]:
    """The card of one token, as plain values."""
    config, state = settings_of(run), told.row.state
    weights = {name: float(stream[at]) for name, stream in trained_by(strip).items() if stream[at]}
    said = {"at": at, "by": weights, "lines": [], "why": ""}
    if config is None:
        return said | {"why": STRANGE}
    if strip.sample is None or told.row.domain != "training":
        return said | {"why": fate(state) if told.row.domain != "training" or not told.samples else ""}
    lines = _lines(run, told, strip, at, config, weights)
    why = fate(state) if state not in TRAINS else "" if weights else _silent(told, strip, at, config)
    return said | {"lines": [asdict(line) for line in lines], "why": why}


def _lines(
    run: RunFolder, told: Told, strip: Strip, at: int, config: RunConfig, weights: dict[str, float]
) -> list[CardLine]:
    trainer, lines = config.trainer, []
    token = _token(strip, at, frozen="logprobs" not in strip.streams)
    share = share_of(run, told, strip.number, config) if weights else None
    if "rl" in weights:
        lines.append(_credit(run, told, token, config))
        lines.append(_ratio(strip, config))
        rl = rl_line(trainer.loss, token)
        lines += [rl, *_scaled(rl, share, "rl", at, weights["rl"], config)]
        if trainer.proximal is None and (edge := bound(trainer.loss, token)):
            lines.append(CardLine(name="bound", note=edge))
        if trainer.kl is not None and trainer.kl.how == "loss":
            lines.append(kl_line(trainer.kl, token))
        if trainer.kl is not None and trainer.kl.how == "advantage":
            note = "At train time kl.coef times the sample's mean of log π − log reference is taken off the advantage."
            lines.append(CardLine(name="kl shaping", note=note, replay=True))
        if trainer.entropy_coef:
            note = "The entropy is computed at train time and not kept."
            lines.append(CardLine(name="entropy term", formula="−entropy_coef · H", note=note, replay=True))
    if "ce" in weights:
        ce = CardLine(name="ce term", formula="−log π", note="log π is the trainer's and not recorded.", replay=True)
        lines += [ce, *_scaled(ce, share, "ce", at, weights["ce"], config)]
    if "ref_kl" in weights:
        pull = ref_kl_line(token)
        lines += [pull, *_scaled(pull, share, "ref_kl", at, weights["ref_kl"], config)]
    return lines


def _token(strip: Strip, at: int, frozen: bool) -> Token:
    def value(name: str) -> float | None:
        stream = strip.streams.get(name)
        return None if stream is None else float(stream[at])

    return Token(
        advantage=value("advantages"),
        old=None if frozen else value("logprobs"),
        ref=value("ref_logprobs"),
        base=value("base_logprobs"),
    )


def _ratio(strip: Strip, config: RunConfig) -> CardLine:
    """Known only where it must be 1."""
    trainer = config.trainer
    if "logprobs" not in strip.streams:
        return CardLine(name="ratio", formula="1: a frozen model sampled it", value=1.0)
    if trainer.proximal is not None and trainer.minibatches == 1:
        note = "It is measured from the batch's start, and the only step is taken from there. Who really sampled is "
        return CardLine(
            name="ratio", formula="π / π at the batch's start", value=1.0, note=f"{note}weighed at train time."
        )
    old = "π at the batch's start" if trainer.proximal is not None else "μ"
    note = "π is the trainer's probability at train time, which no file keeps."
    if trainer.clip_skip_threshold is not None:
        share = figure(trainer.clip_skip_threshold)
        note += f" A sample with more than {share} of its ratios outside 0.8 to 1.2 is left out as a whole."
    return CardLine(name="ratio", formula=f"π / {old}", note=note, replay=True)


def _scaled(
    line: CardLine, share: Share | None, part: str, at: int, weight: float, config: RunConfig
) -> list[CardLine]:
    """The term's share of the step's loss."""
    formula = {
        "token": "weight · term / tokens of the component",
        "sample": "weight · term / (rollouts · this rollout's tokens)",
        "fixed": "weight · term / (rollouts · trainer.fixed_length)",
    }[config.trainer.normalise]
    if share is None:
        note = "Its step's normaliser is not counted here: it did not train, or its batch is very large or not whole."
        return [CardLine(name="loss share", formula=formula, note=note)]
    stream = getattr(share.scales, part)
    if at >= len(stream):
        return []
    scale = float(stream[at])
    tokens, rollouts = (int(number) for number in share.totals[PARTS.index(part)])
    note = f"{tokens:,} {part} tokens of {rollouts:,} rollouts train in this optimizer step."
    if line.value is None:
        return [CardLine(name=f"{part} scale", formula="weight / normaliser", value=scale, note=note)]
    numbers = f"{figure(weight)} · {figure(line.value)} / {figure(weight / scale)}"
    name = "loss share" if part == "rl" else f"{part} loss share"
    return [CardLine(name=f"{name} at r = 1", formula=formula, numbers=numbers, value=scale * line.value, note=note)]


def _silent(told: Told, strip: Strip, at: int, config: RunConfig) -> str:
    """Why nothing trains a token of a rollout that trained."""
    row, limit = told.row, config.trainer.max_sample_tokens
    if limit is not None and at >= limit:
        return f"Cut off: the trainer takes the first {limit:,} tokens (trainer.max_sample_tokens)."
    if not strip.streams["loss_mask"][at]:
        return "The policy did not sample it: prompt, template, a tool's words, or an earlier sample's token."
    if config.length.mask_truncated and strip.ended == "truncated":
        return "Nothing in a reply that was cut off trains (length.mask_truncated)."
    version = int(strip.streams["versions"][at])
    if config.on_stale == "mask" and version < row.step - 1 - config.staleness:
        return f'Too old: version {version} in step {row.step} (staleness = {config.staleness}, on_stale = "mask").'
    return "All of its weights are zero: the algorithm does not train it."


# -- credit -----------------------------------------------------------------------------------------------------------


def algorithm_of(row: Row, config: RunConfig) -> algorithms.AlgorithmConfig | None:
    """The algorithm that credits this rollout's actor."""
    env = next((env for env in config.env if env.name == row.env), None)
    if env is None:
        return None
    return next((seat.algo for seat in env.seats if seat.name == row.actor), env.algo)


def _credit(run: RunFolder, told: Told, token: Token, config: RunConfig) -> CardLine:
    algo, row = algorithm_of(told.row, config), told.row
    if algo is None or row.reward is None:
        return CardLine(name="advantage", value=token.advantage, note="The run's config does not name its environment.")
    rows = _compared(run, row, algo)
    deep = isinstance(algo, algorithms.HierarchicalConfig)
    peers = [_peer(run, one, deep) for one in rows if one.reward is not None and not one.error]
    me = _peer(run, row, deep)
    if all(peer.index != me.index for peer in peers):
        peers.append(me)
    return advantage(algo, me, peers, token.advantage)


def _compared(run: RunFolder, row: Row, algo: algorithms.AlgorithmConfig) -> list[Row]:
    if isinstance(algo, algorithms.GroupCreditConfig) and algo.baseline == "batch":
        states = ("trained", "skipped", "dropped:no_sample")  # a replay keeps the credit it had
        query = Query(env=row.env, step=(row.step, row.step), domain=row.domain, state=states, sort="step", limit=None)
        return run.rollouts.find(query).rows
    return [run.rollouts.row(index) for index in run.rollouts.mates(row.index)]


def _peer(run: RunFolder, row: Row, deep: bool) -> Peer:
    scope: tuple = (row.kind, row.actor)
    if deep:
        parent = run.rollouts.get(row.index).parent
        scope = (row.member if parent else None, parent, *scope)
    reward = np.nan if row.reward is None else row.reward
    return Peer(index=row.index, reward=reward, tokens=row.tokens, turns=row.turns, scope=scope)
