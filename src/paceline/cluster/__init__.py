"""Where the parts of a run live."""

from paceline.cluster.local import local
from paceline.cluster.result import RunFailed, RunResult
from paceline.cluster.session import train

__all__ = ["RunFailed", "RunResult", "local", "train"]
