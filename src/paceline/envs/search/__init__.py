"""Search over a corpus of short documents: an index, and a service around it."""

from paceline.envs.search.client import LocalSearch, SearchClient, Searcher
from paceline.envs.search.index import BM25, Dense, Document, Embedder, Hit, Index, load_corpus, open_index, tokenise
from paceline.envs.search.server import SearchOptions, load_options

__all__ = [
    "BM25",
    "Dense",
    "Document",
    "Embedder",
    "Hit",
    "Index",
    "LocalSearch",
    "SearchClient",
    "SearchOptions",
    "Searcher",
    "load_corpus",
    "load_options",
    "open_index",
    "tokenise",
]
