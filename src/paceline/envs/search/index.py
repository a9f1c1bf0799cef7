"""Indexes a corpus of short documents, by words (BM25) or by meaning (embeddings), and keeps an index in a folder.

A corpus is one JSON object per line, `{"id": ..., "title": ..., "text": ...}`; a title may be left out.
"""

import codecs
import hashlib
import re
import unicodedata
import zipfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from paceline.config.secret import redact
from paceline.data import DataError
from paceline.envs.base import EnvError

BUILT_IN_CORPUS = Path(__file__).with_name("corpus.jsonl")
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
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        document = _document(line, f"{path}:{number}")
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
    for key in ("title", "text"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise DataError(f"{where}: `{key}` must be a string, not {type(row[key]).__name__}")
    title, text = row.get("title") or "", row.get("text") or ""
    if not text.strip():
        raise DataError(f"{where}: a document needs a `text` that is not empty")
    return Document(str(name), title, text)


MAX_QUERY_CHARS = 4096
"""Longest query in characters; a model may write any nonsense."""
K1, B = 1.2, 0.75
"""The usual choice: how soon repetition stops to count, and how much length is held against a document."""
DEFAULT_TOP_K = 5
Arrays = dict[str, NDArray]
"""An index without its documents, as a file holds it."""

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found, and how well it fits."""

    document: Document
    score: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.document) | {"score": self.score}


def tokenise(text: str) -> list[str]:
    """Words are runs of letters and digits, compared without case; there is no stemming and there are no stop words.

    >>> tokenise("The Müller-Bridge, built in 1204")
    ['the', 'müller', 'bridge', 'built', 'in', '1204']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class BM25:
    """Ranks documents by the words of a query they hold, rare ones above all.

        score(q, d) = sum over words w of q:  idf(w) * tf (k1 + 1) / (tf + k1 (1 - b + b |d| / mean |d|))
        idf(w) = ln(1 + (N - n + 1/2) / (n + 1/2)),  n of N documents hold w,  tf is how often d does

    Robertson and Zaragoza, "The Probabilistic Relevance Framework" (2009), with Lucene's idf, which is never negative.
    All that does not depend on the query is computed once, so a search is a sum over the postings of its words. Word
    `w` owns `places[starts[w] : starts[w + 1]]`, ascending positions in `documents`, and the weights beside them.
    """

    def __init__(self, documents: Sequence[Document], arrays: Arrays) -> None:
        self.documents = documents
        self._starts, self._places, self._weights = arrays["starts"], arrays["places"], arrays["weights"]
        words = arrays["words"].tobytes().decode().split("\n")  # a word holds no line break
        self._number = {word: number for number, word in enumerate(words)}

    @classmethod
    def build(cls, documents: Sequence[Document]) -> "BM25":
        return cls(documents, cls.count_words(documents))

    @staticmethod
    def count_words(documents: Sequence[Document]) -> Arrays:
        """The arrays of an index over these documents."""
        numbers: dict[str, int] = {}
        held, places, counts = array("q"), array("q"), array("q")
        lengths = np.zeros(len(documents))
        for place, document in enumerate(documents):
            found = Counter(tokenise(document.words))
            lengths[place] = found.total()
            held.extend(numbers.setdefault(word, len(numbers)) for word in found)
            places.extend([place] * len(found))
            counts.extend(found.values())
        # Sorted by word; stable, so that each word's documents stay in their order.
        order = np.argsort(np.asarray(held, np.int64), kind="stable")
        word_of, place_of, count = (np.asarray(values, np.int64)[order] for values in (held, places, counts))
        starts = np.searchsorted(word_of, np.arange(len(numbers) + 1))
        holding = np.diff(starts)[word_of]  # documents with the word
        idf = np.log1p((len(lengths) - holding + 0.5) / (holding + 0.5))
        usual = lengths.mean() if lengths.any() else 1.0
        damping = K1 * (1 - B + B * lengths[place_of] / usual)
        return {
            "words": np.frombuffer("\n".join(numbers).encode(), np.uint8),
            "starts": starts.astype(np.int64),
            "places": place_of,
            "weights": (idf * count * (K1 + 1) / (count + damping)).astype(np.float32),
        }

    def search(self, query: str, top_k: int = DEFAULT_TOP_K) -> list[Hit]:
        scores = np.zeros(len(self.documents), np.float32)
        known = Counter(self._number[word] for word in tokenise(query) if word in self._number)
        # In one order whatever the query's was: the same sums for the same words, to the bit.
        for number, times in sorted(known.items()):
            span = slice(self._starts[number], self._starts[number + 1])
            scores[self._places[span]] += times * self._weights[span]  # a document stands only once among these
        return top_hits(self.documents, scores, top_k, above=0.0)


def top_hits(documents: Sequence[Document], scores: NDArray, top_k: int, above: float = -np.inf) -> list[Hit]:
    """The highest scores, best first; of equals the one that comes first in the corpus."""
    candidates = np.flatnonzero(scores > above)
    if len(candidates) > top_k:
        # Everything that ties with the last place stays in, so that the corpus' order decides and not the partition's.
        least = -np.partition(-scores[candidates], top_k - 1)[top_k - 1]
        candidates = candidates[scores[candidates] >= least]
    ranked = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return [Hit(documents[place], float(scores[place])) for place in ranked]


EMBEDDING_BATCH_SIZE = 64
EMBEDDING_SECONDS = 60.0


class Embedder:
    """An embeddings endpoint, in OpenAI's form."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        self.url, self.model = f"{url.rstrip('/').removesuffix('/embeddings')}/embeddings", model
        self._key = api_key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=EMBEDDING_SECONDS)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One row of length 1 per text."""
        starts = range(0, len(texts), EMBEDDING_BATCH_SIZE)
        vectors = np.concatenate([self._embed_batch(texts[i : i + EMBEDDING_BATCH_SIZE]) for i in starts])
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)

    def close(self) -> None:
        self._client.close()

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float64]:
        body = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        try:
            response = self._client.post(self.url, json=body)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise EnvError(f"the embeddings service at {self.url} does not answer: {cause}") from error
        if response.status_code != 200:
            detail = " ".join(redact(response.text, self._key)[:200].split())
            raise EnvError(f"the embeddings service at {self.url} answered {response.status_code}: {detail}")
        try:
            rows = sorted(response.json()["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], np.float64)
        except (ValueError, KeyError, TypeError) as error:
            raise EnvError(f"the embeddings service at {self.url} answered, but with no embeddings") from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise EnvError(f"the embeddings service at {self.url} gave no vector for each of {len(texts)} texts")
        return vectors


class Dense:
    """Search by meaning: the whole corpus as vectors, compared with the query's by their cosine."""

    def __init__(self, documents: Sequence[Document], vectors: NDArray[np.float32], embedder: Embedder) -> None:
        self.documents, self._vectors, self._embedder = documents, vectors, embedder

    def search(self, query: str, top_k: int = DEFAULT_TOP_K) -> list[Hit]:
        (vector,) = self._embedder.embed([query])
        if len(vector) != self._vectors.shape[1]:
            raise EnvError(
                f"{self._embedder.url} gives vectors of {len(vector)} numbers, the index holds such of "
                f"{self._vectors.shape[1]}: it was made by another model, delete it"
            )
        return top_hits(self.documents, self._vectors @ vector, top_k)


Index = BM25 | Dense
"""Finds documents. Safe to be asked by several threads at once."""

# A folder holds documents.jsonl, so that a service can be started from it alone, and bm25.npz (words and postings) or
# dense.npz (vectors). Each index names the corpus it was made from by its digest, and is made anew when that differs.
FORMAT = 1
DOCUMENTS = "documents.jsonl"


def open_index(corpus: str | None = None, folder: str | None = None, embedder: Embedder | None = None) -> Index:
    """The index of a corpus: out of the folder if it is there and fits, else made and, given a folder, kept in it."""

    def build() -> Arrays:
        if embedder is None:
            return BM25.count_words(documents)
        return {"vectors": embedder.embed([document.words for document in documents])}

    def index(arrays: Arrays) -> Index:
        return BM25(documents, arrays) if embedder is None else Dense(documents, arrays["vectors"], embedder)

    if folder is None:
        documents = load_corpus(BUILT_IN_CORPUS if corpus is None else corpus)
        return index(build())
    path = Path(folder)
    source = path / DOCUMENTS if corpus is None else Path(corpus)
    if corpus is None and not source.exists():
        raise DataError(f"the index folder {folder} holds no documents yet: name them with --corpus")
    documents = load_corpus(source)
    mark = f"{FORMAT} {digest(documents)}" + (f" {embedder.model}" if embedder is not None else "")
    file = path / ("bm25.npz" if embedder is None else "dense.npz")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if source.resolve() != (path / DOCUMENTS).resolve():
            save_corpus(documents, path / DOCUMENTS)
        if (arrays := _read(file, mark)) is None:
            arrays = build()
            _write(file, mark, arrays)
        return index(arrays)
    except OSError as error:
        raise DataError(f"the index folder {path} cannot be used: {error.strerror or error}") from error


def _read(file: Path, mark: str) -> Arrays | None:
    """The arrays of an index of this very corpus; None if there is none, or a damaged one."""
    if not file.exists():
        return None
    try:
        with np.load(file, allow_pickle=False) as saved:
            return dict(saved) if saved["mark"].item() == mark else None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, mark: str, arrays: Arrays) -> None:
    """Beside its place first: a concurrent reader finds the old file or the new one."""
    draft = file.with_suffix(".draft")
    with draft.open("wb") as out:
        np.savez(out, mark=np.array(mark), **arrays)  # ty: ignore[invalid-argument-type] - names and arrays
    draft.replace(file)
