"""Decides about fields that a body does not list: harmless ones are ignored and named, the others refused."""

import difflib
import logging
import re
from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from paceline.inference.server.errors import bad
from paceline.util.rate_limited_logger import RateLimitedLogger

IGNORED_HEADER = "Paceline-Ignored"
"""Names, in an answer, the fields of the request that had no effect."""
MOST_UNKNOWN = 64
LIKENESS = 0.8
"""From here on a name counts as a misspelling of a known one."""

# Parameters of vLLM, SGLang and llama.cpp that a client relies on, each with the values that change nothing.
PROMPT_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "truncate_prompt_tokens": (-1,),
}
SAMPLING_FIELDS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "max_new_tokens": (),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
_NEUTRAL = PROMPT_FIELDS | SAMPLING_FIELDS
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PLACE = re.compile(r"\.\d+(?=\.)")
_seldom = RateLimitedLogger(logging.getLogger("paceline.server"))


def take_unknown(body: BaseModel) -> list[str]:
    """Take what no model lists out of a body, and name it.

    Refused is what the body's class calls `unsupported`, and a name that is nearly that of a known field.
    """
    refused = getattr(type(body), "unsupported", {})
    found: dict[str, None] = {}
    count = 0
    for where, model in _models(body, ""):
        extra = model.__pydantic_extra__ or {}
        count += len(extra)
        if count > MOST_UNKNOWN:
            raise bad(f"the body has more than {MOST_UNKNOWN} fields that do not exist", code="unknown_field")
        for name, value in extra.items():
            if value is None or (not where and value in _NEUTRAL.get(name, ())):
                continue
            shown = _shown(where + name)
            if not where and name in refused:
                raise bad(f"`{name}` is not supported: leave it out", name, "unsupported_field")
            if near := _misspelled(name, model):
                raise bad(f"there is no field `{shown}`: did you mean `{near}`?", shown, "unknown_field")
            found[_PLACE.sub("", shown)] = None
        extra.clear()
    return list(found)


def ignored_fields(request: Request) -> list[str]:
    """Fields that `read_body` took out of this request's body."""
    return getattr(request.state, "ignored", [])


def name_ignored(request: Request, response: Response) -> Response:
    """Name ignored fields in the answer's header and, once in a while, in the log."""
    if names := ", ".join(ignored_fields(request)):
        response.headers[IGNORED_HEADER] = names
        _seldom.warn(request.url.path, "%s: ignored fields that do not exist: %s", request.url.path, names)
    return response


def _models(value: BaseModel, where: str) -> Iterator[tuple[str, BaseModel]]:
    yield where, value
    for name, inner in value.__dict__.items():
        if isinstance(inner, BaseModel):
            yield from _models(inner, f"{where}{name}.")
        # A list holds models or none: long lists of token ids are not gone through.
        elif isinstance(inner, list) and inner and isinstance(inner[0], BaseModel):
            for place, item in enumerate(inner):
                yield from _models(item, f"{where}{name}.{place}.")


def _misspelled(name: str, model: BaseModel) -> str | None:
    return next(iter(difflib.get_close_matches(name[:64], type(model).model_fields, 1, LIKENESS)), None)


def _shown(name: str) -> str:
    """A client's own word, where it may stand in a header and in the name of a metric."""
    return name if _PLAIN.fullmatch(name) else "(no identifier)"
