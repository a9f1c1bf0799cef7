"""Simulates runs in virtual time: the real orchestrator in front of simulated GPUs."""

from paceline.simulate.cost import CARDS, Decoder, Lengths, Model, SimulationPlan, TrainingGpus
from paceline.simulate.engine import SimulatedEngine, SimulationDeadlock, VirtualClock, VirtualLoop, run_virtual
from paceline.simulate.run import SimulationReport, best, simulate, sweep

__all__ = [
    "CARDS",
    "Decoder",
    "Lengths",
    "Model",
    "SimulatedEngine",
    "SimulationDeadlock",
    "SimulationPlan",
    "SimulationReport",
    "TrainingGpus",
    "VirtualClock",
    "VirtualLoop",
    "best",
    "run_virtual",
    "simulate",
    "sweep",
]
