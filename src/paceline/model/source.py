"""Checks a model folder by its file names and JSON files, before any weights are read.

transformers finds most of these problems late and words them for the developer of a model class. Here each is one
sentence that names the folder, what is wrong in it, and what to use instead.

Resolves a model's name to a folder, a hub name, or the model in the package.
"""

import contextlib
import importlib.resources
import importlib.util
import itertools
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config.model import QUICKSTART
from paceline.errors import PacelineError, first_line
from paceline.weights.manifest import MANIFEST, find_problems, join_first


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


def unloadable_message(what: str, name: str, error: Exception) -> str:
    """The sentence for what transformers could not load."""
    local = name.startswith("paceline:") or Path(name).expanduser().is_dir()
    where = "" if local else " (there is no such folder, so it was looked up on the hub)"
    return f"{what} `{name}` cannot be loaded{where}: {first_line(error)}"


WEIGHTS = "model.safetensors"
"""The file of the weights. It may be cut into parts, which `FILE.index.json` then names."""
PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth")
"""Weights in files that can run code when they are read."""
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.spm", "*.bpe")
"""Files that hold a tokenizer's vocabulary, by the names that families give them."""
TRAINABLE_QUANTISED = ("bitnet",)
"""Quantised in the forward pass only: the checkpoint holds plain weights."""
TEXT_MODELS = "use a text model, such as Qwen2.5, Qwen3, Llama 3 or SmolLM2"
LISTED = 4
"""File names in a sentence."""
ROPE_OF_WHOLE_BATCH = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest sequence in the batch."""


def check_source(folder: Path, trust_remote_code: bool, mlx: bool = False) -> None:
    """Raise the first reason why the model in a local folder cannot be loaded, or is damaged."""
    if problem := folder_problem(folder):
        raise ModelError(problem)
    config = config_problems(read_config(folder), str(folder), trust_remote_code=trust_remote_code, mlx=mlx)
    for problem in itertools.chain(config, weight_problems(folder, mlx)):
        raise ModelError(problem)
    if found := find_problems(folder):  # an export of Paceline's has the digests of its files
        raise ModelError(
            f"model `{folder}` is damaged: {join_first(found)}; export it again, or remove {folder / MANIFEST} if you "
            "changed the files yourself"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; a truncated or damaged one is an error with its place."""
    return _json(folder / "config.json")


def config_problems(config: Mapping[str, Any], name: str, *, trust_remote_code: bool, mlx: bool) -> Iterator[str]:
    """Reasons against training the model that config.json alone shows."""
    for problem in (None if mlx else _quantisation_problem(config), _kind_problem(config, trust_remote_code)):
        if problem:
            yield f"model `{name}`: {problem}"


def tokenizer_problem(folder: Path) -> str | None:
    """What to do about a folder without a tokenizer's vocabulary."""
    if any(_matching_files(folder, *VOCABULARIES)) or _names_code(folder / "tokenizer_config.json"):
        return None  # code may keep its vocabulary anywhere
    files = "tokenizer.json, tokenizer.model or vocab.json"
    return (
        f"there is no tokenizer in {folder} (no {files}): set model.tokenizer to the folder or hub name of the model "
        "it was trained from, or copy that model's tokenizer files there"
    )


def folder_problem(folder: Path) -> str | None:
    """Folders that hold something else than a model."""
    if (folder / "config.json").is_file():
        return None
    if (folder / "adapter_config.json").is_file():
        base = None
        with contextlib.suppress(ModelError):  # what matters is that there is no model
            base = _json(folder / "adapter_config.json").get("base_model_name_or_path")
        named = f"`{base}`" if base else "its base"
        return (
            f"model `{folder}`: it holds a LoRA adapter and no model: set model.name to {named} to train a new one; to "
            f"go on from this one, merge it first: PeftModel.from_pretrained(BASE, '{folder}').merge_and_unload()"
            ".save_pretrained(FOLDER)"
        )
    if files := list(_matching_files(folder, "*.gguf")):
        return gguf_problem(files[0])
    exported = folder / "export"
    if (exported / "config.json").is_file():
        return f"model `{folder}`: this is a run directory; the model it trained is in {exported}"
    return f"model `{folder}`: there is no config.json in it, so it is no Hugging Face model folder{_holds(folder)}"


def _quantisation_problem(config: Mapping[str, Any]) -> str | None:
    """Packed weights have no gradient."""
    original = "use the checkpoint it was made from, in float32, bfloat16 or float16"
    settings = config.get("quantization_config")
    if isinstance(config.get("quantization"), Mapping):
        return f'its weights are quantised for mlx: set backend = "mlx" on a Mac, or {original}'
    if not isinstance(settings, Mapping) or settings.get("quant_method") in TRAINABLE_QUANTISED:
        return None
    method = settings.get("quant_method") or "an unnamed method"
    return f"its weights are quantised ({method}), and quantised weights cannot be trained: {original}"


