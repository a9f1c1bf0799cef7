"""`paceline rollout`: plays episodes of an environment and prints them, before any training."""

import asyncio
import copy
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from paceline.config import RunConfig
from paceline.config.env import BaseEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.data import Row, Ticket, make_cursor
from paceline.envs import EnvError, Environment, Outcome, Split, build_environment
from paceline.envs.judges import JudgePanel, JudgeService, verdict_metrics
from paceline.errors import EngineError, Overloaded, PacelineError, RequestError
from paceline.observe.monitor.directory import to_json_value
from paceline.observe.monitor.show_rollout import show_rollout, show_summary
from paceline.orchestrator import Clock
from paceline.orchestrator.episodes import metric_value, outcome_error, row_for_ticket
from paceline.rollout import Message, Rollout, SamplingClient, Seat, SessionMap, Turn, assemble
from paceline.rollout.assemble import canonical_text
from paceline.rollout.endpoint import TextSeat
from paceline.rollout.seat import SeatFactories
from paceline.runtime.episode_runtime import EpisodeRuntime, OpenAIServer, open_episode_runtime
from paceline.runtime.signals import run_until_complete
from paceline.util.deadlines import DeadlineError
from paceline.util.user_code import is_cancelled, is_ctrl_c

PREVIEW_DOMAIN = 2
"""Domain of sampling noise, beside training's and evaluation's."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Flags of `paceline rollout`, whose help explains them."""

    count: int = 4
    env: str | None = None
    split: Split = "train"
    row: int | None = None
    """Play all episodes on this row, as a group; else each on its own, the ones a run would draw first."""
    endpoint: str | None = None
    endpoint_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 8
    json: bool = False
    raw: bool = False
    ids: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 or self.concurrency < 1:
            raise PacelineError(
                "a rollout needs at least one episode, and one at a time: give -n and --concurrency >= 1"
            )
        if self.endpoint is None and (self.endpoint_model or self.api_key):
            raise PacelineError(
                "--endpoint-model and --api-key are about an endpoint: give its base URL with --endpoint"
            )
        if self.ids and not self.json:
            raise PacelineError("--ids adds token ids to the JSON: give --json too")


def preview_rollouts(config: RunConfig, options: RolloutOptions, stream: TextIO | None = None) -> int:
    """Play and print; answers with an exit code: 1 if any episode failed. Ctrl-C raises KeyboardInterrupt."""
    console = Console(file=stream, quiet=options.json)
    section = pick_env(config, options.env)
    environment = build_environment(section)
    judges = JudgeService().panel(section, environment)
    console.print(Text(f"{section.name}, played by {options.endpoint or config.model.name}", "dim"))

    def show(record: Record) -> None:
        show_rollout(record, console)
        if options.json:
            print(json.dumps(to_json_value(record), ensure_ascii=False), file=stream, flush=True)

    address = OpenAIServer(options.endpoint, options.endpoint_model, options.api_key) if options.endpoint else None
    with open_episode_runtime(config, split_sampling(config, options.split), address, options.concurrency) as runtime:
        if not isinstance(runtime.client, SamplingClient) and (options.raw or options.ids):
            raise PacelineError(
                f"{options.endpoint} is asked in words, so its tokens are unknown here: leave --raw and --ids out, or "
                "let the model of the run file play in this process or behind `paceline serve`"
            )
        player = EpisodePlayer(section, environment, runtime, options.split, config.seed, judges=judges)
        played = run_until_complete(play_episodes(player, options, show))
    show_summary(played, console)
    return int(any(record["error"] for record in played))


def split_sampling(config: RunConfig, split: Split) -> SamplingConfig:
    return (config.eval.sampling if split == "eval" else None) or config.sampling


def pick_env(config: RunConfig, name: str | None) -> BaseEnvConfig:
    if name is None and len(config.env) == 1:
        return config.env[0]
    found = next((env for env in config.env if env.name == name), None)
    if found is None:
        known = ", ".join(f"`{env.name}`" for env in config.env)
        problem = f"there is no environment `{name}`" if name else "the run file has several environments"
        raise PacelineError(f"{problem}: choose one of {known} with --env")
    return found


