"""Supervised fine-tuning, on a teacher's replies or on written conversations."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.algorithms.base import Algorithm, AlgorithmContext, AlgorithmError
from paceline.config.algorithm import SFTConfig as Config
from paceline.config.model import ModelRef
from paceline.data import Row, Sample, find_bad_rows
from paceline.data.rollout import Tools, message_text
from paceline.envs import POLICY, Environment, Outcome, Split
from paceline.rollout import Group, Message, SamplingClient, Seat, Turn
from paceline.rollout.render import Renderer, RenderError


def demonstration_turns(renderer: Renderer, messages: Sequence[Message], tools: Tools | None = None) -> list[Turn]:
    """A turn for each message of the assistant, in the words and with the end the chat template gives it.

    Each prompt is the template's own, so turns share a sample only where the template writes the past as it was said.
    Nothing was sampled, so log probabilities and versions are placeholders: a loss on these turns must not weigh
    them by a ratio.
    """
    turns, shown = [], list(tools) if tools else None
    for place, message in enumerate(messages):
        if message.get("role") == "assistant" and place:
            before = list(messages[:place])
            said = _reply(renderer, before, message, tools)
            words = {"messages": before, "tools": shown, "text": renderer.reply(said), "said": message}
            turns.append(Turn.unsampled(renderer.prompt(before, tools), said, **words))
    if not turns:
        raise RenderError("a demonstration needs an assistant message after what it answers")
    return turns


def _reply(renderer: Renderer, before: Sequence[Message], message: Message, tools: Tools | None) -> list[int]:
    """The tokens of a reply, from after its opening to the token that ends it."""
    opening, closed = renderer.text(before, tools), renderer.text([*before, message], tools, reply=False)
    if not closed.startswith(opening):
        raise RenderError(
            "the chat template writes a reply otherwise than it opens one, so the reply's tokens cannot be told apart"
        )
    # Whatever follows the end-of-turn token is the template's: a newline, or the next opening.
    words = message_text(message).strip()
    said = max(closed.find(words, len(opening)), len(opening)) + len(words)
    marks = [renderer.decode([token]) for token in sorted(renderer.end_tokens)]
    ends = [at + len(mark) for mark in marks if (at := closed.find(mark, said)) >= 0]
    if not ends:
        raise RenderError("the chat template does not end a reply with the model's end-of-turn token")
    closed = closed[: min(ends)]
    # With the opening before it: some tokenizers treat the beginning of a text in a way of its own.
    ids, head = renderer.encode(closed), renderer.encode(opening)
    return ids[len(head) :] if ids[: len(head)] == head else renderer.encode(closed[len(opening) :])


WRITTEN = "paceline/demonstration"


class SFT(Algorithm):
    """The next-token loss, -log pi, on every token of a teacher or a demonstration.

    With a `teacher`, the frozen model sits in the policy's seat and plays the environment, tools and all; the rewards
    that are shown are its own. With `demonstrations` nothing is sampled: each row's conversation is read out as if the
    policy had said the assistant's part. Held-out rows are always played by the policy.

    What a frozen model says never goes stale, and the policy did not sample it, so there is no ratio to weigh it by:
    samples ship without log probabilities and versions.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._demonstrations: DemonstrationEnvironment | None = None

    def stage(self, environment: Environment) -> Environment:
        if not self._config.demonstrations:
            return environment
        self._demonstrations = DemonstrationEnvironment(environment, self._config.demonstrations)
        return self._demonstrations

    async def begin(self, context: AlgorithmContext) -> None:
        if self._demonstrations is not None:
            self._demonstrations.client = context.client
            read = self._demonstrations.conversation
            where = f"environment `{context.env}`, row"
            self.bad_rows = find_bad_rows(
                context.rows, lambda number: read(context.rows[number], f"{where} {number}"), AlgorithmError
            )
        if isinstance(self._config.teacher, ModelRef):
            self.frozen_sampler = replace(context.client, pool=await context.attach(self._config.teacher))

    def assign(self, group: Group) -> None:
        for rollout in group.rollouts:
            rollout.samples = [_with_ce_weights(sample) for sample in rollout.samples]


def _with_ce_weights(sample: Sample) -> Sample:
    nothing, never = np.zeros(len(sample), np.float32), np.full(len(sample), -1)
    return sample.with_streams(logprobs=None, versions=never, rl_weights=nothing, ce_weights=sample.loss_mask)


class DemonstrationEnvironment(Environment):
    """An environment whose training rows are read out instead of played."""

    def __init__(self, environment: Environment, key: str | bool) -> None:
        if list(environment.actors) != [POLICY]:
            raise AlgorithmError("sft from demonstrations has one speaker, and this environment has several seats")
        self._played, self._key = environment, key
        self.client: SamplingClient | None = None

    def examples(self, split: Split) -> Sequence[Row]:
        return self._played.examples(split)

    async def assign(self, example: Row, draw: int, dice: Any) -> Row:
        return {WRITTEN: self.conversation(example, "a row"), "tools": example.get("tools")}

    async def prepare(self, example: Row) -> Row:
        return example if WRITTEN in example else await self._played.prepare(self._asked(example))

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        if WRITTEN not in example:
            return await self._played.play(example, seats)
        assert self.client is not None
        tools = example["tools"] if isinstance(example["tools"], list) else None
        seats[POLICY].turns[:] = demonstration_turns(self.client.renderer, example[WRITTEN], tools)
        return Outcome.solo(1.0)  # a demonstration is right by definition

    def conversation(self, row: Row, where: str) -> list[Message]:
        """A row's demonstration, as messages that end in the assistant's."""
        value = row.get("messages") if self._key is True else row.get(str(self._key))
        if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
            messages = copy.deepcopy(value)
        else:
            said = row.get("completion") if self._key is True else value
            reply = [{"role": "assistant", "content": str(said)}] if said not in (None, "") else []
            messages = [*copy.deepcopy(row.get("messages") or []), *reply]
        if self._key is True and messages and messages[-1].get("role") != "assistant" and row.get("completion"):
            messages.append({"role": "assistant", "content": str(row["completion"])})
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            name = "messages" if self._key is True else self._key
            raise AlgorithmError(
                f"{where}: there is no demonstration under `{name}`: it must end in an assistant message, or name the "
                "field that holds the reply with demonstrations"
            )
        return messages

    def _asked(self, row: Row) -> Row:
        """A held-out row up to the reply that its conversation ends in: the policy is asked, and not told."""
        if self._key not in (True, "messages") or not isinstance(row.get("messages"), list):
            return row
        messages = list(row["messages"])
        while len(messages) > 1 and messages[-1].get("role") == "assistant":
            messages.pop()
        return {**row, "messages": messages}

    def forget(self, before: int) -> None:
        self._played.forget(before)

    def state(self) -> dict[str, Any]:
        return self._played.state()

    def load(self, state: dict[str, Any]) -> None:
        self._played.load(state)
