"""Numbers that assembly has packed are the turn's own, and the record writes the same bytes with them as without."""

import copy
import json
import pickle
import sys
from array import array
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Ticket
from paceline.data.rollout import expand_versions, pack_floats, pack_ids, pack_versions
from paceline.observe.record import body as bodies
from paceline.observe.record.layout import rollout_facts
from paceline.observe.record.rollout_recorder import _encode_rollout
from paceline.observe.record.rows import fold, fold_lines
from paceline.rollout import Rollout, Turn, assemble

TICKET = Ticket(3, "env", 0, 1, 2)


def turn(prompt: list[int], said: list[int], versions: list[int], **more) -> Turn:
    logprobs = [-0.25 * place for place in range(len(said))]
    given = {"finish": "stop", "temperature": 0.7, "text": "Said – so"} | more
    return Turn(prompt_ids=prompt, completion_ids=said, logprobs=logprobs, versions=versions, **given)


def played(*turns: Turn, **more) -> Rollout:
    rollout = Rollout(ticket=TICKET, member=0, turns=list(turns), reward=1.0, **more)
    rollout.samples = [s.with_streams(advantages=np.where(s.loss_mask, 0.3, 0)) for s in assemble(rollout)]
    return rollout


def long_way(rollout: Rollout) -> Rollout:
    """The same rollout, of unpacked turns."""
    return replace(rollout, turns=[replace(turn) for turn in rollout.turns])


def alike(rollout: Rollout) -> bool:
    plain = long_way(rollout)
    assert all(turn.packed is None for turn in plain.turns)
    return _encode_rollout(rollout) == _encode_rollout(plain)


def edit_mask(sample):
    sample.loss_mask[-1] = False
    return sample


def edit_versions(sample):
    sample.versions[-1] += 1
    return sample


CHANGES = {
    "nothing": lambda s: s,
    "credit": lambda s: s.with_streams(advantages=np.arange(len(s)), rl_weights=s.loss_mask * 0.5),
    "other tokens": lambda s: s.with_streams(token_ids=s.token_ids + 1),
    "the same tokens": lambda s: s.with_streams(token_ids=s.token_ids.copy()),
    "other log probabilities": lambda s: s.with_streams(logprobs=np.ones(len(s))),
    "no log probabilities": lambda s: s.with_streams(logprobs=None),
    "other temperatures": lambda s: s.with_streams(temperatures=np.full(len(s), 2.0)),
    "a cut": lambda s: s.truncated_to(max(1, len(s) - 2)),
    "other spans": lambda s: replace(s, spans=()),
    "no ticket": lambda s: replace(s, ticket=None),
    "the mask, in place": edit_mask,
    "the versions, in place": edit_versions,
}

tokens = st.builds(
    lambda seed, count: np.random.default_rng(seed).integers(0, 2**31, count).tolist(),
    st.integers(0, 99),
    st.sampled_from([1, 2, 20, 40, 60]),
)


@st.composite
def conversations(draw) -> Rollout:
    turns: list[Turn] = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 3]))):
        prompt, said = draw(tokens), draw(tokens)
        if turns and draw(st.booleans()):
            prompt = [*turns[-1].prompt_ids, *turns[-1].completion_ids, *prompt]
        one = [draw(st.integers(0, 9))] * len(said)
        versions = draw(st.just(one) | st.lists(st.integers(0, 9), min_size=len(said), max_size=len(said)))
        log_z = draw(st.none() | st.just([-0.5] * len(said)))
        turns.append(turn(prompt, said, versions, log_z=log_z, text=draw(st.text(max_size=20))))
    rollout = played(*turns, error=draw(st.none() | st.just("it broke")))
    names = draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=2))
    for name in sorted(names, key=lambda name: name.endswith("in place")):  # what is checked anew comes first
        rollout.samples = [CHANGES[name](sample) for sample in rollout.samples]
    if draw(st.sampled_from([False, False, False, True])):
        rollout.samples = draw(st.sampled_from([[], rollout.samples * 2]))
    return rollout


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_the_quick_way_writes_the_bytes_of_the_long_way(rollout):
    assert alike(rollout)


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_sample_as_it_was_made_is_not_compared(change, monkeypatch):
    compared = []
    real = bodies.LongEncoder._compared
    monkeypatch.setattr(
        bodies.LongEncoder, "_compared", lambda self, sample: compared.append(sample) or real(self, sample)
    )
    rollout = played(turn(list(range(30)), list(range(40)), [4] * 40))
    rollout.samples = [CHANGES[change](sample) for sample in rollout.samples]
    _encode_rollout(rollout)
    assert bool(compared) == (change not in ("nothing", "credit", "no ticket"))
    assert alike(rollout)


