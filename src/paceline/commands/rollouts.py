"""`paceline rollout`: play some episodes of an environment and look at them, before any training."""

import asyncio
import copy
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from paceline.config import RunConfig
from paceline.config.env import BaseEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.data import Row, Ticket, order_of
from paceline.envs import EnvError, Environment, Outcome, Split, build_environment
from paceline.errors import EngineError, Overloaded, PacelineError, RequestError
from paceline.observe.monitor.directory import plain
from paceline.observe.monitor.show_rollout import show_rollout, show_summary
from paceline.orchestrator import RealClock
from paceline.orchestrator.episodes import assigned, fault, metric_of
from paceline.rollout import Message, Rollout, Seat, SessionMap, Turn, assemble
from paceline.rollout.endpoint import WordSeat
from paceline.rollout.history import meaning
from paceline.rollout.seat import Guests
from paceline.runtime.episode_runtime import EpisodeRuntime, OpenAIServer, open_house
from paceline.runtime.signals import run_to_the_end
from paceline.util.deadlines import DeadlineError
from paceline.util.user_code import is_cancelled, is_ctrl_c

LOOKING = 2
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


def rollouts(config: RunConfig, options: RolloutOptions, stream: TextIO | None = None) -> int:
    """Play and print; answers with an exit code: 1 if any episode failed. Ctrl-C raises KeyboardInterrupt."""
    console = Console(file=stream, quiet=options.json)
    section = pick_section(config, options.env)
    environment = build_environment(section)
    console.print(Text(f"{section.name}, played by {options.endpoint or config.model.name}", "dim"))

    def show(record: Record) -> None:
        show_rollout(record, console)
        if options.json:
            print(json.dumps(plain(record), ensure_ascii=False), file=stream, flush=True)

    address = OpenAIServer(options.endpoint, options.endpoint_model, options.api_key) if options.endpoint else None
    with open_house(config, sampling_on(config, options.split), address, options.concurrency) as house:
        if house.client is None and (options.raw or options.ids):
            raise PacelineError(
                f"{options.endpoint} is asked in words, so its tokens are unknown here: leave --raw and --ids out, or "
                "let the model of the run file play in this process or behind `paceline serve`"
            )
        played = run_to_the_end(play_some(section, options, house, environment, seed=config.seed, show=show))
    show_summary(played, console)
    return int(any(record["error"] for record in played))


def sampling_on(config: RunConfig, split: Split) -> SamplingConfig:
    return (config.eval.sampling if split == "eval" else None) or config.sampling


def pick_section(config: RunConfig, name: str | None) -> BaseEnvConfig:
    if name is None and len(config.env) == 1:
        return config.env[0]
    found = next((env for env in config.env if env.name == name), None)
    if found is None:
        known = ", ".join(f"`{env.name}`" for env in config.env)
        said = f"there is no environment `{name}`" if name else "the run file has several environments"
        raise PacelineError(f"{said}: choose one of {known} with --env")
    return found


