"""Renders conversations to exact tokens and back, through the model's chat template."""

import logging
import re
import types
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jinja2
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from paceline.clients.tools import ToolReader, for_template, with_calls_as_text
from paceline.data import part_problem
from paceline.data.rollout import Message, Turn, copied, is_text
from paceline.errors import PacelineError
from paceline.rollout.history import same

V = TypeVar("V")

ENTRY = 16
"""Weight of an entry by itself: a great many small ones fill the memory too."""


class Recent(Generic[V]):
    """Values by their text; those unused for longest make room for new ones.

    >>> recent = Recent(2 * ENTRY + 5)
    >>> for key, weight in [("a", 2), ("b", 3)]:
    ...     recent.put(key, weight, weight)
    >>> recent.get("a")
    2
    >>> recent.put("c", 1, 1)
    >>> recent.get("b"), recent.get("a"), recent.get("c")
    (None, 2, 1)
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._weight = 0
        self._kept: OrderedDict[str, tuple[V, int]] = OrderedDict()

    def get(self, key: str) -> V | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        return kept[0]

    def put(self, key: str, value: V, weight: int) -> None:
        """A value under a key that has none; one too heavy for the whole room is not kept."""
        weight += ENTRY
        if weight > self._room:
            return
        self._kept[key] = value, weight
        self._weight += weight
        while self._weight > self._room:
            _, (_, lost) = self._kept.popitem(last=False)
            self._weight -= lost


MOST_PARTS = 10_000
"""Larger data is not called plain: it may contain itself."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_MISSING = object()


class Sandbox(ImmutableSandboxedEnvironment):
    """Allows and forbids what its parent does, and asks it only where the answer is not known."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            value = obj.get(attribute, _MISSING)
            return value if value is not _MISSING else self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in _HARMLESS:
            return getattr(obj, attribute)
        if isinstance(obj, Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, _MISSING)
            if type(value) in _SCALARS:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(obj) is types.BuiltinMethodType and type(obj.__self__) is str:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


@lru_cache(maxsize=32)
def compiled(source: str) -> jinja2.Template | None:
    """The template as transformers would run it, in our sandbox; None where it would run it in one we do not know."""
    by_transformers = getattr(chat_template_utils, "_compile_jinja_template", None)
    theirs = None if by_transformers is None else by_transformers(source).environment
    if type(theirs) is not ImmutableSandboxedEnvironment:
        return None
    ours = theirs.overlay()
    ours.__class__ = Sandbox
    return ours.from_string(source)


def is_plain(value: Any) -> bool:
    """Whether it is data as a JSON parser gives it: no subclass, no object that could do anything, nothing endless."""
    rest = [value]
    for item in rest:
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind is dict:
            rest += item
            rest += item.values()
        elif kind is list:
            rest += item
        else:
            return False
        if len(rest) > MOST_PARTS:
            return False
    return True


def _harmless(example: Any) -> set[str]:
    """Attributes of strings, or of loops, that the sandbox hands out as they are."""
    sandbox = ImmutableSandboxedEnvironment()
    safe = {name for name in dir(example) if sandbox.is_safe_attribute(example, name, None)}
    return {name for name in safe if sandbox.wrap_str_format(getattr(example, name, None)) is None}


_COUNTERS = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
_OF_DICTS = frozenset(dir(dict))
_HARMLESS = {(str, name) for name in _harmless("")} | {
    (LoopContext, name) for name in _COUNTERS & _harmless(LoopContext([1], jinja2.Undefined))
}


REMEMBERED_MESSAGES = 1 << 21
"""Characters of messages kept as the template is given them."""
PROBE = "paceline-probe"
"""A word to find again in what a template writes."""

Tools = Sequence[dict[str, Any]]

_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""Keys a message may have and go the short way: none that transformers rewrites for the template."""


class RenderError(PacelineError):
    """A conversation the model's chat template cannot express, as a sentence for the user."""


