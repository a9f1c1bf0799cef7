"""Builds the parts of a run and places them in processes and on machines."""

from paceline.cluster.local import local
from paceline.cluster.policy import RunFailed, RunResult
from paceline.cluster.session import train

__all__ = ["RunFailed", "RunResult", "local", "train"]