async def play_some(
    section: BaseEnvConfig,
    options: RolloutOptions,
    house: EpisodeRuntime,
    environment: Environment | None = None,
    *,
    seed: int = 0,
    show: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Play episodes; a record for each seat that spoke. They are shown in order, each as soon as it is there."""
    environment = environment or build_environment(section)
    rows = rows_of(section, environment, options.split)
    gate = asyncio.Semaphore(options.concurrency)
    prepared: dict[int, asyncio.Task[Row]] = {}

    async def one(ticket: Ticket, member: int) -> list[Record]:
        async with gate:  # bounded: each episode before it has a timeout
            if ticket.number not in prepared:
                row = ready(environment, options.split, rows[ticket.row], ticket, seed)
                prepared[ticket.number] = asyncio.ensure_future(row)
            played = await episode(section, environment, house, prepared[ticket.number], ticket, member, seed)
            return records(played, raw=options.raw, ids=options.ids)

    drawn = islice(draws(section, options.split, options.row, rows, seed), options.count)
    tasks = [asyncio.create_task(one(*draw)) for draw in drawn]
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
        await house.close()
    return found


def rows_of(section: BaseEnvConfig, environment: Environment, split: Split) -> Sequence[Row]:
    rows = environment.examples(split)
    if not rows:
        raise EnvError(f"environment `{section.name}` has no {split} rows")
    return rows


async def ready(environment: Environment, split: Split, row: Row, ticket: Ticket, seed: int) -> Row:
    """A row as a run of this seed would play it."""
    if split == "train":
        return await assigned(environment, row, ticket, seed)
    return await environment.prepare(copy.deepcopy(row))


def draws(
    section: BaseEnvConfig, split: Split, row: int | None, rows: Sequence[Row], seed: int
) -> Iterator[tuple[Ticket, int]]:
    """Rows without end: one for all, the held-out ones in order, or those a run of this seed trains on first."""
    if row is not None:
        if not 0 <= row < len(rows):
            raise EnvError(f"environment `{section.name}` has {split} rows 0 to {len(rows) - 1}, not {row}")
        for member in count():
            yield Ticket(0, section.name, 0, 0, row), member
    cursor = order_of(rows, seed, section.name, section.curriculum)
    for number in count():
        drawn = (number // len(rows), number, number % len(rows)) if split == "eval" else cursor.draw()
        yield Ticket(number, section.name, *drawn), 0


@dataclass(frozen=True, slots=True)
class Played:
    """One episode, however it ended."""

    ticket: Ticket
    member: int
    table: SessionMap
    outcome: Outcome | None
    error: str | None
    seconds: float
    house: EpisodeRuntime


async def episode(
    section: BaseEnvConfig,
    environment: Environment,
    house: EpisodeRuntime,
    row: "asyncio.Task[Row]",
    ticket: Ticket,
    member: int,
    seed: int,
    guests: Guests | None = None,
) -> Played:
    """One episode. Whatever goes wrong in it is told with it; only a lost engine ends the others too."""
    table = house.table((seed, LOOKING, ticket.number, member), environment.actors, guests or {})
    outcome, error, began = None, None, time.perf_counter()

    async def play() -> Outcome | None:
        mine = copy.deepcopy(await asyncio.shield(row))  # bounded: by the episode's timeout
        return await environment.play(mine, table)

    try:
        outcome = await RealClock().within(section.timeout, f"an episode of `{section.name}`", play())
        spoke = {name: seat for name, seat in table.items() if seat.turns and seat.trained}
        error = "dropped by the environment" if outcome is None else fault(spoke, outcome)
    except DeadlineError as failure:
        error = f"{failure}: {section.to_raise('timeout')}"
    except EngineError as failure:
        if not isinstance(failure, RequestError | Overloaded):
            raise
        error = str(failure)
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        error = "something the environment awaited was cancelled"
    except PacelineError as failure:
        error = str(failure)
    except BaseException as failure:  # a user's code: shown with its place, so that it can be mended
        if is_ctrl_c(failure):
            raise
        frames = traceback.extract_tb(failure.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        error = f"{type(failure).__name__}: {failure}{place}"
    finally:
        table.leave()
    if not isinstance(outcome, Outcome):
        outcome = None
    else:  # what can be shown of it; the error says what is wrong with the rest
        numbers = {key: metric_of(value) for key, value in outcome.metrics.items()}
        outcome = replace(outcome, metrics={key: value for key, value in numbers.items() if value is not None})
    return Played(ticket, member, table, outcome, error, time.perf_counter() - began, house)


def records(played: Played, *, raw: bool = False, ids: bool = False) -> list[Record]:
    """A record for each seat that spoke; with what each turn's prompt was, as text or as token ids, where asked."""
    outcome, house = played.outcome, played.house
    spoke = {name: seat for name, seat in played.table.items() if seat.turns} or dict(list(played.table.items())[:1])
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
            metrics=dict(outcome.metrics) if outcome and seat.trained else {},
            error=played.error if name == list(spoke)[-1] else None,
        )
        record = _record(rollout, seat, house) | {"seconds": played.seconds}
        if raw or ids:
            record["turns"] = [_turn(turn, house, raw, ids) for turn in seat.turns]
        found.append(record)
    return found


def _record(rollout: Rollout, seat: Seat, house: EpisodeRuntime) -> Record:
    """A rollout as the run directory keeps it, with some more that is good to see."""
    conversations = conversations_of(rollout.turns, house.spell)
    last = conversations[-1] if conversations else {"messages": [], "sampled": []}
    record = rollout.record() | {"kind": rollout.kind, "trained": seat.trained, **last}
    if tools := next((turn.tools for turn in reversed(rollout.turns) if turn.tools), None):
        record["tools"] = tools
    if len(conversations) > 1:
        record["conversations"] = conversations
    if isinstance(seat, WordSeat):
        return record | {"tokens": seat.tokens}
    return record | {"context": rollout.trajectory_length, "samples": len(assemble(rollout))}


def _turn(turn: Turn, house: EpisodeRuntime, raw: bool, ids: bool) -> Record:
    """One call of the model, exactly: what it was given and what it sampled."""
    text = {"prompt": house.spell(turn.prompt_ids), "completion": house.spell(turn.completion_ids)} if raw else {}
    tokens = {"prompt_ids": turn.prompt_ids, "completion_ids": turn.completion_ids, "logprobs": turn.logprobs}
    return text | {"finish": turn.finish, "prompt_tokens": len(turn.prompt_ids)} | (tokens if ids else {})


def conversations_of(turns: Sequence[Turn], spell: Callable[[Sequence[int]], str]) -> list[Record]:
    """The conversations of a seat, each once and whole, and the places in them that were sampled."""
    whole: list[list[Message]] = []
    for turn in turns:
        given = [{"role": "tokens", "content": spell(turn.prompt_ids)}] if turn.messages is None else turn.messages
        whole.append([*given, turn.message])
    keys = [tuple(map(meaning, messages)) for messages in whole]
    return [
        {"messages": messages, "sampled": sorted({len(k) - 1 for k in keys if key[: len(k)] == k})}
        for messages, key in zip(whole, keys, strict=True)
        if not any(len(k) > len(key) and k[: len(key)] == key for k in keys)
    ]
