"""Opens the datasets that an environment's section of the run file names."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from paceline.config.env import CustomEnvConfig, DatasetEnvConfig, RetrievalConfig
from paceline.data import Row, open_dataset
from paceline.envs.base import Split

_LIMIT: ContextVar[int | None] = ContextVar("rows of each dataset", default=None)


@contextmanager
def first_rows(count: int) -> Generator[None]:
    """Inside, environments open only the first rows of their datasets: enough to see that their fields are right."""
    token = _LIMIT.set(count)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def dataset_rows(
    config: DatasetEnvConfig | CustomEnvConfig | RetrievalConfig,
    split: Split,
    refine: Callable[[Row], Row] | None = None,
    *,
    require: Sequence[str] = (),
    prompted: bool = True,
) -> Sequence[Row]:
    """The rows a section of the run file names for a split; none when it names none.

    `refine` turns a row into the environment's form. It raises `BadRow`, and the reader adds file and line.
    """
    source = config.dataset if split == "train" else config.eval_dataset
    if source is None:
        return []
    return open_dataset(source, config.fields, limit=_LIMIT.get(), require=require, prompted=prompted, refine=refine)
