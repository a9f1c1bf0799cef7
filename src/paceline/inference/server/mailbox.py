"""From the engine's thread to the event loop, with one wake-up for everything a step produced."""

import asyncio
from collections import deque
from functools import partial
from typing import Any

GATHER_SECONDS = 0.001
"""How long a letter may wait for others: less than a decode step takes."""


class Post:
    """Carries letters from any thread to mailboxes of one event loop.

    A step of the engine speaks to hundreds of listeners. The first letter wakes the loop, the others only join the
    pile; a moment later the loop delivers them all, in the order they came. Without that moment it would fight the
    engine for Python's lock over every token. The flag is lowered before the pile is emptied, so a letter that comes in
    between raises it again: none is ever left lying.
    """

    def __init__(self) -> None:
        self._pile: deque[tuple[Mailbox, Any]] = deque()
        self._woken = False
        self._loop = asyncio.get_running_loop()

    def send(self, box: "Mailbox", letter: Any) -> None:
        self._pile.append((box, letter))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_SECONDS, self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self._pile:
            box, letter = self._pile.popleft()
            box.put(letter)


class Mailbox:
    """Letters for one reader. A reader that is late finds several at once, and can answer them together."""

    def __init__(self, post: Post) -> None:
        self._letters: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None
        self.slot = partial(post.send, self)
        """Where any thread may drop a letter."""

    def put(self, letter: Any) -> None:
        """Deliver a letter; from the loop's own thread only."""
        self._letters.append(letter)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Any]:
        """All letters, once there is at least one."""
        if not self._letters:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter  # bounded: by the client's patience
        letters, self._letters = self._letters, []
        return letters
