"""Simulates runs in virtual time: the real orchestrator in front of simulated GPUs."""

from paceline.simulate.clock import NothingLeft, VirtualClock, VirtualLoop, leap
from paceline.simulate.cost import CARDS, Decoder, Lengths, Model, SimulatedGpu, TrainingGpus
from paceline.simulate.engine import SimulatedEngine
from paceline.simulate.plan import SimulationPlan
from paceline.simulate.run import SimulationReport, best, simulate, sweep

__all__ = [
    "CARDS",
    "Decoder",
    "Lengths",
    "Model",
    "NothingLeft",
    "SimulatedEngine",
    "SimulatedGpu",
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
