"""Constrains output: a compiled grammar says which tokens may come next.

xgrammar, an optional extra, does the work: it also reads what outlines_core cannot (any JSON), compiles a regular
expression for 151k tokens in 0.04 s instead of 1.7 s, and takes 10 to 50 microseconds for a mask.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from paceline.engine.base import Grammar
from paceline.engine.schemas import is_quick_pattern, is_quick_schema, prepare_schema, rewrite_pattern
from paceline.errors import Overloaded, RequestError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

MOST_COMPILED = 128
MOST_SOURCE = 1 << 16
THREADS = 4
WORKER_FILE = Path(__file__).with_name("grammar_worker.py")
MOST_WORKERS = 2
MOST_IDLE = 1
"""A worker's libraries take hundreds of megabytes."""
MOST_GROWTH = 64 << 20
"""Bytes by which an idle worker may have grown."""
COMPILE_SECONDS = 30
"""For a grammar that is not sure to be quick, the start of its process included."""
COMPILE_BYTES = 4 << 30
QUICK_SECONDS = 0.5
MOST_COMPILED_BYTES = 32 << 20
"""Bytes of JSON in which a worker hands over a grammar that was slow to compile; reading them takes five times that."""
MOST_WHITESPACE = 12
"""In a row between two parts of JSON: room for an indented line, and a weak model cannot idle its budget away."""


class GrammarMatcherFactory:
    """Makes a matcher for each request; grammars are compiled once and kept.

    Tokens count as the bytes they stand for, so characters may be cut anywhere between them. Special tokens are no
    text: none is ever allowed, except the end of the turn where the grammar is complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self._compiled: dict[Grammar, CompiledGrammar] = {}
        self._compiling: dict[Grammar, threading.Lock] = {}
        self._lock = threading.Lock()
        self._workers = GrammarWorkers()

    def __call__(self, grammar: Grammar) -> "TokenGuide":
        """Takes no time for a known grammar, but seconds for a new one with long bounded repeats. From any thread."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            with self._lock:
                lock = self._compiling.setdefault(grammar, threading.Lock())
            try:
                with lock:  # a group asks for the same grammar all at once; another grammar does not wait for it
                    compiled = self._compiled.get(grammar) or self._compile(grammar)
            finally:  # what is refused is not remembered either
                with self._lock:
                    self._compiling.pop(grammar, None)
            with self._lock:
                self._compiled[grammar] = compiled
                if len(self._compiled) > MOST_COMPILED:
                    del self._compiled[next(iter(self._compiled))]
        return TokenGuide(compiled)

    @cached_property
    def _compiler(self) -> "GrammarCompiler":
        from xgrammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer_info, max_threads=min(THREADS, os.cpu_count() or 1), cache_enabled=False)

    @cached_property
    def _tokenizer_info(self) -> "TokenizerInfo":
        import xgrammar

        # Counted to the highest id, not by `len`: ids may have gaps.
        size = max(self._tokenizer.get_vocab().values()) + 1
        read = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=size, stop_token_ids=self._end_tokens
        )
        spelled = list(read.decoded_vocab)
        for token, added in self._tokenizer.added_tokens_decoder.items():
            if added.special and token < size:
                spelled[token] = b""  # a token without bytes is never allowed
        return xgrammar.TokenizerInfo(spelled, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=self._end_tokens)

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        if len(grammar.source) > MOST_SOURCE:
            raise RequestError(f"the grammar has {len(grammar.source)} characters: at most {MOST_SOURCE} are taken")
        try:
            compiled = self._run_compiler(grammar)
        except RuntimeError as error:  # xgrammar's word for everything, its own file and line before the sentence
            raise RequestError(f"the grammar is wrong: {str(error).strip().partition(': ')[2] or error}") from error
        if not TokenGuide(compiled).allowed_mask(compiled.tokenizer_info.vocab_size).any():
            raise RequestError("no text follows this grammar, or none that this model's tokens can spell")
        return compiled

    def _run_compiler(self, grammar: Grammar) -> "CompiledGrammar":
        if grammar.kind == "regex":
            pattern = rewrite_pattern(grammar.source)
            quick = is_quick_pattern(grammar.source)
            known = None if quick else self._workers.compile(self._tokenizer_info, "regex", pattern)
            return known or self._compiler.compile_regex(pattern)
        schema = '{"type": "object"}' if grammar.kind == "json" else prepare_schema(grammar.source)
        quick = is_quick_schema(schema)
        known = None if quick else self._workers.compile(self._tokenizer_info, "json_schema", schema)
        return known or self._compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_WHITESPACE)


