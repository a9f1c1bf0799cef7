"""Collects preflight findings: problems that stop a run, and notes on what could not be checked."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError


class PreflightError(PacelineError):
    """A run that would fail at its start. The message has one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(slots=True)
class Preflight:
    """The findings, one sentence each."""

    problems: list[str] = field(default_factory=list)
    """Why `train` would refuse the run."""
    notes: list[str] = field(default_factory=list)
    """Things that cannot be checked from here."""

    def attempt(self, work: Callable[[], Any]) -> Any:
        """The result of `work`; None where it raised a `PacelineError`, which becomes a problem."""
        try:
            return work()
        except PacelineError as error:
            self.add(str(error).splitlines())
            return None

    def add(self, problems: Iterable[str]) -> None:
        self.problems += [problem for problem in problems if problem not in self.problems]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
