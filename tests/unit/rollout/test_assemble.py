"""Laws of recording: turns become samples token for token, and a conversation goes on from its recorded ids."""

import dataclasses
import random
import re
import string
from pathlib import Path

import jinja2
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from conftest import ENDS
from paceline.clients.tools import inline_tool_calls, template_message
from paceline.data import Sample, Ticket
from paceline.rollout import Renderer, RenderError, Rollout, Turn, assemble
from paceline.rollout import render as pieces
from paceline.rollout import render as sandbox
from paceline.rollout.assemble import MAX_CACHED_CALL_CHARS, canonical_text
from paceline.rollout.render import ENTRY_OVERHEAD, MIN_PIECE_CHARS, LruCache
from rollouts import continued_prompt

TICKET = Ticket(4, "maze", 0, 4, 1)
TOKENS = st.lists(st.integers(0, 3), max_size=3)  # few ids, so that prompts agree by chance as well


def recorded(prompt_ids: list[int], completion_ids: list[int], at: int = 0, **changes) -> Turn:
    """A turn whose every logprob and version is its own."""
    said = range(len(completion_ids))
    return Turn(
        **{
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [-float(at * 100 + i + 1) for i in said],
            "versions": [at * 100 + i for i in said],
            "finish": "stop",
            "temperature": 1.0 + at,
            **changes,
        }
    )


def samples_of(turns: list[Turn]):
    return assemble(Rollout(ticket=TICKET, member=3, turns=turns))


# --- assembly


@st.composite
def episodes(draw):
    """Turns that go on from the last one, from an earlier one, from a cut of it, or from nowhere."""
    turns: list[Turn] = []
    for at in range(draw(st.integers(0, 5))):
        seen = [t.prompt_ids + t.completion_ids for t in turns]
        history = draw(st.sampled_from([*seen[-1:] * 3, *seen, *(s[:-1] for s in seen), [0]]))
        prompt = (history + draw(TOKENS)) or [0]
        finish = draw(st.sampled_from(["stop", "length"]))
        turns.append(recorded(prompt, draw(TOKENS), at, finish=finish))
        if draw(st.booleans()):  # as nearly always: one version sampled all of it
            turns[-1] = dataclasses.replace(turns[-1], versions=[at] * len(turns[-1].versions))
    return turns


@settings(max_examples=50, deadline=None)
@given(episodes())
def test_every_sampled_token_trains_once_where_the_engine_saw_it(turns):
    samples = samples_of(turns)
    assert sum(int(s.loss_mask.sum()) for s in samples) == sum(len(t.completion_ids) for t in turns)
    spans = [(sample, span) for sample in samples for span in sample.spans]
    for turn in turns:
        seen = (turn.prompt_ids + turn.completion_ids, turn.versions)
        place = next(i for i, (s, (a, b)) in enumerate(spans) if (s.token_ids[:b].tolist(), [*s.versions[a:b]]) == seen)
        sample, (start, end) = spans.pop(place)
        assert start == len(turn.prompt_ids)
        assert sample.loss_mask[start:end].all()
        assert sample.logprobs[start:end].tolist() == turn.logprobs
        assert set(sample.temperatures[start:end]) <= {turn.temperature}
    assert not spans
    for sample in samples:
        context = ~sample.loss_mask
        assert not sample.logprobs[context].any()
        assert set(sample.versions[context]) <= {-1}
        assert (sample.env, sample.ticket, sample.rollout) == ("maze", TICKET, 3)


@settings(max_examples=50, deadline=None)
@given(episodes())
def test_a_turn_joins_the_longest_sample_that_its_prompt_repeats_and_no_other(turns):
    threads: list[list[Turn]] = []
    for turn in turns:
        ends = [thread[-1].prompt_ids + thread[-1].completion_ids for thread in threads]
        fitting = [i for i, end in enumerate(ends) if turn.prompt_ids[: len(end)] == end]
        if fitting:
            threads[max(fitting, key=lambda i: len(ends[i]))].append(turn)
        else:
            threads.append([turn])
    samples = samples_of(turns)
    assert [len(s.spans) for s in samples] == [len(thread) for thread in threads]
    assert [s.ended == "truncated" for s in samples] == [thread[-1].finish == "length" for thread in threads]


@settings(max_examples=50, deadline=None)
@given(episodes())
def test_a_sample_that_was_not_checked_is_what_checking_makes_of_it(turns):
    for sample in samples_of(turns):
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        checked = Sample(**fields)
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                assert value.dtype == getattr(checked, name).dtype
                assert value.flags.c_contiguous
                np.testing.assert_array_equal(value, getattr(checked, name))
            else:
                assert value == getattr(checked, name)


