"""Questions whose answers must be looked up, over several turns."""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx

from paceline.config.env import RetrievalConfig as Config
from paceline.config.secret import redact
from paceline.data import BadRow, Row, open_rows
from paceline.envs.answers import normalise_answer
from paceline.envs.base import POLICY, DatasetEnvironment, EnvError, Outcome, Split
from paceline.envs.search.index import DEFAULT_TOP_K, MAX_QUERY_CHARS, QUESTIONS, open_index
from paceline.rollout import Seat

INSTRUCTIONS = """\
Answer the question. What you do not know you can look up: write <search>some words</search> and stop, and you will be \
shown what was found between <information> and </information>. You may look up several things, one after another. When \
you know the answer, write only it between <answer> and </answer>.

Question: {question}"""
HINT = "Write <search>some words</search> to look something up, or <answer>your answer</answer>."
NO_RESULTS = "Nothing was found."

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)

ResultDict = dict[str, Any]
"""`id`, `title`, `text` and `score` of a document."""


class Move(NamedTuple):
    """A reply's search or answer. `formed`: the only one, at its end, and without results the model made up itself."""

    kind: str
    text: str
    formed: bool


normalise = partial(normalise_answer, articles=False)


class Retrieval(DatasetEnvironment[Config]):
    """The reward is the answer's score. Metrics: `correct`, `searches` (that were run) and `format` (whether every
    reply was well formed). What was found is context; only what the model said is trained."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._searcher = LocalSearch(config) if config.url is None else SearchClient(config, config.url)

    def examples(self, split: Split) -> Sequence[Row]:
        if self._config.dataset is None and self._config.eval_dataset is None:
            return [row for row in open_rows(str(QUESTIONS), refine=self._row) if row["split"] == split]
        return super().examples(split)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        seat, messages = seats[POLICY], list(example["messages"])
        searches, formed, answer = 0, True, ""
        for turn in range(1, self._config.max_turns + 1):
            reply = await seat.chat(messages)
            move = read_move(reply.text)
            formed = formed and move is not None and move.formed
            if move is not None and move.kind == "answer":
                answer = move.text
                break
            # A reply that ran into the token limit was no turn to go on from.
            if turn == self._config.max_turns or reply.truncated:
                break
            if move is not None and move.text:
                searches += 1
                found = format_results(await self._searcher.search(move.text), self._config.max_result_chars)
                messages += [reply.message, {"role": self._config.results_role, "content": found}]
            else:
                messages += [reply.message, {"role": "user", "content": HINT}]
        accepted = example["answer"]
        correct = max(float(normalise(answer) == normalise(one)) for one in accepted)
        metrics = {"correct": correct, "searches": float(searches), "format": float(formed)}
        if self._config.score == "exact":
            return Outcome.solo(correct, **metrics)
        shared = max(f1(answer, one) for one in accepted)
        return Outcome.solo(shared, **metrics, f1=shared)

    def _row(self, row: Row) -> Row:
        answer = row["answer"]
        accepted = [answer] if isinstance(answer, str | int | float) else answer
        plain = isinstance(accepted, list) and all(isinstance(one, str | int | float) for one in accepted)
        if not plain or not accepted:
            raise BadRow("a question needs an `answer`, a string or a list of those that are accepted")
        messages = row["messages"]
        asked = messages[0].get("content")
        # A row's bare question gets the instructions; `messages` of its own are taken to have theirs.
        if len(messages) == 1 and isinstance(asked, str) and asked in (row.get("prompt"), row.get("question")):
            if not asked.strip():
                raise BadRow("a row needs a `question`, or `messages` that ask one")
            messages = [{"role": "user", "content": INSTRUCTIONS.format(question=asked)}]
        return row | {"messages": messages, "answer": [str(one) for one in accepted]}


def read_move(text: str) -> Move | None:
    """The first thing a reply does, thoughts aside: what follows a search was written without its results.

    >>> read_move("I wonder. <search>the oldest bridge</search>")
    Move(kind='search', text='the oldest bridge', formed=True)
    """
    spoken = text.rpartition("</think>")[2]
    found = _ACTION.search(spoken)
    if found is None:
        return None
    return Move(found[1], found[2].strip(), not spoken[found.end() :].strip() and "<information>" not in spoken)


def format_results(found: Sequence[ResultDict], most: int) -> str:
    """Results as the model reads them."""
    lines = []
    for number, result in enumerate(found, start=1):
        text = " ".join(result["text"].split())
        text = text if len(text) <= most else f"{text[:most].rstrip()} ..."
        lines.append(f"[{number}] " + (f"{result['title']}: {text}" if result.get("title") else text))
    return "\n".join(["<information>", *(lines or [NO_RESULTS]), "</information>"])


def f1(given: str, wanted: str) -> float:
    """Harmonic mean of precision and recall over words."""
    ours, theirs = normalise(given).split(), normalise(wanted).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 256


class LocalSearch:
    """An index in this process, searched in a thread."""

    def __init__(self, config: Config) -> None:
        self._index, self._top_k = open_index(config.corpus), config.top_k or DEFAULT_TOP_K

    async def search(self, query: str) -> list[ResultDict]:
        hits = await asyncio.to_thread(self._index.search, query[:MAX_QUERY_CHARS], self._top_k)
        return [hit.as_dict() for hit in hits]


class SearchClient:
    """A service that answers `POST /search {"query", "top_k"?}` with `{"results": [...]}`. If the environment variable
    is set, what it holds is sent as the service's API key."""

    def __init__(self, config: Config, url: str) -> None:
        self._config = config
        self.url = f"{url.rstrip('/').removesuffix('/search')}/search"
        self._key = key = os.environ.get(config.api_key_variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise EnvError(f"{config.api_key_variable} holds no usable API key: it must be one line of ASCII")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def search(self, query: str) -> list[ResultDict]:
        config = self._config
        body = {"query": query[:MAX_QUERY_CHARS]} | ({"top_k": config.top_k} if config.top_k else {})
        try:
            response = await self._client().post(self.url, json=body)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            late = f"did not answer within {config.search_timeout:g} s: {config.raise_hint('search_timeout')}"
            raise EnvError(f"the search service at {self.url} {late}") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise EnvError(
                f"the search service at {self.url} does not answer: {str(error) or type(error).__name__}; start it "
                "with `paceline search-server`, or leave `url` out to search in this process"
            ) from error
        if response.status_code != 200:
            detail = " ".join(redact(response.text, self._key)[:300].split())
            hint = f"; its API key is read from {config.api_key_variable}" if response.status_code == 401 else ""
            raise EnvError(f"the search service at {self.url} answered {response.status_code}: {detail}{hint}")
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

    async def aclose(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened[1].aclose()

    def _client(self) -> httpx.AsyncClient:
        """One for each event loop: connections cannot move to another."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            # Episodes beyond this many wait for a connection, and that wait is no sign of a dead service.
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
            patience = httpx.Timeout(self._config.search_timeout, connect=CONNECT_SECONDS, pool=None)
            self._open = (loop, httpx.AsyncClient(timeout=patience, limits=limits, headers=self._headers))
        return self._open[1]
