"""Explains one token: which losses train it, by which formula, with which numbers, and what is not known.

The record holds the sampler's log probability and not the trainer's, so the ratio r = pi / old is known only where it
must be 1. Elsewhere a card shows the term at r = 1, where the policy stands if it has not moved since, and from where
on a bound would hold the token back. No bound holds a token at r = 1, so there the terms of `paceline.trainer.terms`
are these few products, without torch. Tests hold each to the trainer's own.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.config import algorithm as algorithms
from paceline.config import trainer as config
from paceline.config.trainer import MAX_LOG_RATIO, REF_KL_TRUST
from paceline.data import Scales
from paceline.observe.analysis.text import four_digits as figure
from paceline.observe.record import Query, Row, RunFolder, Told
from paceline.observe.web.rollouts.group import TRAINS, fate
from paceline.observe.web.tokens.credit import CardLine, Peer, advantage, share_of
from paceline.observe.web.tokens.strip import Strip, settings_of, trained_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The known values of one token that trains. Log probabilities are at the sampling temperature."""

    advantage: float | None = None
    old: float | None = None
    """log of what the ratio is measured from; None where it was not kept."""
    ref: float | None = None
    base: float | None = None


FORMULAS = {
    "dppo": "−A · r + kl_tau · (log r)²",
    "ppo": "−min(r · A, clip(r) · A)",
    "gspo": "−min(s · A, clip(s) · A), s the sequence's ratio",
    "cispo": "−clip(r) · A · log π",
    "reinforce": "−A · log π",
}


def rl_line(c: config.LossConfig, token: Token) -> CardLine:
    """The rl term at r = 1."""
    a = token.advantage
    if isinstance(c, config.CustomLossConfig):
        return CardLine("rl term", f"given by {c.import_path}", replay=True)
    formula = FORMULAS[c.type]
    if isinstance(c, config.ReinforceConfig) and c.max_ratio is not None:
        formula = "−min(r, max_ratio) · A · log π"
    if a is None:
        return CardLine("rl term", formula, note="Its advantage is made at train time.", replay=True)
    needs = isinstance(c, config.CISPOConfig | config.ReinforceConfig)
    if needs and token.old is None:
        return CardLine("rl term", formula, note="The sampler's log probability was not kept.", replay=True)
    weight = 1.0  # r, within the bounds of its weight
    match c:
        case config.CISPOConfig():
            weight = min(max(1.0, c.min_ratio), c.max_ratio)
        case config.ReinforceConfig() if c.max_ratio is not None:
            weight = min(1.0, c.max_ratio)
    log_pi = token.old if needs and token.old is not None else 1.0
    numbers = f"−({figure(a)}) · {figure(log_pi)}"
    return CardLine("rl term at r = 1", formula, numbers, 0.0 - weight * a * log_pi)


def bound(c: config.LossConfig, token: Token) -> str:
    """From where on the rl term leaves the token out, or holds it."""
    a = token.advantage
    if not a or token.old is None:
        return ""
    mu, up = math.exp(token.old), a > 0
    match c:
        case config.DPPOConfig():
            edge, key = (mu + c.high, "+ trainer.loss.high") if up else (mu - c.low, "− trainer.loss.low")
            return _edge("Dropped from the policy term", edge, up, f"μ {figure(mu)} {key}")
        case config.PPOConfig():
            edge, key = (mu * (1 + c.clip_high), "clip_high") if up else (mu * (1 - c.clip_low), "clip_low")
            return _edge("Clipped, so without a gradient,", edge, up, f"μ {figure(mu)}, trainer.loss.{key}")
        case config.GSPOConfig():
            side = f"above {figure(1 + c.clip_high)}" if up else f"below {figure(1 - c.clip_low)}"
            return f"The whole sequence is clipped once its ratio s is {side}."
        case config.CISPOConfig():
            return f"Its weight is held within {figure(c.min_ratio)} and {figure(c.max_ratio)}; no token is left out."
        case config.ReinforceConfig() if c.max_ratio is not None:
            return f"Its weight is at most {figure(c.max_ratio)}; no token is left out."
    return ""


def _edge(what: str, edge: float, up: bool, made: str) -> str:
    if (edge >= 1) if up else (edge <= 0):
        return f"No bound can hold it: its probability cannot {'rise' if up else 'fall'} so far ({made})."
    return f"{what} once π is {'above' if up else 'below'} {figure(edge)} ({made})."


def ref_kl_line(token: Token) -> CardLine:
    """A teacher's pull at r = 1."""
    formula = "−(log teacher − log π) · r"
    if token.ref is None or token.old is None:
        return CardLine("ref_kl term", formula, note="The teacher's or the sampler's score was not kept.")
    value, numbers = token.old - token.ref, f"−({figure(token.ref)} − {figure(token.old)})"
    mu, up = math.exp(token.old), token.ref > token.old
    edge = _edge("Dropped", mu + REF_KL_TRUST if up else mu - REF_KL_TRUST, up, f"μ {figure(mu)}, trust {REF_KL_TRUST}")
    return CardLine("ref_kl term at r = 1", formula, numbers, value, note=edge)