def test_turns_that_go_on_share_their_tokens_and_know_their_own():
    first = turn([1, 2], [3, 4], [0, 0])
    second = turn([1, 2, 3, 4, 5], [6], [1])
    other = turn([9], [8, 7], [0, 1])
    assemble(Rollout(ticket=TICKET, member=0, turns=[first, second, other]))
    assert first.packed.tokens is second.packed.tokens
    for spoken in (first, second, other):
        packed = spoken.packed
        full = np.frombuffer(packed.tokens, np.int32)[: packed.end].tolist()
        assert full == [*spoken.prompt_ids, *spoken.completion_ids]
        assert packed.start == len(spoken.prompt_ids)
    assert (first.packed.versions, second.packed.versions) == (0, 1)
    assert np.frombuffer(other.packed.versions, np.int32).tolist() == [0, 1]


@pytest.mark.parametrize("travelled", [copy.deepcopy, lambda rollout: pickle.loads(pickle.dumps(rollout))])
def test_what_travels_is_written_alike_though_it_can_be_changed_again(travelled):
    rollout = played(turn(list(range(30)), list(range(40)), [4] * 40))
    there = travelled(rollout)
    assert there.turns == rollout.turns
    assert there.turns[0].packed is None
    assert _encode_rollout(there) == _encode_rollout(rollout)
    there.samples[0].logprobs[-1] = 3.0
    assert _encode_rollout(there) != _encode_rollout(rollout)


def test_what_was_sampled_is_not_written_over():
    (sample,) = assemble(Rollout(ticket=TICKET, member=0, turns=[turn([1, 2], [3, 4], [0, 0])]))
    for stream in (sample.token_ids, sample.logprobs, sample.temperatures):
        with pytest.raises(ValueError, match="read-only"):
            stream[0] = 1


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=3))
def test_a_row_says_the_oldest_and_the_newest_version(versions):
    rollout = Rollout(ticket=TICKET, member=0, turns=[turn([1], [2] * len(some), some) for some in versions])
    every = [version for some in versions for version in some]
    row = rollout_facts(rollout, "trained")
    assert (row.version_min, row.version_max) == ((min(every), max(every)) if every else (-1, -1))


def test_what_is_packed_is_no_field_of_a_turn():
    """Who writes turns down finds what was said, as before, and nothing of ours."""
    rollout = played(turn(list(range(30)), list(range(40)), [4] * 40))
    assert rollout.turns[0].packed is not None
    assert json.loads(json.dumps(asdict(rollout.turns[0])))["completion_ids"] == list(range(40))
    assert rollout.turns[0] == replace(rollout.turns[0])
    assert "packed" not in repr(rollout.turns[0])


def test_a_turn_made_of_another_says_what_it_says_itself():
    rollout = played(turn(list(range(30)), list(range(40)), [4] * 40))
    before = _encode_rollout(rollout)
    rollout.turns = [replace(rollout.turns[0], logprobs=[-9.0] * 40)]
    assert _encode_rollout(rollout) != before
    assert alike(rollout)


def test_token_ids_beyond_four_bytes_are_assembled_and_have_no_body():
    rollout = played(turn(list(range(30)), [2**31, *range(20)], [4] * 21))
    assert rollout.turns[0].packed is None
    assert rollout.samples[0].token_ids[30] == 2**31
    assert _encode_rollout(rollout)[0] == b""


# -- numbers and letters ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.floats()))
def test_bytes_are_those_of_arrays(integers, numbers):
    assert pack_ids(integers) == array("i", integers).tobytes()
    assert pack_floats(numbers) == array("f", numbers).tobytes()
    assert expand_versions(pack_versions(integers), len(integers)) == pack_ids(integers)


@pytest.mark.parametrize(("values", "error"), [([2**31], OverflowError), ([1.5], TypeError), ([None], TypeError)])
def test_numbers_that_do_not_fit_are_refused(values, error):
    for pack in (pack_ids, pack_versions):
        with pytest.raises(error):
            pack(values)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 40))
def test_a_text_is_folded_letter_by_letter(text, plain):
    for whole in (text, "A plain Text. " * plain + text):
        assert fold(whole) == whole.casefold().encode()


@given(st.lists(st.text()))
def test_texts_are_lines_of_one_text(texts):
    """Surrogates included, which no file takes: they are made harmless wherever they stand."""
    assert fold_lines(texts) == fold("\n".join(filter(None, texts)) + "\n")


def test_capitals_play_no_part_in_any_alphabet():
    capitals = [letter for letter in map(chr, range(sys.maxunicode + 1)) if letter.casefold() != letter]
    assert len(capitals) > 1000
    for letter in capitals:
        text = f"Plain words – and {letter} once among very many that have no others, as most texts are."
        assert fold(text) == text.casefold().encode()
