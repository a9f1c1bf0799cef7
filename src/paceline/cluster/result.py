"""Defines the result of a run: its outcome, its curve, and the trained policy."""

import base64
import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.monitor import RunOutcome
from paceline.monitor.history import Curve, MetricHistory
from paceline.monitor.plot import reward_picture
from paceline.monitor.text import amount, one_line, score

if TYPE_CHECKING:
    from paceline.cluster.policy import Policy

PICTURE_DPI = 90
"""Of the curve in a notebook, which is as wide as a page."""


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run. In a notebook it shows its curve."""

    outcome: RunOutcome
    directory: Path
    metrics: list[dict[str, Any]]
    """One entry per step, as in `metrics.jsonl`."""
    summary: list[str]
    error: Exception | None = None

    @cached_property
    def policy(self) -> "Policy":
        """The trained model, to chat with: `result.policy.chat("2 + 3 =")`. It is loaded when it is first used."""
        from paceline.cluster.policy import Policy

        return Policy(self.outcome.export or self.outcome.checkpoint or self.directory)

    def __repr__(self) -> str:
        rewards = [f"{key}: {_course(curve)}" for key, curve in self._rewards().items() if curve]
        parts = [f"{self.directory.name}: {self.outcome.status} after {amount(self.outcome.step, 'step')}"]
        parts += [f"reward {rewards[0].partition(': ')[2]}"] if len(rewards) == 1 else rewards
        parts += [one_line(self.outcome.message)] if self.outcome.status == "failed" else []
        return f"RunResult({', '.join([*parts, str(self.directory)])})"

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self.summary)
        if not any(self._rewards().values()):
            return f"<div>{lines}</div>"
        picture = base64.b64encode(reward_picture(self.metrics, self.directory.name, PICTURE_DPI)).decode()
        name = html.escape(repr(self), quote=True)
        return f'<div>{lines}<img alt="{name}" src="data:image/png;base64,{picture}"></div>'

    def _rewards(self) -> dict[str, Curve]:
        return MetricHistory.of(self.metrics).rewards


class RunFailed(PacelineError):
    """A run that ended because of an error. `result` is what it left behind up to there."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(result.outcome.message)
        self.result = result


def _course(curve: Curve) -> str:
    return f"{score(curve[0][1])} → {score(curve[-1][1])}"
