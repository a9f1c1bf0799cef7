"""Stores an index in a folder, so that a large corpus is read and weighed once.

    documents.jsonl  the documents themselves: a service can be started from the folder alone
    bm25.npz         words and postings
    dense.npz        vectors, if it is searched by meaning

Each index names the corpus it was made from by its digest, and is made anew when that is another one.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data import DataError
from paceline.envs.search.corpus import BUILT_IN, Document, digest, load_corpus, save_corpus
from paceline.envs.search.dense import Dense, Embedder
from paceline.envs.search.index import BM25, Index

FORMAT = 1
DOCUMENTS = "documents.jsonl"
Arrays = dict[str, NDArray]


def open_index(corpus: str | None = None, folder: str | None = None, embedder: Embedder | None = None) -> Index:
    """The index of a corpus: out of the folder if it is there and fits, else made and, given a folder, kept in it."""
    kept = Path(folder) if folder is not None else None
    source = _source(corpus, kept)
    documents = load_corpus(source)
    mark = f"{FORMAT} {digest(documents)}"
    if kept is None:
        return BM25.build(documents) if embedder is None else Dense.build(documents, embedder)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        if Path(source).resolve() != (kept / DOCUMENTS).resolve():
            save_corpus(documents, kept / DOCUMENTS)
        if embedder is None:
            return _bm25(documents, kept / "bm25.npz", mark)
        return _dense(documents, kept / "dense.npz", f"{mark} {embedder.model}", embedder)
    except OSError as error:
        raise DataError(f"the index folder {kept} cannot be used: {error.strerror or error}") from error


def _source(corpus: str | None, kept: Path | None) -> str | Path:
    if corpus is not None:
        return corpus
    if kept is None:
        return BUILT_IN
    if not (kept / DOCUMENTS).exists():
        raise DataError(f"the index folder {kept} holds no documents yet: name them with --corpus")
    return kept / DOCUMENTS


def _bm25(documents: Sequence[Document], file: Path, mark: str) -> BM25:
    if (held := _read(file, mark, ("words", "starts", "places", "weights"))) is not None:
        return BM25(documents, _spelled(held["words"]), held["starts"], held["places"], held["weights"])
    made = BM25.build(documents)
    words = np.frombuffer("\n".join(made.words).encode(), np.uint8)  # a word holds no line break
    _write(file, mark, {"words": words, "starts": made.starts, "places": made.places, "weights": made.weights})
    return made


def _dense(documents: Sequence[Document], file: Path, mark: str, embedder: Embedder) -> Dense:
    if (held := _read(file, mark, ("vectors",))) is not None:
        return Dense(documents, held["vectors"], embedder)
    made = Dense.build(documents, embedder)
    _write(file, mark, {"vectors": made.vectors})
    return made


def _spelled(words: NDArray) -> list[str]:
    return words.tobytes().decode().split("\n") if words.size else []


def _read(file: Path, mark: str, names: Sequence[str]) -> Arrays | None:
    """The arrays of an index of this very corpus; None if there is none, or a damaged one."""
    if not file.exists():
        return None
    try:
        with np.load(file, allow_pickle=False) as held:
            if held["mark"].item() != mark:
                return None
            return {name: held[name] for name in names}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, mark: str, arrays: Arrays) -> None:
    """Beside its place first: a concurrent reader finds the old file or the new one."""
    draft = file.with_suffix(".draft")
    with draft.open("wb") as out:
        np.savez(out, mark=np.array(mark), **arrays)  # ty: ignore[invalid-argument-type] - names and arrays
    draft.replace(file)