def _kind_problem(config: Mapping[str, Any], trust_remote_code: bool) -> str | None:
    """Model types that are no causal language models, by what they are instead."""
    kind, own_code, encodes = config.get("model_type"), "auto_map" in config, config.get("is_encoder_decoder")
    if not isinstance(kind, str):
        return "its config.json has no `model_type`, so it is no Hugging Face language model"
    if importlib.util.find_spec("torch") is None:  # without it transformers cannot say which model types are what
        return None
    from transformers import __version__
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    named = config.get("architectures")
    called = f"{named[0]} (model type `{kind}`)" if isinstance(named, list) and named else f"a model of type `{kind}`"
    if own_code and trust_remote_code:
        return None
    if kind not in CONFIG_MAPPING_NAMES:
        if own_code:
            return (
                f"{called} comes with Python code of its own: set model.trust_remote_code = true if you trust where it "
                "comes from"
            )
        return (
            f"transformers {__version__} does not know the model type `{kind}`: a newer one may "
            "(pip install -U transformers)"
        )
    causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not causal and (kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or "vision_config" in config):
        return f"{called} reads images beside text, and Paceline trains text-only causal language models: {TEXT_MODELS}"
    if not causal and (encodes or kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES):
        return f"{called} is an encoder-decoder; Paceline trains decoder-only models: {TEXT_MODELS}"
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder") and not encodes:
        return f"{called} is an encoder: it fills in masked words and writes no text: {TEXT_MODELS}"
    return None if causal else f"{called} is no causal language model: {TEXT_MODELS}"


def weight_problems(folder: Path, mlx: bool) -> Iterator[str]:
    parts, index = sorted(_matching_files(folder, "model*.safetensors")), folder / f"{WEIGHTS}.index.json"
    if not (folder / WEIGHTS).is_file():
        if index.is_file():
            try:
                named = sorted({str(file) for file in _json(index).get("weight_map", {}).values()})
            except (ModelError, AttributeError) as error:
                yield str(error) if isinstance(error, ModelError) else f"{index} holds no table `weight_map`"
                return
            if missing := [file for file in named if not (folder / file).is_file()]:
                verb = "is" if len(missing) == 1 else "are"
                yield f"{index} names {join_first(missing, LISTED)}, which {verb} not there: download the model again"
            parts = sorted({*parts, *(folder / file for file in named if file not in missing)})
        elif not parts or not mlx:  # mlx-lm reads every part it finds, without an index
            yield _none_found(folder, parts)
            return
    for file in parts:
        if problem := _damage(file):
            yield problem


def _none_found(folder: Path, parts: list[Path]) -> str:
    if parts:
        return (
            f"{folder}/model.safetensors.index.json, which says what is in {parts[0].name} and the others, is missing"
        )
    if files := list(_matching_files(folder, "*.gguf")):
        return gguf_problem(files[0])
    if files := list(_matching_files(folder, *PICKLES)):
        return (
            f"model `{folder}`: its weights are in {files[0].name}, a pickle, which can run code when it is read: if "
            f"you trust where it comes from, convert it once: AutoModelForCausalLM.from_pretrained('{folder}')"
            f".save_pretrained(FOLDER), then set model.name to FOLDER and model.tokenizer to `{folder}`"
        )
    return f"model `{folder}`: there are no weights in it: model.safetensors is missing{_holds(folder)}"


def _damage(file: Path) -> str | None:
    """A safetensors file says in its first bytes how long it is."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start.startswith(b"version "):
            return f"{file} is a pointer of Git LFS, not the weights themselves: run `git lfs pull` in that folder"
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            header = json.loads(opened.read(length)) if 0 < length <= size - 8 else None
        except ValueError:
            header = None
    try:
        tables = [entry for name, entry in (header or {}).items() if name != "__metadata__"]
        whole = 8 + length + max((int(entry["data_offsets"][1]) for entry in tables), default=0)
    except (AttributeError, LookupError, TypeError, ValueError):
        header = None
    if header is None:
        return f"{file} is no safetensors file, or only the beginning of one: download it again"
    return f"{file} is cut off: {size} of {whole} bytes are there; download it again" if size < whole else None


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{file} is cut off or damaged: not valid JSON at line {error.lineno} ({error.msg}); download it again"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ModelError(f"{file} must hold an object, not {type(read).__name__}")
    return read


def has_code(folder: Path) -> bool:
    """Whether the model or its tokenizer comes with Python code of its own, which loading it would run."""
    return any(_names_code(folder / name) for name in ("config.json", "tokenizer_config.json"))


def _names_code(file: Path) -> bool:
    return file.is_file() and "auto_map" in _json(file)


def _matching_files(folder: Path, *patterns: str) -> Iterator[Path]:
    return (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())


def _holds(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f" (it holds {join_first(names, LISTED)})" if names else " (it is empty)"
