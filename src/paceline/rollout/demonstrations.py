"""Turns a written conversation into the turns in which the policy would have said it."""

from collections.abc import Sequence

from paceline.rollout.history import message_text
from paceline.rollout.render import Renderer, RenderError
from paceline.rollout.template import Tools
from paceline.rollout.types import Message, Turn


def recite(renderer: Renderer, messages: Sequence[Message], tools: Tools | None = None) -> list[Turn]:
    """A turn for each message of the assistant, in the words and with the end the chat template gives it.

    Each prompt is the template's own, so turns share a sample only where the template writes the past as it was said.
    Nothing was sampled, so log probabilities and versions are placeholders: a loss on these turns must not weigh
    them by a ratio.
    """
    turns: list[Turn] = []
    for place, message in enumerate(messages):
        if message.get("role") != "assistant" or not place:
            continue
        before = list(messages[:place])
        said = _reply(renderer, before, message, tools)
        turns.append(
            Turn(
                prompt_ids=renderer.prompt(before, tools),
                completion_ids=said,
                logprobs=[0.0] * len(said),
                versions=[0] * len(said),
                finish="stop",
                temperature=1.0,
                messages=before,
                tools=list(tools) if tools else None,
                text=renderer.reply(said),
                said=message,
            )
        )
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
