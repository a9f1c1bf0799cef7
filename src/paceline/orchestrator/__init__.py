"""The conductor: gate, dispatcher, loop, evaluation, resume."""

from paceline.orchestrator.breaker import Breaker, RunStopped
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints, DamagedCheckpoint
from paceline.orchestrator.clock import Clock, DeadlineError, RealClock
from paceline.orchestrator.course import Course, lay_out, opened
from paceline.orchestrator.gate import Gate
from paceline.orchestrator.loop import Conductor, Parts, RollBack

__all__ = [
    "Breaker",
    "CheckpointError",
    "Checkpoints",
    "Clock",
    "Conductor",
    "Course",
    "DamagedCheckpoint",
    "DeadlineError",
    "Gate",
    "Parts",
    "RealClock",
    "RollBack",
    "RunStopped",
    "lay_out",
    "opened",
]
