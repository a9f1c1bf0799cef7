"""A buyer and a seller bargain about one price, each knowing only what the thing is worth to themselves.

    paceline train examples/arenas/negotiation.toml

Prices are digits. In turn each names one; to repeat the other's price is to accept it. The buyer gains what the price
is below their value, the seller what it is above their cost, and neither anything if they never agree. A side that
says something that is no price walks away and pays for it.
"""

from collections.abc import Sequence
from typing import Any

from paceline.envs import Split
from paceline.selfplay import Actor, Arena, Artifact, EpisodeRequest, EpisodeState, Event, MultiTurnEpisode, Rubric

PRICES = "0123456789"
WALKS_AWAY = -1.0


def gains(state: EpisodeState, arena: Arena) -> dict[str, float]:
    """Each side's share of the deal, out of the nine there can be."""
    price, walked = state.data["price"], state.data["walked"]
    if price is None:
        return {actor: WALKS_AWAY if actor == walked else 0.0 for actor in state.actors}
    worth = state.request.artifact.data
    return {"buyer": (worth["buyer"] - price) / 9, "seller": (price - worth["seller"]) / 9}


class Bargain(MultiTurnEpisode):
    """The seller opens. What the thing is worth to a side, only that side observes."""

    episode_type = "bargain"
    actors = ("seller", "buyer")
    rubric = Rubric([gains])
    max_turns = 6

    def init_state(self, state: EpisodeState, artifact: Artifact) -> None:
        state.data.update(price=None, walked=None)

    def get_initial_prompt(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> str:
        return ""

    def get_observation(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> str | None:
        return None if state.began(state.current_actor) else str(artifact.data[state.current_actor])

    def describe(self, event: Event, listener: str) -> str:
        return event.text

    def compose(self, state: EpisodeState, opening: str | None, told: Sequence[str], observation: str | None) -> str:
        """`add: 7+5`: what it is worth to this side, which is told once, and the other's last price."""
        return f"add: {observation or 0}+{''.join(told) or 0}"

    async def env_response(self, state: EpisodeState, arena: Arena, artifact: Artifact) -> None:
        said = state.last_text
        before = state.steps[-2].text if state.turn > 1 else None
        if len(said) != 1 or said not in PRICES:
            state.data["walked"] = state.current_actor
        elif said == before:
            state.data["price"] = int(said)
        state.done = state.data["walked"] is not None or state.data["price"] is not None

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        return {"deal": float(state.data["price"] is not None), "walked": float(state.data["walked"] is not None)}


class Negotiation(Arena):
    """Every pair of a cost and a higher value, so that there is always something to share."""

    def __init__(self, client: Any = None, credit_assigner: Any = None) -> None:
        super().__init__(client, credit_assigner)
        self.add_actor(Actor("seller"))
        self.add_actor(Actor("buyer"))
        self.add_episode(Bargain())

    def requests(self, split: Split) -> Sequence[EpisodeRequest]:
        pairs = [(cost, value) for cost in range(10) for value in range(cost + 1, 10)]
        held_out = split == "eval"
        return [
            EpisodeRequest("bargain", Artifact({"seller": cost, "buyer": value}))
            for at, (cost, value) in enumerate(pairs)
            if (at % 5 == 0) == held_out
        ]
