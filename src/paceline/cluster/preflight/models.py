"""Checks models and tokenizers by their files: which family, which weights, which chat template."""

import importlib.util
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedTokenizerBase

from paceline.cluster.local import renderer_of
from paceline.cluster.preflight.found import Preflight
from paceline.config import RunConfig
from paceline.config.apple import on_mlx
from paceline.config.model import ModelConfig
from paceline.model.naming import ModelError, resolve, unloadable
from paceline.model.source import (
    config_problems,
    folder_problem,
    has_code,
    read_config,
    tokenizer_problem,
    weight_problems,
)
from paceline.model.tokenizer import load_tokenizer


def check_policy(config: RunConfig, found: Preflight) -> None:
    """The model that is trained, its tokenizer, and how conversations become tokens."""
    model = config.model
    check_model(model, found, mlx=on_mlx(config.backend))
    source = found.attempt(lambda: resolve(model.tokenizer or model.name))
    folder = None if source is None else _folder(source)
    if folder is None or (not Path(source).is_dir() and tokenizer_problem(folder)):
        return  # it will be fetched from the hub
    if model.trust_remote_code and found.attempt(lambda: has_code(folder)):
        return
    local = model.model_copy(update={"tokenizer": str(folder)})
    if (tokenizer := found.attempt(lambda: load_tokenizer(local))) is not None:
        found.attempt(lambda: _check_renderer(tokenizer, model))


def _check_renderer(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Raise a sentence unless the tokenizer can write conversations: by a chat template, or known to `renderers`."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    renderer_of(tokenizer, ends, model)


def check_model(model: ModelConfig, found: Preflight, *, mlx: bool) -> None:
    """A model's files and its family."""
    if (source := found.attempt(lambda: resolve(model.name))) is None:
        return
    if (folder := _folder(source)) is None:
        found.note(
            f"model `{model.name}` is neither a folder here nor in the hub's local cache: its files are checked when "
            "the run downloads them"
        )
        return
    if problem := folder_problem(folder):
        found.add([problem])
        return
    known = False
    if (config := found.attempt(lambda: read_config(folder))) is not None:
        problems = list(config_problems(config, model.name, trust_remote_code=model.trust_remote_code, mlx=mlx))
        found.add(problems)
        if model.trust_remote_code and found.attempt(lambda: has_code(folder)):
            found.note(
                f"model `{model.name}` has Python code of its own, which is not run here: `train` checks the rest"
            )
        elif not problems and not mlx:
            known = _check_family(folder, model, found)
    if Path(source).is_dir():  # of a hub's model, what is not in the cache will be fetched
        damaged = list(weight_problems(folder, mlx))
        found.add(damaged)
        if known and not damaged:
            from paceline.model.soundness import header_problems

            found.add(header_problems(folder, model.name))


def _check_family(folder: Path, model: ModelConfig, found: Preflight) -> bool:
    """Whether transformers knows the family and Paceline trains it; if not, the reason is among the findings."""
    if importlib.util.find_spec("torch") is None:
        found.note(f"torch is not installed here: the layers of `{model.name}` are checked when the run loads it")
        return False
    from paceline.model.support import check_family, refusals_name

    def check() -> bool:
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(unloadable("model", model.name, error)) from error
        with refusals_name(model.name):
            check_family(config)
        return True

    return bool(found.attempt(check))


def _folder(source: str) -> Path | None:
    """Where a model's files are on this machine: its folder, or the hub's cache; None where they are in neither."""
    if Path(source).is_dir():
        return Path(source)
    try:
        cached = try_to_load_from_cache(source, "config.json")
    except ValueError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None
