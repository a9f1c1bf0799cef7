"""Where the parts of a run live."""

from paceline.cluster.local import local
from paceline.cluster.session import RunResult, train

__all__ = ["RunResult", "local", "train"]
