"""Sorts what failed an episode by kind, and makes the error that ends a run over it."""

from collections.abc import Mapping
from typing import Literal

from paceline.envs.base import JudgeFailed
from paceline.envs.workers import WorkerFailed
from paceline.errors import EngineError, RequestError, RunStopped
from paceline.util.deadlines import DeadlineError
from paceline.util.user_code import UserCodeError, cause_chain, describe_error, full_traceback, user_frames


class UserCodeStopped(RunStopped, UserCodeError):
    """The run cannot go on, because user code raised too often."""


def stop_error(text: str, cause: BaseException | None) -> RunStopped:
    """The error that ends a run over a failed episode, raised from what its environment raised."""
    frames = "" if cause is None else user_frames(cause)
    error = UserCodeStopped(text, frames, full_traceback(cause)) if cause is not None and frames else RunStopped(text)
    error.__cause__ = cause
    return error


FailureKind = Literal["episode", "timeout", "worker", "engine", "request", "judge"]
KIND_BY_CLASS: Mapping[type[BaseException], FailureKind] = {
    DeadlineError: "timeout",
    JudgeFailed: "judge",
    RequestError: "request",
    EngineError: "engine",
}
"""A request error is an engine error too: the first that fits counts."""


def failure_kind(error: BaseException) -> FailureKind:
    """Of which kind an exception out of an environment is. One that was raised `from` another, or as part of a group,
    is of the kind of what caused it: an engine that is gone is no fault of the code that asked it."""
    kinds = [kind for cause in cause_chain(error) if (kind := _kind_of(cause))]
    return kinds[-1] if kinds else "episode"


def error_text(error: BaseException) -> str:
    """The exception as a user reads it: of a group, the first one in it; of our own, the sentence alone."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, WorkerFailed) and error.kind == "exited":
        return f"a worker process {error}"
    if isinstance(error, EngineError | DeadlineError | JudgeFailed):
        return str(error)
    return describe_error(error)


def _kind_of(error: BaseException) -> FailureKind | None:
    if isinstance(error, WorkerFailed):
        return "worker" if error.kind == "exited" else "timeout" if error.kind == "timed_out" else None
    return next((kind for known, kind in KIND_BY_CLASS.items() if isinstance(error, known)), None)


class EpisodeLost(Exception):
    """An episode failed: why, and of which kind the failure is. It concerns that episode alone."""

    def __init__(self, cause: str, kind: FailureKind = "episode") -> None:
        super().__init__(cause)
        self.kind: FailureKind = kind
