"""Loads a model's tokenizer, and finds the tokens that end a turn."""

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.config.model import ModelConfig
from paceline.model.hub import fetch
from paceline.model.source import ModelError, read_config, resolve, tokenizer_problem, unloadable_message


def find_tokenizer(config: ModelConfig) -> str:
    """The folder or hub name of the run's tokenizer; raises a sentence for a folder that has none."""
    source = resolve(config.tokenizer or config.name)
    if Path(source).is_dir() and (problem := tokenizer_problem(Path(source))):
        raise ModelError(problem)
    return source


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with the run's chat template if it names one."""
    source = find_tokenizer(config)
    fetch(source, "tokenizer", weights=False)
    code = config.trust_remote_code  # which may be another repository's
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=code, local_files_only=not code)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ModelError(unloadable_message("tokenizer", source, error)) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if not tokenizer.encode("text", add_special_tokens=False):
        # transformers makes an empty tokenizer of a family's class where the vocabulary's file is missing.
        raise ModelError(f"the tokenizer of `{source}` has no vocabulary: set model.tokenizer to one that has")
    _check_ids(tokenizer, config, source)
    if config.chat_template:
        path = Path(config.chat_template)
        if not path.is_file():
            raise ModelError(f"model.chat_template: no such file `{path}`")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def _check_ids(tokenizer: PreTrainedTokenizerBase, config: ModelConfig, source: str) -> None:
    """Refuse a tokenizer that writes ids for which the model has no embedding. Added special tokens may lie beyond
    them: some families mark images so, which their text models never meet."""
    folder = Path(resolve(config.name))
    if not (folder / "config.json").is_file():
        return
    described = read_config(folder)
    rows = described.get("vocab_size") or (described.get("text_config") or {}).get("vocab_size")
    if not isinstance(rows, int):
        return
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = [(index, text) for text, index in tokenizer.get_vocab().items() if index >= rows and index not in special]
    if (end := tokenizer.eos_token_id) is not None and end >= rows:
        beyond.append((end, tokenizer.eos_token or ""))
    if beyond:
        index, text = max(beyond)
        raise ModelError(
            f"the tokenizer of `{source}` has ids up to {index} ({text!r}), and the model `{config.name}` has "
            f"embeddings for {rows}: set model.tokenizer to the tokenizer the model was trained with"
        )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary and the chat template, to tell whether two processes have the same tokenizer."""
    parts = [tokenizer.get_vocab(), tokenizer.chat_template]
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: Any) -> tuple[int, ...]:
    """Tokens that end a turn: the tokenizer's and those the model's generation config adds."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    extra: Iterable[int] = [configured] if isinstance(configured, int) else configured or ()
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return tuple(dict.fromkeys((*own, *extra)))
