"""Environments whose rows come from a dataset."""

from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.config.base import PathKey
from paceline.config.env.base import EnvBase


def _mixable(source: str | list[str] | dict[str, float]) -> str | list[str] | dict[str, float]:
    if not source:
        raise ValueError("name at least one dataset")
    if isinstance(source, list) and (twice := sorted({name for name in source if source.count(name) > 1})):
        raise ValueError(f'`{twice[0]}` is named twice: to draw it more often write {{"{twice[0]}" = 2.0, ...}}')
    for name, weight in source.items() if isinstance(source, dict) else ():
        if weight <= 0:
            raise ValueError(f"the weight of `{name}` is {weight:g}: it must be above 0")
    return source


Source = Annotated[str | list[str] | dict[str, float], AfterValidator(_mixable), PathKey("dataset")]
"""A dataset by file or URI; a list of several, in equal shares; or several with weights."""


class DatasetEnv(EnvBase):
    """An environment whose rows come from a dataset."""

    dataset: Source
    """Training rows: a .jsonl, .json, .csv, .parquet or .arrow file, `split@owner/name` of the hub, or a URI such as
    `reasoning-gym:gcd?size=100`. A list mixes several in equal shares, `{"a.jsonl" = 3.0, "b.csv" = 1.0}` by weight."""
    eval_dataset: Source | None = None
    """Held-out rows; no evaluation when left out."""
    fields: dict[str, str] = Field(default_factory=dict)
    """What the rows call things, `{gt_answer = "answer"}`; `a.b` reaches into an object."""
