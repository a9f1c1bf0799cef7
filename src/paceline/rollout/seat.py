"""A seat in an episode: a client that speaks for the policy and records every token."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline.clients import Pool
from paceline.clients.tools import reply_message
from paceline.config.inference import SamplingConfig
from paceline.data.rollout import JudgeVerdict, Message, Turn, copy_message
from paceline.engine import Completion, GenerateRequest, noise_key
from paceline.errors import PacelineError
from paceline.rollout.assemble import TurnIndex
from paceline.rollout.render import Renderer

if TYPE_CHECKING:
    from paceline.rollout.endpoint import Endpoint
    from paceline.rollout.recording import RecordingServer


@dataclass(frozen=True, slots=True)
class SamplingClient:
    """The pool, renderer and sampling settings that all seats of a run share."""

    pool: Pool
    renderer: Renderer
    sampling: SamplingConfig
    end_tokens: frozenset[int]
    recorder: "RecordingServer | None" = None
    top_logprobs: int = 0
    """Most likely tokens to record beside each sampled one."""

    def make_seat(self, seed_parts: Sequence[int], priority: int, actor: str, model: str) -> "Seat":
        return Seat(self, seed_parts, priority, actor=actor, model=model)

    async def close(self) -> None:
        if self.recorder is not None:
            await self.recorder.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the policy."""

    text: str
    """All of it, tool calls as the model wrote them."""
    truncated: bool
    """Whether it hit the token limit."""
    message: Message = field(default_factory=dict)
    """To append to the conversation, with `tool_calls` if it made any."""
    tokens: int = 0
    prompt_tokens: int = 0
    turn: Turn | None = field(default=None, repr=False, compare=False)
    """What was recorded of it; None where no tokens are."""

    def __post_init__(self) -> None:
        if not self.message:
            object.__setattr__(self, "message", {"role": "assistant", "content": self.text})

    @property
    def content(self) -> str:
        """The text without tool calls."""
        return self.message["content"]

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """In OpenAI's form: `call["function"]["name"]` and `["arguments"]`, the latter as JSON text."""
        return self.message.get("tool_calls", [])


class SeatClosed(PacelineError):
    """A call to a seat whose episode is over."""


