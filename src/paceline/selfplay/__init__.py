"""Self-play: actors meet in episodes, rubrics pay them, stores remember.

Names are imported when they are first used, so that a league's ratings can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.selfplay.arena import Arena, ArtifactStore
    from paceline.selfplay.environment import ArenaEnvironment, arena_environment
    from paceline.selfplay.episode import Episode, MultiTurnEpisode, Rubric, SingleTurnEpisode
    from paceline.selfplay.league import League, Match
    from paceline.selfplay.payoff import Payoff
    from paceline.selfplay.state import (
        Actor,
        ArenaError,
        Artifact,
        EpisodeRequest,
        EpisodeResult,
        EpisodeState,
        Event,
        Step,
    )

_HOMES = {
    "arena": ("Arena", "ArtifactStore"),
    "environment": ("ArenaEnvironment", "arena_environment"),
    "episode": ("Episode", "MultiTurnEpisode", "Rubric", "SingleTurnEpisode"),
    "league": ("League", "Match"),
    "payoff": ("Payoff",),
    "state": (
        "Actor",
        "ArenaError",
        "Artifact",
        "EpisodeRequest",
        "EpisodeResult",
        "EpisodeState",
        "Event",
        "Step",
    ),
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
        raise AttributeError(f"module `paceline.selfplay` has no attribute `{name}`")
    return getattr(importlib.import_module(f"paceline.selfplay.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