@pytest.mark.parametrize("wrong", [{"versions": [-1, -1]}, {"temperature": -1.0}, {"prompt_ids": []}])
def test_a_turn_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="maze"):
        samples_of([dataclasses.replace(recorded([1], [2, 3], versions=[0, 0]), **wrong)])


def test_a_greedy_turn_is_scored_at_temperature_one():
    (sample,) = samples_of([recorded([1], [2], temperature=0.0)])
    np.testing.assert_array_equal(sample.temperatures, 1)


# --- rendering


class Scribe:
    """Plays the policy: says given texts in tokens no tokenizer would choose, and records them as a seat does."""

    def __init__(self, name: str, tokenizer) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids(ENDS[name])
        self.renderer = Renderer(tokenizer, [self.end])
        self.beyond_ascii = "" if name == "quickstart" else "é中🙂"

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def say(self, prompt: list[int], messages: list[dict], pieces: list[str]) -> Turn:
        ids = [*(i for piece in pieces for i in self.encode(piece)), self.end]
        assert self.renderer.reply(ids) == "".join(pieces)
        return recorded(prompt, ids, messages=messages, text=self.renderer.reply(ids))

    def words(self):
        letters = string.ascii_letters + string.digits + ".,:!?'+-" + self.beyond_ascii
        return st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=4).map(" ".join)


@pytest.fixture(scope="session", params=list(ENDS))
def scribe(request, load):
    return Scribe(request.param, load(request.param))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answered(turn: Turn, *more: dict) -> list[dict]:
    return [*turn.messages, {"role": "assistant", "content": turn.text}, *more]


START = [{"role": "system", "content": "be brief"}, user("reverse: planet")]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_conversation_goes_on_from_the_exact_ids_it_recorded(scribe, data):
    """No sampled token is ever tokenised again: neither in this turn nor, through it, in any earlier one."""
    messages, turns = START, []
    prompt = scribe.renderer.prompt(messages)
    for _ in range(data.draw(st.integers(2, 3))):
        turns.append(scribe.say(prompt, messages, list(data.draw(scribe.words()))))
        role = data.draw(st.sampled_from(["user", "tool"]))
        messages = answered(turns[-1], {"role": role, "content": data.draw(scribe.words())})
        prompt = continued_prompt(scribe.renderer, turns[-1], messages)
        before = turns[-1].prompt_ids + turns[-1].completion_ids
        assert prompt[: len(before)] == before
        assert scribe.tokenizer.decode(prompt) == scribe.tokenizer.decode(scribe.renderer.prompt(messages))
    (sample,) = samples_of([*turns, scribe.say(prompt, messages, ["so"])])
    assert len(sample.spans) == len(turns) + 1


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_going_on_equals_rendering_anew_when_the_tokens_are_the_tokenizers_own(scribe, data):
    """Whatever the template puts after the end-of-turn token, such as a newline, is kept."""
    messages = START
    prompt = scribe.renderer.prompt(messages)
    for _ in range(3):
        turn = scribe.say(prompt, messages, [data.draw(scribe.words())])
        messages = answered(turn, user(data.draw(scribe.words())))
        prompt = continued_prompt(scribe.renderer, turn, messages)
        assert prompt == scribe.renderer.prompt(messages)


def test_a_template_that_respells_a_reply_does_not_retokenise_it(scribe):
    turn = scribe.say(scribe.renderer.prompt(START), START, [" ", "ten", " al", "p", " \n"])
    prompt = continued_prompt(scribe.renderer, turn, answered(turn, user("again")))
    assert prompt[: len(turn.prompt_ids + turn.completion_ids)] == turn.prompt_ids + turn.completion_ids


