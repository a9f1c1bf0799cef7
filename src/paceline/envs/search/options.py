"""`paceline search-server`: what is searched, and where it listens."""

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.env.retrieval import SEARCH_KEY_VARIABLE
from paceline.config.errors import from_flags
from paceline.config.secret import in_address
from paceline.config.serve import is_loopback
from paceline.envs.search.index import DEFAULT_TOP_K

MOST_RESULTS = 100


class SearchOptions(Section):
    """A search service over one corpus."""

    corpus: str | None = None
    """Documents, one JSON object with `id`, `text` and perhaps `title` per line; those of the package when left out."""
    index: str | None = None
    """Folder to keep the index in. What is in it is used if it was made from the same documents."""
    top_k: int = Field(default=DEFAULT_TOP_K, ge=1, le=MOST_RESULTS)
    """Results for a query that does not say how many it wants."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs an API key."""
    port: int = Field(default=8100, ge=0, le=65535)
    """0 picks a free port."""
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    """Clients must send it as `Authorization: Bearer KEY`."""
    embeddings_url: str | None = None
    """Base URL of an OpenAI-compatible endpoint: search by meaning instead of BM25."""
    embeddings_model: str | None = None
    """Its model."""
    embeddings_api_key: str | None = Field(default=None, repr=False)
    """What it wants to be sent as `Authorization: Bearer KEY`."""

    @model_validator(mode="after")
    def _guarded(self) -> "SearchOptions":
        if not self.api_key and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or "
                f"{SEARCH_KEY_VARIABLE}), or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _both_or_none(self) -> "SearchOptions":
        if (self.embeddings_url is None) != (self.embeddings_model is None):
            raise ValueError("search by meaning needs both --embeddings-endpoint and --embeddings-model")
        if told := in_address(self.embeddings_url or ""):
            raise ValueError(
                f"--embeddings-endpoint has {told}, where others may read it: give --embeddings-api-key instead"
            )
        return self


def load_options(**flags: object) -> SearchOptions:
    """The options from the command line's flags; those that are None have their defaults."""
    return from_flags(SearchOptions, flags)
