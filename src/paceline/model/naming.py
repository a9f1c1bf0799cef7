"""Resolves a model's name to a folder, a hub name, or the model in the package."""

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
    if path.suffix == ".gguf" and not path.is_dir():
        raise ModelError(gguf_problem(path))
    if path.is_file():
        raise ModelError(f"model `{name}` is a file: give the Hugging Face folder it belongs to ({path.parent})")
    if looks_local and not path.is_dir():
        raise ModelError(f"model `{name}`: no such folder; give a Hugging Face folder, a hub name or `{QUICKSTART}`")
    return str(path) if path.is_dir() else name


def base_name(name: str) -> str:
    """The model an adapter belongs to, as any library finds it: an absolute folder, or the hub name."""
    source = resolve(name)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def gguf_problem(file: Path) -> str:
    """How to make a folder that can be trained from llama.cpp's format."""
    if not file.is_file():
        return f"model `{file}`: no such file, and GGUF files must be converted before training (docs/models.md)"
    return (
        f"model `{file}` is a GGUF file, made for llama.cpp, and Paceline needs a Hugging Face folder: use the model "
        "it was made from, or convert it once (pip install gguf): AutoModelForCausalLM.from_pretrained("
        f"'{file.parent}', gguf_file='{file.name}', dtype='float32', quantization_config=GgufConfig(dequantize=True)), "
        "then save_pretrained(FOLDER); docs/models.md has all the lines"
    )


def first_line(error: Exception) -> str:
    """The first line of an error's message, or else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def unloadable(what: str, name: str, error: Exception) -> str:
    """The sentence for what transformers could not load."""
    local = name.startswith("paceline:") or Path(name).expanduser().is_dir()
    where = "" if local else " (there is no such folder, so it was looked up on the hub)"
    return f"{what} `{name}` cannot be loaded{where}: {first_line(error)}"
