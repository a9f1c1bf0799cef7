"""Datasets of the Hugging Face hub: `split@owner/name`, or `split@owner/name:config`."""

import importlib
from pathlib import Path
from typing import Any

from paceline.data.fields import Shape
from paceline.data.formats import Listed
from paceline.data.rows import DataError


def hub_name(uri: str) -> str | None:
    """The dataset a URI names on the hub (or the folder it names instead); None for files and schemes."""
    if "@" not in uri.partition("?")[0] or Path(uri).exists():
        return None
    return uri.partition("@")[2].partition(":")[0]


def open_hub(uri: str, shape: Shape, limit: int | None) -> Listed:
    """The rows of one split. `datasets` keeps them on disk and maps them; a folder works like a hub name."""
    split, _, place = uri.partition("@")
    name, _, config = place.partition(":")
    if not split or not name:
        raise DataError(f"dataset {uri}: write `split@owner/name`, train@openai/gsm8k say")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f'dataset {uri}: datasets of the hub need the datasets package: pip install "paceline[data]"'
        ) from error
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    # All it raises of its own: a missing name, split or config, no network, files it cannot parse.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            f"dataset {uri}: cannot be loaded: {reason}; without a network, name a local file instead"
        ) from error
    places = (f"dataset {uri}, row {number}" for number in range(1, len(rows) + 1))
    return Listed(rows, places, shape, limit)
