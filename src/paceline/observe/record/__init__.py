"""Writes the record of a run off its hot path, and reads it from the run directory alone. Imports neither torch nor
transformers."""

from paceline.observe.record.folder import Changed, RunFolder, RunStatus, TimelineSpan, find_runs, open_run
from paceline.observe.record.rollout_recorder import RolloutRecorder
from paceline.observe.record.rows import Gone, Query, Row, Told, ToldTurn

__all__ = [
    "Changed",
    "Gone",
    "Query",
    "RolloutRecorder",
    "Row",
    "RunFolder",
    "RunStatus",
    "TimelineSpan",
    "Told",
    "ToldTurn",
    "find_runs",
    "open_run",
]
