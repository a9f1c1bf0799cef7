"""Algorithms: one short module each, on one contract."""

from collections.abc import Callable, Sequence

from paceline.algorithms.base import (
    Algorithm,
    AlgorithmContext,
    AlgorithmError,
    RewardCredit,
    broadcast,
    centred,
    spread,
)
from paceline.algorithms.baselines import GAE, RAE, Constant, Reward
from paceline.algorithms.custom import CreditInputs, CustomCredit, custom_algorithm
from paceline.algorithms.distillation import OPD, OPSD
from paceline.algorithms.echo import Echo
from paceline.algorithms.grpo import GRPO, Hierarchical, MaxRL
from paceline.algorithms.per_actor import PerActorAlgorithm
from paceline.algorithms.sft import SFT
from paceline.config import algorithm as config
from paceline.config.env import BaseEnvConfig

__all__ = [
    "GAE",
    "GRPO",
    "OPD",
    "OPSD",
    "RAE",
    "SFT",
    "Algorithm",
    "AlgorithmContext",
    "AlgorithmError",
    "Constant",
    "CreditInputs",
    "CustomCredit",
    "Echo",
    "Hierarchical",
    "MaxRL",
    "PerActorAlgorithm",
    "Reward",
    "RewardCredit",
    "broadcast",
    "build_algorithm",
    "centred",
    "credit_for",
    "spread",
]


BUILDERS: dict[type, Callable[..., Algorithm]] = {
    config.GRPOConfig: GRPO,
    config.MaxRLConfig: lambda _: MaxRL(),
    config.RewardConfig: lambda _: Reward(),
    config.ConstantConfig: Constant,
    config.RAEConfig: RAE,
    config.HierarchicalConfig: Hierarchical,
    config.GAEConfig: lambda _: GAE(),
    config.EchoConfig: Echo,
    config.OPDConfig: OPD,
    config.OPSDConfig: OPSD,
    config.SFTConfig: SFT,
    config.CustomConfig: custom_algorithm,
}


def build_algorithm(c: config.AlgorithmConfig) -> Algorithm:
    return BUILDERS[type(c)](c)


def credit_for(env: BaseEnvConfig, actors: Sequence[str]) -> Algorithm:
    """The algorithm for an environment's actors: its `algo`, and for the seats it names one of their own."""
    assert env.algo is not None
    common, seats = build_algorithm(env.algo), {}
    for seat in env.seats:
        if seat.name not in actors:
            known = ", ".join(f"`{actor}`" for actor in actors)
            raise AlgorithmError(f"environment `{env.name}` has no seat `{seat.name}`: its seats are {known}")
        if seat.name in seats:
            raise AlgorithmError(f"environment `{env.name}`: seat `{seat.name}` is given twice; it has one algorithm")
        seats[seat.name] = build_algorithm(seat.algo)
    return PerActorAlgorithm(common, seats) if seats else common
