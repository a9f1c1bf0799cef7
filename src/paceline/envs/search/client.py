"""Sends an environment's queries to an index in this process, or to a search service."""

import asyncio
import os
from typing import Any

import httpx

from paceline.config.env import SEARCH_KEY_VARIABLE
from paceline.config.secret import redact
from paceline.envs.base import EnvError
from paceline.envs.search.index import DEFAULT_TOP_K, Index

MAX_QUERY_CHARS = 4096
"""Longest query in characters; a model may write any nonsense."""
CONNECT_SECONDS = 5.0
_MAX_CONNECTIONS = 256

ResultDict = dict[str, Any]
"""`id`, `title`, `text` and `score` of a document."""


class LocalSearch:
    """An index in this process, searched in a thread."""

    def __init__(self, index: Index, top_k: int | None) -> None:
        self._index, self._top_k = index, top_k or DEFAULT_TOP_K

    async def search(self, query: str) -> list[ResultDict]:
        hits = await asyncio.to_thread(self._index.search, query[:MAX_QUERY_CHARS], self._top_k)
        return [hit.as_dict() for hit in hits]


class SearchClient:
    """A service that answers `POST /search {"query", "top_k"?}` with `{"results": [...]}`. If the environment variable
    is set, what it holds is sent as the service's API key."""

    def __init__(
        self,
        url: str,
        top_k: int | None = None,
        timeout: float = 30.0,
        key_variable: str = SEARCH_KEY_VARIABLE,
        advice: str = "raise its timeout",
    ) -> None:
        self.url = f"{url.rstrip('/').removesuffix('/search')}/search"
        self._key_variable, key = key_variable, os.environ.get(key_variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise EnvError(f"{key_variable} holds no usable API key: it must be one line of ASCII")
        self._key = key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._top_k, self._timeout, self._advice = top_k, timeout, advice
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def search(self, query: str) -> list[ResultDict]:
        body = {"query": query[:MAX_QUERY_CHARS]} | ({"top_k": self._top_k} if self._top_k else {})
        try:
            response = await self._client().post(self.url, json=body)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise EnvError(
                f"the search service at {self.url} did not answer within {self._timeout:g} s: {self._advice}"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise EnvError(
                f"the search service at {self.url} does not answer: {str(error) or type(error).__name__}; start it "
                "with `paceline search-server`, or leave `url` out to search in this process"
            ) from error
        if response.status_code != 200:
            detail = " ".join(redact(response.text, self._key)[:300].split())
            hint = f"; its API key is read from {self._key_variable}" if response.status_code == 401 else ""
            raise EnvError(f"the search service at {self.url} answered {response.status_code}: {detail}{hint}")
        return self._results(response)

    async def aclose(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened[1].aclose()

    def _results(self, response: httpx.Response) -> list[ResultDict]:
        try:
            results = response.json()["results"]
            if all(isinstance(result["text"], str) for result in results):
                return results
        except (ValueError, KeyError, TypeError):
            pass
        raise EnvError(
            f'the search service at {self.url} must answer {{"results": [{{"text": ...}}, ...]}}; it said: '
            + " ".join(response.text[:200].split())
        )

    def _client(self) -> httpx.AsyncClient:
        """One for each event loop: connections cannot move to another."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            # Episodes beyond this many wait for a connection, and that wait is no sign of a dead service.
            limits = httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS)
            patience = httpx.Timeout(self._timeout, connect=CONNECT_SECONDS, pool=None)
            self._open = (loop, httpx.AsyncClient(timeout=patience, limits=limits, headers=self._headers))
        return self._open[1]
