"""Frozen models that score what the policy sampled: room for those that the run serves itself."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.config.cluster import scored_here
from paceline.config.reference import ModelRef
from paceline.planner.places import BYTES, LOGITS, Place
from paceline.planner.shape import Shape, shape_of

SCORED_AT_ONCE = 32_768
"""Tokens of a scorer's micro-batch where the run file leaves them to be found."""

POLICY = ""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Whoever is asked about a share of the rollouts."""

    share: float
    shape: Shape | None
    """Of a model on scorers of the run; None for the policy, which its own engines serve."""


def teachers(config: RunConfig) -> Iterator[Teacher]:
    """Those whose speed can be planned: an endpoint is somebody else's."""
    total = sum(env.weight for env in config.env)
    shares: dict[str, float] = {}
    for env in config.env:
        asked = [getattr(algo, "teacher", None) for _, algo in env.credits]
        names = {ref.name for ref in asked if isinstance(ref, ModelRef) and ref.base_url is None}
        for name in names | ({POLICY} if "policy" in asked else set()):
            shares[name] = shares.get(name, 0.0) + env.weight / total
    for name, share in shares.items():
        yield Teacher(share, None if name == POLICY else shape_of(name))


def scorer_places(config: RunConfig, device: float | None, runtime: float) -> list[Place]:
    """Each scorer holds its model and one micro-batch, of which nothing is kept for a backward pass."""
    item, places = BYTES[config.model.dtype], []
    budget = config.trainer.micro_batch_tokens
    tokens = SCORED_AT_ONCE if budget == "auto" else budget
    for name in scored_here(config):
        shape = shape_of(name)
        wide = 6 * shape.hidden + 2 * shape.mlp * shape.active_experts
        parts = {
            "teacher weights": float(shape.parameters * item),
            "teacher activations": float(tokens * wide * item + LOGITS * 8),
            "runtime": runtime,
        }
        places.append(Place(f"scorer GPU, {name}", device, config.cluster.scorers, parts))
    return places
