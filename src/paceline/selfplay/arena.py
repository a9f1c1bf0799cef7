"""Defines the arena: actors, the episodes they meet in, and the stores kept between them."""

import copy
import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from paceline.clients import NoEngineLeft
from paceline.envs import JudgeFailed, Split
from paceline.envs.judges import Judge, ask_until_readable
from paceline.errors import EngineError, Mismatch, RequestError
from paceline.rollout import Message, Reply, SessionMap
from paceline.selfplay.episode import (
    Actor,
    ArenaError,
    Artifact,
    Episode,
    EpisodeRequest,
    EpisodeResult,
    EpisodeState,
    SeatAssignment,
    Step,
)


class ArtifactStore:
    """Artifacts in the order they came; when it is full the oldest makes room.

    >>> store = ArtifactStore(max_size=2)
    >>> for question in ("1+1", "1+2", "1+3"):
    ...     store.add(Artifact(question))
    >>> [artifact.data for artifact in store]
    ['1+2', '1+3']
    """

    def __init__(self, max_size: int) -> None:
        if max_size < 1:
            raise ArenaError(f"a store of {max_size} artifacts can hold nothing: give max_size of at least 1")
        self._artifacts: deque[Artifact] = deque(maxlen=max_size)

    def add(self, artifact: Artifact) -> None:
        self._artifacts.append(artifact)

    def sample(self, k: int, rng: random.Random) -> list[Artifact]:
        """Up to `k` different entries; fewer if the store holds fewer. `rng` is the arena's, so that runs repeat."""
        return rng.sample(list(self._artifacts), min(k, len(self._artifacts)))

    def count(self) -> int:
        return len(self._artifacts)

    def __len__(self) -> int:
        return len(self._artifacts)

    def __iter__(self) -> Iterator[Artifact]:
        return iter(tuple(self._artifacts))

    def copy(self) -> "ArtifactStore":
        clone = copy.copy(self)
        clone._artifacts = self._artifacts.copy()
        return clone

    def state(self) -> list[dict[str, Any]]:
        """State for the checkpoint, as JSON; the artifacts' data must be JSON too."""
        return [artifact.as_dict() for artifact in self._artifacts]

    def load(self, state: list[dict[str, Any]]) -> None:
        self._artifacts = deque((Artifact(**entry) for entry in state), self._artifacts.maxlen)


T = TypeVar("T")
MAX_JUDGE_ATTEMPTS = 3
"""Times that a judge is asked before its answers count as unreadable."""