class ToolsDropped(RenderError):
    """An environment offers tools of which the model would not see a word."""


DROPPED = (
    "the model's chat template ignores `tools`: the environment offers {names}, and the prompt is the same without. "
    "Name a template that writes them with model.chat_template, choose another model (Qwen2.5, Qwen3 and Llama 3 write "
    "them), or describe them in the messages yourself and set model.allow_dropped_tools = true"
)
_TOOL = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object"}}}


def dropped_tools(tokenizer: PreTrainedTokenizerBase, tools: Tools = (_TOOL,)) -> str:
    """Why these tools cannot be offered, if the tokenizer's chat template writes nothing of them; else nothing."""
    template, asked = ChatTemplate(tokenizer), [{"role": "user", "content": PROBE}]
    if template.write(asked, tools, reply=True) != template.write(asked, None, reply=True):
        return ""
    return DROPPED.format(names=names_of(tools))


def names_of(tools: Tools) -> str:
    """Their names, for a sentence."""
    return ", ".join(f"`{tool.get('function', tool).get('name', '?')}`" for tool in tools)


class ChatTemplate:
    """Writes what `tokenizer.apply_chat_template` writes, to the letter, in about a third of its time.

    The short way is the same template in a quicker sandbox, for messages that are plain data. All others
    take the long way, where transformers first makes them harmless.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise RenderError("the tokenizer has no chat template: name one with model.chat_template")
        self._tokenizer = tokenizer
        self._given: Recent[tuple[Message, bool]] = Recent(REMEMBERED_MESSAGES)
        self._most_calls = 2
        """How many calls in one message the template knows to write, where 2 is any number."""
        self._most_calls = next((n for n in (2, 1) if self._writes_calls(n)), 0)
        self._given = Recent(REMEMBERED_MESSAGES)

    def write(self, messages: Sequence[Message], tools: Tools | None, reply: bool) -> str:
        """The conversation as text, with the opening of a reply if asked for."""
        try:
            return self._write(messages, list(tools) if tools else None, reply)
        # A template is a small program that is run on what an environment says; what it trips over is that.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RenderError(f"the model's chat template cannot express this conversation: {error}") from error

    def _write(self, messages: Sequence[Message], tools: list[Any] | None, reply: bool) -> str:
        tokenizer, given, short = self._tokenizer, [], bool(messages)
        for message in messages:
            expressed, plain = self._give(message)
            given.append(expressed)
            short = short and plain
        special = tokenizer.special_tokens_map
        if short and is_plain(tools) and is_plain(special):
            template = compiled(tokenizer.get_chat_template(None, tools))
            if template is not None:
                settings = {"documents": None, "add_generation_prompt": reply, **special}
                return template.render(messages=given, tools=tools, **settings)
        text = tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=reply)
        assert isinstance(text, str)
        return text

    def _give(self, message: Message) -> tuple[Message, bool]:
        """A message as templates expect it, and whether it may go the short way."""
        if is_text(message):
            return (message if message["role"] != "developer" else for_template(message)), True
        known = self._given.get(key := repr(message))
        if known is None:
            if problem := part_problem(message.get("content")):
                raise RenderError(problem)
            expressed = for_template(copied(message))
            # Calls the template would leave out, or refuse, are part of the text instead: nothing said is lost.
            if min(len(expressed.get("tool_calls", ())), 2) > self._most_calls:
                expressed = with_calls_as_text(expressed)
            known = expressed, _KNOWN.issuperset(expressed) and is_plain(expressed)
            self._given.put(key, known, len(key))
        return known

    def _writes_calls(self, count: int) -> bool:
        names = [f"{PROBE}-{place}" for place in range(count)]
        calls = [{"id": "123456789", "type": "function", "function": {"name": n, "arguments": "{}"}} for n in names]
        try:
            text = self.write([{"role": "assistant", "content": "", "tool_calls": calls}], None, reply=False)
        except RenderError:
            return False
        return all(name in text for name in names)


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
