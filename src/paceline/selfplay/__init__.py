"""Self-play: actors play episodes, rubrics score them, and stores keep artifacts between them.

Names are imported when they are first used, so that a league's ratings can be read without torch.
"""

from typing import TYPE_CHECKING

from paceline.util.lazy_import import lazy_getattr

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


__getattr__ = lazy_getattr(
    __name__,
    {
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
    },
)


def __dir__() -> list[str]:
    return __all__