class Arena:
    """Registers actors, episodes and stores, and lists the episodes to play.

    `requests(split)` lists episodes known beforehand; `get_batch()` draws new ones as training goes on, from the stores
    if it likes. An arena fills in at least one of them. `client` and `credit_assigner` are for `training_loop` and are
    left out in a run file.
    """

    def __init__(self, client: Any = None, credit_assigner: Any = None, seed: int = 0) -> None:
        self.client, self.credit_assigner = client, credit_assigner
        self.actors: dict[str, Actor] = {}
        self.episodes: dict[str, Episode] = {}
        self.stores: dict[str, ArtifactStore] = {}
        self.judges: Mapping[str, Judge] = {}
        """Frozen models that the run file names (`[[env.judges]]`): `await arena.judges[NAME].grade(seat, row)`."""
        self.rng = random.Random(seed)
        """Draw from this and no other, and a resumed run draws what an unbroken one would."""
        self._pending: deque[EpisodeRequest] = deque()
        self._assigned: dict[int, EpisodeRequest] = {}
        """The requests of draws that may be played again after a restart."""

    # -- what a user fills in ---------------------------------------------------------------------------------------

    def get_batch(self) -> Sequence[EpisodeRequest]:
        """The next episodes to train on. Requests of one type and artifact are tries of one thing."""
        return []

    def requests(self, split: Split) -> Sequence[EpisodeRequest]:
        """Episodes known beforehand, in a fixed order; those of `eval` are played for evaluation only."""
        return []

    def get_eval_batch(self) -> Sequence[EpisodeRequest]:
        """The episodes of an evaluation by `training_loop`: those of `requests("eval")`, else a draw of their own, the
        same at each evaluation where `get_batch` depends on `rng` alone."""
        if known := self.requests("eval"):
            return known
        apart = self.isolated_copy()
        apart.rng = random.Random("evaluation")
        return apart.get_batch()

    def matches(self) -> Sequence[EpisodeRequest]:
        """Episodes in which versions of the policy meet for a league's ratings; those of training when left out."""
        return self.requests("train") or _distinct(self.isolated_copy().get_batch())

    # -- registries -------------------------------------------------------------------------------------------------

    def add_actor(self, actor: Actor) -> None:
        _register(self.actors, actor.id, actor, "actor")

    def add_episode(self, episode: Episode) -> None:
        _register(self.episodes, episode.episode_type, episode, "episode type")

    def add_store(self, name: str, store: ArtifactStore) -> None:
        _register(self.stores, name, store, "store")

    def actor(self, id: str) -> Actor:
        return _lookup(self.actors, id, "actor", "add_actor")

    def episode(self, episode_type: str) -> Episode:
        return _lookup(self.episodes, episode_type, "episode type", "add_episode")

    def store(self, name: str) -> ArtifactStore:
        return _lookup(self.stores, name, "store", "add_store")

    def check(self, request: EpisodeRequest) -> None:
        """Raise unless every actor that a request names is registered."""
        for name in (*self.episode(request.episode_type).actors, *request.models):
            self.actor(name)

    # -- playing ----------------------------------------------------------------------------------------------------

    def draw(self, number: int) -> EpisodeRequest:
        """The request of draw `number`: the next of `get_batch`, or the one it got before, if it is played again."""
        if number in self._assigned:
            return self._assigned[number]
        if not self._pending:
            self._pending.extend(_distinct(self.get_batch()))  # several tries of one thing once: a group repeats it
        if not self._pending:
            raise ArenaError(f"{type(self).__name__} has nothing to play: its get_batch() gave no request")
        request = self._pending.popleft()
        try:
            json.dumps(_request_to_json(request))
        except (TypeError, ValueError) as error:
            raise ArenaError(
                f"{type(self).__name__}.get_batch() gave {request}, which a checkpoint cannot keep ({error}): "
                "let its artifact and meta be JSON"
            ) from error
        self._assigned[number] = request
        return request

    def forget(self, before: int) -> None:
        """Draws before this one are not played again."""
        self._assigned = {number: request for number, request in self._assigned.items() if number >= before}

    def assign_seats(
        self, request: EpisodeRequest, table: SessionMap, parent_seating: SeatAssignment | None = None
    ) -> SeatAssignment:
        """Take seats for an episode: a root takes those the table came with, a child opens its own."""
        self.check(request)
        names = self.episode(request.episode_type).actors or tuple(self.actors)
        parent = parent_seating.lead_seat if parent_seating else ""
        trained = request.is_trainable and (parent_seating is None or parent_seating.trained)
        models = {**(parent_seating.models if parent_seating else {}), **request.models}
        kind, seats = request.episode_type, {}
        for name in names:
            model = models.get(name, "")
            trains = trained and not model
            free = not parent_seating and not model and name in table and not table[name].turns
            at = name if free else table.open(name, parent=parent, model=model)
            seat, seats[name] = table[at], at
            seat.kind, seat.trained, seat.max_tokens = kind, trains, self.actor(name).max_tokens
        return SeatAssignment(table, seats, kind, parent, trained, models)

    async def play(self, request: EpisodeRequest, seating: SeatAssignment) -> EpisodeResult:
        """One episode in seats that were taken for it."""
        return await self.episode(request.episode_type).play(self, request, seating)

    async def run_episode(self, request: EpisodeRequest, table: SessionMap) -> EpisodeResult:
        """One episode at a fresh table."""
        return await self.play(request, self.assign_seats(request, table))

    async def step(self, concurrency: int = 8) -> Any:
        """Play and credit the next batch on `client`: a `TrainingBatch` with its records. At most `concurrency`
        episodes of `get_batch` run at once."""
        if not hasattr(getattr(self, "client", None), "play"):
            raise ArenaError(
                f"{type(self).__name__} has no client to play on: make it with one, as in "
                f"{type(self).__name__}(OpenAIClient(base_url=...), credit_assigner=GRPOCredit())"
            )
        return await self.client.play(self, concurrency)

    async def call_model(
        self, state: EpisodeState, messages: Sequence[Message], actor: str | None = None, model: str = ""
    ) -> Reply:
        """An actor's reply to these messages. Without an actor it is a judge who answers, and is never trained;
        `model` then names a served adapter, the policy when left out."""
        if actor is None:
            try:
                return await state.seating.judge(model).chat(messages)
            except (RequestError, NoEngineLeft, Mismatch):
                raise  # asking again changes nothing
            except EngineError as error:
                raise JudgeFailed(f"the judge could not answer: {error}") from error
        seat = state.seating.seat(self.actor(actor).id)
        messages = list(messages)
        reply = await seat.chat(messages)
        state.steps.append(Step(actor, tuple(messages), reply.text, reply.truncated))
        return reply

    async def ask_judge(
        self, state: EpisodeState, messages: Sequence[Message], read: Callable[[str], T], model: str = ""
    ) -> T:
        """The verdict `read` finds in a judge's words. Where it raises `ValueError` the judge is asked anew, with noise
        of its own; if no answer can be read, `JudgeFailed` quotes the first one."""

        async def ask(unreadable: Sequence[object]) -> str:
            return (await self.call_model(state, messages, model=model)).text

        return (await ask_until_readable(ask, read, MAX_JUDGE_ATTEMPTS))[1]

    def isolated_copy(self) -> Self:
        """A copy with stores and draws of its own: episodes played in it do not change this arena."""
        other = copy.copy(self)
        other.stores = {name: store.copy() for name, store in self.stores.items()}
        other.rng = copy.copy(self.rng)
        other._pending, other._assigned = self._pending.copy(), self._assigned.copy()
        return other

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for the checkpoint, as JSON: the stores, the random numbers, requests drawn but not yet given out, and
        those given out but perhaps not played to their end."""
        version, numbers, gauss = self.rng.getstate()
        return {
            "stores": {name: store.state() for name, store in self.stores.items()},
            "rng": [version, list(numbers), gauss],
            "drawn": [_request_to_json(request) for request in self._pending],
            "given": [[number, _request_to_json(request)] for number, request in self._assigned.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        for name, entries in state["stores"].items():
            self.store(name).load(entries)
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))
        self._pending = deque(_request_from_json(written) for written in state["drawn"])
        self._assigned = {number: _request_from_json(written) for number, written in state["given"]}


def _distinct(requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
    return list({request.key: request for request in requests}.values())


def _request_to_json(request: EpisodeRequest) -> list[Any]:
    models = dict(request.models)
    return [request.episode_type, request.artifact.as_dict(), request.meta, request.is_trainable, models]


def _request_from_json(written: Sequence[Any]) -> EpisodeRequest:
    kind, artifact, meta, trains, models = written
    return EpisodeRequest(kind, Artifact(**artifact), meta, trains, models)


def _register(registry: dict[str, T], name: str, value: T, what: str) -> None:
    if not name:
        raise ArenaError(f"{what} {value!r} has no name: give it one")
    if name in registry:
        raise ArenaError(f"{what} `{name}` is registered already: each needs a name of its own")
    registry[name] = value


def _lookup(registry: Mapping[str, T], name: str, what: str, how: str) -> T:
    if name not in registry:
        known = ", ".join(f"`{other}`" for other in registry) or "none"
        raise ArenaError(f"{what} `{name}` is not registered in this arena: registered are {known}; add it with {how}")
    return registry[name]
