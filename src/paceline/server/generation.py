"""Runs the choices of one HTTP request, and carries tokens from the engine's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from paceline.engine.base import Completion, Engine, GenerateRequest, Piece

GATHER_SECONDS = 0.001
"""How long a message may wait for others: less than a decode step takes."""


class ThreadToLoopQueue:
    """Carries messages from any thread to inboxes of one event loop.

    A step of the engine reaches hundreds of listeners. The first message wakes the loop, the others are only appended;
    a moment later the loop delivers them all, in the order they came. Without that moment it would fight the engine for
    Python's lock over every token. The flag is lowered before the queue is emptied, so a message that comes in between
    raises it again: none is ever left behind.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._flush_scheduled = False
        self._loop = asyncio.get_running_loop()

    def send(self, inbox: asyncio.Queue[Any], message: Any) -> None:
        """From any thread."""
        self._pending.append((inbox, message))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_SECONDS, self._deliver)

    def _deliver(self) -> None:
        self._flush_scheduled = False
        while self._pending:
            inbox, message = self._pending.popleft()
            inbox.put_nowait(message)


Event = tuple[int, Piece | Completion]
"""A choice's index with its new tokens, or with its completion."""

CHOICES_PER_TURN = 32
"""Choices submitted in one turn of the event loop, so that a request of thousands does not block others."""


class Generation:
    """Runs requests concurrently and reports their events, in order for each choice.

    Leaving the context takes whatever still runs out of the engine, however it is left: done, failed, or because the
    client is gone.
    """

    def __init__(
        self, engine: Engine, queue: ThreadToLoopQueue, requests: Sequence[GenerateRequest], listen: bool
    ) -> None:
        self._engine, self._queue, self._requests, self._listen = engine, queue, requests, listen
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: list[asyncio.Task[Completion]] = []
        self._stopped_choices: set[int] = set()

    async def __aenter__(self) -> "Generation":
        try:
            for index, request in enumerate(self._requests):
                if index and index % CHOICES_PER_TURN == 0:
                    await asyncio.sleep(0)
                listener = partial(self._enqueue, index) if self._listen else None
                task = asyncio.ensure_future(self._engine.generate(request, listener))
                task.add_done_callback(partial(self._on_done, index))
                self._tasks.append(task)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()

    def stop(self, index: int) -> None:
        """Cancel a choice whose text is complete, as after a stop string."""
        self._stopped_choices.add(index)
        self._tasks[index].cancel()

    async def events(self) -> AsyncIterator[list[Event]]:
        """Events since the last look, until every choice has ended. The first failure ends it all."""
        running = len(self._tasks)
        while running:
            events: list[Event] = []
            messages = [await self._inbox.get()]  # bounded: by the client's patience
            while not self._inbox.empty():  # a reader that is late finds several, and answers them together
                messages.append(self._inbox.get_nowait())
            for index, item in messages:
                if isinstance(item, asyncio.Task):
                    running -= 1
                    if index in self._stopped_choices:
                        continue
                    item = await item  # bounded: it is done
                events.append((index, item))
            yield events

    async def completions(self) -> list[Completion]:
        """The completion of every choice, without streaming."""
        await asyncio.gather(*self._tasks)  # bounded: by the client's patience
        return [task.result() for task in self._tasks]  # bounded: it is done

    def _enqueue(self, index: int, item: "Piece | asyncio.Task[Completion]") -> None:
        self._queue.send(self._inbox, (index, item))

    def _on_done(self, index: int, task: "asyncio.Task[Completion]") -> None:
        if not task.cancelled():
            task.exception()  # looked at here, so that a failure after the first is no "never retrieved" complaint
        self._enqueue(index, task)  # by the same queue as the pieces, or the end could overtake them
