"""Of which kind a failure is, and so what becomes of its episode."""

from collections.abc import Iterator, Mapping
from typing import Literal

from paceline.config.failures import Failures
from paceline.envs.base import JudgeFailed
from paceline.envs.workers import WorkerFailed
from paceline.failures import Policy, policy
from paceline.inference import EngineError, RequestError
from paceline.orchestrator.clock import DeadlineError
from paceline.user_code import described

Kind = Literal["episode", "timeout", "worker", "engine", "request", "judge"]
KINDS: tuple[Kind, ...] = ("episode", "timeout", "worker", "engine", "request", "judge")

Policies = Mapping[Kind, Policy]


def policies(config: Failures) -> Policies:
    """What the run file says of each kind of failed episode."""
    return {kind: policy(getattr(config, kind), config.tries) for kind in KINDS}


def kind_of(error: BaseException) -> Kind:
    """Of which kind an exception out of an environment is. One that was raised `from` another, or as part of a group,
    is of the kind of what caused it: an engine that is gone is no fault of the code that asked it."""
    return next((kind for cause in causes(error) if (kind := _known(cause))), "episode")


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and what it says it was caused by, the latest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        inner = current.exceptions[0] if isinstance(current, BaseExceptionGroup) else None
        current = inner or current.__cause__


def told(error: BaseException) -> str:
    """The exception as a user reads it: of a group, whatever went wrong first in it; of our own, the sentence alone."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, WorkerFailed) and error.kind == "exited":
        return f"a worker process {error}"
    if isinstance(error, EngineError | DeadlineError | JudgeFailed):
        return str(error)
    return described(error)


def _known(error: BaseException) -> Kind | None:
    match error:
        case DeadlineError():
            return "timeout"
        case JudgeFailed():
            return "judge"
        case RequestError():
            return "request"
        case EngineError():
            return "engine"
        case WorkerFailed(kind="exited"):
            return "worker"
        case WorkerFailed(kind="timed_out"):
            return "timeout"
    return None
