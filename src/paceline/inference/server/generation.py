"""The choices of one HTTP request while the engine works on them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType

from paceline.inference.base import Completion, Engine, GenerateRequest, Piece
from paceline.inference.server.mailbox import Mailbox, Post

Event = tuple[int, Piece | Completion]
"""A choice's index with what it said or how it ended."""

AT_ONCE = 32
"""Choices handed to the engine in one turn of the event loop: a request of thousands lets others be heard."""


class Generation:
    """Runs requests side by side and tells what happens, in order for each choice.

    Leaving the context takes whatever still runs out of the engine, however it is left: done, failed, or because the
    client is gone.
    """

    def __init__(self, engine: Engine, post: Post, requests: Sequence[GenerateRequest], listen: bool) -> None:
        self._engine = engine
        self._requests = requests
        self._listen = listen
        self._box = Mailbox(post)
        self._tasks: list[asyncio.Task[Completion]] = []
        self._stopped: set[int] = set()

    async def __aenter__(self) -> "Generation":
        try:
            for index, request in enumerate(self._requests):
                if index and index % AT_ONCE == 0:
                    await asyncio.sleep(0)
                task = asyncio.ensure_future(self._engine.generate(request, self._listener(index)))
                task.add_done_callback(partial(self._ended, index))
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
        """Enough of this choice: its text is complete although the engine does not know."""
        self._stopped.add(index)
        self._tasks[index].cancel()

    async def events(self) -> AsyncIterator[list[Event]]:
        """What happened since the last look, until every choice has ended. The first failure ends it all."""
        running = len(self._tasks)
        while running:
            events: list[Event] = []
            for index, what in await self._box.take():
                if isinstance(what, asyncio.Task):
                    running -= 1
                    if index in self._stopped:
                        continue
                    what = await what  # bounded: it is done
                events.append((index, what))
            yield events

    async def completions(self) -> list[Completion]:
        """Every choice as a whole, for those who do not listen."""
        await asyncio.gather(*self._tasks)  # bounded: by the client's patience
        return [task.result() for task in self._tasks]  # bounded: it is done

    def _listener(self, index: int) -> "partial[None] | None":
        return partial(self._heard, index) if self._listen else None

    def _heard(self, index: int, piece: Piece) -> None:
        self._box.slot((index, piece))

    def _ended(self, index: int, task: "asyncio.Task[Completion]") -> None:
        if not task.cancelled():
            task.exception()  # looked at here, so that a failure after the first is no "never retrieved" complaint
        # By the same post as the pieces, or the end could overtake them.
        self._box.slot((index, task))
