"""Renders conversations to exact tokens and back."""

import logging
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from paceline.clients.tools import ToolReader
from paceline.data.rollout import Message, Turn
from paceline.rollout.history import same
from paceline.rollout.template import DROPPED, PROBE, ChatTemplate, Recent, RenderError, Tools, ToolsDropped, names_of

REMEMBERED_PIECES = 1 << 20
"""Tokens of pieces kept."""
SHORTEST = 32
"""Characters of a piece: those between an end-of-turn token and the next role belong to what follows."""


class Pieces:
    """The tokenizer's ids of a text, exactly as it would give them for the whole.

    Before it does anything else a tokenizer looks for its added tokens in the text as it stands, the leftmost first and
    of several the longest, and from there on never looks across one. So a text can be cut at them beforehand, and a
    conversation that is rendered anew is tokenised only where it is new. Each piece begins with its added token, for
    some tokenizers treat the beginning of a text in a way of its own: only the first piece is one.

    Tokens that are looked for in normalised text are no matter, as they are found within a piece. Where one swallows
    the white space beside it, or counts only as a word of its own, the text stays whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._quick: Tokenizer | None = None
        self._cut: re.Pattern[str] | None = None
        self._known: Recent[list[int]] = Recent(REMEMBERED_PIECES)
        backend = None if tokenizer.split_special_tokens else getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            self._quick, self._cut = backend, _cut(list(backend.get_added_tokens_decoder().values()))

    def encode(self, text: str) -> list[int]:
        if self._cut is None:
            return self._whole(text)
        ids: list[int] = []
        start = 0
        for match in self._cut.finditer(text):
            at = match.start()
            if at - start >= SHORTEST:
                ids += self._piece(text[start:at])
                start = at
        ids += self._piece(text[start:])
        return ids

    def _piece(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = self._whole(text)
            self._known.put(text, ids, len(ids))
        return ids

    def _whole(self, text: str) -> list[int]:
        # The same tokens by the shorter way: half of the time would go into options that are not set.
        quick = self._quick
        if quick is not None and quick.truncation is None and quick.padding is None:
            return quick.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)


def _cut(added: list[AddedToken]) -> re.Pattern[str] | None:
    """Finds the tokens a text may be cut at; None if it may not."""
    plain = [token for token in added if token.content and not token.normalized]
    if not plain or any(token.lstrip or token.rstrip or token.single_word for token in plain):
        return None
    return re.compile("|".join(re.escape(token.content) for token in sorted(plain, key=lambda t: -len(t.content))))


REMEMBERED = 1 << 20
"""Tokens of prompts kept rendered, so that a group renders its prompt once."""


Dropped = Literal["allow", "warn", "refuse"]
log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """The model's prompt, as token ids and as text."""

    ids: list[int]
    text: str
    """As the template renders it; the ids may spell a recorded turn otherwise."""


