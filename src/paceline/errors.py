"""Errors that are a sentence for the user rather than a bug, and those of every engine and trainer."""


class PacelineError(Exception):
    """Says what was wrong, where, and what to write instead. The command line prints it without a traceback."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class EngineError(PacelineError):
    """The engine cannot answer, as a sentence for the user."""


class RequestError(EngineError):
    """This request can never be answered; another may be."""


class UnknownModel(RequestError):
    """The request names a model that is not served."""


class Overloaded(EngineError):
    """The queue is full; the same request may succeed later."""


class Mismatch(EngineError):
    """Weights are not what they claim to be: nothing sampled from them could be trusted."""


class DeltaBaseMismatch(EngineError):
    """The engine does not hold the weights a delta builds on: it must be sent all of them."""


class UpdateLost(EngineError):
    """The weights of an update are gone: no engine can be given them any more."""


class Unreachable(EngineError):
    """No answer came: the engine or the way to it is gone. Noise is keyed, so asking another one is safe."""


class PartialUpdateError(Unreachable):
    """An update broke off in the middle: the engine holds a mixture of two versions, says so, and answers no request
    until it is sent all weights."""


class RunStopped(PacelineError):
    """The run cannot go on, as a sentence for the user."""


class TrainerError(PacelineError):
    """Training cannot go on, as a sentence for the user."""


class TrainerLost(TrainerError):
    """The trainer's process ended, and with it everything since the newest checkpoint."""
