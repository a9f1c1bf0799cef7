"""Algorithms: one short module each, on one contract."""

from collections.abc import Sequence

from paceline.algorithms.base import Algorithm, AlgorithmError, Means, RewardCredit, broadcast, centred, spread
from paceline.algorithms.constant import Constant
from paceline.algorithms.custom import CreditInputs, CustomCredit, custom_algorithm
from paceline.algorithms.echo import Echo
from paceline.algorithms.gae import GAE
from paceline.algorithms.grpo import GRPO
from paceline.algorithms.hierarchical import Hierarchical
from paceline.algorithms.max_rl import MaxRL
from paceline.algorithms.opd import OPD
from paceline.algorithms.opsd import OPSD
from paceline.algorithms.rae import RAE
from paceline.algorithms.reward import Reward
from paceline.algorithms.seats import Seats
from paceline.algorithms.sft import SFT
from paceline.config import algorithm as config
from paceline.config.env import EnvBase

__all__ = [
    "GAE",
    "GRPO",
    "OPD",
    "OPSD",
    "RAE",
    "SFT",
    "Algorithm",
    "AlgorithmError",
    "Constant",
    "CreditInputs",
    "CustomCredit",
    "Echo",
    "Hierarchical",
    "MaxRL",
    "Means",
    "Reward",
    "RewardCredit",
    "Seats",
    "broadcast",
    "build_algorithm",
    "centred",
    "credit_for",
    "spread",
]


def build_algorithm(c: config.AlgorithmConfig) -> Algorithm:
    """The algorithm a section of the run file describes."""
    match c:
        case config.GRPO():
            return GRPO(c)
        case config.MaxRL():
            return MaxRL()
        case config.Reward():
            return Reward()
        case config.Constant():
            return Constant(c)
        case config.RAE():
            return RAE(c)
        case config.Hierarchical():
            return Hierarchical(c)
        case config.GAE():
            return GAE()
        case config.Echo():
            return Echo(c)
        case config.OPD():
            return OPD(c)
        case config.OPSD():
            return OPSD(c)
        case config.SFT():
            return SFT(c)
        case config.Custom():
            return custom_algorithm(c)


def credit_for(env: EnvBase, actors: Sequence[str]) -> Algorithm:
    """Who credits an environment's actors: its `algo`, and in the seats it names an algorithm of their own."""
    assert env.algo is not None
    common, seats = build_algorithm(env.algo), {}
    for seat in env.seats:
        if seat.name not in actors:
            known = ", ".join(f"`{actor}`" for actor in actors)
            raise AlgorithmError(f"environment `{env.name}` has no seat `{seat.name}`: its seats are {known}")
        if seat.name in seats:
            raise AlgorithmError(f"environment `{env.name}`: seat `{seat.name}` is given twice; it has one algorithm")
        seats[seat.name] = build_algorithm(seat.algo)
    return Seats(common, seats) if seats else common
