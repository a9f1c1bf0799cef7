"""What a captured step is told: the same, whether or not the step before decoded the same sequences."""

from concurrent.futures import Future

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine import GenerateRequest
from paceline.engine.cuda.step import StepShape, is_decode_only, split_fields
from paceline.engine.sequence import Chunk, DecodeSequence

ROWS, EXTRA, COLUMNS = 6, 16, 8


def _sequence(slot: int, prompt: int, temperature: float = 1.0, arrival: int = 0) -> DecodeSequence:
    request = GenerateRequest(prompt_ids=tuple(range(10, 10 + prompt)), max_tokens=50, temperature=temperature)
    sequence = DecodeSequence(request, Future(), list(request.prompt_ids), 60)
    sequence.slot, sequence.arrival = slot, arrival
    return sequence


def _decoding(sequence: DecodeSequence, start: int, adapter: int = 0) -> Chunk:
    index = start + 1 - len(sequence.request.prompt_ids)
    return Chunk(sequence, start, 1, True, 0, adapter, index)


def _written(shape: StepShape, chunks: list[Chunk], changed: dict[tuple[int, int], int]) -> tuple[list[int], list]:
    buffer = np.full(shape.size + 3, -7, np.int64)
    order = sorted(chunks, key=lambda c: (c.length > 1, not c.samples_token))
    drawn = shape.fill(buffer, order, changed, COLUMNS, ROWS)
    assert (buffer[shape.size :] == -7).all()
    return buffer[: shape.size].tolist(), list(drawn)


ROW = st.tuples(st.integers(0, 4), st.integers(0, 1), st.sampled_from([True] * 9 + [False]), st.booleans())
"""How far past its prompt a sequence is, its adapter, whether it is sampled from, and whether the host saw a token."""
CHANGES = st.dictionaries(
    st.tuples(st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1)), st.integers(1, 99), max_size=4
)


@st.composite
def _steps(draw: st.DrawFn) -> list[tuple[list[tuple[int, int]], list[tuple[int, int, bool, bool]], dict]]:
    """Steps in which sequences come, go and change their slots: who is where, how far each is, what pages changed."""
    steps = []
    running = [(who, who) for who in range(ROWS)]
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 3)) == 0:
            who, where = draw(st.permutations(range(ROWS))), draw(st.permutations(range(ROWS)))
            running = list(zip(who, where, strict=True))[: draw(st.integers(1, ROWS))]
        rows = draw(st.lists(ROW, min_size=len(running), max_size=len(running)))
        steps.append((running, rows, draw(CHANGES)))
    return steps


@given(st.lists(st.integers(1, 5), min_size=ROWS, max_size=ROWS), _steps())
def test_what_a_step_is_told_does_not_depend_on_the_steps_before_it(prompts, steps) -> None:
    pool = [_sequence(0, length, length / 4, arrival) for arrival, length in enumerate(prompts)]
    shape = StepShape(ROWS, 0, ROWS)
    for running, rows, changed in steps:
        chunks = []
        for (who, slot), (further, adapter, samples, seen) in zip(running, rows, strict=True):
            sequence = pool[who]
            sequence.slot = slot
            sequence.tokens += [100 + who] * seen
            chunk = _decoding(sequence, len(sequence.request.prompt_ids) - 1 + further, adapter)
            chunk.samples_token = samples
            chunks.append(chunk)
        told, drawn = _written(shape, chunks, changed)
        fresh, expected = _written(StepShape(ROWS, 0, ROWS), chunks, changed)
        assert told == fresh
        assert [id(chunk) for chunk in drawn] == [id(chunk) for chunk in expected]


def test_the_same_sequences_a_token_further_are_known_again_others_and_in_other_slots_not() -> None:
    shape, a, b = StepShape(ROWS, 0, ROWS), _sequence(0, 3), _sequence(1, 2, arrival=1)
    _written(shape, [_decoding(a, 2), _decoding(b, 1)], {})
    assert not shape.same_sequences
    told, _ = _written(shape, [_decoding(a, 3), _decoding(b, 2)], {})
    assert shape.same_sequences
    assert told == _written(StepShape(ROWS, 0, ROWS), [_decoding(a, 3), _decoding(b, 2)], {})[0]
    other = _sequence(1, 2, temperature=0.5, arrival=2)  # in the place of one that is done
    told, _ = _written(shape, [_decoding(a, 4), _decoding(other, 3)], {})
    assert not shape.same_sequences
    assert told == _written(StepShape(ROWS, 0, ROWS), [_decoding(a, 4), _decoding(other, 3)], {})[0]
    _written(shape, [_decoding(a, 4), _decoding(b, 3)], {})
    a.slot, b.slot = 1, 0
    told, _ = _written(shape, [_decoding(a, 4), _decoding(b, 3)], {})
    assert not shape.same_sequences
    assert told == _written(StepShape(ROWS, 0, ROWS), [_decoding(a, 4), _decoding(b, 3)], {})[0]


def test_a_prompt_among_them_is_written_whole() -> None:
    shape, a, b = StepShape(ROWS, EXTRA, ROWS), _sequence(0, 3), _sequence(1, 9, arrival=1)
    prompt = Chunk(b, 0, 9, True, 0)
    for _ in range(2):
        told, drawn = _written(shape, [prompt, _decoding(a, 2)], {(1, 0): 5})
        assert not shape.same_sequences
        fields = split_fields(np.array(told), shape.sizes)
        assert fields["ids"][ROWS : ROWS + 9].tolist() == list(b.request.prompt_ids)
        assert fields["positions"][ROWS : ROWS + 9].tolist() == list(range(9))
        assert fields["rows"][:2].tolist() == [0, ROWS + 8]
        assert (fields["places"][0], fields["pages"][0]) == (COLUMNS, 5)
        assert [chunk.sequence for chunk in drawn] == [a, b]
    assert is_decode_only([_decoding(a, 2)])
    assert not is_decode_only([prompt])
    assert not is_decode_only([Chunk(a, 2, 1, False, 0)])
