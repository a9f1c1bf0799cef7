"""Renders conversations to exact tokens and back, through the model's chat template."""

import logging
import re
import types
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jinja2
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from paceline.clients.tools import inline_tool_calls, template_message
from paceline.data import part_problem
from paceline.data.rollout import Message, Tools, Turn, copy_message, is_text
from paceline.errors import PacelineError
from paceline.model.tokenizer import tokenizer_digest

V = TypeVar("V")

ENTRY_OVERHEAD = 16
"""Weight added to each entry, so that many small entries cannot fill the memory."""


class LruCache(Generic[V]):
    """A cache bounded by weight that evicts the least recently used entries.

    >>> cache = LruCache(2 * ENTRY_OVERHEAD + 5)
    >>> for key, weight in [("a", 2), ("b", 3)]:
    ...     cache.put(key, weight, weight)
    >>> cache.get("a")
    2
    >>> cache.put("c", 1, 1)
    >>> cache.get("b"), cache.get("a"), cache.get("c")
    (None, 2, 1)
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._weight = capacity, 0
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()

    def get(self, key: str) -> V | None:
        if (entry := self._entries.get(key)) is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: str, value: V, weight: int) -> None:
        """Add a key that is not cached yet; a value heavier than the capacity is not cached."""
        weight += ENTRY_OVERHEAD
        if weight > self._capacity:
            return
        self._entries[key] = value, weight
        self._weight += weight
        while self._weight > self._capacity:
            _, (_, evicted) = self._entries.popitem(last=False)
            self._weight -= evicted


MAX_JSON_NODES = 10_000
"""Larger values do not count as JSON data: they may contain themselves."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_MISSING = object()


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Has the rules of its parent class, with a fast path for attributes that are known to be safe."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            value = obj.get(attribute, _MISSING)
            return value if value is not _MISSING else self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in _SAFE_ATTRIBUTES:
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
def compile_template(source: str) -> jinja2.Template | None:
    """Compile a template as transformers does, in `TemplateSandbox`; None if transformers uses an unknown sandbox."""
    compile_theirs = getattr(chat_template_utils, "_compile_jinja_template", None)
    base = None if compile_theirs is None else compile_theirs(source).environment
    if type(base) is not ImmutableSandboxedEnvironment:
        return None
    environment = base.overlay()
    environment.__class__ = TemplateSandbox
    return environment.from_string(source)


def is_json_data(value: Any) -> bool:
    """Whether a value is what a JSON parser returns: no subclasses, no other objects, no cycles."""
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
        if len(rest) > MAX_JSON_NODES:
            return False
    return True


def _safe_attributes(example: Any) -> set[str]:
    """Attributes of strings, or of loops, that the sandbox hands out as they are."""
    sandbox = ImmutableSandboxedEnvironment()
    safe = {name for name in dir(example) if sandbox.is_safe_attribute(example, name, None)}
    return {name for name in safe if sandbox.wrap_str_format(getattr(example, name, None)) is None}


_LOOP_COUNTERS = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
_DICT_ATTRIBUTES = frozenset(dir(dict))
_SAFE_ATTRIBUTES = {(str, name) for name in _safe_attributes("")} | {
    (LoopContext, name) for name in _LOOP_COUNTERS & _safe_attributes(LoopContext([1], jinja2.Undefined))
}


MESSAGE_CACHE_CHARS = 1 << 21
PROBE = "paceline-probe"
"""A word to find again in what a template writes."""

_TEMPLATE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""Message keys that the fast path supports: transformers rewrites none of them for the template."""


class RenderError(PacelineError):
    """A conversation the model's chat template cannot express, as a sentence for the user."""


class ToolsDropped(RenderError):
    """An environment offers tools that the chat template does not render."""


DROPPED_TOOLS_MESSAGE = (
    "the model's chat template ignores `tools`: the environment offers {names}, and the prompt is the same without. "
    "Name a template that writes them with model.chat_template, choose another model (Qwen2.5, Qwen3 and Llama 3 write "
    "them), or describe them in the messages yourself and set model.allow_dropped_tools = true"
)


