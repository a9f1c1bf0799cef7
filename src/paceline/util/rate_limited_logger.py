"""Logs a warning that keeps recurring only once in a while."""

import asyncio
import logging
from collections.abc import Hashable

EVERY_SECONDS = 30.0
MOST_CAUSES = 256


class RateLimitedLogger:
    """Warns once for each cause, and again when it still holds half a minute later. Time is the event loop's."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._warned_at: dict[Hashable, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def warn(self, cause: Hashable, text: str, *args: object) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop or len(self._warned_at) > MOST_CAUSES:  # another loop has another time
            self._loop, self._warned_at = loop, {}
        if loop.time() - self._warned_at.get(cause, -EVERY_SECONDS) >= EVERY_SECONDS:
            self._warned_at[cause] = loop.time()
            self._log.warning(text, *args)
