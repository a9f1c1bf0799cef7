"""Predicts the memory and the step time of a run file before anything is loaded, and compares them with the run."""

from paceline.planner.compare import Comparison, compare
from paceline.planner.hardware import Hardware, found, parse, with_memory
from paceline.planner.plan import ResourcePlan, predict, write_plan

__all__ = [
    "Comparison",
    "Hardware",
    "ResourcePlan",
    "compare",
    "found",
    "parse",
    "predict",
    "with_memory",
    "write_plan",
]
