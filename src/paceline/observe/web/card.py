"""Explains one token: which losses train it, by which formula and with which numbers.

The record holds the log probability of the sampler and that of the trainer in the step's own forward pass, so a card
has the ratio and the term as they trained. Records of earlier versions lack the trainer's: there a card shows the term
at r = 1, where the policy stands if it has not moved since, and from where on a bound would hold the token back. The
same under `proximal` with several optimizer steps, whose start no file keeps. The terms are the trainer's own, on numpy
arrays. Credit has the formulas of `paceline.algorithms`, on rewards that the record kept; tests hold the two together.
Where they differ on a run, its rewards were changed after the credit was given, or one of the two is wrong; the card
says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.config import algorithm as algorithms
from paceline.config import trainer as losses
from paceline.config.trainer import TEACHER_KL_TRUST
from paceline.data import Sample, Scales, component_counts, minibatches, token_scales
from paceline.observe.analysis.text import format_four_digits as figure
from paceline.observe.record import Query, Row, RunFolder, StoredRollout
from paceline.observe.record.layout import RecordFiles, identity
from paceline.observe.web.rollouts import TRAINED_STATES, state_text
from paceline.observe.web.tokens import (
    SHIPPED_STATES,
    TokenStrip,
    alternatives,
    credit_config,
    loss_weights,
    shipped_rows,
    trainer_streams,
)
from paceline.trainer.terms import KL_TERMS, Ratio, TrainedTokens, rl_clip_reason, rl_term, teacher_kl_term

UNKNOWN_CONFIG = (
    "This version of Paceline does not understand the run's config, so it cannot say which formulas it used."
)
LOSS_PARTS = ("rl", "ce", "teacher_kl")
FORMULAS = {
    "dppo": "−A · r + kl_tau · (log r)²",
    "ppo": "−min(r · A, clip(r) · A)",
    "gspo": "−min(s · A, clip(s) · A), s the sequence's ratio",
    "cispo": "−clip(r) · A · log π",
    "reinforce": "−A · log π",
}
PASS_REWARD = 0.5
"""As in grpo: a reward of at least this counts as a pass."""
CREDIT_TOLERANCE = 1e-5
MOST_TOKENS = 4_000_000
"""Tokens of a batch that is counted for a card; the replay page takes its time for larger ones."""


@dataclass(frozen=True, slots=True)
class CardLine:
    """One line of a token's card: a name, how it is made, the numbers put in, and what comes out."""

    name: str
    formula: str = ""
    numbers: str = ""
    value: float | None = None
    note: str = ""
    wrong: bool = False
    """The record says something else."""
    replay: bool = False
    """The missing value can be computed by replaying the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """The known values of one token that trains. Log probabilities are at the sampling temperature."""

    advantage: float | None = None
    old: float | None = None
    """log of what the ratio is measured from; None where it was not kept."""
    ref: float | None = None
    base: float | None = None
    new: float | None = None
    """log of the policy in the step's forward pass, or in gspo of what has the sequence's ratio to `old`; None where it
    was not recorded, and the terms are those at r = 1."""
    entropy: float | None = None

    @property
    def now(self) -> float | None:
        """log pi, as far as it is known."""
        return self.old if self.new is None else self.new

    @property
    def suffix(self) -> str:
        return " at r = 1" if self.new is None else ""


def token_card(run: RunFolder, rollout: StoredRollout, strip: TokenStrip, at: int) -> dict[str, Any]:
    config, row = credit_config(run), rollout.row
    weights = {name: float(stream[at]) for name, stream in loss_weights(strip).items() if stream[at]}
    card = {"at": at, "by": weights, "lines": [], "why": "", "alternatives": alternatives(run, rollout, strip, at)}
    if config is None:
        return card | {"why": UNKNOWN_CONFIG}
    if strip.sample is None or row.domain != "training":
        return card | {"why": state_text(row.state) if row.domain != "training" or not rollout.samples else ""}
    why = state_text(row.state)
    if row.state in TRAINED_STATES:
        why = "" if weights else _why_untrained(rollout, strip, at, config)
    return card | {"lines": _lines(run, rollout, strip, at, config, weights), "why": why}


def _lines(
    run: RunFolder, rollout: StoredRollout, strip: TokenStrip, at: int, config: RunConfig, weights: dict[str, float]
) -> list[CardLine]:
    trainer, lines = config.trainer, []
    names = {"advantage": "advantages", "old": "logprobs", "ref": "teacher_logprobs", "base": "kl_ref_logprobs"}
    token = TokenValues(**{k: float(strip.streams[name][at]) for k, name in names.items() if name in strip.streams})
    scores = trainer_streams(run, rollout, strip)
    if scores and not np.isnan(scores["trainer_logprobs"][at]):
        token = replace(token, new=float(scores["trainer_logprobs"][at]), entropy=float(scores["entropy"][at]))
    share = sample_scales(run, rollout, strip.number, config) if weights else None

    def with_share(line: CardLine, part: str, of: TokenValues) -> list[CardLine]:
        return [line, *_share_lines(line, share, part, at, weights[part], config, of.suffix)]

    if "rl" in weights:
        lines += [_credit_line(run, rollout.row, token.advantage, config), _ratio_line(strip, config, scores, at)]
        rl_token = replace(token, new=_rl_logprob(strip, token, scores, trainer))
        lines += with_share(rl_line(trainer.loss, rl_token), "rl", rl_token)
        if not trainer.proximal and (edge := bound_note(trainer.loss, token)):
            lines.append(CardLine("bound", note=edge))
        if trainer.kl is not None and trainer.kl.how == "loss":
            lines.append(kl_line(trainer.kl, token))
        if trainer.kl is not None and trainer.kl.how == "advantage":
            note = "At train time kl.coef times the sample's mean of log π − log reference is taken off the advantage."
            lines.append(CardLine("kl shaping", note=note, replay=True))
        if trainer.entropy_coef:
            lines.append(entropy_line(trainer.entropy_coef, token))
    if "ce" in weights:
        lines += with_share(ce_line(token), "ce", token)
    if "teacher_kl" in weights:
        lines += with_share(teacher_kl_line(token), "teacher_kl", token)
    if scores and scores["skipped"][at] == 1:
        lines.append(CardLine("left out", note="The whole sample was left out (trainer.clip_skip_threshold)."))
    return lines


def _rl_logprob(
    strip: TokenStrip, token: TokenValues, scores: dict[str, NDArray], trainer: losses.TrainerConfig
) -> float | None:
    """log of the policy as the rl term compares it with `token.old`."""
    if token.new is None or token.old is None or strip.sample is None:
        return None
    if trainer.proximal:  # from the batch's start, which is known where the only step begins there
        return token.old if trainer.minibatches == 1 else None
    if trainer.loss.type == "gspo":
        return token.old + float(np.log(scores["ratio"][strip.sample.rl_token_weights != 0]).mean())
    return token.new


def rl_line(c: losses.LossConfig, token: TokenValues) -> CardLine:
    a = token.advantage
    if isinstance(c, losses.CustomLossConfig):
        return CardLine("rl term", f"given by {c.import_path}", replay=True)
    formula = FORMULAS[c.type]
    if isinstance(c, losses.ReinforceConfig) and c.max_ratio is not None:
        formula = "−min(r, max_ratio) · A · log π"
    if a is None:
        return CardLine("rl term", formula, note="Its advantage is made at train time.", replay=True)
    needs = isinstance(c, losses.CISPOConfig | losses.ReinforceConfig)
    if needs and token.old is None:
        return CardLine("rl term", formula, note="The sampler's log probability was not kept.", replay=True)
    ratio, tokens = _batch_of(token)
    loss, clipped = rl_term(c)(ratio, tokens)
    r, value = float(ratio.value[0]), float(loss[0]) + 0.0  # without the sign of -0.0
    if token.new is None:
        numbers = f"−({figure(a)}) · {figure((token.old or 0.0) if needs else 1.0)}"
        return CardLine("rl term at r = 1", formula, numbers, value)
    note = f"A = {figure(a)}, {'s' if c.type == 'gspo' else 'r'} = {figure(r)}."
    if clipped[0]:
        note += f" A bound held it back, {rl_clip_reason(c, r, r, float(ratio.difference[0]), a > 0)}."
    return CardLine("rl term", formula, "", value, note=note)


def ce_line(token: TokenValues) -> CardLine:
    if token.new is None:
        return CardLine("ce term", "−log π", note="log π is the trainer's and was not recorded.", replay=True)
    return CardLine("ce term", "−log π", f"−({figure(token.new)})", -token.new)


def entropy_line(coef: float, token: TokenValues) -> CardLine:
    formula = "−entropy_coef · H"
    if token.entropy is None:
        return CardLine("entropy term", formula, note="The entropy was not recorded.", replay=True)
    return CardLine("entropy term", formula, f"−{figure(coef)} · {figure(token.entropy)}", -coef * token.entropy)


def _batch_of(token: TokenValues) -> tuple[Ratio, TrainedTokens]:
    """A batch of this token alone, for the policy that trained it or, where that is not known, one that has not changed
    since it sampled."""
    old, advantage, ref, base, new = (
        np.array([x or 0.0]) for x in (token.old, token.advantage, token.ref, token.base, token.now)
    )
    streams = dict.fromkeys(("rollout_logprobs", "prox_logprobs"), old) | {"logprobs": new}
    streams |= {"advantages": advantage, "teacher_logprobs": ref, "kl_ref_logprobs": base}
    streams |= dict.fromkeys(("rl_scale", "ce_scale", "teacher_kl_scale", "regulariser_scale"), np.ones(1))
    streams |= dict.fromkeys(("entropy", "versions", "segments"), np.zeros(1, np.int64))
    return Ratio.from_logprobs(new, old), TrainedTokens(**streams, names=("",))


def bound_note(c: losses.LossConfig, token: TokenValues) -> str:
    """A sentence: at which probability the rl term drops or clips the token."""
    a = token.advantage
    if not a or token.old is None:
        return ""
    mu, up = math.exp(token.old), a > 0
    match c:
        case losses.DPPOConfig():
            edge, key = (mu + c.high, "+ trainer.loss.high") if up else (mu - c.low, "− trainer.loss.low")
            return _edge_note("Dropped from the policy term", edge, up, f"μ {figure(mu)} {key}")
        case losses.PPOConfig():
            edge, key = (mu * (1 + c.clip_high), "clip_high") if up else (mu * (1 - c.clip_low), "clip_low")
            return _edge_note("Clipped, so without a gradient,", edge, up, f"μ {figure(mu)}, trainer.loss.{key}")
        case losses.GSPOConfig():
            side = f"above {figure(1 + c.clip_high)}" if up else f"below {figure(1 - c.clip_low)}"
            return f"The whole sequence is clipped once its ratio s is {side}."
        case losses.CISPOConfig():
            return f"Its weight is held within {figure(c.min_ratio)} and {figure(c.max_ratio)}; no token is left out."
        case losses.ReinforceConfig() if c.max_ratio is not None:
            return f"Its weight is at most {figure(c.max_ratio)}; no token is left out."
    return ""


def _edge_note(what: str, edge: float, up: bool, source: str) -> str:
    if (edge >= 1) if up else (edge <= 0):
        return f"No bound can hold it: its probability cannot {'rise' if up else 'fall'} so far ({source})."
    return f"{what} once π is {'above' if up else 'below'} {figure(edge)} ({source})."


def teacher_kl_line(token: TokenValues) -> CardLine:
    formula = "−(log teacher − log π) · r"
    if token.ref is None or token.old is None:
        return CardLine("teacher_kl term", formula, note="The teacher's or the sampler's score was not kept.")
    ratio, tokens = _batch_of(token)
    loss, _ = teacher_kl_term(ratio, tokens)
    numbers = f"−({figure(token.ref)} − {figure(float(tokens.logprobs[0]))})"
    if token.new is not None:
        numbers += f" · {figure(float(ratio.value[0]))}"
    mu, up = math.exp(token.old), token.ref > token.old
    edge = mu + TEACHER_KL_TRUST if up else mu - TEACHER_KL_TRUST
    note = _edge_note("Dropped", edge, up, f"μ {figure(mu)}, trust {TEACHER_KL_TRUST}")
    return CardLine(f"teacher_kl term{token.suffix}", formula, numbers, float(loss[0]) + 0.0, note=note)


def kl_line(c: losses.KLConfig, token: TokenValues) -> CardLine:
    shape = {"k1": "d", "k2": "d² / 2", "k3": "e^−d + d − 1"}[c.kind]
    formula = f"kl.coef · ({shape}), d = log π − log reference"
    if token.base is None or token.old is None:
        return CardLine("kl term", formula, note="The reference is scored at train time.", replay=True)
    now = token.old if token.new is None else token.new
    term = KL_TERMS[c.kind](np.array([now]), np.array([token.base]))
    numbers = f"{figure(c.coef)} · {c.kind}(d = {figure(now - token.base)})"
    return CardLine(f"kl term{token.suffix}", formula, numbers, c.coef * float(term[0]))


def _ratio_line(strip: TokenStrip, config: RunConfig, scores: dict[str, NDArray], at: int) -> CardLine:
    trainer = config.trainer
    if "logprobs" not in strip.streams:
        return CardLine("ratio", "1: a frozen model sampled it", value=1.0)
    if trainer.proximal and trainer.minibatches == 1:
        note = "It is measured from the batch's start, and the only step is taken from there. Who really sampled is "
        return CardLine("ratio", "π / π at the batch's start", value=1.0, note=f"{note}weighed at train time.")
    old = "π at the batch's start" if trainer.proximal else "μ"
    if not trainer.proximal and scores:
        new, sampled = float(scores["trainer_logprobs"][at]), float(strip.streams["logprobs"][at])
        numbers = f"exp({figure(new)} − ({figure(sampled)}))"
        return CardLine("ratio", "π / μ", numbers, float(scores["ratio"][at]), _bound_sentence(scores, at))
    note = "π is the trainer's probability at train time, which this record does not have."
    if scores:
        note = "Of a later optimizer step; the policy at the batch's start is not recorded."
    if trainer.clip_skip_threshold is not None:
        share = figure(trainer.clip_skip_threshold)
        note += f" A sample with more than {share} of its ratios outside 0.8 to 1.2 is left out as a whole."
    return CardLine("ratio", f"π / {old}", note=note, replay=True)


def _bound_sentence(scores: dict[str, NDArray], at: int) -> str:
    return "A bound of the loss held it back." if scores["clipped"][at] == 1 else "No bound held it back."


def _why_untrained(rollout: StoredRollout, strip: TokenStrip, at: int, config: RunConfig) -> str:
    """Why nothing trains a token of a rollout that trained."""
    row, limit = rollout.row, config.trainer.max_sample_tokens
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


# -- the share of the step's loss -------------------------------------------------------------------------------------


def _share_lines(
    line: CardLine,
    share: tuple[Scales, NDArray] | None,
    part: str,
    at: int,
    weight: float,
    config: RunConfig,
    suffix: str,
) -> list[CardLine]:
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
    tokens, rollouts = (int(number) for number in totals[LOSS_PARTS.index(part)])
    note = f"{tokens:,} {part} tokens of {rollouts:,} rollouts train in this optimizer step."
    if line.value is None:
        return [CardLine(f"{part} scale", "weight / normaliser", value=scale, note=note)]
    numbers = f"{figure(weight)} · {figure(line.value)} / {figure(weight / scale)}"
    name = "loss share" if part == "rl" else f"{part} loss share"
    return [CardLine(f"{name}{suffix}", formula, numbers, scale * line.value, note=note)]


def sample_scales(
    run: RunFolder, rollout: StoredRollout, number: int, config: RunConfig
) -> tuple[Scales, NDArray] | None:
    """One sample's scales, and the counts they come from: tokens and rollouts of rl, ce and teacher_kl. None where the
    rollout did not train, or its batch is too large to be counted here."""
    row, trainer, limit = rollout.row, config.trainer, config.trainer.max_sample_tokens
    if row.state not in SHIPPED_STATES or not run.rollouts.keeps_all:
        return None
    record = (*identity(RecordFiles(run.path).index)[:2], len(shipped_rows(run, row.step)))
    totals = _step_totals(run, row.step, trainer.minibatches, limit, record).get(row.index)
    if totals is None:
        return None
    own = _trained_parts(rollout, limit)
    return token_scales(own, trainer.normalise, trainer.fixed_length, totals=totals)[number], totals


def _trained_parts(rollout: StoredRollout, limit: int | None) -> list[Sample]:
    return rollout.samples if limit is None else [sample.truncated_to(limit) for sample in rollout.samples]


@lru_cache(maxsize=64)
def _step_totals(run: RunFolder, step: int, parts: int, limit: int | None, record: tuple) -> dict[int, NDArray]:
    """The counts of each rollout's optimizer step, by the rollout's number in the record; none of a large batch.
    `record` is another one once the step's rows have changed."""
    rows = shipped_rows(run, step)
    if sum(row.prompt + row.tokens for row in rows) > MOST_TOKENS or not all(row.whole for row in rows):
        return {}
    batch = [(row.index, part) for row in rows for part in _trained_parts(run.rollouts.get(row.index), limit)]
    samples, found = [sample for _, sample in batch], {}
    for part in minibatches(samples, parts) if batch else ():
        found |= dict.fromkeys((batch[at][0] for at in part), component_counts([samples[at] for at in part]))
    return found


