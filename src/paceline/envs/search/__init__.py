"""Search over a corpus of short documents: an index, and a service around it."""

from paceline.envs.search.client import LocalSearch, SearchClient, Searcher
from paceline.envs.search.corpus import Document, load_corpus
from paceline.envs.search.dense import Dense, Embedder
from paceline.envs.search.index import BM25, Hit, Index, tokenise
from paceline.envs.search.server import SearchOptions, load_options
from paceline.envs.search.store import open_index

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
