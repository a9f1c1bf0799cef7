"""Laws of recording: turns become samples token for token, and a conversation goes on from its recorded ids."""

import dataclasses
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from conftest import ENDS
from paceline.data import Ticket
from paceline.rollout import Renderer, RenderError, Rollout, Turn, assemble

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
    return turns


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
        prompt = scribe.renderer.extend(turns[-1], messages)
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
        prompt = scribe.renderer.extend(turn, messages)
        assert prompt == scribe.renderer.prompt(messages)


def test_a_template_that_respells_a_reply_does_not_retokenise_it(scribe):
    turn = scribe.say(scribe.renderer.prompt(START), START, [" ", "ten", "al", "p", " \n"])
    prompt = scribe.renderer.extend(turn, answered(turn, user("again")))
    assert prompt[: len(turn.prompt_ids + turn.completion_ids)] == turn.prompt_ids + turn.completion_ids


def test_what_does_not_continue_a_recorded_turn_is_rendered_anew(scribe):
    said = scribe.say(scribe.renderer.prompt(START), START, ["tenalp"])
    turn = dataclasses.replace(said, prompt_ids=[scribe.end, *said.prompt_ids])  # a mark that no rendering has
    goes_on = answered(turn, user("again"))
    assert scribe.renderer.extend(turn, goes_on)[: len(turn.prompt_ids)] == turn.prompt_ids
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
        assert scribe.renderer.extend(before, messages) == scribe.renderer.prompt(messages), name


def test_a_thought_the_template_drops_is_not_kept_and_one_it_keeps_is(load):
    qwen = Scribe("qwen3", load("qwen3"))
    turn = qwen.say(qwen.renderer.prompt(START), START, ["<think>\nhm", "m\n</think>\n\nten", "alp"])
    asked = answered(turn, user("again"))
    assert qwen.renderer.extend(turn, asked) == qwen.renderer.prompt(asked)
    assert "hmm" not in qwen.tokenizer.decode(qwen.renderer.prompt(asked))
    called = qwen.renderer.extend(turn, answered(turn, {"role": "tool", "content": "42"}))
    assert called[: len(turn.prompt_ids + turn.completion_ids)] == turn.prompt_ids + turn.completion_ids


def test_a_tokenizer_that_opens_every_text_opens_no_turn(load):
    tokenizer = load("quickstart")
    opening = ("<|pad|>", tokenizer.convert_tokens_to_ids("<|pad|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[opening])
    assert tokenizer.encode("a")[0] == opening[1]
    scribe = Scribe("quickstart", tokenizer)
    turn = scribe.say(scribe.renderer.prompt(START), START, ["tenalp"])
    assert opening[1] not in scribe.renderer.extend(turn, answered(turn, user("again")))


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