# -- credit -----------------------------------------------------------------------------------------------------------

_advantage_line = partial(CardLine, "advantage")


def _credit_line(run: RunFolder, row: Row, recorded: float | None, config: RunConfig) -> CardLine:
    env = next((env for env in config.env if env.name == row.env), None)
    algo = None if env is None else next((seat.algo for seat in env.seats if seat.name == row.actor), env.algo)
    if algo is None or row.reward is None:
        return _advantage_line(value=recorded, note="The run's config does not name its environment.")

    def scope(one: Row) -> tuple:
        parent = run.rollouts.get(one.index).parent if isinstance(algo, algorithms.HierarchicalConfig) else ""
        return one.member if parent else None, parent, one.kind, one.actor

    if isinstance(algo, algorithms.GroupCreditConfig) and algo.baseline == "batch":
        states = ("trained", "skipped", "dropped:no_sample")  # a replay keeps the credit it had
        query = Query(env=row.env, step=(row.step, row.step), domain=row.domain, state=states, sort="step", limit=None)
        rows = run.rollouts.find(query).rows
    else:
        rows = [run.rollouts.row(index) for index in run.rollouts.group_members(row.index)]
    peers = [one for one in rows if one.reward is not None and not one.error]
    if all(peer.index != row.index for peer in peers):
        peers.append(row)
    mine = scope(row)
    return explain_advantage(algo, row, [peer for peer in peers if scope(peer) == mine], recorded)


