"""Tic-tac-toe against oneself: the policy plays both sides and is trained on both.

    paceline train examples/arenas/tic_tac_toe.toml

A move is one digit, 1 to 9, row by row. Whoever says anything else, or takes a square that is taken, loses. Each player
hears only the other's moves, so the conversation is the game:

    add: 0+0      5       x begins in the middle; nobody has moved before
    add: 0+1      9       o took 1, x takes 9

The quickstart model knows such questions and answers them with a digit; what the digit means here it learns by playing.
Training plays the policy against itself, from the empty board and after each first move; evaluation plays it against an
opponent that moves at random, as `x` and as `o`.
"""

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from paceline.arena import Actor, Arena, Artifact, EpisodeRequest, EpisodeState, Event, MultiTurnEpisode, Rubric
from paceline.envs import Split

SQUARES = "123456789"
LINES = ("123", "456", "789", "147", "258", "369", "159", "357")
OTHER = {"x": "o", "o": "x"}


def to_move(moves: str) -> str:
    return "xo"[len(moves) % 2]


def standing(moves: str) -> str | None:
    """Who has won after these legal moves: a player, `draw`, or None while the game is on.

    >>> standing("14253"), standing("12"), standing("123456789")
    ('x', None, 'x')
    """
    last = moves[-1::-2]  # of whoever moved last, and only they can have won by it
    if any(set(line) <= set(last) for line in LINES):
        return OTHER[to_move(moves)]
    return "draw" if len(moves) == len(SQUARES) else None


def advance(state: EpisodeState, said: str) -> None:
    """One move of whoever's turn it is. An illegal one loses."""
    moves = state.data["moves"]
    legal = len(said) == 1 and said in SQUARES and said not in moves
    state.data["legal"] = legal
    state.data["moves"] = moves + said if legal else moves
    state.data["winner"] = standing(moves + said) if legal else OTHER[to_move(moves)]
    state.done = state.data["winner"] is not None


def pays(winner: str, player: str) -> float:
    return 0.0 if winner == "draw" else 1.0 if winner == player else -1.0


def result(state: EpisodeState, arena: Arena) -> dict[str, float]:
    """A win pays 1, a loss -1, a draw nothing: what one wins the other loses."""
    return {player: pays(state.data["winner"], player) for player in state.actors}


class Game(MultiTurnEpisode):
    """Both sides are the policy."""

    episode_type = "self-play"
    actors = ("x", "o")
    rubric = Rubric([result])

    def init_state(self, state: EpisodeState, artifact: Artifact) -> None:
        opening = artifact.data["opening"]
        state.data.update(moves=opening, winner=None, legal=True)
        state.events.extend(Event("xo"[turn % 2], move) for turn, move in enumerate(opening))

    def get_initial_actor(self, artifact: Artifact, state: EpisodeState) -> str:
        return to_move(state.data["moves"])

    def get_initial_prompt(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> str:
        """The moves this player finds made in their own name; the other's come as news, like all later ones."""
        return artifact.data["opening"]["xo".index(state.current_actor) :: 2]

    def describe(self, event: Event, listener: str) -> str:
        return event.text

    def compose(self, state: EpisodeState, opening: str | None, told: Sequence[str], observation: str | None) -> str:
        return f"add: {opening or 0}+{''.join(told) or 0}"

    async def env_response(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> None:
        advance(state, state.last_text)

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        return {"legal": float(state.data["legal"]), "draw": float(state.data["winner"] == "draw")}


def against_random(state: EpisodeState, arena: Arena) -> dict[str, float]:
    player = state.request.artifact.data["player"]
    return {player: pays(state.data["winner"], player)}


class AgainstRandom(Game):
    """The policy on one side, random legal moves on the other. The artifact fixes the side and the dice."""

    episode_type = "against-random"
    rubric = Rubric([against_random])

    def init_state(self, state: EpisodeState, artifact: Artifact) -> None:
        super().init_state(state, artifact)
        state.data["dice"] = random.Random(artifact.data["dice"])
        self._reply(state, artifact)

    def get_next_actor(self, state: EpisodeState, artifact: Artifact) -> str:
        return artifact.data["player"]

    async def env_response(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> None:
        advance(state, state.last_text)
        self._reply(state, artifact)

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        won = state.data["winner"] == state.request.artifact.data["player"]
        return super().get_metrics(state) | {"win": float(won)}

    def _reply(self, state: EpisodeState, artifact: Artifact) -> None:
        moves = state.data["moves"]
        if state.data["winner"] is None and to_move(moves) != artifact.data["player"]:
            move = state.data["dice"].choice([square for square in SQUARES if square not in moves])
            state.events.append(Event(to_move(moves), move))
            legal = state.data["legal"]
            advance(state, move)
            state.data["legal"] = legal


class TicTacToe(Arena):
    """Games begin after up to `openings` moves, every way these can be made."""

    def __init__(
        self, client: Any = None, credit_assigner: Any = None, *, openings: int = 1, eval_games: int = 64
    ) -> None:
        super().__init__(client, credit_assigner)
        self._openings, self._eval_games = openings, eval_games
        for player in OTHER:
            self.add_actor(Actor(player))
        self.add_episode(Game())
        self.add_episode(AgainstRandom())

    def requests(self, split: Split) -> Sequence[EpisodeRequest]:
        if split == "train":
            openings = ["".join(p) for n in range(self._openings + 1) for p in permutations(SQUARES, n)]
            return [EpisodeRequest("self-play", Artifact({"opening": opening})) for opening in openings]
        games = [{"opening": "", "player": "xo"[game % 2], "dice": game} for game in range(self._eval_games)]
        return [EpisodeRequest("against-random", Artifact(game)) for game in games]

    def get_batch(self) -> Sequence[EpisodeRequest]:
        """For `training_loop`: eight games from each of four openings."""
        return [request for request in self.rng.sample(self.requests("train"), 4) for _ in range(8)]
