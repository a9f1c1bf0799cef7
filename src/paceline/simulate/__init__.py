"""Runs that take no time: the real orchestrator in front of simulated GPUs, under a clock that leaps."""

from paceline.simulate.clock import NothingLeft, VirtualClock, VirtualLoop, leap
from paceline.simulate.cost import CARDS, Card, Decoder, Learner, Model
from paceline.simulate.engine import SimulatedEngine
from paceline.simulate.lengths import Lengths
from paceline.simulate.plan import Plan
from paceline.simulate.run import Report, simulate
from paceline.simulate.split import best, sweep

__all__ = [
    "CARDS",
    "Card",
    "Decoder",
    "Learner",
    "Lengths",
    "Model",
    "NothingLeft",
    "Plan",
    "Report",
    "SimulatedEngine",
    "VirtualClock",
    "VirtualLoop",
    "best",
    "leap",
    "simulate",
    "sweep",
]