def explain_advantage(
    algo: algorithms.AlgorithmConfig, me: Row, peers: Sequence[Row], recorded: float | None
) -> CardLine:
    """The credit of a rollout with a reward among its peers, itself included."""
    place = [peer.index for peer in peers].index(me.index)
    match algo:
        case algorithms.GRPOConfig() | algorithms.EchoConfig():
            line = _group_line(algo, peers, place, "batch" if algo.baseline == "batch" else "group")
        case algorithms.HierarchicalConfig():
            flat = algorithms.GRPOConfig(std=algo.std, positive_only=algo.positive_only)
            line = _group_line(flat, peers, place, "siblings")
        case algorithms.MaxRLConfig():
            line = _max_rl_line(_rewards(peers), place)
        case algorithms.RewardConfig():
            line = _advantage_line("the reward itself", figure(me.reward or 0.0), me.reward)
        case algorithms.ConstantConfig():
            line = _advantage_line("a constant (algo.value)", value=algo.value)
        case algorithms.RAEConfig():
            if recorded is None:
                return _advantage_line("reward − running mean of this role")
            formula, mine = "reward − running mean of what this role earned before", me.reward or 0.0
            note = "The running mean is not recorded; it is what the reward and the advantage leave."
            return _advantage_line(formula, f"{figure(mine)} − {figure(mine - recorded)}", recorded, note)
        case algorithms.GAEConfig():
            note = "The critic's values at train time are not recorded."
            return _advantage_line("made by the trainer's critic from the rewards", note=note, replay=True)
        case algorithms.CustomConfig():
            return _advantage_line(f"given by {algo.import_path}", value=recorded)
        case _:
            return _advantage_line(f"{algo.type} gives none: no reward trains here", value=recorded)
    if (
        recorded is None
        or line.value is None
        or abs(recorded - line.value) <= CREDIT_TOLERANCE * max(1.0, abs(line.value))
    ):
        return line
    note = f"The record says {figure(recorded)}: rewards or credit were changed after one another. {line.note}"
    return replace(line, note=note.strip(), wrong=True)


