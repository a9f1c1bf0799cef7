"""Runs whose rollouts say something: written by the real keeper, with made-up conversations."""

import base64
import struct
import zlib
from pathlib import Path

import numpy as np

from paceline.data import Ticket
from paceline.observe.monitor import RunPlan
from paceline.observe.record import RolloutRecorder
from paceline.rollout import Rollout, Turn, assemble

TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Finds a word.", "parameters": {}}}]


def png(size: int = 24) -> str:
    """A small picture, as messages carry it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"".join(bytes((x * 10, y * 10, 120)) for x in range(size)) for y in range(size))
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def turn(messages: list | None, text: str, version: int = 0, said: dict | None = None, **more) -> Turn:
    """One reply; each word is a token."""
    ids = [len(word) for word in text.split()] or [1]
    return Turn(
        **{
            "prompt_ids": [1, 2, 3],
            "completion_ids": ids,
            "logprobs": [-0.5] * len(ids),
            "versions": [version] * len(ids),
            "finish": "stop",
            "temperature": 1.0,
            "messages": messages,
            "text": text,
            "said": said,
        }
        | more
    )


def rollout(
    ticket: int, member: int, turns: list[Turn], reward: float | None = 0.0, env: str = "words", **more
) -> Rollout:
    made = Rollout(ticket=Ticket(ticket, env, 0, ticket, ticket), member=member, turns=turns, reward=reward, **more)
    if made.error is None and turns:
        made.samples = [s.with_streams(advantages=np.where(s.loss_mask, reward, 0)) for s in assemble(made)]
    return made


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


class Talking:
    """Writes the record of a run directory."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "run.lock").touch()
        self.keeper = RolloutRecorder(path)
        self.keeper.begin(RunPlan(path.name, path, None, 0, {}, ("words",), "cpu", 0))

    def played(self, step: int, state: str, *rollouts: Rollout) -> "Talking":
        self.keeper.finished_rollouts(step, state, rollouts)
        return self

    def close(self) -> None:
        self.keeper.close()
