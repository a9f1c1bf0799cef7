"""Self-play: actors meet in episodes, rubrics pay them, stores remember.

Names are imported when they are first used, so that a league's ratings can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.arena.arena import Arena
    from paceline.arena.environment import ArenaEnvironment, arena_environment
    from paceline.arena.episode import Episode, MultiTurnEpisode, SingleTurnEpisode
    from paceline.arena.league import League, Match
    from paceline.arena.payoff import Payoff
    from paceline.arena.rubric import Rubric
    from paceline.arena.state import EpisodeState
    from paceline.arena.store import ArtifactStore
    from paceline.arena.types import Actor, ArenaError, Artifact, EpisodeRequest, EpisodeResult, Event, Step

_HOMES = {
    "arena": ("Arena",),
    "environment": ("ArenaEnvironment", "arena_environment"),
    "episode": ("Episode", "MultiTurnEpisode", "SingleTurnEpisode"),
    "league": ("League", "Match"),
    "payoff": ("Payoff",),
    "rubric": ("Rubric",),
    "state": ("EpisodeState",),
    "store": ("ArtifactStore",),
    "types": ("Actor", "ArenaError", "Artifact", "EpisodeRequest", "EpisodeResult", "Event", "Step"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Actor",
    "Arena",
    "ArenaEnvironment",
    "ArenaError",
    "Artifact",
    "ArtifactStore",
    "Episode",
    "EpisodeRequest",
    "EpisodeResult",
    "EpisodeState",
    "Event",
    "League",
    "Match",
    "MultiTurnEpisode",
    "Payoff",
    "Rubric",
    "SingleTurnEpisode",
    "Step",
    "arena_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `paceline.arena` has no attribute `{name}`")
    return getattr(importlib.import_module(f"paceline.arena.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