def _rewards(peers: Sequence[Row]) -> NDArray:
    return np.array([peer.reward for peer in peers], np.float64)


def _group_line(
    algo: algorithms.GRPOConfig | algorithms.EchoConfig, peers: Sequence[Row], place: int, whom: str
) -> CardLine:
    rewards = _rewards(peers)
    reward = float(rewards[place])
    if algo.length_bonus is not None:
        costs = np.array([peer.tokens if algo.length_bonus == "tokens" else peer.turns for peer in peers], np.float64)
        passed = rewards >= PASS_REWARD
        if passed.any() and (mean_cost := costs[passed].mean()) > 0:
            rewards[passed] *= 1 + np.clip(1 - costs[passed] / mean_cost, 0, 1)
    mine, mean = float(rewards[place]), float(rewards.mean())
    of = f"mean of the {whom}" + (f" ({len(peers)} rollouts)" if len(peers) > 1 else " (itself alone)")
    value = mine - mean if np.ptp(rewards) else 0.0
    formula, numbers = f"reward − {of}", f"{figure(mine)} − {figure(mean)}"
    spread = float(rewards.std(ddof=int(algo.std == "sample"))) if len(rewards) > 1 else 0.0
    if algo.std != "none" and spread > 1e-8:
        value /= spread
        formula, numbers = f"({formula}) / their standard deviation", f"({numbers}) / {figure(spread)}"
    note = ""
    if mine != reward:
        note = f"For its length the reward {figure(reward)} counts as {figure(mine)} (algo.length_bonus)."
    if algo.positive_only and value < 0:
        value, note = 0.0, f"{note} Negative, so it is set to zero (algo.positive_only).".strip()
    return _advantage_line(formula, numbers, value, note)


def _max_rl_line(rewards: NDArray, place: int) -> CardLine:
    mine, mean = float(rewards[place]), float(rewards.mean())
    if mean <= 0:
        return _advantage_line("0, since the group's mean reward is not above 0", value=0.0)
    value = (mine - mean) / mean if np.ptp(rewards) else 0.0
    numbers = f"({figure(mine)} − {figure(mean)}) / {figure(mean)}"
    return _advantage_line("(reward − group mean) / group mean", numbers, value)
