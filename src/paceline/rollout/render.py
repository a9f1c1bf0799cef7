"""Conversations to exact tokens and back."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from paceline.errors import PacelineError
from paceline.rollout.types import Message, Turn

REMEMBERED = 4096
"""Prompts kept rendered, so that a group renders its prompt once."""


class RenderError(PacelineError):
    """A conversation the model's chat template cannot express, as a sentence for the user."""


class Renderer:
    """The model's chat template. Sampled tokens are never tokenised again: a conversation that goes on from a recorded
    turn keeps that turn's ids and renders only what was appended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_tokens)
        self._rendered: dict[str, list[int]] = {}
        if tokenizer.chat_template is None:
            raise RenderError("the tokenizer has no chat template: name one with model.chat_template")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The whole conversation and the opening of the reply. All tries of one example ask for the same one."""
        key = repr(messages)
        if key not in self._rendered:
            if len(self._rendered) >= REMEMBERED:
                self._rendered.clear()
            self._rendered[key] = self._encode(self._text(messages, reply=True))
        return list(self._rendered[key])

    def extend(self, turn: Turn, messages: Sequence[Message]) -> list[int]:
        """A prompt that continues a recorded turn, or the whole conversation anew if it does not.

        The recorded ids end at the end-of-turn token; whatever the template puts after it (a newline, say) belongs to
        the suffix and is kept.
        """
        suffix = self._suffix(turn, messages)
        if suffix is None:
            return self.prompt(messages)
        return [*turn.prompt_ids, *turn.completion_ids, *self._encode(suffix)]

    def reply(self, completion_ids: Sequence[int]) -> str:
        """What was said, without the token that ended it."""
        said = completion_ids[:-1] if completion_ids and completion_ids[-1] in self._ends else completion_ids
        return self._decode(said)

    def _suffix(self, turn: Turn, messages: Sequence[Message]) -> str | None:
        if turn.messages is None or turn.finish != "stop":
            return None
        said = [*turn.messages, {"role": "assistant", "content": turn.text}]
        if list(messages[: len(said)]) != said:
            return None
        opening, whole = self._text(turn.messages, reply=True), self._text(messages, reply=True)
        closed, end = self._text(said, reply=False), self._decode(turn.completion_ids[-1:])
        # The longer conversation must begin with what was said, letter by letter or as the template spells it. Either
        # alone is too strict: Qwen3 gives a last reply an empty thought, Llama 3 trims replies.
        heads = (opening + turn.text + end, closed[: closed.rfind(end) + len(end)])
        return next((whole[len(h) :] for h in heads if len(h) > len(opening) and whole.startswith(h)), None)

    def _text(self, messages: Sequence[Message], reply: bool) -> str:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply)
        assert isinstance(text, str)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
