"""Where chat templates run: as safe as jinja's own sandbox, and quicker.

Templates are programs from the internet, so what they touch is examined. Jinja does that anew for every `message.role`,
which is most of what rendering costs; here the answers for dicts, strings and loops are known beforehand.
"""

import types
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

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
