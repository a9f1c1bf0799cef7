"""Spells single tokens: the text and bytes that OpenAI's logprobs show for each."""

import json
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

Spelling = tuple[str, list[int]]
"""A token's text and its UTF-8 bytes; the bytes tell apart what looks the same broken letter in text."""


class TokenBytes:
    """The spelling of every token, worked out once per token that is ever shown."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Spelling] = {}
        self._added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        self._raw_bytes = _reader_of(tokenizer)

    def spell(self, token: int) -> Spelling:
        spelling = self._known.get(token)
        if spelling is None:
            spelling = self._known[token] = self._spell(token)
        return spelling

    def _spell(self, token: int) -> Spelling:
        piece = self._added.get(token)
        if piece is None:
            written: Any = self._tokenizer.convert_ids_to_tokens(token)
            data = self._raw_bytes(written or "")
        else:
            data = piece.encode()
        return data.decode("utf-8", "replace"), list(data)


def _reader_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """How the vocabulary writes bytes: one letter per byte (GPT-2 and after), or `<0xE2>` and `▁` (SentencePiece)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    kinds = {part.get("type") for part in [state, *state.get("decoders", [])]} if state else set()
    if "ByteLevel" in kinds:
        return _byte_letters
    return _sentence_piece if kinds & {"ByteFallback", "Metaspace", "Replace"} else str.encode


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others follow from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _alphabet()


def _byte_letters(piece: str) -> bytes:
    if all(letter in _LETTERS for letter in piece):
        return bytes(_LETTERS[letter] for letter in piece)
    return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
