"""Conversations recorded as exact tokens."""

from paceline.rollout.assemble import assemble, threads
from paceline.rollout.recording import Recorder
from paceline.rollout.render import Renderer, RenderError
from paceline.rollout.seat import Reply, Seat, SeatLeft, Voice
from paceline.rollout.table import Table
from paceline.rollout.types import Group, Message, Rollout, Turn

__all__ = [
    "Group",
    "Message",
    "Recorder",
    "RenderError",
    "Renderer",
    "Reply",
    "Rollout",
    "Seat",
    "SeatLeft",
    "Table",
    "Turn",
    "Voice",
    "assemble",
    "threads",
]
