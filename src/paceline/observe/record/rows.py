"""Queries of the record and their results as plain values, and the text of messages, case-folded for search."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample, Ticket
from paceline.observe.record.layout import BODY, DOMAINS, IMAGES, NAMED, ROW, escape_surrogates

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which rollouts are asked for; all that is left out does not matter. Ranges include both ends; None there leaves
    that end open."""

    env: str | Sequence[str] | None = None
    actor: str | Sequence[str] | None = None
    step: tuple[int | None, int | None] | None = None
    reward: tuple[float | None, float | None] | None = None
    length: tuple[int | None, int | None] | None = None
    """Sampled tokens."""
    error: str | bool | None = None
    """True: with any error. False: with none. Otherwise the kind of it."""
    state: str | Sequence[str] | None = None
    """A state, or the beginning of one that ends with `:` (`dropped:` is all that were dropped)."""
    finish: str | None = None
    domain: str | None = None
    """`training`, `evaluation` or `match`."""
    ticket: int | None = None
    row: int | None = None
    text: str = ""
    """Text that a message contains; case does not matter."""
    sort: str = "-step"
    """A column, with `-` for the largest first: step, reward, advantage, tokens, turns, ticket, time."""
    offset: int = 0
    limit: int | None = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout in a list."""

    index: int
    step: int
    env: str
    actor: str
    kind: str
    state: str
    finish: str
    error: str
    """Its kind; empty where nothing went wrong."""
    domain: str
    ticket: int
    row: int
    member: int
    tokens: int
    prompt: int
    turns: int
    samples: int
    version_min: int
    version_max: int
    reward: float | None
    advantage: float | None
    time: float
    whole: bool
    """Whether its conversation was kept, and not this row alone."""
    images: bool


@dataclass(frozen=True, slots=True)
class ResultPage(Generic[T]):
    """A page of what was asked for, and how much there is."""

    total: int
    rows: list[T]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A rollout's place in a list, and who stands before and after it."""

    place: int
    total: int
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """One engine call, exactly as it happened."""

    prompt_ids: NDArray
    completion_ids: NDArray
    logprobs: NDArray
    versions: NDArray
    log_z: NDArray | None = None
    finish: str = ""
    temperature: float = 1.0
    recomputed: bool = False
    weights: dict[int, str] = field(default_factory=dict)
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    text: str = ""
    said: Any = None
    seconds: float = 0.0
    """From the call to its last token; 0 where it was not measured, as in records of earlier versions."""
    started: float = 0.0
    """Seconds from the start of the episode to the call; 0 too in records of earlier versions."""
    top: list[list[tuple[int, float]]] | None = None
    """The most likely tokens at each place, where `record.top_logprobs` asked for them."""
    queued: float = 0.0
    """Seconds of the call that it waited in the engine; 0 in records of earlier versions."""

    @property
    def message(self) -> Any:
        return self.said or {"role": "assistant", "content": self.text}

    @property
    def full_ids(self) -> NDArray:
        """The prompt and what was sampled after it."""
        return np.concatenate([self.prompt_ids, self.completion_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One rollout with all that was kept of it."""

    row: Row
    ticket: Ticket
    parent: str = ""
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    messages: list[Any] = field(default_factory=list)
    """The conversation as its last turn had it, with the reply. Other people's values: text, parts, images."""
    turns: list[StoredTurn] = field(default_factory=list)
    """Empty in runs that kept a sample of readable rollouts alone."""
    samples: list[Sample] = field(default_factory=list)
    verdicts: list[Any] = field(default_factory=list)
    """The parts of its reward, where judges grade: the fields of a `JudgeVerdict` each."""
    target: str = ""
    """The answer that its row expects; empty where it has none, or the record is of an earlier version."""
    seconds: float = 0.0
    """From the start of its episode until its reward was known; 0 where it was not measured."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """What its episode waited for besides the engine: kind, start in the episode, seconds."""


class RolloutNotFound(LookupError):
    """There is no such rollout, or the run went back and it is gone."""


def row_of(index: int, cells: np.void, names: Sequence[str]) -> Row:
    values: dict[str, Any] = dict(zip(ROW.names or (), cells.item(), strict=True))
    domain, flags = values["domain"], values["flags"]
    values |= {column: names[values[column]] for column in NAMED}
    values |= {column: None if isnan(values[column]) else values[column] for column in ("reward", "advantage")}
    values |= {"index": index, "domain": DOMAINS[domain] if domain < len(DOMAINS) else ""}
    values |= {"whole": bool(flags & BODY), "images": bool(flags & IMAGES)}
    return Row(**{name: values[name] for name in Row.__slots__})


MOST_TEXT = 1 << 20
"""Bytes of one rollout that can be searched; its body keeps the rest."""
_ASCII = bytes(range(128))


def fold(text: str) -> bytes:
    """As the text file has it: capitals play no part in a search, in any alphabet."""
    if text.isascii():
        return text.lower().encode()
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return escape_surrogates(text).casefold().encode()
    # Python folds letter by letter as soon as one is not ASCII, and mostly those are a few dashes without capitals.
    if 8 * (len(data) - len(text)) <= len(text):
        others = data.translate(None, _ASCII).decode()
        if others.casefold() == others:
            return data.lower()
    return text.casefold().encode()


def fold_lines(texts: Sequence[str]) -> bytes:
    """Several texts, folded, each with its end of line; one that is empty has none."""
    whole = "\n".join(filter(None, texts)) + "\n"
    if whole.isascii():
        return whole.lower().encode()
    return b"\n".join([*map(fold, filter(None, texts)), b""])


def message_texts(messages: Iterable[Any]) -> Iterator[str]:
    """Every text of these messages: contents, and the tool calls with their arguments."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if type(content) is str:
            yield content
        elif isinstance(content, list | tuple):
            parts = (part.get("text") if isinstance(part, dict) else part for part in content)
            yield from (part for part in parts if isinstance(part, str))
        if isinstance(calls := message.get("tool_calls"), list | tuple):
            functions = (call.get("function") for call in calls if isinstance(call, dict))
            yield from (f"{f.get('name')} {f.get('arguments')}" for f in functions if isinstance(f, dict))


def has_images(messages: Iterable[Any]) -> bool:
    """Whether a message holds a part that is not text."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list | tuple) and any(isinstance(p, dict) and p.get("type") != "text" for p in content):
            return True
    return False
