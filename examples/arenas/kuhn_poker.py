"""Kuhn poker against oneself: three cards, two players, one bet, and an exactly known value.

    paceline train examples/arenas/kuhn_poker.toml

Each player antes 1 and sees one of the cards 1, 2, 3. In turn they say a digit: an even one to check, or fold to a bet;
an odd one to bet, or call. The higher card wins at a showdown. The game is worth -1/18 to the first player when both
play perfectly (Kuhn 1950), and no way of playing is perfect without bluffing. What is no digit forfeits the most there
is to lose. A player hears `add: 3+1`: their card, which is told once, and whether the other just bet.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from paceline.envs import Split
from paceline.selfplay import Actor, Arena, Artifact, EpisodeRequest, EpisodeState, Event, MultiTurnEpisode, Rubric

PLAYERS = ("first", "second")
CARDS, DIGITS = "123", "0123456789"
FOLDS = {"10": 1, "010": -1}
"""The first player's gain when a player folds, by who bet (1) and who did not."""
SHOWDOWNS = {"00": 1, "11": 2, "011": 2}
"""The gain of the holder of the higher card."""


def payoff(cards: str, said: str) -> int | None:
    """The first player's gain, which the second loses; None while the game is on.

    >>> payoff("31", "11"), payoff("13", "10"), payoff("12", "00"), payoff("12", "0")
    (2, 1, -1, None)
    """
    if said in FOLDS:
        return FOLDS[said]
    return SHOWDOWNS[said] * (1 if cards[0] > cards[1] else -1) if said in SHOWDOWNS else None


def stakes(state: EpisodeState, arena: Arena) -> dict[str, float]:
    won = float(state.data["won"])
    return {"first": won, "second": -won}


class Hand(MultiTurnEpisode):
    """One hand. The cards are private: each player observes their own, once."""

    episode_type = "hand"
    actors = PLAYERS
    rubric = Rubric([stakes])

    def init_state(self, state: EpisodeState, artifact: Artifact) -> None:
        state.data.update(said="", won=None, legal=True)

    def get_initial_prompt(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> str:
        return ""

    def get_observation(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> str | None:
        return None if state.began(state.current_actor) else artifact.data["cards"][PLAYERS.index(state.current_actor)]

    def describe(self, event: Event, listener: str) -> str:
        return str(int(event.text) % 2)

    def compose(self, state: EpisodeState, opening: str | None, told: Sequence[str], observation: str | None) -> str:
        return f"add: {observation or 0}+{''.join(told) or 0}"

    async def env_response(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> None:
        said, word = state.data["said"], state.last_text
        if len(word) == 1 and word in DIGITS:
            state.data["said"] = said = said + str(int(word) % 2)
            state.data["won"] = payoff(artifact.data["cards"], said)
        else:
            state.data.update(legal=False, won=-2 if state.current_actor == "first" else 2)
        state.done = state.data["won"] is not None

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        return {"legal": float(state.data["legal"]), "bets": float(state.data["said"].count("1"))}


class KuhnPoker(Arena):
    def __init__(self, client: Any = None, credit_assigner: Any = None) -> None:
        super().__init__(client, credit_assigner)
        for player in PLAYERS:
            self.add_actor(Actor(player))
        self.add_episode(Hand())

    def requests(self, split: Split) -> Sequence[EpisodeRequest]:
        deals = ["".join(deal) for deal in permutations(CARDS, 2)]
        return [EpisodeRequest("hand", Artifact({"cards": cards})) for cards in deals]

    def get_batch(self) -> Sequence[EpisodeRequest]:
        """For `training_loop`: every deal, eight times."""
        return [request for request in self.requests("train") for _ in range(8)]
