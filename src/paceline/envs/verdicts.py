"""Writes the questions that judges are asked, and reads the grades in their answers."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from paceline.config.env.judges import JudgeConfig
from paceline.data.rollout import message_text
from paceline.envs.base import EnvError
from paceline.rollout import Message

MAX_ANSWER = 100_000
"""Characters of an answer that are read; a grade behind them is none."""
_FIELD = re.compile(r"\{(\{[A-Za-z_][\w-]*\})\}|\{([A-Za-z_][\w-]*)\}")
_NUMBER = r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?(?![\w.]*\d)"
_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}")
_SCORES = re.compile(rf"\bscore\b(?:\W|is|of){{0,20}}?{_NUMBER}", re.IGNORECASE)
_WORDS = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_VERDICTS = re.compile(r"\bverdict\b(?:\W|is){0,20}?\b(yes|no)\b", re.IGNORECASE)
RESERVED = ("conversation", "reply")


def fill_prompt(template: str, fields: Mapping[str, Any], where: str) -> str:
    """The template with its fields. Braces around anything else, such as JSON, stay as they are.

    >>> fill_prompt('{question} Answer {"score": 1}, not {{question}}.', {"question": "How good?"}, "")
    'How good? Answer {"score": 1}, not {question}.'
    """

    def fill(found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        if (name := found[2]) not in fields:
            raise EnvError(f"{where}: {missing_field(name, fields)}")
        value = fields[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _FIELD.sub(fill, template)


def missing_field(name: str, fields: Mapping[str, Any]) -> str:
    """The sentence on a field that the prompt names and the row lacks."""
    near = get_close_matches(name, fields, n=1)
    hint = f"did you mean `{{{near[0]}}}`? " if near else ""
    known = ", ".join(f"`{{{field}}}`" for field in fields)
    return (
        f"its prompt names `{{{name}}}`, which is no field of this row; {hint}there are {known} "
        f"(write {{{{{name}}}}} for the word in braces)"
    )


def prompt_fields(template: str) -> list[str]:
    """The fields of a row that a prompt names."""
    return [found[2] for found in _FIELD.finditer(template) if found[2] and found[2] not in RESERVED]


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as one text: the role before each message, tool calls as `name(arguments)`."""
    return "\n\n".join(f"{message.get('role', '')}: {_spoken(message)}" for message in messages)


def _spoken(message: Message) -> str:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [f"{function.get('name')}({function.get('arguments')})" for function in functions]
    return "\n".join(filter(None, [message_text(message), *calls]))


def instruction(config: JudgeConfig) -> str:
    """How the judge is to answer."""
    worst, best = config.scale
    grade = f"a number from {worst:g} (worst) to {best:g} (best)"
    match config.verdict:
        case "number":
            return f"Give your reasons in a few sentences. Then end with the line `Score: N`, where N is {grade}."
        case "json":
            return f'Answer with one JSON object, {{"reason": "...", "{config.key}": N}}, where N is {grade}.'
    return "Give your reasons in a few sentences. Then end with the line `Verdict: yes` or `Verdict: no`."


def read_grade(config: JudgeConfig, text: str) -> tuple[float, float]:
    """The grade in an answer, as it was written and from 0 to 1; raises `ValueError` where there is none."""
    worst, best = config.scale
    spoken = text[:MAX_ANSWER].rpartition("</think>")[2].strip()
    if not spoken:
        raise ValueError("it is empty")
    if "<think>" in spoken:
        raise ValueError("its thoughts do not end")
    match config.verdict:
        case "number":
            value = _read_number(spoken, max(worst, best))
        case "json":
            value = _read_json(spoken, config.key, worst, best)
        case "yes-no":
            value = best if _read_yes(spoken) else worst
    if not min(worst, best) <= value <= max(worst, best):
        raise ValueError(f"{value:g} lies outside the scale from {worst:g} to {best:g}")
    return value, (value - worst) / (best - worst)


def _read_number(text: str, most: float) -> float:
    found = list(_SCORES.finditer(text))[-1:] or list(_NUMBERS.finditer(text))
    if len(found) != 1:
        raise ValueError(f"it holds {len(found) or 'no'} numbers, and none stands after `Score:`")
    if (of := found[0][2]) is not None and float(of) != most:
        raise ValueError(f"`{found[0][0]}` is of {of}, and the scale ends at {most:g}")
    return float(found[0][1])


def _read_json(text: str, key: str, worst: float, best: float) -> float:
    found = [one for one in _objects(text) if key in one]
    if not found:
        raise ValueError(f"it holds no JSON object with the field `{key}`")
    value = found[-1][key]
    if isinstance(value, bool):
        return best if value else worst
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"its `{key}` is {json.dumps(value)[:80]}, which is no number")
    return number


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, outermost ones only."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield value
        at = text.find("{", end)


def _read_yes(text: str) -> bool:
    found = [word.lower() for word in _VERDICTS.findall(text)[-1:] or set(map(str.lower, _WORDS.findall(text)))]
    if len(found) != 1:
        raise ValueError("it says both yes and no" if found else "it says neither yes nor no")
    return found[0] == "yes"
