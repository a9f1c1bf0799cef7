"""What a model is called, and where that leads: a folder, a hub name, or the package itself."""

import importlib.resources
from pathlib import Path

from paceline.config.model import QUICKSTART
from paceline.errors import PacelineError


class ModelError(PacelineError):
    """A model or tokenizer that cannot be used, as a sentence for the user."""


def resolve(name: str) -> str:
    """The folder or hub name behind a model name."""
    if name == QUICKSTART:
        return str(importlib.resources.files("paceline") / "quickstart")
    if name.startswith("paceline:"):
        raise ModelError(f"model `{name}`: the only model in the package is `{QUICKSTART}`")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not path.is_dir():
        raise ModelError(f"model `{name}`: no such folder; give a Hugging Face folder, a hub name or `{QUICKSTART}`")
    return str(path) if path.is_dir() else name


def base_name(name: str) -> str:
    """The model an adapter belongs to, as any library finds it: an absolute folder, or the hub name."""
    source = resolve(name)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def first_line(error: Exception) -> str:
    """What went wrong, in short."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
