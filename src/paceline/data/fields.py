"""Turns a file's rows into the common row format, whatever names the file uses.

    {"question": "2+2?", "gt_answer": 4}  ->  {"messages": [{"role": "user", "content": "2+2?"}], "answer": 4, ...}

Nothing here knows where a row comes from: the reader adds file and line to an error.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.data.rows import DataError, Row

PROMPTS = ("prompt", "question")
"""Fields that become `messages` where there are none."""


class BadRow(Exception):
    """A row that cannot be used: why, as the end of a sentence that begins with its place."""


@dataclass(frozen=True)
class RowShape:
    """Turns a file's row into one of ours, or says why it cannot."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """From the file's names to ours; `a.b` reaches into an object."""
    demonstrations: bool = False
    """Conversations must end in what the assistant said; a `completion` is put after the prompt."""
    require: Sequence[str] = ()
    """Fields a row cannot do without, `answer` say."""
    prompted: bool = True
    """A row must say what the policy hears. A user's own code may make that up from whatever a row has."""
    refine: Callable[[Row], Row] | None = None
    """The reader's own change to a row when all else is well. It raises `BadRow`, and changes nothing inside the row:
    the values may still be the file's own."""

    def __post_init__(self) -> None:
        targets = list(self.fields.values())
        if twice := sorted({name for name in targets if targets.count(name) > 1}):
            raise DataError(f"fields: `{twice[0]}` is given by more than one field: map one of them only")

    def __call__(self, row: Row) -> Row:
        row = self._renamed(row)
        if "input_token_ids" in row:
            row["input_token_ids"] = _token_ids(row["input_token_ids"])
        if (messages := _messages(row, self.demonstrations)) is not None:
            row["messages"] = messages
        elif self.prompted and "input_token_ids" not in row:
            names = ", ".join(f"`{name}`" for name in row) or "nothing"
            raise BadRow(
                "a row needs `messages`, `prompt`, `question` or `input_token_ids` and has "
                f'{names}: name the right one with fields = {{NAME = "prompt"}}'
            )
        if self.demonstrations and row.get("messages", [{}])[-1].get("role") != "assistant":
            raise BadRow("a demonstration must end in an assistant message, or have a `completion`")
        if missing := [name for name in self.require if row.get(name) in (None, "")]:
            raise BadRow(
                f'a row needs `{missing[0]}`: if it has another name, write fields = {{NAME = "{missing[0]}"}}'
            )
        return row if self.refine is None else self.refine(row)

    def _renamed(self, row: Row) -> Row:
        taken = {ours: _value(row, theirs) for theirs, ours in self.fields.items()}
        return {name: value for name, value in row.items() if name not in self.fields} | taken


def _value(row: Row, path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise BadRow(f"there is no field `{path}`, which fields names; the row has {', '.join(row)}")
        value = value[key]
    return value


def _messages(row: Row, demonstrations: bool) -> list[dict] | None:
    """The row's conversation as fresh messages; None if it has none."""
    name = next((name for name in ("messages", *PROMPTS) if row.get(name) is not None), None)
    if name is None:
        return None
    messages = _conversation(row[name], name, "user")
    if demonstrations and name != "messages" and row.get("completion") is not None:
        messages += _conversation(row["completion"], "completion", "assistant")
    return messages


def _conversation(value: Any, name: str, role: str) -> list[dict]:
    """A list of messages, such a list as JSON text (tables have no better place for it), or one message's text."""
    if isinstance(value, str) and name != "messages":
        return [{"role": role, "content": value}]
    if isinstance(value, str):
        value = _parsed(value, name)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadRow(f"`{name}` must be a list of messages, not {_kind(value)}")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> dict:
    if not isinstance(message, Mapping):
        raise BadRow(f"{where} must be an object with `role` and `content`, not {_kind(message)}")
    # A table gives every message every other message's keys; what is not there must not look as if it were.
    said = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not isinstance(said.get("role"), str) or not said["role"]:
        raise BadRow(f"{where} has no `role`: write system, user, assistant or tool")
    content = said.get("content")
    if content is None and not said.get("tool_calls"):
        raise BadRow(f"{where} has no `content`")
    if isinstance(content, list) and not all(isinstance(part, Mapping) for part in content):
        raise BadRow(f"{where}: the parts of `content` must be objects")
    if content is not None and not isinstance(content, str | list):
        raise BadRow(f"{where}: `content` must be text, not {_kind(content)}")
    return said


def part_problem(content: Any) -> str | None:
    """Why a text model cannot read a message's content: the first part of it that is no text; None for all else."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if isinstance(kind, str) and kind != "text":
            what = "images are" if "image" in kind else f"parts of type `{kind}` are"
            return (
                f'{what} not supported, the model reads text only: write {{"type": "text", "text": "..."}} or a string'
            )
    return None


def _token_ids(value: Any) -> list[int]:
    ids = _parsed(value, "input_token_ids") if isinstance(value, str) else value
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise BadRow(f"`input_token_ids` must be a list of whole numbers, not {_kind(ids)}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise BadRow(f"`input_token_ids` must hold whole numbers from 0, not {token!r}")
    return list(ids)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow(f"`{name}` is text, but not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets without end
        raise BadRow(f"`{name}` cannot be read: {error}") from error


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"an empty {type(value).__name__}" if value in ([], {}, "") else type(value).__name__
