"""Conversations recorded as exact tokens."""

from paceline.rollout.assemble import assemble
from paceline.rollout.render import Renderer, RenderError
from paceline.rollout.seat import Reply, Seat, Voice
from paceline.rollout.types import Group, Message, Rollout, Turn

__all__ = ["Group", "Message", "RenderError", "Renderer", "Reply", "Rollout", "Seat", "Turn", "Voice", "assemble"]
