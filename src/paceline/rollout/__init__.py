"""Conversations recorded as exact tokens."""

from paceline.data.rollout import Group, Message, Rollout, Turn
from paceline.rollout.assemble import assemble, threads
from paceline.rollout.recording import RecordingServer
from paceline.rollout.render import Renderer, RenderError
from paceline.rollout.rollout_sample import RolloutSample
from paceline.rollout.seat import Reply, SamplingClient, Seat, SeatClosed, SessionMap

__all__ = [
    "Group",
    "Message",
    "RecordingServer",
    "RenderError",
    "Renderer",
    "Reply",
    "Rollout",
    "RolloutSample",
    "SamplingClient",
    "Seat",
    "SeatClosed",
    "SessionMap",
    "Turn",
    "assemble",
    "threads",
]
