"""Searches a corpus by BM25: ranks documents by the words of a query they hold, rare ones above all.

    score(q, d) = sum over words w of q:  idf(w) * tf (k1 + 1) / (tf + k1 (1 - b + b |d| / mean |d|))
    idf(w) = ln(1 + (N - n + 1/2) / (n + 1/2)),  n of N documents hold w,  tf is how often d does

Robertson and Zaragoza, "The Probabilistic Relevance Framework" (2009), with Lucene's idf, which is never negative. All
that does not depend on the query is computed once, so a search is a sum over the postings of its words.
"""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.envs.search.corpus import Document

K1, B = 1.2, 0.75
"""The usual choice: how soon repetition stops to count, and how much length is held against a document."""
DEFAULT_TOP_K = 5

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found, and how well it fits."""

    document: Document
    score: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.document) | {"score": self.score}


class Index(Protocol):
    """Finds documents. Safe to be asked by several threads at once."""

    @property
    def documents(self) -> Sequence[Document]: ...

    def search(self, query: str, top_k: int = DEFAULT_TOP_K) -> list[Hit]:
        """The best documents, best first; none that does not fit at all."""
        ...


def tokenise(text: str) -> list[str]:
    """Words are runs of letters and digits, compared without case; there is no stemming and there are no stop words.

    >>> tokenise("The Müller-Bridge, built in 1204")
    ['the', 'müller', 'bridge', 'built', 'in', '1204']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class BM25:
    """The postings of every word, weighted: the documents that hold it and what it adds to their scores.

    Word `w` owns `places[starts[w] : starts[w + 1]]`, ascending positions in `documents`, and the weights beside them.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        words: Sequence[str],
        starts: NDArray[np.int64],
        places: NDArray[np.int64],
        weights: NDArray[np.float32],
    ) -> None:
        self.documents = documents
        self.words, self.starts, self.places, self.weights = words, starts, places, weights
        self._number = {word: number for number, word in enumerate(words)}

    @classmethod
    def build(cls, documents: Sequence[Document]) -> "BM25":
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
        word_of = np.frombuffer(held, np.int64) if held else np.empty(0, np.int64)
        order = np.argsort(word_of, kind="stable")
        word_of = word_of[order]
        place_of = np.asarray(places, np.int64)[order]
        starts = np.searchsorted(word_of, np.arange(len(numbers) + 1))
        weights = _weights(np.asarray(counts, np.float64)[order], lengths, place_of, np.diff(starts)[word_of])
        return cls(documents, list(numbers), starts.astype(np.int64), place_of, weights)

    def search(self, query: str, top_k: int = DEFAULT_TOP_K) -> list[Hit]:
        scores = np.zeros(len(self.documents), np.float32)
        for number, times in self._asked(tokenise(query)):
            span = slice(self.starts[number], self.starts[number + 1])
            scores[self.places[span]] += times * self.weights[span]  # a document stands only once among these
        return best(self.documents, scores, top_k, above=0.0)

    def _asked(self, words: Iterable[str]) -> list[tuple[int, int]]:
        """Known words by number, in one order whatever theirs was: the same sums for the same words, to the bit."""
        return sorted(Counter(self._number[word] for word in words if word in self._number).items())


def best(documents: Sequence[Document], scores: NDArray, top_k: int, above: float = -np.inf) -> list[Hit]:
    """The highest scores, best first; of equals the one that comes first in the corpus."""
    candidates = np.flatnonzero(scores > above)
    if len(candidates) > top_k:
        # Everything that ties with the last place stays in, so that the corpus' order decides and not the partition's.
        least = -np.partition(-scores[candidates], top_k - 1)[top_k - 1]
        candidates = candidates[scores[candidates] >= least]
    ranked = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return [Hit(documents[place], float(scores[place])) for place in ranked]


def _weights(counts: NDArray, lengths: NDArray, places: NDArray, documents_with: NDArray) -> NDArray[np.float32]:
    """The score that each posting adds to its document."""
    idf = np.log1p((len(lengths) - documents_with + 0.5) / (documents_with + 0.5))
    usual = lengths.mean() if lengths.any() else 1.0
    damping = K1 * (1 - B + B * lengths[places] / usual)
    return (idf * counts * (K1 + 1) / (counts + damping)).astype(np.float32)
