"""Games of the `textarena` package."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.config.env.doors import TextArena as Config
from paceline.data import Row
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split
from paceline.envs.offloop import run_user_code
from paceline.envs.textarena_game import Game, random_move
from paceline.importing import import_object
from paceline.rollout import Message, Seat

HELD_OUT = 1 << 30
"""Distance between the seeds of training and held-out games."""
MOST_PLAYERS = 16
STEP_SECONDS = 60.0


class TextArena(Environment):
    """The game's words are user messages, the policy's moves are its replies, and rewards are the game's own.

    Each player has a conversation of its own and sees only what the game shows it. What an illegal move costs is the
    game's business too: most ask once more, then the player loses.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._players = config.players or self._fewest()
        self._open(config.seed)  # a game that cannot be played is an error now, not in the first episode
        self._opponent: Callable[..., Any] | None = None
        if config.opponent == "self":
            self.actors = tuple(_seat(i) for i in range(self._players)) if self._players > 1 else (POLICY,)
            return
        if self._players == 1:
            raise EnvError(f"textarena game `{config.game}` is for one player: leave `opponent` out")
        if config.opponent != "random":
            self._opponent = import_object(config.opponent)

    def examples(self, split: Split) -> Sequence[Row]:
        train = split == "train"
        first = self._config.seed + (0 if train else HELD_OUT)
        size = self._config.size if train else self._config.eval_size
        return [{"seed": first + i, "seat": i % self._players} for i in range(size)]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        game = await run_user_code(self._open, example["seed"], timeout=STEP_SECONDS)
        mine = self._seats(example["seat"])
        luck = random.Random(example["seed"])
        told: dict[int, list[Message]] = {player: self._opening() for player in range(self._players)}
        turns = 0
        while not game.over and turns < self._config.max_turns:
            player, text = game.look()
            told[player].append({"role": "user", "content": text})
            if player in mine:
                reply = await seats[mine[player]].chat(told[player])
                told[player].append(reply.message)
                move = reply.content
            else:
                move = await self._choose(game, told[player], luck)
            await run_user_code(game.move, move, timeout=STEP_SECONDS)
            turns += 1
        return self._outcome(game, mine, turns)

    def _outcome(self, game: Game, mine: Mapping[int, str], turns: int) -> Outcome:
        rewards = {seat: float(game.rewards.get(player, 0.0)) for player, seat in mine.items()}
        metrics = {
            "turns": float(turns),
            "unfinished": float(not game.over),
            "illegal": float(any(game.lost_by_rule(player) for player in mine)),
        }
        if self._config.opponent != "self":
            metrics["won"] = float(all(reward > 0 for reward in rewards.values()))
        return Outcome(rewards, metrics)

    def _seats(self, seat: int) -> dict[int, str]:
        """Which players the policy plays, and under which names."""
        return {seat: POLICY} if self._config.opponent != "self" else dict(enumerate(self.actors))

    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self._config.system_prompt}] if self._config.system_prompt else []

    async def _choose(self, game: Game, told: Sequence[Message], luck: random.Random) -> str:
        """An opponent's move."""
        texts = [message["content"] for message in told]
        if self._opponent is None:
            return await run_user_code(random_move, game, texts, luck, timeout=STEP_SECONDS)
        move = await run_user_code(self._opponent, texts[-1], luck, timeout=STEP_SECONDS)
        if not isinstance(move, str):
            raise EnvError(f"{self._config.opponent} returned {move!r}: return the move as a string")
        return move

    def _fewest(self) -> int:
        for players in range(1, MOST_PLAYERS + 1):
            try:
                self._open(self._config.seed, players)
            except AssertionError:  # how its games refuse a number of players
                continue
            return players
        raise EnvError(f"textarena game `{self._config.game}` takes no number of players up to {MOST_PLAYERS}")

    def _open(self, seed: int, players: int | None = None) -> Game:
        config = self._config
        try:
            return Game(config.game, config.args, players or self._players, seed)
        except AssertionError as error:
            if players is not None:
                raise
            raise EnvError(f"textarena game `{config.game}` with {self._players} players: {error}") from error
        except (TypeError, ValueError, LookupError, OSError, ImportError, SyntaxError) as error:
            raise EnvError(f"textarena game `{config.game}` cannot be opened: {error}") from error


def _seat(player: int) -> str:
    return f"player_{player}"