def test_a_template_that_adds_to_a_reply_has_it_rendered_anew(load):
    """The model would see more than it said, so what it said is not what it sees."""
    tokenizer = load("quickstart")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %} (noted){% endif %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    scribe = Scribe("quickstart", tokenizer)
    turn = scribe.say(scribe.renderer.prompt(START), START, ["ten", "alp"])
    asked = answered(turn, user("again"))
    assert continued_prompt(scribe.renderer, turn, asked) == scribe.renderer.prompt(asked)
    assert "tenalp (noted)" in tokenizer.decode(scribe.renderer.prompt(asked))


def test_what_does_not_continue_a_recorded_turn_is_rendered_anew(scribe):
    said = scribe.say(scribe.renderer.prompt(START), START, ["tenalp"])
    turn = dataclasses.replace(said, prompt_ids=[scribe.end, *said.prompt_ids])  # a mark that no rendering has
    goes_on = answered(turn, user("again"))
    assert continued_prompt(scribe.renderer, turn, goes_on)[: len(turn.prompt_ids)] == turn.prompt_ids
    stopped = [*turn.completion_ids[:-1], *scribe.encode("!")]
    another_end = dataclasses.replace(turn, completion_ids=stopped, text=scribe.renderer.reply(stopped))
    cases = {
        "truncated": (dataclasses.replace(turn, finish="length"), goes_on),
        "given as tokens": (dataclasses.replace(turn, messages=None), goes_on),
        "ended by a token the template does not write": (another_end, goes_on),
        "edited reply": (turn, [*START, {"role": "assistant", "content": "tenalP"}, user("again")]),
        "edited prompt": (turn, [START[0], user("reverse: planets"), *goes_on[2:]]),
        "respaced reply": (turn, [*START, {"role": "assistant", "content": "tenalp "}, user("again")]),
        "respaced prompt": (turn, [START[0], user("reverse: planet "), *goes_on[2:]]),
        "no system": (turn, goes_on[1:]),
        "rolled back": (turn, START),
        "another": (turn, [*START, user("or")]),
    }
    for name, (before, messages) in cases.items():
        assert continued_prompt(scribe.renderer, before, messages) == scribe.renderer.prompt(messages), name


def test_a_thought_the_template_drops_is_not_kept_and_one_it_keeps_is(load):
    qwen = Scribe("qwen3", load("qwen3"))
    turn = qwen.say(qwen.renderer.prompt(START), START, ["<think>\nhm", "m\n</think>\n\nten", "alp"])
    asked = answered(turn, user("again"))
    assert continued_prompt(qwen.renderer, turn, asked) == qwen.renderer.prompt(asked)
    assert "hmm" not in qwen.tokenizer.decode(qwen.renderer.prompt(asked))
    called = continued_prompt(qwen.renderer, turn, answered(turn, {"role": "tool", "content": "42"}))
    assert called[: len(turn.prompt_ids + turn.completion_ids)] == turn.prompt_ids + turn.completion_ids


def test_a_tokenizer_that_opens_every_text_opens_no_turn(load):
    tokenizer = load("quickstart")
    opening = ("<|pad|>", tokenizer.convert_tokens_to_ids("<|pad|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[opening])
    assert tokenizer.encode("a")[0] == opening[1]
    scribe = Scribe("quickstart", tokenizer)
    turn = scribe.say(scribe.renderer.prompt(START), START, ["tenalp"])
    assert opening[1] not in continued_prompt(scribe.renderer, turn, answered(turn, user("again")))


def test_a_reply_loses_its_end_token_and_nothing_else(scribe):
    ids = scribe.encode("so be it")
    assert scribe.renderer.reply([*ids, scribe.end]) == scribe.renderer.reply(ids) == "so be it"
    assert scribe.renderer.reply([scribe.end, *ids]) == ENDS[scribe.name] + "so be it"
    assert scribe.renderer.reply([scribe.end]) == scribe.renderer.reply([]) == ""


def test_a_tokenizer_without_a_chat_template_is_refused(load):
    tokenizer = load("quickstart")
    tokenizer.chat_template = None
    with pytest.raises(RenderError, match=r"name one with model\.chat_template"):
        Renderer(tokenizer, [])


def test_markers_that_the_tokenizer_spells_in_letters_are_told(load):
    tokenizer = load("quickstart")
    assert Renderer(tokenizer, []).split_markers == []
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    assert Renderer(tokenizer, []).split_markers == ["<|im_start|>"]


# --- the short ways: pieces, the sandbox, what is remembered


def pieces_of(tokenizer) -> list[str]:
    """What texts are made of here: tokens, halves of tokens, and whatever tokenizers treat in a way of its own."""
    added = [token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()][:12]
    halves = [half for token in added for half in (token[:-1], token[1:], token + token[0], token[0] + token)]
    plain = [
        "so",
        " be",
        "it ",
        "  ",
        "\n",
        "\n\n",
        " \n ",
        "\t",
        "é",
        "中",
        "🙂",
        "e\u0301",
        "\u00a0",
        "▁",
        "'s",
        "12",
    ]
    return [*added, *halves, *plain, "x" * MIN_PIECE_CHARS, "a few words, " * 3]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_text_cut_at_its_added_tokens_has_the_tokens_of_the_whole(scribe, data):
    texts = st.lists(st.sampled_from(pieces_of(scribe.tokenizer)) | st.text(max_size=4), max_size=12).map("".join)
    for text in data.draw(st.lists(texts, min_size=1, max_size=3)):
        for twice in (text, text):
            assert scribe.renderer.encode(twice) == scribe.encode(twice)


def trained(*added: AddedToken, **parts) -> PreTrainedTokenizerFast:
    """A tokenizer of another make, with these tokens added."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    for name, part in parts.items():
        setattr(backend, name, part)
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(["so be it and so it is", "<a> b </a> c <b> the end of it all"], trainer)
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


first = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
MAKES = {
    "a space before the first word": trained(AddedToken("<a>", normalized=False), pre_tokenizer=first),
    "one token within another": trained(
        *(AddedToken(text, normalized=False) for text in ("<a>", "<a><b>", "<b>so", "a><")), pre_tokenizer=first
    ),
    "tokens of normalised text": trained(
        AddedToken("<a>", normalized=False),
        AddedToken("<b>", normalized=True),
        normalizer=tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Lowercase(), tokenizers.normalizers.Prepend("▁")]
        ),
    ),
    "a space before every text": trained(
        AddedToken("<a>", normalized=False), normalizer=tokenizers.normalizers.Prepend("▁")
    ),
    "tokens that swallow white space": trained(
        AddedToken("<a>", normalized=False, lstrip=True),
        AddedToken("<b>", normalized=False, rstrip=True),
        pre_tokenizer=first,
    ),
    "tokens that are whole words": trained(AddedToken("<a>", normalized=False, single_word=True), pre_tokenizer=first),
    "no tokens at all": trained(pre_tokenizer=first),
}


@pytest.mark.parametrize("make", MAKES)
def test_and_so_it_has_whatever_the_tokenizer_is_like(make, monkeypatch):
    monkeypatch.setattr(pieces, "MIN_PIECE_CHARS", 1)
    tokenizer, rng = MAKES[make], random.Random(0)
    parts = ["<a>", "<b>", "<A>", "<B>", "so", "it", " ", "  ", "\n", "a><", "x"]
    cut = pieces.CachedEncoder(tokenizer)
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(0, 8)))
        assert cut.encode(text) == tokenizer.encode(text, add_special_tokens=False), text


def test_pieces_are_tokenised_once(load):
    """A conversation that is rendered anew costs only what is new in it."""
    tokenizer = load("quickstart")
    cut, seen = pieces.CachedEncoder(tokenizer), []
    whole, cut._tokenize = cut._tokenize, lambda text: seen.append(text) or whole(text)
    parts = [f"<|user|>{i} and so on, for as long as it takes<|end|>" for i in range(4)]
    for count in (1, 2, 3, 4, 4):
        cut.encode("".join(parts[:count]))
    assert len([text for text in seen if "0 and so on" in text]) == 1
    assert len(seen) <= 2 * len(parts)


def test_what_is_remembered_is_bounded():
    rng, recent = random.Random(0), LruCache(10 * ENTRY_OVERHEAD)
    for i in range(500):
        weight = rng.randrange(12 * ENTRY_OVERHEAD)
        recent.put(f"{i}", i, weight)
        assert recent.get(f"{i}") == (i if weight <= 9 * ENTRY_OVERHEAD else None)
        assert sum(weight for _, weight in recent._entries.values()) == recent._weight <= 10 * ENTRY_OVERHEAD


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 1) | st.text("ab\n<é", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
TEXTS = st.text(string.ascii_letters + " \n</think>", max_size=20) | st.just("<think>\nso\n</think>\n\nit is")
ODD = st.just(Path("so"))
CALLED = st.fixed_dictionaries({"name": st.sampled_from(["add", "look_up"]), "arguments": VALUES | ODD})
SPOKEN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": TEXTS},
    optional={
        "tool_calls": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": CALLED}), max_size=2),
        "name": st.just("ann"),
        "reasoning_content": TEXTS,
        "thinking": TEXTS,
        "odd": ODD | VALUES,
    },
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@settings(max_examples=20, deadline=None)
@example(messages=[user("so?"), {"role": "assistant", "content": "it is", "thinking": "hm"}], tools=None, reply=False)
@given(messages=st.lists(SPOKEN, max_size=6), tools=st.sampled_from([None, [TOOL]]), reply=st.booleans())
def test_the_template_writes_what_transformers_has_it_write(scribe, messages, tools, reply):
    template = scribe.renderer._template
    try:
        given = [template_message(message) for message in messages]
        most = template._max_calls
        given = [inline_tool_calls(m) if min(len(m.get("tool_calls", ())), 2) > most else m for m in given]
        theirs = scribe.tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=reply)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
        with pytest.raises(RenderError):
            template.write(messages, tools, reply)
    else:
        assert template.write(messages, tools, reply) == theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].role }}{{ messages[0].missing }}{{ messages[0].items }}",
        "{{ messages[0].missing.deeper }}",
        "{{ messages[0].items() | list }}{{ messages[0].keys() | list }}{{ messages[0].get('role') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop }}{{ messages[0].clear() }}",
        "{{ messages[0].__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(1) }}{{ ('{0.__class__}'|attr('format'))(1) }}",
        "{{ messages[0]|attr('content') }}{{ messages[0]|attr('keys') }}{{ ''|attr('__class__') }}",
        "{{ messages|map(attribute='role')|join('-') }}{{ messages|selectattr('role', 'equalto', 'user')|list }}",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.previtem }}{{ loop.cycle(1, 2) }}{% endfor %}",
        "{% for m in messages %}{{ loop.__init__ }}{{ loop._iterable }}{{ loop.nope }}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content.split() }}{% endfor %}",
        "{% set ns = namespace(a=1, b=[]) %}{{ ns.a }}{{ ns.b }}{{ ns.c }}{% set ns.a = 'x' %}{{ ns.a.upper() }}",
        "{% set ns = namespace() %}{{ ns.__class__ }}{{ ns._Namespace__attrs }}",
        "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(1) }}",
        "{% macro m(x) %}{{ x.strip('e') }}{{ caller is defined }}{% endmacro %}{{ m(messages[0].role) }}{{ m.name }}",
        "{% generation %}{{ messages[0].content.encode('utf8') }}{% endgeneration %}",
        "{{ messages | tojson }}{{ messages[0].content.nope }}{{ messages[0].content.nope() }}",
        "{{ 'a'.join(messages) }}",
        "{{ messages[0].content.startswith() }}",
        "{{ raise_exception('no') }}",
        "{{ dict(a=1).a }}{{ range(3) | list }}{{ bos_token }}",
        "{{ messages[0].content.replace('e', 'x', 1).title().center(9) }}{{ 'abc'[::-1].upper().isupper() }}",
        "{% for c in 'ab'.join(['x', 'y']) %}{{ c.islower() }}{% endfor %}{{ strftime_now }}",
    ],
)
def test_the_sandbox_allows_and_forbids_what_jinjas_does(quickstart, source):
    quickstart.chat_template = source
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a b"}]
    ours = sandbox.compile_template(source)
    assert isinstance(ours.environment, sandbox.TemplateSandbox)
    assert outcome(lambda: ours.render(messages=messages, tools=None, **quickstart.special_tokens_map)) == outcome(
        lambda: quickstart.apply_chat_template(messages, tokenize=False)
    )
    assert messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a b"}]


@pytest.fixture(scope="module")
def quickstart(load):
    return load("quickstart")


def outcome(write) -> str | tuple[type, str]:
    try:
        return re.sub("0x[0-9a-f]+", "", write())
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)


def test_nor_does_it_hand_out_what_a_namespace_hides():
    """Transformers has namespaces of its own, which take no such names; jinja's do."""
    source = "{% set ns = namespace(_a=1, b='x') %}{{ ns.b }}{{ ns._a }}{{ ns._a + 1 }}"
    outcomes = [
        outcome(kind().from_string(source).render) for kind in (sandbox.TemplateSandbox, ImmutableSandboxedEnvironment)
    ]
    assert outcomes[0] == outcomes[1]


def test_numbers_and_truths_that_are_equal_do_not_say_the_same():
    def call(arguments) -> dict:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    said = [
        canonical_text(call(arguments)) for arguments in ({"a": 1}, {"a": True}, {"a": 1.0}, {"a": "1"}, '{"a": ', "{}")
    ]
    assert len(set(said)) == len(said)
    for text in ('{"a":1}', ' {"a" : 1}', '{"a": 1}' + " " * 2 * MAX_CACHED_CALL_CHARS):
        assert canonical_text(call(text)) == said[0]
