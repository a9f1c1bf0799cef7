"""Downloads models of the hub before they are read, again and again where the hub is busy."""

from pathlib import Path

from paceline.model.source import VOCABULARIES, ModelError, unloadable_message
from paceline.util.hub_retry import passing_trouble, retry_hub

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.py", *VOCABULARIES)
WEIGHT_FILES = ("model*.safetensors",)


class HubBusy(ModelError):
    """The hub could not be reached, or was busy, to the last try."""


def fetch(source: str, what: str = "model", *, weights: bool = True) -> Path:
    """The folder of a model's files; what the cache lacks of one of the hub is downloaded."""
    if (folder := Path(source)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    patterns = [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(retry_hub(f"{what} `{source}`", lambda: snapshot_download(source, allow_patterns=patterns)))
    except (OSError, ValueError, RuntimeError) as error:  # every kind of the hub's and of its HTTP client's
        kind = HubBusy if passing_trouble(error) else ModelError
        raise kind(unloadable_message(what, source, error)) from error