class GrammarWorkers:
    """Up to `MOST_WORKERS` processes that compile what may take long; one that takes too long is ended, and a small one
    stays for the next grammar."""

    def __init__(self) -> None:
        self._slots = threading.Semaphore(MOST_WORKERS)
        self._idle: list[subprocess.Popen[str]] = []

    def compile(self, info: "TokenizerInfo", kind: str, source: str) -> "CompiledGrammar | None":
        """None for one that proved quick, and is best compiled here."""
        from xgrammar import CompiledGrammar

        if not self._slots.acquire(timeout=COMPILE_SECONDS):
            raise Overloaded("other grammars are being compiled: try again later")
        worker = None
        try:
            while worker is None or worker.poll() is not None:
                worker = self._idle.pop() if self._idle else _start_worker(info)
            answer = _request(worker, {"kind": kind, "source": source, "whitespace": MOST_WHITESPACE})
            if answer["grown"] > MOST_GROWTH or len(self._idle) >= MOST_IDLE:
                worker.kill()
            else:
                self._idle.append(worker)
        except (OSError, ValueError):  # ended by the deadline or by its own limits: the answer is no JSON
            if worker is not None:
                worker.kill()
            raise RequestError(
                f"compiling the grammar takes more than {COMPILE_SECONDS} s or {COMPILE_BYTES >> 30} GiB: use fewer "
                "repeats inside repeats"
            ) from None
        finally:
            self._slots.release()
        if "wrong" in answer:
            raise RuntimeError(answer["wrong"])
        if "large" in answer:
            raise RequestError(
                f"the grammar is too large: compiled it takes {answer['large'] >> 20} MiB, and at most "
                f"{MOST_COMPILED_BYTES >> 20} are taken; use fewer alternatives that begin alike"
            )
        if "quick" in answer:
            return None
        return CompiledGrammar.deserialize_json(answer["compiled"], info)


def _start_worker(info: "TokenizerInfo") -> "subprocess.Popen[str]":
    worker = subprocess.Popen(
        [sys.executable, "-P", str(WORKER_FILE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run; it ends when its input does
    )
    assert worker.stdin is not None
    limits = {"memory": COMPILE_BYTES, "seconds": COMPILE_SECONDS, "written": MOST_COMPILED_BYTES}
    quick = {"quick_seconds": QUICK_SECONDS, "quick_bytes": MOST_GROWTH}
    begin = {"tokenizer": info.serialize_json(), "threads": 1, **limits, **quick}
    worker.stdin.write(json.dumps(begin) + "\n")
    return worker


def _request(worker: "subprocess.Popen[str]", question: dict[str, Any]) -> dict[str, Any]:
    """One answer, or a ValueError where the worker has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    deadline = threading.Timer(COMPILE_SECONDS, worker.kill)
    deadline.start()
    try:
        worker.stdin.write(json.dumps(question) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())
    finally:
        deadline.cancel()


class TokenGuide:
    """One completion's place in its grammar."""

    def __init__(self, compiled: "CompiledGrammar") -> None:
        from xgrammar import GrammarMatcher

        self._matcher, self._size = GrammarMatcher(compiled), compiled.tokenizer_info.vocab_size
        self._bits = np.full((1, -(-self._size // 32)), -1, dtype=np.int32)

    def allowed_mask(self, vocabulary: int) -> NDArray[np.bool_]:
        """True for every token that may come next; ids the tokenizer does not know never do."""
        mask = np.zeros(vocabulary, dtype=np.bool_)
        if not self._matcher.is_terminated():
            if not self._matcher.fill_next_token_bitmask(self._bits):
                self._bits.fill(-1)  # its word for "all of them"
            known = min(vocabulary, self._size)
            bits = self._bits.view(np.uint8)[0]
            mask[:known] = np.unpackbits(bits, bitorder="little", count=known).view(np.bool_)
        return mask

    def advance(self, token: int) -> bool:
        """Take the token that came; True once an end token has."""
        return not self._matcher.accept_token(token) or self._matcher.is_terminated()


def grammar_matcher_factory(
    tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]
) -> GrammarMatcherFactory | None:
    """An engine's grammars for constrained output; None where xgrammar, or the torch it needs, is not installed."""
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        return None
    return GrammarMatcherFactory(tokenizer, end_tokens)
