"""Whatever goes wrong with a call is an answer too."""

import traceback
from collections.abc import Awaitable
from pathlib import Path

from paceline.cluster.processes.frames import Call, Done, Failed
from paceline.errors import PacelineError
from paceline.user_code import described, failure_traces, user_frames, whole


async def answered(call: Call, doing: Awaitable[Done], log: Path | None = None) -> Done | Failed:
    """What the call came to. A bug keeps its name there, and its trace here: in the log, where standard error is a
    person's screen."""
    try:
        return await doing  # bounded: by whoever does it
    except OSError as error:
        return Failed(call.number, error.strerror or str(error), error.errno)
    except PacelineError as error:
        frames, trace = failure_traces(error)
        return Failed(call.number, str(error), None, frames, trace)
    except Exception as error:
        _keep_trace(log)
        return Failed(call.number, described(error), None, user_frames(error), whole(error))


def _keep_trace(log: Path | None) -> None:
    if log is None:
        traceback.print_exc()
        return
    with log.open("a", encoding="utf-8") as file:
        traceback.print_exc(file=file)
