"""Defines the data types of self-play: actors, artifacts, episode requests and results."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.envs import EnvError
from paceline.rollout import Message


class ArenaError(EnvError):
    """An arena that cannot be played, as a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A role the policy plays and is trained in. Judges are no actors."""

    id: str
    system_prompt: str = ""
    max_tokens: int | None = None
    """Longest reply of this actor; the run's `sampling.max_tokens` when left out."""

    def opening(self) -> list[Message]:
        """The messages every conversation with this actor begins with."""
        return [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []

    def build_messages(self, user: str) -> list[Message]:
        """A conversation of one question."""
        return [*self.opening(), {"role": "user", "content": user}]


@dataclass(frozen=True, slots=True)
class Artifact:
    """The subject of an episode: a question, a deal of cards, an opening.

    Left out, the id is a hash of the data, so that the same thing drawn twice is the same artifact: episodes on it are
    tries of one example, and those on different artifacts never share a baseline.
    """

    data: Any
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            text = json.dumps(self.data, sort_keys=True, default=repr)
            object.__setattr__(self, "id", hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """A request to play an episode."""

    episode_type: str
    artifact: Artifact
    meta: dict[str, Any] = field(default_factory=dict)
    is_trainable: bool = True
    """False plays it, and everything it spawns, without training on it."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Actors played by a served adapter instead of the policy, by its name; they do not train."""

    @property
    def key(self) -> tuple[str, str]:
        """Requests that agree here are tries of one thing."""
        return self.episode_type, self.artifact.id


@dataclass(frozen=True, slots=True)
class Step:
    """One thing an actor said, and the conversation it was an answer to."""

    actor: str
    messages: tuple[Message, ...]
    text: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Something all actors may hear of: an actor's words, or, with no speaker, what the environment says to all."""

    speaker: str
    text: str


@dataclass(slots=True)
class EpisodeResult:
    """How an episode ended, with those it spawned."""

    request: EpisodeRequest
    seats: dict[str, str]
    """The seat each actor sat in."""
    rewards: dict[str, float]
    metrics: dict[str, float]
    steps: list[Step]
    data: dict[str, Any]
    """The episode's own data (`EpisodeState.data`)."""
    children: list["EpisodeResult"] = field(default_factory=list)

    def followed_by(self, later: "EpisodeResult") -> "EpisodeResult":
        """This episode and its continuation as one: it went on in the same seats, so its rewards add up to one return,
        and every part of it is credited alike."""
        return EpisodeResult(
            request=self.request,
            seats=self.seats,
            rewards={actor: reward + later.rewards[actor] for actor, reward in self.rewards.items()},
            metrics=self.metrics | later.metrics,
            steps=[*self.steps, *later.steps],
            data=self.data | later.data,
            children=[*self.children, *later.children],
        )

    def tree(self) -> list["EpisodeResult"]:
        """This episode and all below it, parents first."""
        return [self, *(below for child in self.children for below in child.tree())]
