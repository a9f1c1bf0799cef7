"""Writes the record of a run off its hot path, and reads it from the run directory alone. Imports neither torch nor
transformers."""

from paceline.observe.record.folder import ChangedKey, RunFolder, RunStatus, TimelineSpan, find_runs, open_run
from paceline.observe.record.rollout_recorder import RolloutRecorder
from paceline.observe.record.rows import Query, RolloutNotFound, Row, StoredRollout, StoredTurn

__all__ = [
    "ChangedKey",
    "Query",
    "RolloutNotFound",
    "RolloutRecorder",
    "Row",
    "RunFolder",
    "RunStatus",
    "StoredRollout",
    "StoredTurn",
    "TimelineSpan",
    "find_runs",
    "open_run",
]
