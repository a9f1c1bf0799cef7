"""Counts the tokens of one batch: prompts, replies, and those that train."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.config.model import ModelRef
from paceline.planner.shape import ModelShape, shape_of

POLICY = ""


def teachers(config: RunConfig) -> Iterator[tuple[float, ModelShape | None]]:
    """The share of the rollouts that each teacher scores, and its shape; None for the policy, which its own engines
    serve. The speed of an external endpoint cannot be planned."""
    total = sum(env.weight for env in config.env)
    shares: dict[str, float] = {}
    for env in config.env:
        asked = [getattr(algo, "teacher", None) for _, algo in env.algorithms]
        names = {ref.name for ref in asked if isinstance(ref, ModelRef) and ref.base_url is None}
        for name in names | ({POLICY} if "policy" in asked else set()):
            shares[name] = shares.get(name, 0.0) + env.weight / total
    for name, share in shares.items():
        yield share, None if name == POLICY else shape_of(name)


PROMPT = 128
"""Tokens of a prompt where none are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One batch, in tokens of an average rollout. Before a run these are assumptions."""

    rollouts: float
    group: float
    prompt: float
    reply: float
    longest: float
    """Reply that a synchronous batch waits for."""
    kept: float = 1.0
    """Share of the sampled groups that train; filters drop the rest, and others are sampled in their stead."""
    played: float = 1.0
    """Share of the rollouts that the engine samples; demonstrations are only read."""
    evaluated: float = 0.0
    """Episodes of one evaluation; 0 where the run file does not say."""
    assumed: bool = True

    @property
    def sampled(self) -> float:
        """Rollouts sampled for a batch."""
        return self.rollouts * self.played / max(self.kept, 0.01)

    @property
    def trained_tokens(self) -> float:
        return self.rollouts * (self.prompt + self.reply)

    def computed_tokens(self, shared: bool) -> float:
        """Tokens of a batch, prompts once a group where they are shared."""
        prompts = self.rollouts / (self.group if shared else 1)
        return prompts * self.prompt + self.rollouts * self.reply


def assumed(config: RunConfig, shape: ModelShape, prompt: int | None = None, reply: int | None = None) -> Work:
    """Prompts of 128 tokens and replies of half the allowed length, where no lengths are given."""
    most = config.sampling.max_tokens
    weights = [(env.weight, env.algo.plays if env.algo else True, env.group_size or 1) for env in config.env]
    total = sum(weight for weight, _, _ in weights)
    # Where a section counts its held-out examples.
    held_out = [getattr(env, "eval_examples", None) or 0 for env in config.env if config.eval.every]
    return Work(
        rollouts=config.batch_size,
        group=sum(weight * size for weight, _, size in weights) / total,
        prompt=prompt or max(1, min(PROMPT, shape.longest(config.engine) - most)),
        reply=reply or max(1.0, most / 2),
        longest=max(most, reply or 0),
        played=sum(weight for weight, plays, _ in weights if plays) / total,
        evaluated=sum(min(n, config.eval.examples or n) for n in held_out) * config.eval.samples,
        assumed=prompt is None or reply is None,
    )
