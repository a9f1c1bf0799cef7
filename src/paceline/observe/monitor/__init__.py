"""Monitors of a run: live views, files, exporters and the watchdog. Imports neither torch nor transformers."""

from paceline.observe.monitor.base import Monitor, Monitors, RunOutcome, RunPlan
from paceline.observe.monitor.directory import RunDirectory, RunRecorder, read_jsonl, read_valid_jsonl
from paceline.observe.monitor.exporters import exporter
from paceline.observe.monitor.plain import PlainLines
from paceline.observe.monitor.screen import Screen, choose_view
from paceline.observe.monitor.summary import plot_rewards, summary
from paceline.observe.monitor.watchdog import watch_run

__all__ = [
    "Monitor",
    "Monitors",
    "PlainLines",
    "RunDirectory",
    "RunOutcome",
    "RunPlan",
    "RunRecorder",
    "Screen",
    "choose_view",
    "exporter",
    "plot_rewards",
    "read_jsonl",
    "read_valid_jsonl",
    "summary",
    "watch_run",
]
