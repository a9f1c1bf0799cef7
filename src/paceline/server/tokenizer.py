"""Tokenizes prompts, renders chat templates, and detokenizes output incrementally."""

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paceline.server.errors import bad_request

TokenText = tuple[str, list[int]]
"""A token's text and its UTF-8 bytes; the bytes tell apart what looks the same broken letter in text."""


class TokenBytes:
    """The spelling of every token, worked out once per token that is ever shown."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added_tokens = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        self._raw_bytes = _byte_decoder(tokenizer)
        self.decode_token = cache(self._decode_token)

    def _decode_token(self, token: int) -> TokenText:
        added = self._added_tokens.get(token)
        written: Any = self._tokenizer.convert_ids_to_tokens(token) if added is None else None
        data = self._raw_bytes(written or "") if added is None else added.encode()
        return data.decode("utf-8", "replace"), list(data)


def _byte_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """How the vocabulary writes bytes: one letter per byte (GPT-2 and after), or `<0xE2>` and `▁` (SentencePiece)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    kinds = {part.get("type") for part in [state, *state.get("decoders", [])]} if state else set()
    if "ByteLevel" in kinds:
        return _decode_byte_level
    return _decode_sentencepiece if kinds & {"ByteFallback", "Metaspace", "Replace"} else str.encode


_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""GPT-2's letters for the 256 bytes."""


def _decode_byte_level(piece: str) -> bytes:
    if all(letter in _BYTE_OF_LETTER for letter in piece):
        return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
    return piece.encode()


def _decode_sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


REPLACEMENT = "�"
"""Stands for bytes that are no letter, or not one yet."""
MOST_REPLACEMENTS = 64
"""So many broken letters in a row will not mend: some decoders show a whole run of bytes as broken until its last
letter is complete, but text is not held back for ever."""


class Detokenizer:
    """Turns a growing list of tokens into text that only ever grows: a token may be half a letter.

    A window of tokens is decoded together, since many decoders treat the first token of a text specially. It starts at
    a place where the text was whole. Broken letters at the end are held back, for the next token may complete them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        """`before` are the tokens the text follows upon: they are not said, but may change how it begins."""
        self._decode = decode
        self._window = list(before)
        self._context = len(self._window)
        """Tokens at the window's start whose text is known to be whole; they are there as neighbours only."""
        self._num_sent = len(decode(self._window).rstrip(REPLACEMENT)) if before else 0
        """Letters of the window's text that were passed on."""

    def copy(self) -> "Detokenizer":
        twin = copy.copy(self)
        twin._window = list(self._window)
        return twin

    def feed(self, token_ids: Sequence[int]) -> str:
        """The letters these tokens complete."""
        self._window += token_ids
        text = self._decode(self._window)
        sound = len(text.rstrip(REPLACEMENT))
        whole = sound == len(text) or len(text) - sound > MOST_REPLACEMENTS
        end = len(text) if whole else sound
        new = text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        if whole and new:  # keep only the latest tokens, as neighbours of what comes
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._num_sent = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """The rest: a letter that was never completed."""
        return self._decode(self._window)[self._num_sent :]


LONG_TEXT = 20_000
"""Characters from which a text is tokenised on another thread, so that streams go on meanwhile."""
INLINE_TEXTS = 16
"""As many short texts are tokenised at once; more, on another thread too."""
CONTEXT_TOKENS = 4
"""Prompt tokens a decoder may look back at."""
RESERVED_KWARGS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Not the client's to set: `chat_template` would be a program of its own, `tokenize` another kind of answer."""


class ServerTokenizer:
    """Writes prompts and reads replies. It refuses a text that cannot fit before it spends time on it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], max_context: int) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self.token_bytes = TokenBytes(tokenizer)
        self._max_characters = max_context * max(map(len, tokenizer.get_vocab()), default=1)
        self._max_context = max_context
        # Streams decode a few tokens at a time, and transformers' wrapper costs several times the decoding itself.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        tidies = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._quick_decode: Callable[[Sequence[int]], str] | None = backend.decode if backend and not tidies else None

    async def encode(self, text: str, special: bool) -> tuple[int, ...]:
        """The text's tokens; `special` adds what the tokenizer puts around a bare text."""
        return (await self.encode_all([text], special))[0]

    async def encode_all(self, texts: Sequence[str], special: bool) -> list[tuple[int, ...]]:
        """The tokens of each text; equal ones are written once."""
        distinct = list(dict.fromkeys(texts))
        for text in distinct:
            self._check_length(len(text))

        def write() -> dict[str, tuple[int, ...]]:
            return {text: tuple(self.tokenizer.encode(text, add_special_tokens=special)) for text in distinct}

        few = len(distinct) <= INLINE_TEXTS and sum(map(len, distinct)) < LONG_TEXT
        tokens = write() if few else await asyncio.to_thread(write)
        return [tokens[text] for text in texts]

    def _check_length(self, characters: int) -> None:
        if characters > self._max_characters:
            raise bad_request(
                f"the prompt has at least {characters} characters, far more than a context of {self._max_context} "
                "tokens holds",
                code="context_length_exceeded",
            )

    async def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]
    ) -> tuple[int, ...]:
        """The conversation, and the opening of the reply, as the model's chat template writes them."""
        if clash := (RESERVED_KWARGS | self.tokenizer.special_tokens_map.keys()) & options.keys():
            raise bad_request(f"chat_template_kwargs cannot set `{sorted(clash)[0]}`", "chat_template_kwargs")
        characters = count_characters([messages, tools, options], self._max_characters)
        self._check_length(characters)
        if self.tokenizer.chat_template is None:
            raise bad_request(
                "this model has no chat template: use /v1/completions, or serve it with --model.chat_template"
            )
        write = partial(
            self.tokenizer.apply_chat_template, messages, tools, tokenize=False, add_generation_prompt=True, **options
        )
        try:
            text = write() if characters < LONG_TEXT else await asyncio.to_thread(write)
        # A template is a small program that is run on what the client sent: whatever it trips over is the client's.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise bad_request(
                f"the model's chat template cannot express this conversation: {error}", "messages"
            ) from error
        assert isinstance(text, str)
        return await self.encode(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without the tokens that only mark its structure."""
        if self._quick_decode is not None:
            return self._quick_decode(token_ids)
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """For a text that follows upon these tokens."""
        return Detokenizer(self.decode, before[-CONTEXT_TOKENS:])


def count_characters(data: Any, most: int) -> int:
    """Characters of all texts in JSON data; whatever else there is counts as one. Not counted on beyond `most`."""
    total, rest = 0, [data]
    while rest and total <= most:
        item = rest.pop()
        total += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            rest += [*item, *item.values()]
        elif isinstance(item, list):
            rest += item
    return total
