"""Questions whose answers must be looked up."""

from typing import Literal

from pydantic import Field

from paceline.config.base import FilePath
from paceline.config.env.base import EnvBase
from paceline.config.env.dataset import Source

SEARCH_KEY_VARIABLE = "PACELINE_SEARCH_API_KEY"
"""Not the model server's: whoever is searched must not learn that one."""


class Retrieval(EnvBase):
    """Look up, then answer. The model writes `<search>query</search>` and reads what was found in the next message;
    `<answer>...</answer>` ends the episode."""

    type: Literal["retrieval"] = "retrieval"
    url: str | None = None
    """A search service (`paceline search-server`); an index in this process is searched when left out."""
    api_key_variable: str = SEARCH_KEY_VARIABLE
    """Environment variable that holds the service's API key, if it wants one. The key itself has no place in a run
    file, which is kept with the run."""
    corpus: FilePath | None = None
    """Documents to search in this process: a .jsonl file of `id`, `text` and perhaps `title`. The small corpus of the
    package when left out."""
    dataset: Source | None = None
    """Training questions, by file or URI: rows of `question` (or `messages`) and `answer`, a string or a list of
    accepted ones. Several mix as a list, or by weight as a table. Those about the package's corpus when left out."""
    eval_dataset: Source | None = None
    """Held-out questions; with a `dataset` of your own and without this there is no evaluation."""
    fields: dict[str, str] = Field(default_factory=dict)
    """What the rows call things, `{gt_answer = "answer"}`; `a.b` reaches into an object."""
    max_turns: int = Field(default=4, ge=1)
    """Replies the model has in all. A search in the last one is not run."""
    top_k: int | None = Field(default=None, ge=1, le=100)
    """Documents shown for a query; 5, or what the service says, when left out."""
    score: Literal["exact", "f1"] = "exact"
    """What pays: the right answer but for case, punctuation and articles, or the share of words in common with it."""
    results_role: Literal["user", "tool"] = "user"
    """Whose message brings the results."""
    max_result_chars: int = Field(default=600, ge=1)
    """Longer documents are shown up to here."""
    search_timeout: float = Field(default=30.0, gt=0)
    """Seconds a search service may take for one query."""
