"""Monitors of a run: live views, files, exporters and the watchdog. Imports neither torch nor transformers."""

from paceline.monitor.base import Monitor, Monitors, RunOutcome, RunPlan
from paceline.monitor.directory import RunDirectory, RunDirectoryError, read_jsonl, read_sound
from paceline.monitor.exporters import MissingExtra, exporter
from paceline.monitor.plain import PlainLines
from paceline.monitor.plot import plot_rewards
from paceline.monitor.recorder import RunRecorder
from paceline.monitor.screen import Screen, choose
from paceline.monitor.summary import summary
from paceline.monitor.watchdog import watching

__all__ = [
    "MissingExtra",
    "Monitor",
    "Monitors",
    "PlainLines",
    "RunDirectory",
    "RunDirectoryError",
    "RunOutcome",
    "RunPlan",
    "RunRecorder",
    "Screen",
    "choose",
    "exporter",
    "plot_rewards",
    "read_jsonl",
    "read_sound",
    "summary",
    "watching",
]