class ChatTemplate:
    """Writes what `tokenizer.apply_chat_template` writes, to the letter, in about a third of its time.

    The fast path runs the same template in `TemplateSandbox`, for messages that are plain JSON data. All others go
    through transformers, which sanitizes them first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise RenderError("the tokenizer has no chat template: name one with model.chat_template")
        self._tokenizer = tokenizer
        self._message_cache: LruCache[tuple[Message, bool]] = LruCache(MESSAGE_CACHE_CHARS)
        self._max_calls = 2
        """Tool calls that the template can render in one message: 0, 1, or 2 for any number."""
        self._max_calls = next((n for n in (2, 1) if self._writes_calls(n)), 0)
        self._message_cache = LruCache(MESSAGE_CACHE_CHARS)

    def write(self, messages: Sequence[Message], tools: Tools | None, reply: bool) -> str:
        """The conversation as text, with the opening of a reply if asked for."""
        try:
            return self._write(messages, list(tools) if tools else None, reply)
        # A template is a program that runs on the environment's messages: its errors are errors of those messages.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RenderError(f"the model's chat template cannot express this conversation: {error}") from error

    def _write(self, messages: Sequence[Message], tools: list[Any] | None, reply: bool) -> str:
        tokenizer, prepared, fast = self._tokenizer, [], bool(messages)
        for message in messages:
            expressed, plain = self._prepare_message(message)
            prepared.append(expressed)
            fast = fast and plain
        special = tokenizer.special_tokens_map
        if fast and is_json_data(tools) and is_json_data(special):
            template = compile_template(tokenizer.get_chat_template(None, tools))
            if template is not None:
                settings = {"documents": None, "add_generation_prompt": reply, **special}
                return template.render(messages=prepared, tools=tools, **settings)
        text = tokenizer.apply_chat_template(prepared, tools=tools, tokenize=False, add_generation_prompt=reply)
        assert isinstance(text, str)
        return text

    def _prepare_message(self, message: Message) -> tuple[Message, bool]:
        """A message as templates expect it, and whether the fast path may render it."""
        if is_text(message):
            return (message if message["role"] != "developer" else template_message(message)), True
        if (cached := self._message_cache.get(key := repr(message))) is None:
            if problem := part_problem(message.get("content")):
                raise RenderError(problem)
            expressed = template_message(copy_message(message))
            # Calls the template would leave out, or refuse, are part of the text instead: nothing said is lost.
            if min(len(expressed.get("tool_calls", ())), 2) > self._max_calls:
                expressed = inline_tool_calls(expressed)
            cached = expressed, _TEMPLATE_KEYS.issuperset(expressed) and is_json_data(expressed)
            self._message_cache.put(key, cached, len(key))
        return cached

    def _writes_calls(self, count: int) -> bool:
        names = [f"{PROBE}-{place}" for place in range(count)]
        calls = [{"id": "123456789", "type": "function", "function": {"name": n, "arguments": "{}"}} for n in names]
        try:
            text = self.write([{"role": "assistant", "content": "", "tool_calls": calls}], None, reply=False)
        except RenderError:
            return False
        return all(name in text for name in names)


MARKER = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_\w+>")
CACHE_TOKENS = 1 << 20
MIN_PIECE_CHARS = 32
"""Characters of a piece: those between an end-of-turn token and the next role belong to what follows."""


class CachedEncoder:
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
        self._fast_tokenizer: Tokenizer | None = None
        self._split_at: re.Pattern[str] | None = None
        self._cache: LruCache[list[int]] = LruCache(CACHE_TOKENS)
        backend = None if tokenizer.split_special_tokens else getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            self._fast_tokenizer = backend
            added = [t for t in backend.get_added_tokens_decoder().values() if t.content and not t.normalized]
            if added and not any(token.lstrip or token.rstrip or token.single_word for token in added):
                texts = sorted((token.content for token in added), key=len, reverse=True)
                self._split_at = re.compile("|".join(map(re.escape, texts)))

    def encode(self, text: str) -> list[int]:
        if self._split_at is None:
            return self._tokenize(text)
        ids: list[int] = []
        start = 0
        for match in self._split_at.finditer(text):
            at = match.start()
            if at - start >= MIN_PIECE_CHARS:
                ids += self._encode_piece(text[start:at])
                start = at
        ids += self._encode_piece(text[start:])
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        if (ids := self._cache.get(text)) is None:
            ids = self._tokenize(text)
            self._cache.put(text, ids, len(ids))
        return ids

    def _tokenize(self, text: str) -> list[int]:
        # Gives the same tokens in half the time: it skips the handling of options that are not set.
        fast = self._fast_tokenizer
        if fast is not None and fast.truncation is None and fast.padding is None:
            return fast.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)


OnDroppedTools = Literal["allow", "warn", "refuse"]
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
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self._pieces = CachedEncoder(tokenizer)
        self._template = ChatTemplate(tokenizer)
        # What `decode` calls for a list of ids, once it has looked at each of them.
        default_decode = type(tokenizer).decode is PreTrainedTokenizerBase.decode
        self._decode_ids = tokenizer._decode if default_decode else tokenizer.decode
        self._prompt_cache: LruCache[Prompt] = LruCache(CACHE_TOKENS)
        self._end_texts = {token: self.decode([token]) for token in self.end_tokens}
        self.on_dropped_tools: OnDroppedTools = "allow"
        """What to do where the template writes nothing of the tools it is given: nothing, one warning, or an error."""
        self.dropped_tools_error: ToolsDropped | None = None
        """The error, once it was raised: an agent behind a URL may turn it into another one."""
        self._tools_checked = False

    @cached_property
    def digest(self) -> str:
        """Of vocabulary and chat template."""
        return tokenizer_digest(self.tokenizer)

    @cached_property
    def split_markers(self) -> list[str]:
        """Markers that the template writes, such as `<|im_start|>`, for which the tokenizer has no token of its own."""
        try:
            text = self.text([{"role": "user", "content": PROBE}])
        except RenderError:
            return []
        return [marker for marker in dict.fromkeys(MARKER.findall(text)) if len(self.encode(marker)) > 1]

    def text(self, messages: Sequence[Message], tools: Tools | None = None, reply: bool = True) -> str:
        """The conversation as the template writes it, with the opening of a reply or without."""
        return self._template.write(messages, tools, reply)

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The whole conversation and the opening of the reply."""
        return list(self.render(messages, tools).ids)

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> Prompt:
        """The prompt as ids and text, cached: all rollouts of one example share it."""
        key = repr((messages, tools))
        if (prompt := self._prompt_cache.get(key)) is None:
            text = self.text(messages, tools)
            if tools and not self._tools_checked:
                self._check_tools_rendered(tools, messages, text)
            prompt = Prompt(self.encode(text), text)
            # A template may ignore long tools, which the key does not.
            self._prompt_cache.put(key, prompt, max(len(prompt.ids), len(key) // 4))
        return prompt

    def _check_tools_rendered(self, tools: Tools, messages: Sequence[Message], text: str) -> None:
        """Raise or warn if the prompt does not show the tools; later prompts are not checked once one did."""
        if self.on_dropped_tools == "allow" or text != self.text(messages, None):
            self._tools_checked = True
            return
        names = ", ".join(f"`{tool.get('function', tool).get('name', '?')}`" for tool in tools)
        sentence = DROPPED_TOOLS_MESSAGE.format(names=names)
        if self.on_dropped_tools == "refuse":
            self.dropped_tools_error = ToolsDropped(sentence)
            raise self.dropped_tools_error
        self._tools_checked = True
        log.warning(sentence)

    def render_continuation(self, turn: Turn, messages: Sequence[Message], opening: str | None = None) -> Prompt:
        """The prompt of messages that begin with what was said up to the end of a recorded turn: it keeps the turn's
        ids, unless the template does not. `opening` is the text of the turn's own prompt, if that is still known.

        The recorded ids end at the end-of-turn token; whatever the template puts after it (a newline, say) belongs to
        the suffix and is kept.
        """
        if turn.messages is None or turn.finish != "stop":
            return self.render(messages, turn.tools)
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
        ids = completion_ids[:-1] if completion_ids and completion_ids[-1] in self.end_tokens else completion_ids
        return self.decode(ids)

    def _suffix(self, turn: Turn, messages: Sequence[Message], opening: str, whole: str, end: str) -> str | None:
        """The text the template writes after the turn, if it writes all that came before as it was recorded.

        Usually it repeats the reply letter by letter. Otherwise it may do so in a spelling of its own: Llama 3 trims
        replies, others set calls or thoughts apart with white space. A thought that the template drops is more than
        spelling: then what was sampled is not what the model would see.
        """
        if whole.startswith(head := opening + turn.text + end):
            return whole[len(head) :]
        content = _strip_whitespace(turn.message["content"])
        if not whole.startswith(opening) or content not in _strip_whitespace(whole[len(opening) :]):
            return None
        body, ended, after = whole[len(opening) :].partition(end) if end else ("", "", "")
        if ended and _strip_whitespace(body) == _strip_whitespace(turn.text):
            return after
        # In other words than the model's own: where the reply ends is seen by putting another in its place.
        place = len(turn.messages or ())
        marked = [*messages[:place], {"role": "assistant", "content": PROBE}, *messages[place + 1 :]]
        before, _, after = self.text(marked, turn.tools)[len(opening) :].partition(PROBE)
        body = whole[len(opening) : len(whole) - len(after)]
        has_content = content in _strip_whitespace(body)
        if not (has_content and whole == opening + body + after and body.startswith(before) and after.startswith(end)):
            return None
        return after[len(end) :]

    def decode(self, ids: Sequence[int]) -> str:
        text = self._decode_ids(list(ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        try:
            return self._pieces.encode(text)
        except (TypeError, UnicodeError) as error:
            raise RenderError(f"the tokenizer cannot read this conversation: {error}") from error


def _strip_whitespace(text: str) -> str:
    return "".join(text.split())