async def play_episodes(
    player: "EpisodePlayer", options: RolloutOptions, show: Callable[[Record], None] = lambda record: None
) -> list[Record]:
    """Play episodes; a record for each seat that spoke. They are shown in order, each as soon as it is finished."""
    gate = asyncio.Semaphore(options.concurrency)
    prepared: dict[int, asyncio.Task[Row]] = {}

    async def one(ticket: Ticket, member: int) -> list[Record]:
        async with gate:  # bounded: each episode before it has a timeout
            if ticket.number not in prepared:
                prepared[ticket.number] = asyncio.ensure_future(player.prepare(ticket))
            played = await player.play(prepared[ticket.number], ticket, member)
            return episode_records(played, raw=options.raw, ids=options.ids)

    tasks = [asyncio.create_task(one(*draw)) for draw in islice(player.draw(options.row), options.count)]
    found: list[Record] = []
    try:
        for task in tasks:
            for record in await task:  # bounded: by its episode's timeout
                found.append(record)
                show(record)
    finally:
        for task in (*tasks, *prepared.values()):
            task.cancel()
        await asyncio.gather(*tasks, *prepared.values(), return_exceptions=True)  # bounded: they are cancelled
        await player.close()
    return found


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    ticket: Ticket
    member: int
    sessions: SessionMap
    outcome: Outcome | None
    error: str | None
    seconds: float
    runtime: EpisodeRuntime


@dataclass(frozen=True)
class EpisodePlayer:
    """Plays episodes of an environment, on the rows and with the noise of a run with this seed."""

    section: BaseEnvConfig
    environment: Environment
    runtime: EpisodeRuntime
    split: Split = "train"
    seed: int = 0
    guests: SeatFactories | None = None
    judges: JudgePanel | None = None

    async def close(self) -> None:
        await self.runtime.close()
        if self.judges is not None:
            await self.judges.service.aclose()

    @cached_property
    def rows(self) -> Sequence[Row]:
        if not (rows := self.environment.examples(self.split)):
            raise EnvError(f"environment `{self.section.name}` has no {self.split} rows")
        return rows

    def draw(self, row: int | None) -> Iterator[tuple[Ticket, int]]:
        """Endless tickets: of one row, of the held-out rows in order, or in the order a run with this seed trains."""
        name, rows = self.section.name, self.rows
        if row is not None:
            if not 0 <= row < len(rows):
                raise EnvError(f"environment `{name}` has {self.split} rows 0 to {len(rows) - 1}, not {row}")
            for member in count():
                yield Ticket(0, name, 0, 0, row), member
        cursor = make_cursor(rows, self.seed, name, self.section.curriculum)
        for number in count():
            in_order = number // len(rows), number, number % len(rows)
            yield Ticket(number, name, *(in_order if self.split == "eval" else cursor.draw())), 0

    async def prepare(self, ticket: Ticket) -> Row:
        """Prepare a ticket's row as a run with this seed would."""
        row = self.rows[ticket.row]
        if self.split == "train":
            return await row_for_ticket(self.environment, row, ticket, self.seed)
        return await self.environment.prepare(copy.deepcopy(row))

    async def play(self, row: "asyncio.Task[Row]", ticket: Ticket, member: int) -> PlayedEpisode:
        """Play one episode. A failure is stored in `error`; only a lost engine is raised."""
        section, noise = self.section, (self.seed, PREVIEW_DOMAIN, ticket.number, member)
        sessions = SessionMap(self.runtime.client, noise, 0, self.environment.actors, self.guests)
        outcome, error, began = None, None, time.perf_counter()

        async def play() -> Outcome | None:
            own_row = copy.deepcopy(await asyncio.shield(row))  # bounded: by the episode's timeout
            return await self.environment.play(own_row, sessions)

        try:
            outcome = await Clock().wait_within(section.timeout, f"an episode of `{section.name}`", play())
            spoke = {name: seat for name, seat in sessions.items() if seat.turns and seat.trained}
            error = "dropped by the environment" if outcome is None else outcome_error(spoke, outcome)
            if error is None and outcome is not None and self.judges is not None:
                outcome = await self.judges.grade_episode(await row, sessions, outcome)  # bounded: it is done
        except DeadlineError as failure:
            error = f"{failure}: {section.raise_hint('timeout')}"
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            error = "something the environment awaited was cancelled"
        except PacelineError as failure:
            if isinstance(failure, EngineError) and not isinstance(failure, RequestError | Overloaded):
                raise
            error = str(failure)
        except BaseException as failure:  # a user's code: shown with its file and line
            if is_ctrl_c(failure):
                raise
            frames = traceback.extract_tb(failure.__traceback__)
            place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            error = f"{type(failure).__name__}: {failure}{place}"
        finally:
            sessions.leave()
        if isinstance(outcome, Outcome):  # only its numeric metrics; `error` names the others
            numbers = {key: metric_value(value) for key, value in outcome.metrics.items()}
            outcome = replace(outcome, metrics={key: value for key, value in numbers.items() if value is not None})
        else:
            outcome = None
        return PlayedEpisode(ticket, member, sessions, outcome, error, time.perf_counter() - began, self.runtime)