class Seat:
    """Takes messages or token ids, calls the pool, and records the exact tokens, logprobs and versions.

    A conversation that goes on from anything this seat said keeps those tokens as they were sampled. It need not be the
    last thing said: an episode may branch, take a turn back, or hold several conversations at once.
    """

    def __init__(
        self,
        client: SamplingClient,
        seed_parts: Sequence[int],
        priority: int,
        actor: str = "policy",
        model: str = "",
        trained: bool = True,
    ) -> None:
        self._init_session(actor, client.sampling, client.recorder)
        self.trained = trained
        self._client, self._model = client, model
        self._seed_parts, self._priority, self._calls = tuple(seed_parts), priority, 0
        self._history: TurnIndex | None = None

    def _init_session(self, actor: str, sampling: SamplingConfig, recorder: "RecordingServer | None") -> None:
        self.actor, self.trained = actor, True
        self.parent, self.kind = "", ""
        """The seat whose episode opened this one, and what kind of episode it plays (`SessionMap`)."""
        self.max_tokens: int | None = None
        """Longest reply from here; the run's own limit when None."""
        self.turns: list[Turn] = []
        self.overrides: dict[str, int] = {}
        """Settings an agent asked for over its URL, in whose place the run's own were used."""
        self.verdicts: list[JudgeVerdict] = []
        """Grades of the environment's judges for what was said here."""
        self._sampling, self._recorder = sampling, recorder
        self._closed = self._has_address = False
        self.opened = time.perf_counter()
        """When the episode began, from which the starts of turns count."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> Reply:
        """The policy's next message in this conversation; `tools` in OpenAI's form."""
        began, renderer = time.perf_counter(), self._client.renderer
        messages = [copy_message(message) for message in messages]
        history = self._history = self._history or TurnIndex()
        past, so_far = history.find(messages, tools)
        if past is None:
            prompt = renderer.render(messages, tools)
        else:
            prompt = renderer.render_continuation(past.turn, messages, past.prompt_text)
        completion = await self._sample(prompt.ids)
        said = self._record(began, list(prompt.ids), completion, messages, list(tools) if tools else None)
        history.add(self.turns[-1], prompt.text, so_far)
        return said

    async def complete(self, token_ids: Sequence[int]) -> Reply:
        """The policy's continuation of exact tokens."""
        return self._record(time.perf_counter(), list(token_ids), await self._sample(token_ids))

    async def base_url(self) -> str:
        """An address for `openai` and compatible clients; it is recorded like everything else and answers until the
        episode is over."""
        if self._recorder is None:
            raise PacelineError("this seat has no recording server behind it")
        self._has_address = True
        address = await self._recorder.address(self)
        if self._closed:
            self._recorder.release(self)
            raise SeatClosed("the episode is over: this seat has no address any more")
        return address

    @property
    def vocabulary(self) -> int:
        return len(self._client.renderer.tokenizer)

    @property
    def version(self) -> int:
        """The policy's version at this moment."""
        return self._client.pool.published_version

    @property
    def tokenizer_digest(self) -> str:
        """What another process compares, to know that it has the policy's tokenizer."""
        return self._client.renderer.digest

    def decode(self, completion_ids: Sequence[int]) -> str:
        """The text of sampled tokens, without the one that ended them."""
        return self._client.renderer.reply(completion_ids)

    def setting(self, name: str) -> Any:
        """The run's value of a sampling setting, by OpenAI's name for it; None if it has none."""
        return getattr(self._sampling, name.replace("max_completion_tokens", "max_tokens"), None)

    def leave(self) -> None:
        """The episode is over: nothing said from here on counts."""
        self._closed = True
        if self._recorder is not None and self._has_address:
            self._recorder.release(self)

    async def _sample(self, prompt: Sequence[int]) -> Completion:
        sampling = self._sampling
        if self._closed:
            raise SeatClosed("the episode is over: this seat takes no more calls")
        noise = noise_key(*self._seed_parts, self._calls)
        self._calls += 1
        completion = await self._client.pool.generate(
            GenerateRequest(
                prompt_ids=tuple(prompt),
                max_tokens=self.max_tokens or sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=self._client.end_tokens,
                noise=noise,
                order=self._priority,
                model=self._model,
                top_logprobs=self._client.top_logprobs,
            )
        )
        if self._closed:
            raise SeatClosed("the episode ended while the policy was speaking")
        return completion

    def _record(
        self,
        began: float,
        prompt: list[int],
        completion: Completion,
        messages: list[Message] | None = None,
        tools: list[dict] | None = None,
    ) -> Reply:
        text = self._client.renderer.reply(completion.token_ids)
        said = reply_message(text, tools) if tools else None
        turn = Turn(
            prompt_ids=prompt,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish=completion.finish,
            temperature=self._sampling.temperature,
            log_z=completion.log_z,
            recomputed=completion.recomputed,
            weights=completion.weights,
            messages=messages,
            tools=tools,
            text=text,
            said=said,
            seconds=time.perf_counter() - began,
            started=began - self.opened,
            top=completion.top,
            queued=completion.queued,
        )
        self.turns.append(turn)
        truncated, message = completion.finish == "length", copy_message(turn.message)
        return Reply(text, truncated, message, len(completion.token_ids), len(prompt), turn)


SeatFactories = Mapping[str, Callable[[str], Seat]]
"""Factories of the seats that the policy does not play, by actor."""


class SessionMap(dict[str, Seat]):
    """Seats by name: one for each actor of the environment, and whatever an episode opens besides.

    An episode that starts others (a proposer whose question several solvers try) opens a seat for each of their actors.
    `parent` and `kind` say where in that tree a seat belongs, so that credit can compare like with like. A seat that
    does not train is played all the same: a judge, or an opponent from the past.
    """

    def __init__(
        self,
        client: "SamplingClient | Endpoint",
        seed_parts: Sequence[int],
        priority: int,
        actors: Sequence[str],
        seat_factories: SeatFactories | None = None,
    ) -> None:
        super().__init__()
        self._client, self._seed_parts, self._priority = client, tuple(seed_parts), priority
        self._seat_factories, self._closed, self.opened = seat_factories or {}, False, time.perf_counter()
        for actor in actors:
            self.open(actor)

    def open(self, actor: str, *, parent: str = "", kind: str = "", model: str = "", trained: bool = True) -> str:
        """Another seat; answers with its name. `model` is an adapter's name; the policy when left out."""
        if self._closed:
            raise SeatClosed("the episode is over: no seat can be opened any more")
        place = len(self)
        name = actor
        if name in self:
            name = next(name for number in count(place) if (name := f"{actor}#{number}") not in self)
        # The first seat draws the noise a one-player task has always drawn.
        seed_parts = (*self._seed_parts, place) if place else self._seed_parts
        factory = self._seat_factories.get(actor)
        seat = factory(name) if factory else self._client.make_seat(seed_parts, self._priority, actor, model)
        seat.parent, seat.kind, seat.trained, seat.opened = parent, kind, trained, self.opened
        self[name] = seat
        return name

    def leave(self) -> None:
        self._closed = True
        for seat in self.values():
            seat.leave()
