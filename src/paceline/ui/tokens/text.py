"""Maps token ids to text, byte for byte, by the `tokenizer.json` of the run's model. Needs no tokenizer library: a
vocabulary is a table."""

import importlib.resources
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from paceline.config.model import QUICKSTART
from paceline.record import RunFolder

LARGEST = 256 << 20
"""Bytes of a tokenizer.json that is read."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def _byte_letters() -> dict[str, int]:
    """The letters that GPT-2's vocabulary writes bytes with: printable ones stand for themselves, the rest follow."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}


_LETTERS = _byte_letters()


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The text of each token; None where its bytes are no whole characters, which `parts` then tells of."""

    texts: list[str | None]
    parts: dict[int, dict[str, str]] = field(default_factory=dict)
    """By place: the token's `bytes`, and the text they are part `of`, if it is known."""


class VocabularyIndex:
    """A vocabulary, the other way round."""

    def __init__(self, spec: dict[str, Any]) -> None:
        vocabulary = spec["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], n) for n, e in enumerate(vocabulary))
        self._tokens = {number: token for token, number in pairs}
        self._added = {token["id"]: token["content"] for token in spec.get("added_tokens") or ()}
        kinds = set(_kinds([spec.get("decoder"), spec.get("pre_tokenizer")]))
        self._bytewise = "ByteLevel" in kinds
        self._spaced = bool(kinds & {"Metaspace", "Replace"})

    def read(self, ids: Sequence[int]) -> TokenTexts:
        said = [self.bytes_of(number) for number in ids]
        texts = [None if one is None else _whole(one) for one in said]
        parts: dict[int, dict[str, str]] = {}
        for first, last in _gaps(texts):
            run = said[first:last]
            of = b"".join(one or b"" for one in run).decode(errors="replace")
            for place, one in enumerate(run, first):
                if one is not None:
                    parts[place] = {"bytes": one.hex(" ").upper(), "of": of}
        return TokenTexts(texts, parts)

    def bytes_of(self, number: int) -> bytes | None:
        """None where the vocabulary does not have it."""
        if (added := self._added.get(number)) is not None:
            return added.encode(errors="replace")
        token = self._tokens.get(number)
        if token is None:
            return None
        if self._bytewise:
            return b"".join(bytes([_LETTERS[c]]) if c in _LETTERS else c.encode(errors="replace") for c in token)
        if found := _BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return (token.replace(_SPACE, " ") if self._spaced else token).encode(errors="replace")


def lexicon_of(run: RunFolder) -> tuple[VocabularyIndex | None, str]:
    """The vocabulary of the run's model, and where it was found or why it was not."""
    looked = []
    for path in _places(run):
        looked.append(str(path))
        try:
            status = path.stat()
            if status.st_size <= LARGEST:
                return _opened(path, status.st_mtime_ns, status.st_size), str(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    where = ", ".join(looked) or "nowhere, since config.toml names no model"
    return None, f"Token ids are shown, since no tokenizer.json that can be read was found (looked at {where})."


def _places(run: RunFolder) -> Iterator[Path]:
    """Paths where the tokenizer may be: with the model, in the hub's cache, or in what the run exported."""
    model = run.config().get("model")
    name = (model.get("tokenizer") or model.get("name")) if isinstance(model, dict) else None
    if name == QUICKSTART:
        yield Path(str(importlib.resources.files("paceline") / "quickstart" / "tokenizer.json"))
    elif isinstance(name, str) and name:
        yield Path(name).expanduser() / "tokenizer.json"
        if (cached := _cached(name)) is not None:
            yield cached
    yield run.path / "export" / "tokenizer.json"


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # a second to import, and seldom needed
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


@lru_cache(maxsize=4)
def _opened(path: Path, changed: int, size: int) -> VocabularyIndex:
    return VocabularyIndex(orjson.loads(path.read_bytes()))


def _kinds(parts: Any) -> Iterator[str]:
    """The types that a tokenizer's stages have, however deep they are nested."""
    if isinstance(parts, list):
        for part in parts:
            yield from _kinds(part)
    elif isinstance(parts, dict):
        yield str(parts.get("type"))
        yield from _kinds(parts.get("decoders"))
        yield from _kinds(parts.get("pretokenizers"))


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _gaps(texts: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Stretches of None."""
    first = None
    for place, text in enumerate([*texts, ""]):
        if text is None and first is None:
            first = place
        elif text is not None and first is not None:
            yield first, place
            first = None
