"""Reads, shapes and checks dataset rows of local files, counts bad ones, and computes a digest.

{"question": "2+2?", "gt_answer": 4}  ->  {"messages": [{"role": "user", "content": "2+2?"}], "answer": 4, ...}
"""

import csv
import json
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

from paceline.errors import PacelineError

FIRST_ROWS = 20
"""When so many rows from the first on are all bad, the rest is not looked at."""
MIN_BAD_ROWS, MAX_BAD_SHARE = 20, 0.01
"""Bad rows are too many from this number on, if they are also more than this share of all; or where they are half."""
MAX_NAMED_ROWS = 3


class BadRows:
    """The bad rows of one dataset. `kind` is the error to raise over too many."""

    def __init__(self, kind: type[PacelineError] = PacelineError) -> None:
        self._kind = kind
        self.seen = 0
        self.indices: set[int] = set()
        self.first: list[str] = []

    def __len__(self) -> int:
        return len(self.indices)

    def check(self, look: Callable[[], object], refused: type[Exception], place: str = "") -> None:
        """Count the next row, which is bad where `look` raises the error `refused`: why, as a sentence that `place`
        begins. Raises when none of the first rows is any good."""
        try:
            look()
        except refused as error:
            self.indices.add(self.seen)
            if len(self.first) < MAX_NAMED_ROWS:
                self.first.append(f"{place}{error}")
        self.seen += 1
        if len(self) == self.seen == FIRST_ROWS:
            self.settle()

    def settle(self) -> None:
        """All were looked at: raises if too many are bad."""
        half = bool(self) and 2 * len(self) >= self.seen
        if half or (len(self) >= MIN_BAD_ROWS and len(self) > MAX_BAD_SHARE * self.seen):
            first, *others = self.first
            others = [f"{len(self)} of the first {self.seen} rows are bad", *others] if self.seen > 1 else []
            raise self._kind("; ".join([first, *others]))

    def __str__(self) -> str:
        """The skipped rows, as a sentence; empty where there are none."""
        if not self:
            return ""
        rows = "1 row is" if len(self) == 1 else f"{len(self)} rows are"
        more = "; ..." if len(self) > MAX_NAMED_ROWS else ""
        return f"{rows} skipped, of {self.seen}: {'; '.join(self.first)}{more}"


def find_bad_rows(rows: Sequence[object], look: Callable[[int], object], refused: type[PacelineError]) -> BadRows:
    """The rows at which `look` raises the error `refused`; that error again where they are too many."""
    found = BadRows(refused)
    for number in range(len(rows)):
        found.check(partial(look, number), refused)
    found.settle()
    return found


Row = dict

PlacedRows = Iterator[tuple[str, Row]]


class DataError(PacelineError):
    """A dataset that cannot be used, as a sentence for the user."""


class Rows(Sequence[Row]):
    """A sequence that makes each row when it is asked for, so that every reader has a row of their own."""

    @abstractmethod
    def _row(self, index: int) -> Row:
        """The row at an index that is known to exist."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(len(self))[index]]
        return self._row(range(len(self))[index])  # a range knows negative indices and where a sequence ends


class RowSubset(Rows):
    def __init__(self, rows: Sequence[Row], indices: Sequence[int]) -> None:
        self.rows = rows
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def _row(self, index: int) -> Row:
        return self.rows[self.indices[index]]


@contextmanager
def wrap_read_errors(source: str) -> Generator[None]:
    """Raise errors of reading a file as `DataError`, a sentence."""
    try:
        yield
    except FileNotFoundError:
        folder = Path(source).parent.resolve().name
        raise DataError(f"dataset {source}: no such file, looked in {folder}/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"dataset {source}: cannot be read: {error}") from error


def json_rows(path: Path) -> PlacedRows:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: must hold a list of objects, not {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", _check_row(row, f"{path}, row {number}")


def csv_rows(path: Path) -> PlacedRows:
    with path.open(encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
        csv.field_size_limit(2**31 - 1)  # Python stops at 131,072 characters, and transcripts are longer
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(f"{path}:{reader.line_num}: a row must have as many fields as the header")
                yield f"{path}:{reader.line_num}", row
        except csv.Error as error:
            raise DataError(f"{path}:{reader.reader.line_num}: not valid CSV: {error}") from error


def parse_object(text: str, place: str) -> Row:
    return _check_row(_parse_json(text, DataError, f"{place}: not valid JSON", f"{place}: cannot be read"), place)


def _parse_json(text: str, kind: type[Exception], invalid: str, unreadable: str) -> Any:
    """The value a text holds; else an error of this kind, which begins with one of the two."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise kind(f"{invalid}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets without end
        raise kind(f"{unreadable}: {error}") from error


