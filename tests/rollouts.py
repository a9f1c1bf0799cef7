"""Rollouts and groups with made-up tokens."""

import numpy as np

from paceline.data import Sample, Ticket
from paceline.rollout import Group, Message, Renderer, Rollout, Turn, assemble
from paceline.rollout.assemble import TurnIndex

TICKET = Ticket(4, "maze", 0, 4, 1)


def rollout(reward: float | None, lengths: tuple[int, ...] = (2, 1), member: int = 0) -> Rollout:
    """One sample per length, each with that many sampled tokens after two of context."""
    turns = [
        Turn(
            prompt_ids=[100 + i, 5],
            completion_ids=list(range(n)),
            logprobs=[-0.5] * n,
            versions=[3] * n,
            finish="stop",
            temperature=1.0,
        )
        for i, n in enumerate(lengths)
    ]
    made = Rollout(ticket=TICKET, member=member, turns=turns, reward=reward)
    made.samples = assemble(made)
    return made


def two_turns(reward: float, member: int = 0, actor: str = "x", kind: str = "", parent: str = "") -> Rollout:
    """Two turns that share nothing, so that credit has two samples to reach."""
    made = rollout(reward, (2, 2), member)
    made.actor, made.kind, made.parent = actor, kind, parent
    return made


def turn(numbers: list[float], messages: list[dict] | None) -> Turn:
    return Turn(
        prompt_ids=[1, 2],
        completion_ids=[3] * len(numbers),
        logprobs=numbers,
        versions=[4] * len(numbers),
        finish="length",
        temperature=0.7,
        log_z=numbers,
        recomputed=True,
        messages=messages,
        tools=[{"type": "function", "function": {"name": "f"}}],
        text="ü",
        said={"role": "assistant", "tool_calls": [{"id": "1"}]},
    )


def group(number: int = 0, messages: list[dict] | None = None, numbers: tuple[float, ...] = (-0.1, -0.2)) -> Group:
    ticket = Ticket(number, "a", 0, number, 3)
    sample = Sample(
        token_ids=[1, 2],
        loss_mask=[False, True],
        versions=[-1, 4],
        temperatures=[1.0, 0.7],
        logprobs=[0.0, -0.1],
        advantages=[0.0, 1 / 3],
        ticket=ticket,
        env="a",
        spans=((1, 2),),
    )
    rollout = Rollout(
        ticket=ticket, member=1, kind="k", turns=[turn(list(numbers), messages)], reward=0.1, samples=[sample]
    )
    rollout.metrics = {"m": np.float32(0.5), "nan": float("inf")}
    return Group(ticket=ticket, rollouts=[rollout], size=2, failed=[Rollout(ticket=ticket, member=0, error="why")])


def continued_prompt(renderer: Renderer, turn: Turn, messages: list[Message]) -> list[int]:
    """The prompt of a conversation, as a seat that has recorded this turn renders it."""
    history = TurnIndex()
    if turn.messages is not None:
        _, said = history.find(turn.messages, turn.tools)
        history.add(turn, renderer.text(turn.messages, turn.tools), said)
    past, _ = history.find(messages, turn.tools)
    return renderer.prompt(messages, turn.tools) if past is None else renderer.render_continuation(turn, messages).ids
