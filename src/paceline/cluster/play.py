"""`paceline play`: take a seat yourself, against the policy or alone."""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from paceline.cluster.house import Address, House, is_checkpoint, open_house
from paceline.cluster.person import Person, PersonSeat, typed
from paceline.cluster.rollouts import Played, draws, episode, pick_section, ready, records, rows_of, sampling_on
from paceline.config import RunConfig
from paceline.config.env import EnvBase
from paceline.envs import Environment, Split, build_environment
from paceline.errors import PacelineError
from paceline.monitor.show_rollout import show_rollout
from paceline.monitor.text import amount, score
from paceline.rollout.table import Guests

AT_ONCE = 8
"""Seats of one game that may speak at the same time, where an episode starts others."""
PATIENCE = 20
"""Games in a row in which the person is never asked, before that is taken for a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """Where to sit, and who else plays."""

    env: str | None = None
    """The environment's name, where the run file has several."""
    seat: str | None = None
    """The actor the person plays; the first when left out."""
    games: int | None = None
    """How many; until the person leaves when left out."""
    split: Split = "train"
    row: int | None = None
    """Play every game on this row."""
    url: str | None = None
    """Base URL of an OpenAI-compatible server that plays the others; the model in this process when left out."""
    model: str | None = None
    """Its name there; or, in this process, a folder, a hub name or a checkpoint in place of the run's own model."""
    api_key: str | None = field(default=None, repr=False)
    reveal: bool = False
    """After each game, show what the others heard and said."""

    def __post_init__(self) -> None:
        if self.games is not None and self.games < 1:
            raise PacelineError("there is nothing to play: give -n >= 1, or leave it out to play until you leave")
        if self.api_key and self.url is None:
            raise PacelineError("--api-key is about an endpoint: give its base URL with --endpoint")


@dataclass(slots=True)
class Score:
    """Who has earned what so far."""

    games: int = 0
    failed: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    """Sums by actor: those of children are their actor's."""

    def add(self, played: Played) -> None:
        if played.error is not None or played.outcome is None:
            self.failed += 1
            return
        self.games += 1
        for name, reward in played.outcome.rewards.items():
            actor = _actor(played, name)
            self.rewards[actor] = self.rewards.get(actor, 0.0) + float(reward)


def play(
    config: RunConfig, options: PlayOptions, stream: TextIO | None = None, read: Callable[[str], str] = typed
) -> int:
    """Play until the games are over or the person leaves; answers with an exit code: 1 if any game failed."""
    console = Console(file=stream)
    section = pick_section(config, options.env)
    environment = build_environment(section)
    seat = pick_seat(section, environment.actors, options.seat)
    config, checkpoint = speaking(config, options)
    _greet(console, section, environment.actors, seat, options.url or checkpoint or config.model.name)
    address = Address(options.url, options.model, options.api_key) if options.url else None
    sampling = sampling_on(config, options.split)
    person, total = Person(console, read), Score()

    def tell(played: Played) -> None:
        total.add(played)
        _show_game(console, played, total.games + total.failed, seat, options.reveal)

    with open_house(config, sampling, address, AT_ONCE, checkpoint) as house:
        guests = {seat: lambda name: PersonSeat(person, name, seat, sampling, house.lodge, house.spell)}
        try:
            asyncio.run(play_games(section, options, house, environment, person, guests, seed=config.seed, tell=tell))
        except KeyboardInterrupt:  # while the others were speaking
            console.print()
    _show_score(console, total, seat)
    return int(total.failed > 0)


def pick_seat(section: EnvBase, actors: Sequence[str], name: str | None) -> str:
    if name is not None and name not in actors:
        known = ", ".join(f"`{actor}`" for actor in actors)
        raise PacelineError(f"environment `{section.name}` has no seat `{name}`: choose one of {known} with --seat")
    return name or actors[0]


async def play_games(
    section: EnvBase,
    options: PlayOptions,
    house: House,
    environment: Environment,
    person: Person,
    guests: Guests,
    *,
    seed: int,
    tell: Callable[[Played], None],
) -> None:
    """One game after another, on the rows a run would draw."""
    rows = rows_of(section, environment, options.split)
    patient = section.model_copy(update={"timeout": math.inf})  # people may think
    silent = 0
    try:
        for ticket, member in islice(draws(section, options.split, options.row, rows, seed), options.games):
            spoken = person.turns
            row = asyncio.ensure_future(ready(environment, options.split, rows[ticket.row], ticket, seed))
            played = await episode(patient, environment, house, row, ticket, member, seed, guests)
            if person.broken:
                raise PacelineError(person.broken)
            if person.left:
                return
            tell(played)
            silent = silent + 1 if person.turns == spoken else 0
            if silent == PATIENCE:
                raise PacelineError(
                    f"{PATIENCE} games went by without a turn of `{', '.join(guests)}`: take another seat"
                )
    finally:
        await house.close()


def speaking(config: RunConfig, options: PlayOptions) -> tuple[RunConfig, Path | None]:
    """The config of whoever plays the others in this process, and the checkpoint of the run they speak from."""
    if options.model is None or options.url is not None:
        return config, None
    if is_checkpoint(Path(options.model)):
        return config, Path(options.model)
    # What a run exports is merged, so there is no adapter beside it.
    model = config.model.model_copy(update={"name": options.model, "lora": None})
    return config.model_copy(update={"model": model}), None


# -- telling ----------------------------------------------------------------------------------------------------------


def _greet(console: Console, section: EnvBase, actors: Sequence[str], seat: str, opponent: object) -> None:
    others = [actor for actor in actors if actor != seat]
    played = f"; {', '.join(others)}: {opponent}" if others else ""
    console.print(Text(f"{section.name}, you are {seat}{played}", "bold"))
    console.print(Text("A line that ends in \\ goes on in the next. Ctrl-D leaves.", "dim"))


def _show_game(console: Console, played: Played, number: int, seat: str, reveal: bool) -> None:
    for record in records(played) if reveal else ():
        if record["actor"] != seat:
            show_rollout(record, console)
    line = Text(f"game {number}", "bold")
    if played.outcome is not None and played.error is None:
        rewards = played.outcome.rewards.items()
        _append(line, ((name, reward, _actor(played, name) == seat) for name, reward in rewards))
        line.append("".join(f"  {name} {score(value)}" for name, value in played.outcome.metrics.items()), "dim")
    if played.error is not None:
        line.append(f"  {played.error}", "red")
    console.print(line, soft_wrap=True)
    console.print()


def _show_score(console: Console, total: Score, seat: str) -> None:
    line = Text(f"score after {amount(total.games, 'game')}", "bold")
    _append(line, ((actor, reward, actor == seat) for actor, reward in total.rewards.items()))
    if total.failed:
        line.append(f"  {total.failed} failed", "red")
    console.print(line, soft_wrap=True)


def _actor(played: Played, name: str) -> str:
    """Who sat in a seat; an environment may also pay somebody who had none."""
    return played.table[name].actor if name in played.table else name


def _append(line: Text, rewards: Iterable[tuple[str, float, bool]]) -> None:
    for name, reward, yours in rewards:
        style = "bold green" if reward > 0 else "bold yellow"
        line.append(f"  {name}{' (you)' if yours else ''} ").append(score(float(reward)), style)