def _check_row(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be an object, not {type(row).__name__}")
    return row


PROMPTS = ("prompt", "question")
TOKENS = "input_token_ids"
"""A prompt as exact tokens."""
ANSWER, GIVEN_ANSWER = "answer", "gt_answer"
"""The right answer; the second name is taken where a reader needs one and a row has no `answer`."""


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
        if twice := sorted(name for name in targets if targets.count(name) > 1):
            raise DataError(f"fields: `{twice[0]}` is given by more than one field: map one of them only")

    def __call__(self, row: Row) -> Row:
        taken = {ours: _value(row, theirs) for theirs, ours in self.fields.items()}
        row = {name: value for name, value in row.items() if name not in self.fields} | taken
        if row.get(TOKENS) is None:  # a table of both kinds of rows has the column in all
            row.pop(TOKENS, None)
        else:
            row[TOKENS] = _token_ids(row[TOKENS])
        if (messages := _messages(row, self.demonstrations)) is not None:
            row["messages"] = messages
        elif self.prompted and TOKENS not in row:
            names = ", ".join(f"`{name}`" for name in row) or "nothing"
            raise BadRow(
                "a row needs `messages`, `prompt`, `question` or `input_token_ids` and has "
                f'{names}: name the right one with fields = {{NAME = "prompt"}}'
            )
        if self.demonstrations and row.get("messages", [{}])[-1].get("role") != "assistant":
            raise BadRow("a demonstration must end in an assistant message, or have a `completion`")
        given = row.get(ANSWER) is None and GIVEN_ANSWER in row
        if ANSWER in self.require and given:
            row[ANSWER] = row[GIVEN_ANSWER]
        if name := next((name for name in self.require if row.get(name) in (None, "")), None):
            if name == ANSWER and given:
                raise BadRow(f"`{GIVEN_ANSWER}` must not be empty: it is {row[name]!r}")
            raise BadRow(f'a row needs `{name}`: if it has another name, write fields = {{NAME = "{name}"}}')
        return row if self.refine is None else self.refine(row)


def _value(row: Row, path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise BadRow(f"there is no field `{path}`, which fields names; the row has {', '.join(row)}")
        value = value[key]
    return value


def check_messages(value: Any, name: str) -> list[dict]:
    """The messages of a list, which may be empty. Raises `BadRow`, with the place of the one that is none."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow(f"`{name}` must be a list of messages, not {_kind(value)}")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _messages(row: Row, demonstrations: bool) -> list[dict] | None:
    if (name := next((name for name in ("messages", *PROMPTS) if row.get(name) is not None), None)) is None:
        return None
    messages = _conversation(row[name], name, "user")
    if demonstrations and name != "messages" and row.get("completion") is not None:
        messages += _conversation(row["completion"], "completion", "assistant")
    return messages


def _conversation(value: Any, name: str, role: str) -> list[dict]:
    """A list of messages, such a list as JSON text (tables have no better place for it), or one message's text."""
    if isinstance(value, str) and name != "messages":
        return [{"role": role, "content": value}]
    return check_messages(_parse_list(value, name, "messages"), name)


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
            instead = 'write {"type": "text", "text": "..."} or a string'
            return f"{what} not supported, the model reads text only: {instead}"
    return None


def _token_ids(value: Any) -> list[int]:
    ids = _parse_list(value, "input_token_ids", "whole numbers")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise BadRow(f"`input_token_ids` must hold whole numbers from 0, not {token!r}")
    return list(ids)


def _parse_list(value: Any, name: str, what: str) -> Sequence[Any]:
    if isinstance(value, str):
        value = _parse_json(value, BadRow, f"`{name}` is text, but not valid JSON", f"`{name}` cannot be read")
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadRow(f"`{name}` must be a list of {what}, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"an empty {type(value).__name__}" if value in ([], {}, "") else type(value).__name__


MOST_ROWS = 20_000
"""Rows that are hashed. Of more, so many at equal distances; the count and the first and last row always are."""
MOST_FOREIGN = 64
"""Of a sequence that is neither a list nor one of Paceline's readers: what one row costs there is unknown."""
DIGEST_BYTES = 16


def row_digest(rows: Sequence[Row]) -> dict[str, Any]:
    """How many rows there are, how many of them were hashed, and their digest in order.

    >>> row_digest([{"a": 1}, {"a": 2}]) == row_digest([{"a": 2}, {"a": 1}])
    False
    """
    most = MOST_ROWS if isinstance(rows, list | tuple | Rows) else MOST_FOREIGN
    total, digest = len(rows), blake2b(digest_size=DIGEST_BYTES)
    hashed = min(total, most)
    for place in range(hashed):
        index = place if hashed == total else place * (total - 1) // (hashed - 1)
        digest.update(_bytes(rows[index]))
    return {"rows": total, "hashed": hashed, "blake2b": digest.hexdigest()}


def row_change(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How the rows of a checkpoint and those of now differ, in a few words; empty if they do not."""
    if saved["rows"] != now["rows"]:
        return f"it had {saved['rows']} rows and has {now['rows']}"
    if saved["hashed"] == now["hashed"] and saved["blake2b"] != now["blake2b"]:
        return f"its {now['rows']} rows have another order or other content"
    return ""


def _bytes(row: Any) -> bytes:
    """A row as text that is the same in every process; of an object that is no JSON only its type counts."""
    try:
        try:
            text = json.dumps(row, sort_keys=True, default=_to_json)
        except TypeError:  # keys of several types have no order
            text = json.dumps(row, skipkeys=True, default=_to_json)
    except (ValueError, RecursionError):  # a row inside itself
        text = type(row).__name__
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray):
        return blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
