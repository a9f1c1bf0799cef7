"""Server-sent events: what is new in a run, or in the folder."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from paceline.ui.answers import encoded
from paceline.ui.following import FolderNews, News, RunNews
from paceline.ui.routes.here import AllRuns

LOOK_SECONDS = 0.5
BEAT_SECONDS = 10.0
"""A line without meaning, by which both sides notice that the other has gone."""

router = APIRouter()


@router.get("/live")
def live(
    runs: AllRuns,
    run: Annotated[str | None, Query(max_length=1000)] = None,
    mark: str = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Of one run `metrics`, `standing`, `status`, `files` and `gone`; without a run, of all of them `runs`."""
    news = FolderNews(runs) if run is None else RunNews(runs.open(run), last_event_id or mark)
    return StreamingResponse(_stream(news), media_type="text/event-stream")


async def _stream(news: FolderNews | RunNews) -> AsyncIterator[bytes]:
    quiet = BEAT_SECONDS  # the first beat comes at once: it opens the stream
    while True:
        found = await asyncio.to_thread(lambda: list(news.look()))
        for one in found:
            yield _event(one)
        quiet = 0.0 if found else quiet + LOOK_SECONDS
        if quiet >= BEAT_SECONDS:
            quiet = 0.0
            yield b": beat\n\n"
        await asyncio.sleep(LOOK_SECONDS)  # bounded: the client leaves, or the server stops


def _event(news: News) -> bytes:
    name, told, mark = news
    number = f"id: {mark}\n" if mark else ""
    return f"event: {name}\n{number}data: ".encode() + encoded(told) + b"\n\n"
