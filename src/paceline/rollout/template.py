"""Runs the model's chat template on a conversation, at every turn of it."""

import types
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import jinja2
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from paceline.clients.tools import for_template, with_calls_as_text
from paceline.data import part_problem
from paceline.data.rollout import Message, copied, is_text
from paceline.errors import PacelineError

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


REMEMBERED = 1 << 21
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
        self._given: Recent[tuple[Message, bool]] = Recent(REMEMBERED)
        self._most_calls = 2
        """How many calls in one message the template knows to write, where 2 is any number."""
        self._most_calls = next((n for n in (2, 1) if self._writes_calls(n)), 0)
        self._given = Recent(REMEMBERED)

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
