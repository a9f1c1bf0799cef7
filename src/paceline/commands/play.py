"""`paceline play`: take a seat yourself, against the policy or alone."""

import asyncio
import math
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from paceline.clients.tools import reply_message
from paceline.commands.rollouts import EpisodePlayer, PlayedEpisode, episode_records, pick_env, split_sampling
from paceline.commands.show import show_messages
from paceline.config import RunConfig
from paceline.config.env import BaseEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.data.rollout import Tools
from paceline.envs import Split, build_environment
from paceline.envs.judges import JudgeService
from paceline.errors import PacelineError
from paceline.observe.monitor.show_rollout import show_rollout, show_verdicts
from paceline.observe.monitor.text import format_amount, format_score
from paceline.rollout import Message, Reply
from paceline.rollout.assemble import same_conversation
from paceline.rollout.endpoint import TextSeat
from paceline.rollout.seat import SeatClosed
from paceline.runtime.episode_runtime import EpisodeRuntime, OpenAIServer, open_episode_runtime
from paceline.runtime.local import with_sections
from paceline.trainer.checkpoint import is_checkpoint
from paceline.util.interrupts import on_interrupt

TOOL_CALL_HINT = 'to call one, say <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


class PersonLeft(PacelineError):
    """The person has left the game."""


def read_line(prompt: str) -> str:
    """Read a line from the keyboard or a pipe; a piped line is echoed, as a terminal would."""
    if sys.stdin is None:  # closed before we began
        raise EOFError
    if sys.stdin.isatty():
        return input(prompt)
    print(prompt, end="", flush=True)  # not by `input`, which sees no signal between the prompt and the line
    if not (line := sys.stdin.readline()):
        raise EOFError
    print(line.removesuffix("\n"), flush=True)
    return line.removesuffix("\n")


