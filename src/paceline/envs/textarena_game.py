"""One game of the `textarena` package, with luck of its own."""

import copy
import random
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.envs.base import EnvError

_LUCK = threading.Lock()
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_LISTS_MOVES = re.compile(r"available|valid|legal|possible|options", re.IGNORECASE)


class Game:
    """A game under way. Games draw from Python's global generator, so each is given its own state of it: how one goes
    on does not depend on which others are played at the same time."""

    def __init__(self, name: str, args: Mapping[str, Any], players: int, seed: int) -> None:
        textarena = _package()
        if name not in textarena.envs.registration.ENV_REGISTRY:
            raise EnvError(f"textarena has no game `{name}`: `textarena.envs.registration.ENV_REGISTRY` lists them")
        self._luck = random.Random(seed).getstate()
        self._said = textarena.ObservationType.PLAYER_ACTION
        self.over = False
        with self._own_luck():
            self._env = textarena.make(name, **args)
            self._env.reset(num_players=players, seed=seed)
        self._core = self._env
        while isinstance(self._core, textarena.Wrapper):
            self._core = self._core.env

    def look(self) -> tuple[int, str]:
        """Whose turn it is, and what the game showed them since their last one.

        Read below the package's wrappers, which would repeat the whole game each time: a conversation that only grows
        keeps its tokens.
        """
        player, seen = self._core.get_observation()
        names = self._core.state.role_mapping
        lines = [
            text if who not in range(self._core.state.num_players) else f"[{names.get(who, f'Player {who}')}] {text}"
            for who, text, kind in seen
            if not (who == player and kind is self._said)
        ]
        return player, "\n".join(lines).strip() or "It is your turn."

    def move(self, action: str) -> None:
        with self._own_luck():
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
    def _own_luck(self) -> Generator[None]:
        with _LUCK:
            outside = random.getstate()
            random.setstate(self._luck)
            try:
                yield
            finally:
                self._luck = random.getstate()
                random.setstate(outside)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Game":
        twin = copy.copy(self)
        twin._env = copy.deepcopy(self._env, memo)
        twin._core = twin._env
        while hasattr(type(twin._core), "is_wrapped_with"):
            twin._core = twin._core.env
        return twin


def random_move(game: Game, told: list[str], luck: random.Random) -> str:
    """Any legal move among those the game named in brackets, like `[4]`: where it last listed them, or anywhere."""
    lists = [line for line in told[-1].splitlines() if _LISTS_MOVES.search(line)]
    for text in ("\n".join(lists), "\n".join(told)):
        moves = sorted(set(_MOVE.findall(text)))
        luck.shuffle(moves)
        if (legal := next(filter(game.allows, moves), None)) is not None:
            return legal
    raise EnvError(
        'this textarena game names no legal move, so opponent = "random" cannot play it: use "self", or the import '
        "path of `choose(observation, random) -> action`"
    )


def _package() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise EnvError('textarena is not installed: pip install "paceline[tasks]"') from error
    return textarena
