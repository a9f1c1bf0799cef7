"""Constrained output: whatever is sampled follows the grammar, and the numbers stay those of the full vocabulary."""

import asyncio
import json
import math
import re
import sys

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from backends import engine_of
from paceline.config import RunConfig
from paceline.engine import GenerateRequest, Grammar, noise_key
from paceline.engine.grammar import GrammarMatcherFactory, grammar_matcher_factory
from paceline.engine.schemas import rewrite_pattern
from paceline.errors import RequestError
from paceline.model import end_tokens, load_model, load_tokenizer

pytest.importorskip("xgrammar")

CONFIG = RunConfig.model_validate({"model": {"name": "paceline:quickstart"}, "device": "cpu"})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", 'b"\n', 3, None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "child": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"anyOf": [{"type": "null"}, {"const": "why"}]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "child"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-c]{2}$"}},
}
REGEXES = [
    r"\d{3}-[A-F]{2}",
    r"(yes|no|maybe)( (yes|no)){0,2}",
    r"^[^a-z\s]{4}.x\.$",
    r"(?:a|b)+?c?",
    r"(?P<left>[\w-]{1,3})@\S{2}",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(CONFIG.model)


@pytest.fixture(scope="module")
def engine(tokenizer):
    model = load_model(CONFIG.model, "cpu")
    ends = end_tokens(tokenizer, model)
    made = engine_of(
        model, CONFIG.engine.model_copy(update={"max_running": 32}), grammars=GrammarMatcherFactory(tokenizer, ends)
    )
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ask(engine, tokenizer):
    """Completions of one prompt, all at once: texts without the end token, and the completions."""
    ends = end_tokens(tokenizer, load_model(CONFIG.model, "cpu"))
    prompt = tuple(tokenizer.encode("reverse: paceline"))

    def run(grammar_list, seeds=1, **more):
        requests = [
            GenerateRequest(
                **{"prompt_ids": prompt, "max_tokens": 200, "stop_token_ids": frozenset(ends), "temperature": 1.0}
                | more,
                noise=noise_key(seed, place),
                grammar=grammar,
            )
            for seed in range(seeds)
            for place, grammar in enumerate(grammar_list)
        ]

        async def all_of_them():
            return await asyncio.gather(*map(engine.generate, requests))

        answers = asyncio.run(all_of_them())
        return [(tokenizer.decode([t for t in a.token_ids if t not in ends]), a) for a in answers]

    return run


def regex(source: str) -> Grammar:
    return Grammar("regex", source)


def schema(value) -> Grammar:
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("pattern", REGEXES)
def test_every_completion_matches_the_whole_expression(ask, pattern):
    answers = ask([regex(pattern)], seeds=24, temperature=1.5)
    finished = [text for text, answer in answers if answer.finish == "stop"]
    assert len(finished) > 12
    for text in finished:
        assert re.fullmatch(pattern, text, re.ASCII), text
    assert len({*finished}) > 2, "the grammar left no choice"


def test_every_completion_follows_the_schema(ask):
    answers = ask([schema(SCHEMA)], seeds=24, max_tokens=480)
    finished = [text for text, answer in answers if answer.finish == "stop"]
    assert len(finished) > 8
    for text in finished:
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert len({*finished}) > 4


def test_any_json_is_an_object(ask):
    answers = ask([Grammar("json")], seeds=24, temperature=0.7)
    finished = [text for text, answer in answers if answer.finish == "stop"]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


def test_greedy_and_cold_requests_follow_too(ask):
    """At a low temperature all that is allowed may be too improbable for float32."""
    for temperature in (0.0, 0.02):
        for text, answer in ask([regex("[!-/]{6}")], seeds=4, temperature=temperature):
            assert re.fullmatch("[!-/]{6}", text), text
            assert all(map(math.isfinite, answer.log_z))


def test_the_end_may_come_only_where_the_text_is_complete(ask):
    for text, answer in ask([regex("(ab){1,20}")], seeds=16):
        assert answer.finish == "stop"
        assert re.fullmatch("(ab)+", text)
    for _, answer in ask([regex("ab")], max_tokens=1):
        assert answer.finish == "length"


def test_different_grammars_and_plain_requests_share_a_batch(ask):
    """What others may say changes nothing for those who may say anything."""
    mixed = [None, regex(r"\d{4}"), schema({"type": "boolean"}), None, regex("[x-z]{3}")]
    answers = ask(mixed, seeds=4)
    for place, (text, answer) in enumerate(answers):
        kind = mixed[place % len(mixed)]
        assert (answer.log_z is None) == (kind is None)
        if place % len(mixed) == 1:
            assert re.fullmatch(r"\d{4}", text)
        if place % len(mixed) == 2:
            assert text in ("true", "false")
    alone = [
        answer
        for place, (_, answer) in enumerate(ask([g if g is None else None for g in mixed], seeds=4))
        if mixed[place % len(mixed)] is None
    ]
    beside = [answer for place, (_, answer) in enumerate(answers) if mixed[place % len(mixed)] is None]
    assert [a.token_ids for a in alone] == [b.token_ids for b in beside]
    for a, b in zip(alone, beside, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_log_probabilities_are_of_the_full_vocabulary_and_log_z_is_the_kept_mass(ask, engine, tokenizer):
    """log_z at each place: the mass the full distribution gives to what the grammar allows there."""
    pattern, temperature = "[a-e]{3}(1|2)", 1.3
    allowed = [set("abcde")] * 3 + [set("12"), set()]
    prompt = tokenizer.encode("reverse: paceline")
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcde12"]
    for _, answer in ask([regex(pattern)], seeds=4, temperature=temperature):
        whole = [*prompt, *answer.token_ids]
        scores = asyncio.run(engine.score([whole], temperature))[0][len(prompt) :]
        assert answer.logprobs == pytest.approx(scores, abs=1e-4)
        for place, letters in enumerate(allowed[:-1]):
            begun = [*prompt, *answer.token_ids[:place]]
            options = [i for i in ids if tokenizer.decode([i]) in letters]
            ends = asyncio.run(engine.score([[*begun, i] for i in options], temperature))
            kept = torch.tensor([score[-1] for score in ends]).logsumexp(0)
            assert answer.log_z[place] == pytest.approx(float(kept), abs=1e-4)
        assert answer.log_z[-1] == pytest.approx(answer.logprobs[-1], abs=1e-4)  # nothing but the end is left


def test_top_p_cuts_within_what_the_grammar_allows(ask):
    for text, answer in ask([regex("[a-z]{5}")], seeds=8, top_p=0.5, top_k=3):
        assert re.fullmatch("[a-z]{5}", text)
        assert all(z <= 1e-6 for z in answer.log_z)


# -- tokenizers that cut characters into bytes ------------------------------------------------------------------------


def byte_level(pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """Every byte a token, as in GPT-2, and two special tokens."""
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token=pad)


def walk(matcher, tokenizer, text: str, size: int) -> bool:
    """Whether the matcher lets this text pass token by token."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.allowed_mask(size)[token]:
            return False
        assert not matcher.advance(token)
    return bool(matcher.allowed_mask(size)[tokenizer.eos_token_id])


@pytest.mark.parametrize("text", ["Straße", "日本🎉", "é", "a\u0301"])
def test_characters_of_several_bytes_pass_and_are_never_cut(text):
    tokenizer = byte_level()
    size = len(tokenizer) + 5
    make = GrammarMatcherFactory(tokenizer, [tokenizer.eos_token_id])
    assert walk(make(regex(re.escape(text))), tokenizer, text, size)
    assert walk(make(regex("." * len(text))), tokenizer, text, size)
    assert walk(make(schema({"const": text})), tokenizer, json.dumps(text, ensure_ascii=False), size)
    assert not walk(make(regex(re.escape(text) + "x")), tokenizer, text, size)
    matcher = make(regex("." * len(text)))
    first = tokenizer.encode(text, add_special_tokens=False)[0]
    matcher.advance(first)
    if len(text[0].encode()) > 1:
        assert not matcher.allowed_mask(size)[tokenizer.convert_tokens_to_ids("a")]


def test_special_tokens_are_no_text_and_strange_ids_are_never_allowed():
    tokenizer = byte_level(pad="aa")
    size = len(tokenizer) + 5
    matcher = GrammarMatcherFactory(tokenizer, [tokenizer.eos_token_id])(regex("a*"))
    allowed = matcher.allowed_mask(size).nonzero()[0].tolist()
    assert allowed == sorted([tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id])  # not the pad token `aa`
    assert matcher.allowed_mask(10).shape == (10,)
    assert matcher.advance(tokenizer.eos_token_id)
    assert not matcher.allowed_mask(size).any()


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="ab\n\té\u00a0 1_-.", max_size=5))
def test_classes_mean_what_python_says(text):
    tokenizer = byte_level()
    for pattern in (r".*", r"\s*", r"\S*", r"\w+", r"\W+", r"[^\d\s]*", r"[\w.-]*", r"[\s\S]{2}", r"(a|\n)*.?"):
        make = _CACHED.setdefault("make", GrammarMatcherFactory(tokenizer, [tokenizer.eos_token_id]))
        passed = walk(make(regex(pattern)), tokenizer, text, len(tokenizer))
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        # The compiler counts a no-break space as a space: it may say less than Python allows, never more.
        assert passed == expected or (expected and "\u00a0" in text)


_CACHED: dict[str, GrammarMatcherFactory] = {}


# -- what cannot be enforced is refused -------------------------------------------------------------------------------

BAD = [
    (regex("("), "regular expression is wrong"),
    (regex("[z-a]"), "regular expression is wrong"),
    (regex("(?=a)b"), r"uses `\(\?="),
    (regex("(?i)a"), r"uses `\(\?i"),
    (regex(r"\bword"), r"uses `\\b`"),
    (regex(r"(a)\1"), r"uses `\\1`"),
    (regex(r"a\Z"), r"uses `\\Z`"),
    (regex("a$b"), "whole text"),
    (regex("a{2"), "grammar is wrong"),
    (regex("é日"), "no text follows"),
    (regex("a" * 70_000), "at most 65536"),
    (schema("{"), "not JSON"),
    (schema("[" * 100_000), "not JSON|at most"),
    (schema([]), "a schema is an object"),
    (schema({"type": "foo"}), "Unsupported type"),
    (schema(False), "cannot accept any value"),
    (schema({"$ref": "#"}), "no text follows"),
    (schema({"$ref": "#/$defs/no"}), "not in the schema"),
    (schema({"not": {}}), "cannot enforce `not`"),
    (schema({"type": "array", "uniqueItems": True}), "cannot enforce `uniqueItems`"),
    (schema({"properties": {"a": {"if": {}}}}), "#/properties/a: constrained output cannot enforce `if`"),
    (schema({"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]}), "takes `anyOf` alone"),
    (schema({"allOf": [{"type": "string"}, {"minLength": 2}]}), "merge them"),
    (schema({"type": "string", "pattern": "(?=a)"}), "#/pattern: the regular expression uses"),
    (schema({"type": "string", "pattern": "a", "minLength": 2}), "not both"),
    (schema({"type": "string", "minLength": -1}), "whole number"),
    (schema({"type": "string", "minLength": 3, "maxLength": 2}), "larger"),
]


@pytest.mark.parametrize(("grammar", "message"), BAD, ids=lambda value: str(value)[:50])
def test_what_cannot_be_enforced_is_refused(ask, grammar, message):
    with pytest.raises(RequestError, match=message):
        ask([grammar])


def test_strings_of_limited_length_hold_no_control_characters():
    tokenizer = byte_level()
    make = GrammarMatcherFactory(tokenizer, [tokenizer.eos_token_id])
    limited = schema({"type": "string", "maxLength": 3})
    assert walk(make(limited), tokenizer, '"é日"', len(tokenizer))
    assert not walk(make(limited), tokenizer, '"\t"', len(tokenizer))
    assert not walk(make(limited), tokenizer, '"abcd"', len(tokenizer))


def test_a_grammar_is_compiled_once(tokenizer, monkeypatch):
    make = GrammarMatcherFactory(tokenizer, [6])
    make(regex("a+"))
    monkeypatch.setattr(make, "_compile", None)
    first, second = make(regex("a+")), make(regex("a+"))
    first.advance(tokenizer.convert_tokens_to_ids("a"))
    assert not second.allowed_mask(103)[6], "two completions share one place in the grammar"


def test_without_the_library_the_request_is_refused(tokenizer, monkeypatch, model):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    assert grammar_matcher_factory(tokenizer, [6]) is None
    engine = engine_of(model, CONFIG.engine, grammars=None)
    request = GenerateRequest(prompt_ids=(1,), max_tokens=1, grammar=regex("a"))
    with pytest.raises(RequestError, match=r"pip install 'paceline\[grammar\]'"):
        engine.submit(request)


def test_rewriting_keeps_what_is_in_sets():
    assert rewrite_pattern(r"[.^$(?]\.\]") == r"[.^$(?]\.\]"
