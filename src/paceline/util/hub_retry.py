"""Repeats what the Hugging Face hub refused because it was busy, failed or could not be reached."""

import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from paceline.util.interrupts import on_interrupt

log = logging.getLogger("paceline.hub")

RETRIES = 5
FIRST_SECONDS, MOST_SECONDS = 10.0, 300.0
"""The first wait; each is twice the one before, up to the second."""
BUSY = ("429", "rate limit", "too many requests")
UNREACHED = ("ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "RemoteProtocolError")
"""Errors of the HTTP client, by name: the hub's library brings one of two."""
T = TypeVar("T")


def retry_hub(what: str, load: Callable[[], T]) -> T:
    """What `load` gives, tried again up to 5 times while the hub is busy, fails or is out of reach. Ctrl-C ends the
    wait. All other errors, a missing name say, are raised at once."""
    for retry in range(RETRIES + 1):
        try:
            return load()
        except Exception as error:
            reason = passing_trouble(error)
            if not reason or retry == RETRIES:
                raise
        seconds = min(FIRST_SECONDS * 2**retry, MOST_SECONDS)
        log.warning("%s: %s; trying again in %g s (%d of %d), Ctrl-C stops", what, reason, seconds, retry + 1, RETRIES)
        with on_interrupt(signal.default_int_handler):  # an event loop's own handler would not end the wait
            time.sleep(seconds)
    raise AssertionError("the last try returns or raises")


def passing_trouble(error: BaseException) -> str:
    """Why the hub may answer a little later, in a few words; empty where it will not. A name that cannot be looked up
    means that there is no network, and is no passing trouble."""
    causes = list(_causes(error))
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return ""
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status == 429 or (status is None and any(mark in str(cause).lower() for mark in BUSY)):
            return "the hub is busy (429, rate limit)"
        if status is not None:
            return f"the hub answers {status}" if status >= 500 else ""
        if type(cause).__name__ in UNREACHED or isinstance(cause, ConnectionRefusedError | ConnectionResetError):
            return "the hub cannot be reached"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from or during, the deepest last."""
    seen: list[BaseException] = []
    while error is not None and all(error is not one for one in seen):
        seen.append(error)
        error = error.__cause__ or error.__context__
    return iter(seen)
