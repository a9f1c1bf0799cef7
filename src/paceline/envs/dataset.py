"""The one door through which environments read their datasets."""

from collections.abc import Callable, Sequence

from paceline.config.env import CustomEnv, DatasetEnv, Retrieval
from paceline.data import Row, open_dataset
from paceline.envs.base import Split


def dataset_rows(
    config: DatasetEnv | CustomEnv | Retrieval,
    split: Split,
    refine: Callable[[Row], Row] | None = None,
    *,
    require: Sequence[str] = (),
    prompted: bool = True,
) -> Sequence[Row]:
    """The rows a section of the run file names for a split; none when it names none.

    `refine` is what the environment makes of a row. It raises `BadRow`, and the door adds file and line.
    """
    source = config.dataset if split == "train" else config.eval_dataset
    if source is None:
        return []
    return open_dataset(source, config.fields, require=require, prompted=prompted, refine=refine)
