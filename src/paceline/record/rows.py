"""Queries of the record and their results, as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.data.sample import Sample, Ticket
from paceline.record.decode import ToldTurn
from paceline.record.layout import BODY, DOMAINS, IMAGES, NAMED


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
class Found:
    """A page of what was asked for, and how much there is."""

    total: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Beside:
    """A rollout's place in a list, and who stands before and after it."""

    place: int
    total: int
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One rollout with all that was kept of it."""

    row: Row
    ticket: Ticket
    parent: str = ""
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    messages: list[Any] = field(default_factory=list)
    """The conversation as its last turn had it, with the reply. Other people's values: text, parts, images."""
    turns: list[ToldTurn] = field(default_factory=list)
    """Empty in runs that kept a sample of readable rollouts alone."""
    samples: list[Sample] = field(default_factory=list)


class Gone(LookupError):
    """There is no such rollout, or the run went back and it is gone."""


def row_of(index: int, cells: np.void, names: Sequence[str]) -> Row:
    def number(value: Any) -> float | None:
        return None if np.isnan(value) else float(value)

    domain, flags = int(cells["domain"]), int(cells["flags"])
    return Row(
        index=index,
        **{column: names[cells[column]] for column in NAMED},
        **{column: int(cells[column]) for column in _INTEGERS},
        domain=DOMAINS[domain] if domain < len(DOMAINS) else "",
        reward=number(cells["reward"]),
        advantage=number(cells["advantage"]),
        time=float(cells["time"]),
        whole=bool(flags & BODY),
        images=bool(flags & IMAGES),
    )


_INTEGERS = (
    "step",
    "ticket",
    "row",
    "member",
    "tokens",
    "prompt",
    "turns",
    "samples",
    "version_min",
    "version_max",
)
