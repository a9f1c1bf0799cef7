"""Self-play: actors play episodes, rubrics score them, and stores keep artifacts between them."""

from paceline.observe.analysis.payoff import Payoff
from paceline.selfplay.arena import Arena, ArtifactStore
from paceline.selfplay.environment import ArenaEnvironment, arena_environment
from paceline.selfplay.episode import (
    Actor,
    ArenaError,
    Artifact,
    Episode,
    EpisodeRequest,
    EpisodeResult,
    EpisodeState,
    Event,
    MultiTurnEpisode,
    Rubric,
    SingleTurnEpisode,
    Step,
)
from paceline.selfplay.league import League, Match

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
