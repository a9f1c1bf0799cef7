"""Self-play: actors meet in episodes, rubrics pay them, stores remember."""

from paceline.arena.arena import Arena
from paceline.arena.environment import ArenaEnvironment, arena_environment
from paceline.arena.episode import Episode, MultiTurnEpisode, SingleTurnEpisode
from paceline.arena.league import League, Match
from paceline.arena.payoff import Payoff
from paceline.arena.rubric import Rubric
from paceline.arena.state import EpisodeState
from paceline.arena.store import ArtifactStore
from paceline.arena.types import Actor, ArenaError, Artifact, EpisodeRequest, EpisodeResult, Event, Step

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
