"""Documents to search: one JSON object per line, `{"id": ..., "title": ..., "text": ...}`; a title may be left out."""

import codecs
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from paceline.data import DataError

BUILT_IN = Path(__file__).with_name("corpus.jsonl")
"""Two hundred short documents about an invented country, made by `scripts/make_corpus.py`."""
QUESTIONS = Path(__file__).with_name("questions.jsonl")
"""Questions about them: no document that answers an eval question answers a training question."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that can be found."""

    id: str
    title: str
    text: str

    @property
    def words(self) -> str:
        """The text it is found by."""
        return f"{self.title}\n{self.text}"


def load_corpus(path: str | Path) -> list[Document]:
    """All documents of a .jsonl file. A bad line is an error with file and line."""
    path = Path(path)
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except FileNotFoundError:
        raise DataError(f"corpus {path}: no such file; write one JSON object with `id` and `text` per line") from None
    except OSError as error:
        raise DataError(f"corpus {path}: cannot be read: {error.strerror}") from error
    documents: list[Document] = []
    seen: dict[str, int] = {}
    for number, document in _documents(lines, path):
        if document.id in seen:
            raise DataError(f"{path}:{number}: the id `{document.id}` stands in line {seen[document.id]} already")
        seen[document.id] = number
        documents.append(document)
    if not documents:
        raise DataError(f"corpus {path}: holds no documents")
    return documents


def save_corpus(documents: Sequence[Document], path: Path) -> None:
    path.write_bytes(b"".join(orjson.dumps(asdict(document)) + b"\n" for document in documents))


def digest(documents: Sequence[Document]) -> str:
    """Equal for equal documents in equal order: tells whether an index was made from them."""
    whole = hashlib.blake2b(digest_size=16)
    for document in documents:
        whole.update(orjson.dumps([document.id, document.title, document.text]))
    return whole.hexdigest()


def _documents(lines: Sequence[bytes], path: Path) -> Iterator[tuple[int, Document]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, _document(line, f"{path}:{number}")


def _document(line: bytes, where: str) -> Document:
    try:
        # Not `json`, which lets half of a surrogate pair through: no answer of a server could hold it.
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg}") from error
    if not isinstance(row, dict):
        raise DataError(f'{where}: a document must be an object such as {{"id": "1", "text": "..."}}')
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise DataError(f"{where}: a document needs an `id`, a string or a whole number")
    title, text = _text(row, "title", where), _text(row, "text", where)
    if not text.strip():
        raise DataError(f"{where}: a document needs a `text` that is not empty")
    return Document(str(name), title, text)


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: `{key}` must be a string, not {type(value).__name__}")
    return value or ""
