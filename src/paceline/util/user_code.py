"""Calls user code so that an exception in it names the hook, the file, the line and the function.

with user_code("trainer.loss, losses.py:mine", "sequence 3"): loss = fn(streams)
"""

import asyncio
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from paceline.errors import PacelineError

TRACEBACK_VARIABLE = "PACELINE_TRACEBACK"
"""Environment variable: with `1` a failed command prints whole tracebacks, Paceline's and torch's frames included."""
_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARY_FOLDERS = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
_LIBRARIES = tuple({str(path) + os.sep for place in _LIBRARY_FOLDERS for path in (place, place.resolve())})
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


_SYS_PATH = tuple(sys.path)
_RECURSION_LIMIT = sys.getrecursionlimit()
FrameFilter = Callable[[traceback.FrameSummary], bool]


class TracedError(PacelineError):
    """A sentence with the traceback that led to it."""

    def __init__(self, message: str, frames: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.frames = frames
        """The traceback, cut to the user's own frames; empty where it is none of theirs."""
        self.trace = trace


class UserCodeError(TracedError):
    """User code that raised. `__cause__` is its exception, where that happened in this process."""


class InternalError(TracedError):
    """An error that Paceline did not expect: a bug to report. `__cause__` is the exception."""


@contextmanager
def user_code(hook: str, about: str = "") -> Generator[None]:
    """Whatever the block raises becomes a `UserCodeError`. `hook` names who was called, as the run file does, and
    `about` what it was called for: an environment, a row, a ticket. Paceline's own errors pass, and so do Ctrl-C and
    the cancellation of the task that runs the block."""
    here = object()
    _open_hooks[here] = (hook, time.monotonic())
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        if is_ctrl_c(error) or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
            raise
        raise hook_error(hook, error, about) from error
    finally:
        del _open_hooks[here]


_open_hooks: dict[object, tuple[str, float]] = {}


def open_hooks() -> list[tuple[str, float]]:
    """Hooks that run now, and since when by the monotonic clock. Safe from any thread."""
    return list(_open_hooks.values())


def restore_import_path() -> None:
    """Undo what user code may have done to the interpreter: modules that are imported later would not be found."""
    sys.path += [entry for entry in _SYS_PATH if entry not in sys.path]
    if sys.getrecursionlimit() < _RECURSION_LIMIT:
        sys.setrecursionlimit(_RECURSION_LIMIT)


def is_cancelled() -> bool:
    """Whether the running task is being cancelled; a CancelledError that comes otherwise is user code's own."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        return False
    return task is not None and task.cancelling() > 0


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt may be the user's signal and not user code's own. While a run is under way it has a
    handler of its own, which raises nothing in user code."""
    here = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    return here and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def hook_error(hook: str, error: BaseException, about: str = "") -> UserCodeError:
    """The error to raise `from` an exception of a hook."""
    # A hook may live in an installed package.
    said, frames = describe_error(error, is_foreign_frame), user_frames(error, is_foreign_frame)
    call = f" ({about})" if about else ""
    return UserCodeError(f"{hook} raised {said}{call}", frames, full_traceback(error))


def unexpected_failure(error: Exception, record: Path) -> PacelineError:
    """An exception that nothing has handled, as a sentence: of user code where its traceback leads there, else a bug of
    Paceline's. `record` is the file that will hold the whole traceback."""
    if user_frames(error):
        failure: PacelineError = hook_error("user code", error)
    elif type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        failure = PacelineError(
            f"out of memory ({error}): lower trainer.micro_batch_tokens, engine.max_running or sampling.max_tokens; "
            "`paceline check` estimates what each needs"
        )
    elif isinstance(error, OSError):
        failure = PacelineError(f"the system refused something the run needs: {error}")
    else:
        what = describe_error(error, lambda frame: True)
        text = f"a bug in Paceline: {what}. Please report it with {record}, which has the traceback"
        failure = InternalError(text, trace=full_traceback(error))
    failure.__cause__ = error
    return failure


def describe_error(error: BaseException, *others: FrameFilter) -> str:
    """The exception and the user's innermost line: `KeyError: 'answer', at score.py, line 12, in judge`. Where no frame
    is the user's, the innermost that one of the `others` takes."""
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    _, frames = _frames(error, is_user_frame, *others)
    return f"{said}, at {_place(frames[-1])}" if frames else said


def frames_of(innermost: FrameType | None) -> list[FrameType]:
    """A running stack, outermost frame first."""
    return [frame for frame, _ in traceback.walk_stack(innermost)][::-1] if innermost is not None else []


def user_place(stack: Iterable[FrameType], *others: FrameFilter) -> str:
    """Where a stack, outermost frame first, stands in user code: `score.py, line 12, in judge`. Empty where no frame is
    the user's, or one that the `others` take."""
    frames = [
        traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name, lookup_line=False) for f in stack
    ]
    taken = (frame for take in (is_user_frame, *others) for frame in reversed(frames) if take(frame))
    return next(map(_place, taken), "")


def user_frames(error: BaseException, *others: FrameFilter) -> str:
    """The traceback without frames of Paceline, the standard library and installed packages. Empty where no other is
    left, unless one of the `others` takes some."""
    one, frames = _frames(error, is_user_frame, *others)
    if not frames:
        return ""
    lines = ["Traceback (of your code):\n", *traceback.format_list(frames), *traceback.format_exception_only(one)]
    return "".join(lines).rstrip()


def _frames(error: BaseException, *takes: FrameFilter) -> tuple[BaseException, list[traceback.FrameSummary]]:
    """The frames of the deepest cause that has any which the first of `takes` takes, else the second, and so on."""
    for take in takes:
        for one in cause_chain(error):
            if frames := [frame for frame in traceback.extract_tb(one.__traceback__) if take(frame)]:
                return one, frames
    return error, []


def full_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def failure_traces(error: BaseException) -> tuple[str, str]:
    """The traces that a failed run records: the user's frames, and the whole traceback; empty for an error that is a
    sentence and nothing else."""
    if isinstance(error, TracedError):
        return error.frames, error.trace
    frames = "" if error.__cause__ is None else user_frames(error.__cause__)
    return (frames, full_traceback(error)) if frames else ("", "")


def trace_to_print(frames: str, trace: str) -> str:
    """The trace that a command prints below the sentence of a failure."""
    return trace if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0") else frames


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what caused it, the deepest cause first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not one for one in seen):
        seen.append(current)
        inner = current.exceptions[0] if isinstance(current, BaseExceptionGroup) else None
        current = inner or current.__cause__
    return reversed(seen)


def is_foreign_frame(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((_PACKAGE_ROOT, "<frozen "))


def is_user_frame(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is neither Paceline's nor of the standard library or an installed package."""
    name = frame.filename
    library = name.startswith(_LIBRARIES) or any(part in name for part in _PACKAGE_FOLDERS)
    generated = name == "<string>" and frame.name == "__init__"  # a dataclass's
    return is_foreign_frame(frame) and not library and not generated


def _place(frame: traceback.FrameSummary) -> str:
    file = frame.filename
    with suppress(ValueError, OSError):  # it lies elsewhere, or the working directory is gone
        file = str(Path(file).relative_to(Path.cwd()))
    return f"{file}, line {frame.lineno}, in {frame.name}"