class Person:
    def __init__(self, console: Console, read: Callable[[str], str] = read_line) -> None:
        self._console, self._read = console, read
        self.turns = 0
        self.has_left, self.input_error = False, ""
        if read is read_line and sys.stdin is not None and sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited from now on

    def ask(self, who: str, new_messages: Sequence[Message], tools: Tools | None) -> str:
        """Show the new messages and read the person's answer.

        This blocks the event loop on purpose: seats take turns at the one keyboard, and a thread that waits for a line
        cannot be interrupted.
        """
        if self.has_left:
            raise PersonLeft("the person has left")
        show_messages(new_messages, self._console)
        if tools:
            named = ", ".join(str(tool.get("function", tool).get("name")) for tool in tools)
            self._console.print(Text(f"tools: {named}; {TOOL_CALL_HINT}", "dim"))
        try:
            # Ctrl-C ends the wait for a line, which an asyncio signal handler would not do.
            with on_interrupt(signal.default_int_handler):
                answer = self._read_answer(who)
        except (EOFError, KeyboardInterrupt):
            self.has_left = True
            self._console.print()
            raise PersonLeft("the person has left") from None
        except UnicodeDecodeError as error:
            self.has_left, self.input_error = True, f"what was typed is no text: {error}"
            raise PersonLeft(self.input_error) from error
        self.turns += 1
        return answer

    def _read_answer(self, who: str) -> str:
        lines = [self._read(f"{who}> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read("... "))
        return "\n".join(lines)


class PersonSeat(TextSeat):
    def __init__(
        self, person: Person, name: str, actor: str, sampling: SamplingConfig, runtime: EpisodeRuntime
    ) -> None:
        super().__init__(sampling, runtime.recorder, actor)
        self._person, self._name, self._decode = person, name, runtime.decode

    async def answer(self, messages: Sequence[Message], tools: Tools | None) -> dict[str, Any]:
        known = self._known_messages(messages)
        text = self._person.ask(self._name, messages[known:], None if known else tools)
        return {"message": reply_message(text, tools), "finish": "stop", "usage": None}

    async def complete(self, token_ids: Sequence[int]) -> Reply:
        if self._closed:
            raise SeatClosed("the episode is over: this seat takes no more calls")
        prompt: Message = {"role": "tokens", "content": self._decode(token_ids)}
        reply = {"role": "assistant", "content": self._person.ask(self._name, [prompt], None)}
        return self.record_reply({"message": reply, "finish": "stop", "usage": None}, [prompt])

    def _known_messages(self, messages: Sequence[Message]) -> int:
        """How many messages the person has seen; a conversation may branch off at any earlier turn."""
        histories = ([*(turn.messages or []), turn.message] for turn in self.turns)
        return max((len(old) for old in histories if same_conversation(messages[: len(old)], old)), default=0)


MOST_CONCURRENT_SEATS = 8
"""Seats of one game that may speak at the same time, where an episode starts others."""
MOST_SILENT_GAMES = 20
"""Games in a row without a turn of the person before an error is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """Flags of `paceline play`, whose help explains them."""

    env: str | None = None
    seat: str | None = None
    count: int | None = None
    split: Split = "train"
    row: int | None = None
    endpoint: str | None = None
    endpoint_model: str | None = None
    model: str | None = None
    """In this process a folder, a hub name or a checkpoint in place of the run's own model; else its name there."""
    api_key: str | None = field(default=None, repr=False)
    reveal: bool = False

    def __post_init__(self) -> None:
        if self.endpoint_model and self.model:
            raise PacelineError("--endpoint-model names a model of the endpoint, --model one to load: give one of them")
        if self.count is not None and self.count < 1:
            raise PacelineError("there is nothing to play: give -n >= 1, or leave it out to play until you leave")
        if self.api_key and self.endpoint is None:
            raise PacelineError("--api-key is about an endpoint: give its base URL with --endpoint")


@dataclass(slots=True)
class ScoreBoard:
    """The actors' rewards so far."""

    games: int = 0
    failed: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    """Sums by actor: those of children are their actor's."""

    def add(self, played: PlayedEpisode) -> None:
        if played.error is not None or played.outcome is None:
            self.failed += 1
            return
        self.games += 1
        for name, reward in played.outcome.rewards.items():
            actor = _actor_of(played, name)
            self.rewards[actor] = self.rewards.get(actor, 0.0) + float(reward)


def play(
    config: RunConfig, options: PlayOptions, stream: TextIO | None = None, read: Callable[[str], str] = read_line
) -> int:
    """Play until the games are over or the person leaves; answers with an exit code: 1 if any game failed."""
    console = Console(file=stream)
    section = pick_env(config, options.env)
    environment = build_environment(section)
    judges = JudgeService().panel(section, environment)
    seat = pick_seat(section, environment.actors, options.seat)
    config, checkpoint = opponent_model(config, options)
    others = ", ".join(actor for actor in environment.actors if actor != seat)
    opponent = f"; {others}: {options.endpoint or checkpoint or config.model.name}" if others else ""
    console.print(Text(f"{section.name}, you are {seat}{opponent}", "bold"))
    console.print(Text("A line that ends in \\ goes on in the next. Ctrl-D leaves.", "dim"))
    name = options.endpoint_model or options.model
    address = OpenAIServer(options.endpoint, name, options.api_key) if options.endpoint else None
    sampling = split_sampling(config, options.split)
    person, total = Person(console, read), ScoreBoard()

    def on_game(played: PlayedEpisode) -> None:
        total.add(played)
        _show_game(console, played, total.games + total.failed, seat, options.reveal)

    with open_episode_runtime(config, sampling, address, MOST_CONCURRENT_SEATS, checkpoint) as runtime:
        guests = {seat: lambda name: PersonSeat(person, name, seat, sampling, runtime)}
        player = EpisodePlayer(section, environment, runtime, options.split, config.seed, guests, judges)
        try:
            asyncio.run(play_games(player, options, person, on_game))
        except KeyboardInterrupt:  # while the others were speaking
            console.print()
    line = Text(f"score after {format_amount(total.games, 'game')}", "bold")
    _append_rewards(line, ((actor, reward, actor == seat) for actor, reward in total.rewards.items()))
    if total.failed:
        line.append(f"  {total.failed} failed", "red")
    console.print(line, soft_wrap=True)
    return int(total.failed > 0)


def pick_seat(section: BaseEnvConfig, actors: Sequence[str], name: str | None) -> str:
    if name is not None and name not in actors:
        known = ", ".join(f"`{actor}`" for actor in actors)
        raise PacelineError(f"environment `{section.name}` has no seat `{name}`: choose one of {known} with --seat")
    return name or actors[0]


async def play_games(
    player: EpisodePlayer, options: PlayOptions, person: Person, on_game: Callable[[PlayedEpisode], None]
) -> None:
    """One game after another, on the rows a run would draw."""
    # A person takes their time.
    player = replace(player, section=player.section.model_copy(update={"timeout": math.inf}))
    silent = 0
    try:
        for ticket, member in islice(player.draw(options.row), options.count):
            spoken = person.turns
            played = await player.play(asyncio.ensure_future(player.prepare(ticket)), ticket, member)
            if person.input_error:
                raise PacelineError(person.input_error)
            if person.has_left:
                return
            on_game(played)
            silent = silent + 1 if person.turns == spoken else 0
            if silent == MOST_SILENT_GAMES:
                seats = ", ".join(player.guests or ())
                raise PacelineError(f"{silent} games went by without a turn of `{seats}`: take another seat")
    finally:
        await player.close()


def opponent_model(config: RunConfig, options: PlayOptions) -> tuple[RunConfig, Path | None]:
    """The config of the model that plays the other seats, and the checkpoint it loads, if any."""
    name = options.endpoint_model or options.model
    if name is None or options.endpoint is not None:
        return config, None
    if is_checkpoint(Path(name)):
        return config, Path(name)
    # What a run exports is merged, so there is no adapter beside it.
    return with_sections(config, model={"name": name, "lora": None}), None


def _show_game(console: Console, played: PlayedEpisode, number: int, seat: str, reveal: bool) -> None:
    for record in episode_records(played):
        if record["actor"] == seat:
            show_verdicts(record, console)
        elif reveal:
            show_rollout(record, console)
    line = Text(f"game {number}", "bold")
    if played.outcome is not None and played.error is None:
        rewards = played.outcome.rewards.items()
        _append_rewards(line, ((name, reward, _actor_of(played, name) == seat) for name, reward in rewards))
        line.append("".join(f"  {name} {format_score(value)}" for name, value in played.outcome.metrics.items()), "dim")
    if played.error is not None:
        line.append(f"  {played.error}", "red")
    console.print(line, soft_wrap=True)
    console.print()


def _actor_of(played: PlayedEpisode, name: str) -> str:
    """The actor of a seat; an environment may also reward an actor without one."""
    return played.sessions[name].actor if name in played.sessions else name


def _append_rewards(line: Text, rewards: Iterable[tuple[str, float, bool]]) -> None:
    for name, reward, yours in rewards:
        style = "bold green" if reward > 0 else "bold yellow"
        line.append(f"  {name}{' (you)' if yours else ''} ").append(format_score(float(reward)), style)
