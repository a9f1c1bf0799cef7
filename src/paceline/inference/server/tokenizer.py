"""Text and conversations to exact tokens, and back: everything the server asks of the tokenizer."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from paceline.inference.server.detokenise import Detokeniser
from paceline.inference.server.errors import bad
from paceline.inference.server.token_bytes import TokenBytes

LONG_TEXT = 20_000
"""Characters from which a text is tokenised on another thread, so that streams go on meanwhile."""
FEW = 16
"""As many short texts are tokenised at once; more, on another thread too."""
CONTEXT = 4
"""Prompt tokens a decoder may look back at."""
RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Not the client's to set: `chat_template` would be a program of its own, `tokenize` another kind of answer."""


class ServerTokenizer:
    """Writes prompts and reads replies. It refuses a text that cannot fit before it spends time on it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], max_context: int) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self.lexicon = TokenBytes(tokenizer)
        self._most_characters = max_context * max(map(len, tokenizer.get_vocab()), default=1)
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

        few = len(distinct) <= FEW and sum(map(len, distinct)) < LONG_TEXT
        tokens = write() if few else await asyncio.to_thread(write)
        return [tokens[text] for text in texts]

    def _check_length(self, characters: int) -> None:
        if characters > self._most_characters:
            raise bad(
                f"the prompt has at least {characters} characters, far more than a context of {self._max_context} "
                "tokens holds",
                code="context_length_exceeded",
            )

    async def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]
    ) -> tuple[int, ...]:
        """The conversation, and the opening of the reply, as the model's chat template writes them."""
        if clash := (RESERVED | self.tokenizer.special_tokens_map.keys()) & options.keys():
            raise bad(f"chat_template_kwargs cannot set `{sorted(clash)[0]}`", "chat_template_kwargs")
        characters = characters_in([messages, tools, options], self._most_characters)
        self._check_length(characters)
        if self.tokenizer.chat_template is None:
            raise bad("this model has no chat template: use /v1/completions, or serve it with --model.chat_template")
        write = partial(
            self.tokenizer.apply_chat_template, messages, tools, tokenize=False, add_generation_prompt=True, **options
        )
        try:
            text = write() if characters < LONG_TEXT else await asyncio.to_thread(write)
        # A template is a small program that is run on what the client sent: whatever it trips over is the client's.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise bad(f"the model's chat template cannot express this conversation: {error}", "messages") from error
        assert isinstance(text, str)
        return await self.encode(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without the tokens that only mark its structure."""
        if self._quick_decode is not None:
            return self._quick_decode(token_ids)
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text with every token shown."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def detokeniser(self, before: Sequence[int] = ()) -> Detokeniser:
        """For a text that follows upon these tokens."""
        return Detokeniser(self.decode, before[-CONTEXT:])


def characters_in(data: Any, most: int) -> int:
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