class Renderer:
    """The model's chat template. Sampled tokens are never tokenised again: a conversation that goes on from a recorded
    turn keeps that turn's ids and renders only what was appended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_tokens)
        self._pieces = Pieces(tokenizer)
        self._template = ChatTemplate(tokenizer)
        # What `decode` calls for a list of ids, once it has looked at each of them.
        plainly = type(tokenizer).decode is PreTrainedTokenizerBase.decode
        self._decoded = tokenizer._decode if plainly else tokenizer.decode
        self._rendered: Recent[Prompt] = Recent(REMEMBERED)
        self._end_texts = {token: self.decode([token]) for token in self._ends}
        self.on_dropped_tools: Dropped = "allow"
        """What to do where the template writes nothing of the tools it is given: nothing, one warning, or an error."""
        self.refused_tools: ToolsDropped | None = None
        """The error, once it was raised: an agent behind a URL may make another of it."""
        self._tools_written = False

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return len(self._tokenizer)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self._ends

    def text(self, messages: Sequence[Message], tools: Tools | None = None, reply: bool = True) -> str:
        """The conversation as the template writes it, with the opening of a reply or without."""
        return self._template.write(messages, tools, reply)

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The whole conversation and the opening of the reply."""
        return list(self.open(messages, tools).ids)

    def open(self, messages: Sequence[Message], tools: Tools | None = None) -> Prompt:
        """The same with its text. All tries of one example ask for the same one."""
        key = repr((messages, tools))
        prompt = self._rendered.get(key)
        if prompt is None:
            text = self.text(messages, tools)
            if tools and not self._tools_written:
                self._look_for(tools, messages, text)
            prompt = Prompt(self.encode(text), text)
            # A template may ignore long tools, which the key does not.
            self._rendered.put(key, prompt, max(len(prompt.ids), len(key) // 4))
        return prompt

    def _look_for(self, tools: Tools, messages: Sequence[Message], text: str) -> None:
        """Refuse tools that the model would not see, or warn of it, until a prompt has shown some."""
        if self.on_dropped_tools == "allow" or text != self.text(messages, None):
            self._tools_written = True
            return
        sentence = DROPPED.format(names=names_of(tools))
        if self.on_dropped_tools == "refuse":
            self.refused_tools = ToolsDropped(sentence)
            raise self.refused_tools
        self._tools_written = True
        log.warning(sentence)

    def extend(self, turn: Turn, messages: Sequence[Message]) -> list[int]:
        """A prompt that continues a recorded turn, or the whole conversation anew if it does not."""
        said = [] if turn.messages is None else [*turn.messages, turn.message]
        if said and same(messages[: len(said)], said):
            return list(self.go_on(turn, messages).ids)
        return self.prompt(messages, turn.tools)

    def go_on(self, turn: Turn, messages: Sequence[Message], opening: str | None = None) -> Prompt:
        """The same with its text, for messages that begin with what was said up to the end of the turn. `opening` is
        the text of the turn's own prompt, if that is still known.

        The recorded ids end at the end-of-turn token; whatever the template puts after it (a newline, say) belongs to
        the suffix and is kept.
        """
        if turn.messages is None or turn.finish != "stop":
            return self.open(messages, turn.tools)
        # The end-of-turn token, if that is what ended the turn and not a stop token that belongs to the text.
        end = self._end_texts.get(turn.completion_ids[-1], "") if turn.completion_ids else ""
        whole = self.text(messages, turn.tools)
        opening = self.text(turn.messages, turn.tools) if opening is None else opening
        suffix = self._suffix(turn, messages, opening, whole, end)
        if suffix is None:
            return Prompt(self.encode(whole), whole)
        # Tokenised with the end before it: some tokenizers treat the beginning of a text in a way of its own.
        ids, last = self.encode(end + suffix), turn.completion_ids[-1:]
        appended = ids[1:] if end and ids[:1] == last else self.encode(suffix)
        return Prompt([*turn.prompt_ids, *turn.completion_ids, *appended], whole)

    def reply(self, completion_ids: Sequence[int]) -> str:
        """The text of a completion, without the token that ended it."""
        said = completion_ids[:-1] if completion_ids and completion_ids[-1] in self._ends else completion_ids
        return self.decode(said)

    def message(self, text: str, tools: Tools | None) -> Message:
        """The text as a message: calls of the tools there are, and the text around them."""
        if not tools:
            return {"role": "assistant", "content": text}
        reader = ToolReader([tool.get("function", tool).get("name", "") for tool in tools])
        said, calls = reader.feed(text)
        rest, more = reader.flush()
        if not (calls := calls + more):
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": said + rest, "tool_calls": [call.as_dict() for call in calls]}

    def _suffix(self, turn: Turn, messages: Sequence[Message], opening: str, whole: str, end: str) -> str | None:
        """The text the template writes after the turn, if it writes all that came before as it was recorded.

        Usually it repeats the reply letter by letter. Otherwise it may do so in a spelling of its own: Llama 3 trims
        replies, others set calls or thoughts apart with white space. A thought that the template drops is more than
        spelling: then what was sampled is not what the model would see.
        """
        if whole.startswith(head := opening + turn.text + end):
            return whole[len(head) :]
        said = _squeezed(turn.message["content"])
        if not whole.startswith(opening) or said not in _squeezed(whole[len(opening) :]):
            return None
        body, ended, after = whole[len(opening) :].partition(end) if end else ("", "", "")
        if ended and _squeezed(body) == _squeezed(turn.text):
            return after
        # In other words than the model's own: where the reply ends is seen by putting another in its place.
        place = len(turn.messages or ())
        marked = [*messages[:place], {"role": "assistant", "content": PROBE}, *messages[place + 1 :]]
        before, _, after = self.text(marked, turn.tools)[len(opening) :].partition(PROBE)
        body = whole[len(opening) : len(whole) - len(after)]
        kept = said in _squeezed(body)
        if not (kept and whole == opening + body + after and body.startswith(before) and after.startswith(end)):
            return None
        return after[len(end) :]

    def decode(self, ids: Sequence[int]) -> str:
        text = self._decoded(list(ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        try:
            return self._pieces.encode(text)
        except (TypeError, UnicodeError) as error:
            raise RenderError(f"the tokenizer cannot read this conversation: {error}") from error


def _squeezed(text: str) -> str:
    return "".join(text.split())
