"""Simulates runs in virtual time: the real orchestrator in front of simulated GPUs."""

from paceline.simulate.cost import CARDS, Decoder, Lengths, Model, SimulationPlan, TrainingGpus
from paceline.simulate.engine import NothingLeft, SimulatedEngine, VirtualClock, VirtualLoop, leap
from paceline.simulate.run import SimulationReport, best, simulate, sweep

__all__ = [
    "CARDS",
    "Decoder",
    "Lengths",
    "Model",
    "NothingLeft",
    "SimulatedEngine",
    "SimulationPlan",
    "SimulationReport",
    "TrainingGpus",
    "VirtualClock",
    "VirtualLoop",
    "best",
    "leap",
    "simulate",
    "sweep",
]
