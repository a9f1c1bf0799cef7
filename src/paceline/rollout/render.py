"""Conversations to exact tokens and back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from paceline.errors import PacelineError
from paceline.inference.tools import ToolReader, for_template, with_calls_as_text
from paceline.rollout.history import same
from paceline.rollout.types import Message, Turn

REMEMBERED = 1 << 20
"""Tokens of prompts kept rendered, so that a group renders its prompt once."""

PROBE = "paceline-probe"
"""A word to find again in what a template writes."""

Tools = Sequence[dict[str, Any]]


class Prompt(NamedTuple):
    """What the model is given."""

    ids: list[int]
    text: str
    """As the template renders it; the ids may spell a recorded turn otherwise."""


class RenderError(PacelineError):
    """A conversation the model's chat template cannot express, as a sentence for the user."""


class Renderer:
    """The model's chat template. Sampled tokens are never tokenised again: a conversation that goes on from a recorded
    turn keeps that turn's ids and renders only what was appended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_tokens)
        self._quick = None if tokenizer.split_special_tokens else getattr(tokenizer, "backend_tokenizer", None)
        self._rendered: dict[str, Prompt] = {}
        self._remembered = 0
        if tokenizer.chat_template is None:
            raise RenderError("the tokenizer has no chat template: name one with model.chat_template")
        self._most_calls = 2
        """How many calls in one message the template knows to write, where 2 is any number."""
        self._most_calls = next((n for n in (2, 1) if self._writes_calls(n)), 0)

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The whole conversation and the opening of the reply."""
        return list(self.open(messages, tools).ids)

    def open(self, messages: Sequence[Message], tools: Tools | None = None) -> Prompt:
        """The same with its text. All tries of one example ask for the same one."""
        key = repr((messages, tools))
        if key not in self._rendered:
            text = self._text(messages, tools, reply=True)
            prompt = Prompt(self._encode(text), text)
            self._remembered += len(prompt.ids)
            if self._remembered > REMEMBERED:
                self._rendered.clear()
                self._remembered = len(prompt.ids)
            self._rendered[key] = prompt
        return self._rendered[key]

    def extend(self, turn: Turn, messages: Sequence[Message]) -> list[int]:
        """A prompt that continues a recorded turn, or the whole conversation anew if it does not."""
        return list(self.go_on(turn, messages).ids)

    def go_on(self, turn: Turn, messages: Sequence[Message], opening: str | None = None) -> Prompt:
        """The same with its text. `opening` is the text of the turn's own prompt, if that is still known.

        The recorded ids end at the end-of-turn token; whatever the template puts after it (a newline, say) belongs to
        the suffix and is kept.
        """
        if turn.messages is None or turn.finish != "stop":
            return self.open(messages, turn.tools)
        count = len(turn.messages) + 1
        if not same(messages[:count], [*turn.messages, turn.message]):
            return self.open(messages, turn.tools)
        whole, end = self._text(messages, turn.tools, reply=True), self._end(turn.completion_ids)
        opening = self._text(turn.messages, turn.tools, reply=True) if opening is None else opening
        suffix = self._suffix(turn, messages, opening, whole, end)
        if suffix is None:
            return Prompt(self._encode(whole), whole)
        # Tokenised with the end before it: some tokenizers treat the beginning of a text in a way of its own.
        ids, last = self._encode(end + suffix), turn.completion_ids[-1:]
        appended = ids[1:] if end and ids[:1] == last else self._encode(suffix)
        return Prompt([*turn.prompt_ids, *turn.completion_ids, *appended], whole)

    def reply(self, completion_ids: Sequence[int]) -> str:
        """What was said, without the token that ended it."""
        said = completion_ids[:-1] if completion_ids and completion_ids[-1] in self._ends else completion_ids
        return self._decode(said)

    def message(self, text: str, tools: Tools | None) -> Message:
        """What was said as a message: calls of the tools there are, and the text around them."""
        if not tools:
            return {"role": "assistant", "content": text}
        reader = ToolReader([tool.get("function", tool).get("name", "") for tool in tools])
        said, calls = reader.feed(text)
        rest, more = reader.flush()
        if not (calls := calls + more):
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": said + rest, "tool_calls": [call.as_dict() for call in calls]}

    def _end(self, completion_ids: Sequence[int]) -> str:
        """The end-of-turn token, if that is what ended the turn and not a stop token that belongs to the text."""
        return self._decode(completion_ids[-1:]) if completion_ids and completion_ids[-1] in self._ends else ""

    def _suffix(self, turn: Turn, messages: Sequence[Message], opening: str, whole: str, end: str) -> str | None:
        """What the template writes after the turn, if it writes all that came before as it was recorded.

        Usually it repeats the reply letter by letter. Otherwise it may do so in a spelling of its own: Llama 3 trims
        replies, others set calls or thoughts apart with white space. A thought that the template drops is more than
        spelling: then what was sampled is not what the model would see.
        """
        if whole.startswith(head := opening + turn.text + end):
            return whole[len(head) :]
        place = len(turn.messages or ())
        marked = [*messages[:place], {"role": "assistant", "content": PROBE}, *messages[place + 1 :]]
        before, _, after = self._text(marked, turn.tools, reply=True)[len(opening) :].partition(PROBE)
        body = whole[len(opening) : len(whole) - len(after)]
        kept = _squeezed(turn.message["content"]) in _squeezed(body)
        if not (kept and whole == opening + body + after and body.startswith(before) and after.startswith(end)):
            return None
        return after[len(end) :]

    def _writes_calls(self, count: int) -> bool:
        names = [f"{PROBE}-{place}" for place in range(count)]
        calls = [{"id": "123456789", "type": "function", "function": {"name": n, "arguments": "{}"}} for n in names]
        try:
            text = self._text([{"role": "assistant", "content": "", "tool_calls": calls}], None, reply=False)
        except RenderError:
            return False
        return all(name in text for name in names)

    def _text(self, messages: Sequence[Message], tools: Tools | None, reply: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [self._expressible(for_template(message)) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=reply,
            )
        # A template is a small program that is run on what an environment says; what it trips over is that.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RenderError(f"the model's chat template cannot express this conversation: {error}") from error
        assert isinstance(text, str)
        return text

    def _expressible(self, message: Message) -> Message:
        """Calls the template would leave out, or refuse, are part of the text instead: nothing said is lost."""
        calls = len(message.get("tool_calls", ()))
        return message if min(calls, 2) <= self._most_calls else with_calls_as_text(message)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        try:
            # The same tokens by the shorter way: half of the time would go into options nobody set.
            quick = self._quick
            if quick is not None and quick.truncation is None and quick.padding is None:
                return quick.encode(text, add_special_tokens=False).ids
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise RenderError(f"the tokenizer cannot read this conversation: {error}") from error


def _squeezed(text: str) -> str:
    return "".join(text.split())
