"""Tic-tac-toe against oneself: the policy plays both sides and is trained on both.

    paceline train examples/arenas/tic_tac_toe.toml

The board is a word of nine letters, one for each square, in which the player to move finds their own squares as `x` and
the other's as `o`; a move is the letter of a free square:

    axcdofghi      c       or any other letter but x and o

The quickstart model has only ever copied, turned round and sorted words: it names some letter of the board, and that
three in a row win is for it to find out. In training a foul costs half a point and dice move instead, so that every
game is played to its end, from many openings. Where strength is measured, a foul loses: against an opponent that moves
at random, as `x` and as `o`, and against the policy's own past.
"""

import random
from collections.abc import Sequence
from typing import Any

from paceline.envs import Split
from paceline.selfplay import Actor, Arena, Artifact, EpisodeRequest, EpisodeState, Event, MultiTurnEpisode, Rubric

SQUARES = "abcdefghi"
LINES = ("abc", "def", "ghi", "adg", "beh", "cfi", "aei", "ceg")
OTHER = {"x": "o", "o": "x"}
FOUL = 0.5


def to_move(moves: str) -> str:
    return "xo"[len(moves) % 2]


def free(moves: str) -> list[str]:
    return [square for square in SQUARES if square not in moves]


def board(moves: str) -> str:
    """The board as the player to move sees it.

    >>> board("be"), board("")
    ('axcdofghi', 'abcdefghi')
    """
    own, others = moves[len(moves) % 2 :: 2], moves[1 - len(moves) % 2 :: 2]
    return "".join("x" if square in own else "o" if square in others else square for square in SQUARES)


def standing(moves: str) -> str | None:
    """The winner after these legal moves: a player, `draw`, or None while the game is on.

    >>> standing("adbec"), standing("ab"), standing("abcdefghi")
    ('x', None, 'x')
    """
    last = moves[-1::-2]  # of the player who moved last: only they can have won by it
    if any(set(line) <= set(last) for line in LINES):
        return OTHER[to_move(moves)]
    return "draw" if len(moves) == len(SQUARES) else None


def pays(winner: str, player: str) -> float:
    return 0.0 if winner == "draw" else 1.0 if winner == player else -1.0


def result(state: EpisodeState, arena: Arena) -> dict[str, float]:
    """A win pays 1, a loss -1, a draw nothing: what one wins the other loses."""
    return {player: pays(state.data["winner"], player) for player in state.actors}


def fouls(state: EpisodeState, arena: Arena) -> dict[str, float]:
    return {player: -float(state.data["fouls"].count(player)) for player in state.actors}


class Match(MultiTurnEpisode):
    """A game by the rules: a foul loses."""

    episode_type = "match"
    actors = ("x", "o")
    rubric = Rubric([result])

    def init_state(self, state: EpisodeState, artifact: Artifact) -> None:
        state.data.update(moves=artifact.data["opening"], winner=None, fouls="")

    def get_initial_actor(self, artifact: Artifact, state: EpisodeState) -> str:
        return to_move(state.data["moves"])

    def get_next_actor(self, state: EpisodeState, artifact: Artifact) -> str:
        return to_move(state.data["moves"])

    def get_initial_prompt(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> str:
        return ""

    def describe(self, event: Event, listener: str) -> None:
        """The board tells it all."""

    def compose(self, state: EpisodeState, opening: str | None, told: Sequence[str], observation: str | None) -> str:
        return board(state.data["moves"])

    async def env_response(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> None:
        self.move(state, state.last_text[:1])

    def move(self, state: EpisodeState, said: str) -> None:
        """One move of the player whose turn it is."""
        moves = state.data["moves"]
        if said not in free(moves):
            state.data["fouls"] += to_move(moves)
            self.foul(state)
        else:
            state.data["moves"] = moves + said
            state.data["winner"] = standing(moves + said)
        state.done = state.data["winner"] is not None

    def foul(self, state: EpisodeState) -> None:
        state.data["winner"] = OTHER[to_move(state.data["moves"])]

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        return {"fouls": float(len(state.data["fouls"])), "draw": float(state.data["winner"] == "draw")}


class Training(Match):
    """A forgiving game: dice move for a player who names no free square."""

    episode_type = "training"
    rubric = Rubric([result, fouls], [1.0, FOUL])

    def foul(self, state: EpisodeState) -> None:
        moves = state.data["moves"]
        # The same dice at the same point of the same game, so that a run can be played again.
        dice = random.Random(f"{moves} {state.data['fouls']}")
        self.move(state, dice.choice(free(moves)))


def against_random(state: EpisodeState, arena: Arena) -> dict[str, float]:
    player = state.request.artifact.data["player"]
    return {player: pays(state.data["winner"], player)}


class AgainstRandom(Match):
    """The policy on one side, random legal moves on the other. The artifact fixes the side and the dice."""

    episode_type = "against-random"
    rubric = Rubric([against_random])

    def init_state(self, state: EpisodeState, artifact: Artifact) -> None:
        super().init_state(state, artifact)
        state.data["dice"] = random.Random(artifact.data["dice"])
        self._reply(state, artifact)

    async def env_response(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> None:
        self.move(state, state.last_text[:1])
        self._reply(state, artifact)

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        won = state.data["winner"] == state.request.artifact.data["player"]
        return super().get_metrics(state) | {"win": float(won)}

    def _reply(self, state: EpisodeState, artifact: Artifact) -> None:
        moves = state.data["moves"]
        if state.data["winner"] is None and to_move(moves) != artifact.data["player"]:
            self.move(state, state.data["dice"].choice(free(moves)))


def openings(count: int, longest: int) -> list[str]:
    """The empty board, then games of random first moves that are not won yet."""
    dice, found = random.Random(0), [""]
    while len(found) < count:
        moves = "".join(dice.sample(SQUARES, dice.randint(0, longest)))
        if all(standing(moves[:n]) is None for n in range(len(moves) + 1)):
            found.append(moves)
    return found


class TicTacToe(Arena):
    """Games from `count` openings of up to `longest` moves."""

    def __init__(
        self,
        client: Any = None,
        credit_assigner: Any = None,
        *,
        count: int = 512,
        longest: int = 6,
        eval_games: int = 64,
    ) -> None:
        super().__init__(client, credit_assigner)
        self._openings, self._eval_games = openings(count, longest), eval_games
        for player in OTHER:
            self.add_actor(Actor(player))
        for kind in (Match, Training, AgainstRandom):
            self.add_episode(kind())

    def requests(self, split: Split) -> Sequence[EpisodeRequest]:
        if split == "train":
            return [EpisodeRequest("training", Artifact({"opening": opening})) for opening in self._openings]
        games = [{"opening": "", "player": "xo"[game % 2], "dice": game} for game in range(self._eval_games)]
        return [EpisodeRequest("against-random", Artifact(game)) for game in games]

    def matches(self) -> Sequence[EpisodeRequest]:
        """The policy meets its past on the empty board."""
        return [EpisodeRequest("match", Artifact({"opening": ""}))]

    def get_batch(self) -> Sequence[EpisodeRequest]:
        """For `training_loop`: eight games from each of four openings."""
        return [request for request in self.rng.sample(self.requests("train"), 4) for _ in range(8)]
