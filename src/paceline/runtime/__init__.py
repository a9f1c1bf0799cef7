"""Builds the parts of a run and places them in processes and on machines."""

from paceline.runtime.local import local_placement
from paceline.runtime.saved_policy import RunFailed, RunResult
from paceline.runtime.session import train

__all__ = ["RunFailed", "RunResult", "local_placement", "train"]
