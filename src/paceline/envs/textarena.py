"""Games of the `textarena` package."""

import copy
import random
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.config.env import TextArenaConfig as Config
from paceline.data import Row
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split, import_extra, row_seeds
from paceline.envs.offloop import run_user_code
from paceline.rollout import Message, Seat
from paceline.util.importing import import_object

_RNG_LOCK = threading.Lock()
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_LISTS_MOVES = re.compile(r"available|valid|legal|possible|options", re.IGNORECASE)


class Game:
    """A game in progress. Games draw from Python's global generator, so each has its own state of it and does not
    depend on the other games that run at the same time."""

    def __init__(self, name: str, args: Mapping[str, Any], players: int, seed: int) -> None:
        textarena = import_extra("textarena")
        if name not in textarena.envs.registration.ENV_REGISTRY:
            raise EnvError(f"textarena has no game `{name}`: `textarena.envs.registration.ENV_REGISTRY` lists them")
        self._rng_state = random.Random(seed).getstate()
        self._action_type = textarena.ObservationType.PLAYER_ACTION
        self.over = False
        with self._own_rng():
            self._env = textarena.make(name, **args)
            self._env.reset(num_players=players, seed=seed)
        self._core = _unwrap(self._env)

    def look(self) -> tuple[int, str]:
        """The player whose turn it is, and what the game showed them since their last turn.

        Read below the package's wrappers, which would repeat the whole game each time: a conversation that only grows
        keeps its tokens.
        """
        player, seen = self._core.get_observation()
        names = self._core.state.role_mapping
        lines = [
            text if who not in range(self._core.state.num_players) else f"[{names.get(who, f'Player {who}')}] {text}"
            for who, text, kind in seen
            if not (who == player and kind is self._action_type)
        ]
        return player, "\n".join(lines).strip() or "It is your turn."

    def move(self, action: str) -> None:
        with self._own_rng():
            self.over, _ = self._env.step(action)

    @property
    def rewards(self) -> Mapping[int, float]:
        """Of players the game has judged; empty while it goes on."""
        return self._core.state.rewards or {} if self.over else {}

    def lost_by_rule(self, player: int) -> bool:
        """Whether an illegal move ended the game for this player."""
        return bool(self._core.state.game_info.get(player, {}).get("invalid_move"))

    def allows(self, action: str) -> bool:
        """Whether a move is legal, tried out on a copy."""
        player, mistakes = self._core.state.current_player_id, getattr(self._core.state, "error_count", 0)
        trial = copy.deepcopy(self)
        trial.move(action)
        return getattr(trial._core.state, "error_count", 0) <= mistakes and not trial.lost_by_rule(player)

    @contextmanager
    def _own_rng(self) -> Generator[None]:
        with _RNG_LOCK:
            outside = random.getstate()
            random.setstate(self._rng_state)
            try:
                yield
            finally:
                self._rng_state = random.getstate()
                random.setstate(outside)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Game":
        twin = copy.copy(self)
        twin._env = copy.deepcopy(self._env, memo)
        twin._core = _unwrap(twin._env)
        return twin


def _unwrap(env: Any) -> Any:
    while isinstance(env, import_extra("textarena").Wrapper):
        env = env.env
    return env


def random_move(game: Game, observations: list[str], rng: random.Random) -> str:
    """Any legal move among those the game named in brackets, like `[4]`: where it last listed them, or anywhere."""
    lists = [line for line in observations[-1].splitlines() if _LISTS_MOVES.search(line)]
    for text in ("\n".join(lists), "\n".join(observations)):
        moves = sorted(set(_MOVE.findall(text)))
        rng.shuffle(moves)
        if (legal := next(filter(game.allows, moves), None)) is not None:
            return legal
    raise EnvError(
        'this textarena game names no legal move, so opponent = "random" cannot play it: use "self", or the import '
        "path of `choose(observation, random) -> action`"
    )


MAX_PLAYERS = 16
STEP_SECONDS = 60.0


class TextArena(Environment):
    """The game's words are user messages, the policy's moves are its replies, and rewards are the game's own.

    Each player has a conversation of its own and sees only what the game shows it. What an illegal move costs is the
    game's business too: most ask once more, then the player loses.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._players = config.players or self._min_players()
        self._new_game(config.seed)  # a game that cannot be played is an error now, not in the first episode
        self._opponent: Callable[..., Any] | None = None
        if config.opponent == "self":
            self.actors = tuple(f"player_{i}" for i in range(self._players)) if self._players > 1 else (POLICY,)
            return
        if self._players == 1:
            raise EnvError(f"textarena game `{config.game}` is for one player: leave `opponent` out")
        if config.opponent != "random":
            self._opponent = import_object(config.opponent)

    def examples(self, split: Split) -> Sequence[Row]:
        seeds = row_seeds(self._config, split)
        return [{"seed": seed, "seat": place % self._players} for place, seed in enumerate(seeds)]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        game = await run_user_code(self._new_game, example["seed"], timeout=STEP_SECONDS)
        against_itself = self._config.opponent == "self"
        mine = dict(enumerate(self.actors)) if against_itself else {example["seat"]: POLICY}
        rng = random.Random(example["seed"])
        system = self._config.system_prompt
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        conversations = {player: list(opening) for player in range(self._players)}
        turns = 0
        while not game.over and turns < self._config.max_turns:
            player, text = game.look()
            conversations[player].append({"role": "user", "content": text})
            if player in mine:
                reply = await seats[mine[player]].chat(conversations[player])
                conversations[player].append(reply.message)
                move = reply.content
            else:
                move = await self._choose(game, conversations[player], rng)
            await run_user_code(game.move, move, timeout=STEP_SECONDS)
            turns += 1
        rewards = {seat: float(game.rewards.get(player, 0.0)) for player, seat in mine.items()}
        metrics = {
            "turns": float(turns),
            "unfinished": float(not game.over),
            "illegal": float(any(game.lost_by_rule(player) for player in mine)),
        }
        if not against_itself:
            metrics["won"] = float(all(reward > 0 for reward in rewards.values()))
        return Outcome(rewards, metrics)

    async def _choose(self, game: Game, conversation: Sequence[Message], rng: random.Random) -> str:
        texts = [message["content"] for message in conversation]
        if self._opponent is None:
            return await run_user_code(random_move, game, texts, rng, timeout=STEP_SECONDS)
        move = await run_user_code(self._opponent, texts[-1], rng, timeout=STEP_SECONDS)
        if not isinstance(move, str):
            raise EnvError(f"{self._config.opponent} returned {move!r}: return the move as a string")
        return move

    def _min_players(self) -> int:
        for players in range(1, MAX_PLAYERS + 1):
            try:
                self._new_game(self._config.seed, players)
            except AssertionError:  # how its games refuse a number of players
                continue
            return players
        raise EnvError(f"textarena game `{self._config.game}` takes no number of players up to {MAX_PLAYERS}")

    def _new_game(self, seed: int, players: int | None = None) -> Game:
        config = self._config
        try:
            return Game(config.game, config.args, players or self._players, seed)
        except AssertionError as error:
            if players is not None:
                raise
            raise EnvError(f"textarena game `{config.game}` with {self._players} players: {error}") from error
        except (TypeError, ValueError, LookupError, OSError, ImportError, SyntaxError) as error:
            raise EnvError(f"textarena game `{config.game}` cannot be opened: {error}") from error