def kl_line(c: config.KLConfig, token: Token) -> CardLine:
    """The pull of the KL reference in the loss, at r = 1."""
    shape = {"k1": "d", "k2": "d² / 2", "k3": "e^−d + d − 1"}[c.kind]
    formula = f"kl.coef · ({shape}), d = log π − log reference"
    if token.base is None or token.old is None:
        return CardLine("kl term", formula, note="The reference is scored at train time.", replay=True)
    d = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, token.old - token.base))
    value = c.coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[c.kind]
    numbers = f"{figure(c.coef)} · {c.kind}(d = {figure(token.old - token.base)})"
    return CardLine("kl term at r = 1", formula, numbers, value)


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
    token = _token(strip, at)
    share = share_of(run, told, strip.number, config) if weights else None
    if "rl" in weights:
        lines.append(_credit(run, told, token, config))
        lines.append(_ratio(strip, config))
        rl = rl_line(trainer.loss, token)
        lines += [rl, *_scaled(rl, share, "rl", at, weights["rl"], config)]
        if trainer.proximal is None and (edge := bound(trainer.loss, token)):
            lines.append(CardLine("bound", note=edge))
        if trainer.kl is not None and trainer.kl.how == "loss":
            lines.append(kl_line(trainer.kl, token))
        if trainer.kl is not None and trainer.kl.how == "advantage":
            note = "At train time kl.coef times the sample's mean of log π − log reference is taken off the advantage."
            lines.append(CardLine("kl shaping", note=note, replay=True))
        if trainer.entropy_coef:
            note = "The entropy is computed at train time and not kept."
            lines.append(CardLine("entropy term", "−entropy_coef · H", note=note, replay=True))
    if "ce" in weights:
        ce = CardLine("ce term", "−log π", note="log π is the trainer's and not recorded.", replay=True)
        lines += [ce, *_scaled(ce, share, "ce", at, weights["ce"], config)]
    if "ref_kl" in weights:
        pull = ref_kl_line(token)
        lines += [pull, *_scaled(pull, share, "ref_kl", at, weights["ref_kl"], config)]
    return lines


def _token(strip: Strip, at: int) -> Token:
    def value(name: str) -> float | None:
        stream = strip.streams.get(name)
        return None if stream is None else float(stream[at])

    names = {"advantage": "advantages", "old": "logprobs", "ref": "ref_logprobs", "base": "base_logprobs"}
    return Token(**{field: value(name) for field, name in names.items()})


def _ratio(strip: Strip, config: RunConfig) -> CardLine:
    """Known only where it must be 1."""
    trainer = config.trainer
    if "logprobs" not in strip.streams:
        return CardLine("ratio", "1: a frozen model sampled it", value=1.0)
    if trainer.proximal is not None and trainer.minibatches == 1:
        note = "It is measured from the batch's start, and the only step is taken from there. Who really sampled is "
        return CardLine("ratio", "π / π at the batch's start", value=1.0, note=f"{note}weighed at train time.")
    old = "π at the batch's start" if trainer.proximal is not None else "μ"
    note = "π is the trainer's probability at train time, which no file keeps."
    if trainer.clip_skip_threshold is not None:
        share = figure(trainer.clip_skip_threshold)
        note += f" A sample with more than {share} of its ratios outside 0.8 to 1.2 is left out as a whole."
    return CardLine("ratio", f"π / {old}", note=note, replay=True)


def _scaled(
    line: CardLine, share: tuple[Scales, NDArray] | None, part: str, at: int, weight: float, config: RunConfig
) -> list[CardLine]:
    """The term's share of the step's loss."""
    formula = {
        "token": "weight · term / tokens of the component",
        "sample": "weight · term / (rollouts · this rollout's tokens)",
        "fixed": "weight · term / (rollouts · trainer.fixed_length)",
    }[config.trainer.normalise]
    if share is None:
        note = "Its step's normaliser is not counted here: it did not train, or its batch is very large or not whole."
        return [CardLine("loss share", formula, note=note)]
    scales, totals = share
    stream = getattr(scales, part)
    if at >= len(stream):
        return []
    scale = float(stream[at])
    tokens, rollouts = (int(number) for number in totals[PARTS.index(part)])
    note = f"{tokens:,} {part} tokens of {rollouts:,} rollouts train in this optimizer step."
    if line.value is None:
        return [CardLine(f"{part} scale", "weight / normaliser", value=scale, note=note)]
    numbers = f"{figure(weight)} · {figure(line.value)} / {figure(weight / scale)}"
    name = "loss share" if part == "rl" else f"{part} loss share"
    return [CardLine(f"{name} at r = 1", formula, numbers, scale * line.value, note=note)]


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
        return CardLine("advantage", value=token.advantage, note="The run's config does not name its environment.")
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