def episode_records(played: PlayedEpisode, *, raw: bool = False, ids: bool = False) -> list[Record]:
    """A record for each seat that spoke; `raw` adds the text of each turn, `ids` its token ids."""
    outcome, runtime, sessions = played.outcome, played.runtime, played.sessions
    spoke = {name: seat for name, seat in sessions.items() if seat.turns} or dict(islice(sessions.items(), 1))
    found = []
    for name, seat in spoke.items():
        rollout = Rollout(
            ticket=played.ticket,
            member=played.member,
            actor=seat.actor,
            kind=seat.kind,
            parent=seat.parent,
            turns=seat.turns,
            reward=float(outcome.rewards[name]) if outcome and name in outcome.rewards else None,
            metrics={**outcome.metrics, **verdict_metrics(seat.verdicts)} if outcome and seat.trained else {},
            verdicts=[asdict(verdict) for verdict in seat.verdicts],
            error=played.error if name == list(spoke)[-1] else None,
        )
        record = _rollout_record(rollout, seat, runtime) | {"seconds": played.seconds}
        if raw or ids:
            record["turns"] = [_turn_record(turn, runtime, raw, ids) for turn in seat.turns]
        found.append(record)
    return found


def _rollout_record(rollout: Rollout, seat: Seat, runtime: EpisodeRuntime) -> Record:
    """The rollout's record as the run directory has it, with its conversations and token counts."""
    conversations = conversations_of(rollout.turns, runtime.decode)
    last = conversations[-1] if conversations else {"messages": [], "sampled": []}
    record = rollout.record() | {"kind": rollout.kind, "trained": seat.trained, **last}
    if tools := next((turn.tools for turn in reversed(rollout.turns) if turn.tools), None):
        record["tools"] = tools
    if len(conversations) > 1:
        record["conversations"] = conversations
    if isinstance(seat, TextSeat):
        return record | {"tokens": seat.tokens}
    return record | {"context": rollout.trajectory_length, "samples": len(assemble(rollout))}


def _turn_record(turn: Turn, runtime: EpisodeRuntime, raw: bool, ids: bool) -> Record:
    """One call of the model: its prompt and its completion."""
    text = {"prompt": runtime.decode(turn.prompt_ids), "completion": runtime.decode(turn.completion_ids)} if raw else {}
    tokens = {"prompt_ids": turn.prompt_ids, "completion_ids": turn.completion_ids, "logprobs": turn.logprobs}
    return text | {"finish": turn.finish, "prompt_tokens": len(turn.prompt_ids)} | (tokens if ids else {})


def conversations_of(turns: Sequence[Turn], decode: Callable[[Sequence[int]], str]) -> list[Record]:
    """The distinct conversations of a seat, and which of their messages were sampled."""
    whole: list[list[Message]] = []
    for turn in turns:
        given = [{"role": "tokens", "content": decode(turn.prompt_ids)}] if turn.messages is None else turn.messages
        whole.append([*given, turn.message])
    keys = [tuple(map(canonical_text, messages)) for messages in whole]
    return [
        {"messages": messages, "sampled": sorted({len(k) - 1 for k in keys if key[: len(k)] == k})}
        for messages, key in zip(whole, keys, strict=True)
        if not any(len(k) > len(key) and k[: len(key)] == key for k in keys)
    ]
