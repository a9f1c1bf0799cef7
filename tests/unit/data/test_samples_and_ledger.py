"""Laws of the data room: samples, the wire, packing and scales, and the books that account for tickets."""

import copy
import csv
import functools
import itertools
import json
import math
import pickle
import random
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.data import (
    Cursor,
    DataError,
    Ledger,
    Sample,
    State,
    Ticket,
    WireError,
    decode,
    encode,
    first_fit_decreasing,
    open_rows,
    pack,
    token_scales,
)
from paceline.data.ledger import LedgerError
from paceline.data.sample import SCALAR_FIELDS, STREAM_DTYPES, WEIGHT_STREAMS
from paceline.util.importing import HookError, import_object

laws = settings(max_examples=25, deadline=None)

REQUIRED = ("token_ids", "loss_mask", "versions", "temperatures")
OPTIONAL = tuple(name for name in STREAM_DTYPES if name not in REQUIRED)
TICKET = Ticket(7, "maze", 1, 40, 3)
SEEDS = st.integers(0, 2**32 - 1)


def sample(length: int = 5, seed: int = 0, present: frozenset[str] | set[str] = frozenset(OPTIONAL), **changes):
    """A valid sample with random streams, some weights zero; `present` names its optional streams."""
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.6
    mask[0] = False
    streams = {name: rng.standard_normal(length) for name in OPTIONAL if name in present}
    for name in present & set(WEIGHT_STREAMS):
        streams[name] = np.where(rng.random(length) < 0.7, streams[name], 0.0)
        streams[name][0] = 0.0
    streams |= {
        "token_ids": rng.integers(0, 2**40, length),
        "loss_mask": mask,
        "versions": np.where(mask, rng.integers(0, 9, length), -1),
        "temperatures": rng.uniform(0.1, 2.0, length),
    }
    return Sample(**({"env": "maze", "ticket": TICKET, "rollout": 2} | streams | changes))


@st.composite
def samples(draw):
    """Any sample: any streams present, any scalars."""
    length = draw(st.integers(1, 12))
    ends = st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda ends: tuple(sorted(ends)))
    return sample(
        length,
        draw(SEEDS),
        draw(st.sets(st.sampled_from(OPTIONAL))),
        ended=draw(st.sampled_from(["terminated", "truncated"])),
        env=draw(st.text(max_size=5)),
        ticket=draw(st.sampled_from([None, TICKET, TICKET._replace(number=8)])),
        rollout=draw(st.integers(0, 2)),
        spans=tuple(draw(st.lists(ends, max_size=3))),
    )


def bits(one: Sample) -> dict:
    return {name: (stream.dtype, stream.shape, stream.tobytes()) for name, stream in one.streams().items()}


def scalars(one: Sample) -> dict:
    return {name: getattr(one, name) for name in SCALAR_FIELDS}


# --- samples


@laws
@given(st.sampled_from(list(STREAM_DTYPES)), st.integers(2, 8), st.integers(1, 8))
def test_streams_of_another_length_are_refused_by_name_and_both_lengths(name, length, other):
    streams = sample(length).streams()
    changed = streams | {name: np.resize(streams[name], other)}
    if other == length:
        Sample(**changed)
        return
    with pytest.raises(ValueError) as caught:
        Sample(**changed, env="maze", ticket=TICKET, rollout=2)
    for part in ("env `maze`", "ticket 7", "rollout 2", str(length), str(other)):
        assert part in str(caught.value)
    if name != "token_ids":
        assert f"`{name}`" in str(caught.value)


first, third = np.eye(5)[0], np.eye(5)[3]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({name: [] for name in REQUIRED}, "needs at least one token"),
        ({"token_ids": np.zeros((5, 1))}, r"`token_ids` has shape \(5, 1\), but the sample has 5 tokens"),
        ({"loss_mask": first, "versions": first - 1}, "`loss_mask` trains the first token"),
        *(({name: first}, f"`{name}` trains the first token") for name in WEIGHT_STREAMS),
        ({"loss_mask": third, "versions": np.full(5, 0)}, "`versions` must be -1 off the loss mask"),
        ({"loss_mask": third, "versions": np.full(5, -1), "logprobs": np.zeros(5)}, "needs its version"),
        *(({"temperatures": np.full(5, t)}, "`temperatures` must be positive") for t in (0.0, -1.0)),
    ],
)
def test_what_cannot_train_is_refused_with_its_place(changes, sentence):
    with pytest.raises(ValueError, match=f"^env `maze`, ticket 7, rollout 2: .*{sentence}"):
        sample(present=set(), **changes)


def test_a_frozen_sampler_needs_no_versions():
    frozen = sample(present=set(), loss_mask=third, versions=np.full(5, -1))
    assert frozen.oldest_version is None
    assert "ticket -" in sample(ticket=None).where


@laws
@given(samples(), st.integers(1, 14))
def test_truncation_slices_every_stream_alike(whole, limit):
    cut = whole.truncated_to(limit)
    assert cut.streams().keys() == whole.streams().keys()
    for name, stream in cut.streams().items():
        np.testing.assert_array_equal(stream, getattr(whole, name)[:limit])
    assert all(0 <= start <= end <= len(cut) for start, end in cut.spans)
    assert cut.spans == tuple((s, min(e, limit)) for s, e in whole.spans if s < limit or len(whole) <= limit)
    assert cut.ended == ("truncated" if len(whole) > limit else whole.ended)
    assert scalars(cut) | {"ended": 0, "spans": 0} == scalars(whole) | {"ended": 0, "spans": 0}


@laws
@given(samples())
def test_age_is_that_of_the_oldest_token_that_trains(one):
    rl = one.loss_mask if one.rl_weights is None else one.loss_mask & (one.rl_weights != 0)
    teacher_kl = (
        one.loss_mask & (one.teacher_kl_weights != 0)
        if one.teacher_kl_weights is not None
        else np.zeros(len(one), bool)
    )
    ce = one.loss_mask & (one.ce_weights != 0) if one.ce_weights is not None else np.zeros(len(one), bool)
    np.testing.assert_array_equal(one.rl_token_weights != 0, rl)
    trained = one.versions[rl | teacher_kl | ce]
    assert one.oldest_version == (None if one.logprobs is None or not len(trained) else trained.min())


# --- wire


@laws
@given(st.lists(samples(), max_size=4))
def test_the_wire_gives_back_every_bit_without_copying(batch):
    data = encode(batch)
    decoded = decode(data)
    assert [scalars(s) for s in decoded] == [scalars(s) for s in batch]
    assert [bits(s) for s in decoded] == [bits(s) for s in batch]
    for one in decoded:
        assert one.ticket is None or isinstance(one.ticket, Ticket)
        for stream in one.streams().values():
            assert not stream.flags.writeable
            assert np.shares_memory(stream, np.frombuffer(data, np.uint8))
            assert stream.tobytes() in data


@pytest.mark.parametrize("odd", [np.nan, -np.nan, -0.0, np.inf, 1e-45])
def test_odd_floats_keep_their_bits_on_the_wire(odd):
    one = sample(3, logprobs=np.full(3, odd), advantages=np.full(3, odd))
    assert bits(decode(encode([one]))[0]) == bits(one)


def test_a_batch_of_an_earlier_version_is_read():
    sample = Sample.as_sampled([1, 2, 3]).with_streams(teacher_logprobs=np.ones(3), kl_ref_logprobs=np.zeros(3))
    written = encode([sample]).replace(b"\xb0teacher_logprobs", b"\xacref_logprobs")
    (again,) = decode(written.replace(b"\xafkl_ref_logprobs", b"\xadbase_logprobs"))
    assert again.teacher_logprobs.tolist() == [1, 1, 1]
    assert again.kl_ref_logprobs.tolist() == [0, 0, 0]


def test_every_truncation_of_a_batch_is_a_wire_error():
    data = encode([sample(3), sample(1, present=set())])
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:end])
    with pytest.raises(WireError):
        decode(data + b"\x00")


@laws
@given(st.binary(max_size=80))
def test_garbage_is_a_wire_error(data):
    with pytest.raises(WireError):
        decode(data)


@settings(laws, max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 255), SEEDS)
def test_a_damaged_byte_is_a_wire_error_or_another_valid_batch(at, byte, seed):
    data = bytearray(encode([sample(3, seed)]))
    data[at % len(data)] = byte
    try:
        decoded = decode(bytes(data))
    except WireError:
        return
    assert all(isinstance(one, Sample) for one in decoded)


@laws
@given(st.text(max_size=6) | st.sampled_from(["(1,", "i4,(,", "O", "|O", ">i8", "<i4", "<i8,", "<i8 "]))
def test_no_dtype_but_the_streams_own_is_read(dtype):
    parts = msgspec.msgpack.decode(encode([sample(1, present=set())]))
    parts[1][0][0]["token_ids"][0] = dtype
    with pytest.raises(WireError, match="token_ids"):
        decode(msgspec.msgpack.encode(parts))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([sample()]),
        b"\x93\x01\x90" + b"\x91" * 100_000 + b"\xc0",  # an extra field nested past any stack
        msgspec.msgpack.encode([2, []]),
        msgspec.msgpack.encode([1, [[{"colours": ["<i8", [1], bytes(8)]}, "terminated", "", None, 0, []]]]),
        msgspec.msgpack.encode([1, [[{}, "terminated", "", None, 0, []]]]),
    ],
    ids=["pickle", "nesting", "version", "unknown stream", "no streams"],
)
def test_foreign_bytes_are_a_wire_error(data):
    with pytest.raises(WireError, match="not a batch of samples"):
        decode(data)


# --- packing


def optimum(lengths: list[int], budget: int) -> int:
    """Fewest bins, by trying everything."""

    @functools.cache
    def fewest(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        longest, rest = left[0], left[1:]
        choices = (c for n in range(len(rest) + 1) for c in itertools.combinations(range(len(rest)), n))
        fits = (c for c in choices if longest + sum(rest[i] for i in c) <= budget)
        return 1 + min(fewest(tuple(r for i, r in enumerate(rest) if i not in c)) for c in fits)

    return fewest(tuple(sorted(lengths, reverse=True)))


@laws
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 16))
def test_packing_keeps_every_sample_once_and_the_budget(lengths, budget):
    bins = first_fit_decreasing(lengths, budget)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert all(load <= budget or len(members) == 1 for load, members in zip(loads, bins, strict=True))
    assert bins == first_fit_decreasing(list(lengths), budget)
    for late, early in itertools.combinations(range(len(bins))[::-1], 2):  # first fit: nothing here fitted further left
        longest = lengths[bins[late][0]]
        assert longest > budget - sum(lengths[i] for i in bins[early] if lengths[i] >= longest)


@laws
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(12, 24))
def test_packing_needs_at_most_the_classic_bound(lengths, budget):
    assert len(first_fit_decreasing(lengths, budget)) <= math.floor(11 / 9 * optimum(lengths, budget) + 6 / 9)


ABSENT = {"advantages": 0, "teacher_logprobs": 0, "logprobs": np.nan, "rewards": np.nan, "kl_ref_logprobs": np.nan}


@laws
@given(st.lists(samples(), max_size=6), st.integers(1, 30))
def test_packed_streams_are_the_samples_laid_end_to_end(batch, budget):
    scales = token_scales(batch)
    micro_batches = pack(batch, scales, budget)
    assert sorted(i for m in micro_batches for i in m.members) == list(range(len(batch)))
    for micro in micro_batches:
        starts = np.cumsum([0, *micro.lengths])
        for index, start, end in zip(micro.members, starts[:-1], starts[1:], strict=True):
            one = batch[index]
            expected = {name: np.full(len(one), fill) for name, fill in ABSENT.items()} | one.streams()
            expected = {name: stream for name, stream in expected.items() if name not in WEIGHT_STREAMS}
            expected["positions"] = np.arange(len(one))
            expected |= {f"{part}_scale": getattr(scales[index], part) for part in ("rl", "ce", "teacher_kl")}
            for name, stream in expected.items():
                np.testing.assert_array_equal(getattr(micro, name)[start:end], stream, err_msg=name)
                assert getattr(micro, name).dtype == STREAM_DTYPES.get(name, getattr(micro, name).dtype)


def test_a_misaligned_pack_is_caught():
    one = sample(3)
    with pytest.raises(AssertionError, match="`rl_scale`"):
        pack([one], token_scales([sample(4)]), 8)


# --- scales

PARTS = ("rl", "ce", "teacher_kl")


def weights(one: Sample, part: str) -> list[float]:
    """What the absence of a stream means, said once more: rl weight one on the mask, nothing else."""
    stream = getattr(one, f"{part}_weights")
    if stream is None:
        return [float(m and part == "rl") for m in one.loss_mask]
    return [float(w) if m or part == "ce" else 0.0 for w, m in zip(stream, one.loss_mask, strict=True)]


def reference(batch: list[Sample], part: str, normalise: str, length: int) -> list[list[float]]:
    """The scales in float64, from the formulas."""
    owners = [i if s.ticket is None else (s.ticket, s.rollout) for i, s in enumerate(batch)]
    counts = dict.fromkeys(owners, 0)
    for owner, one in zip(owners, batch, strict=True):
        counts[owner] += sum(w != 0 for w in weights(one, part))
    rollouts = sum(n > 0 for n in counts.values())
    divisor = {
        "token": lambda owner: sum(counts.values()),
        "sample": lambda owner: rollouts * counts[owner],
        "fixed": lambda owner: rollouts * length,
    }[normalise]
    return [[w and w / divisor(o) for w in weights(s, part)] for o, s in zip(owners, batch, strict=True)]


NORMALISERS = st.sampled_from(["token", "sample", "fixed"])


@laws
@given(st.lists(samples(), max_size=8), NORMALISERS, st.integers(1, 99))
def test_scales_are_weights_over_their_normaliser(batch, normalise, length):
    for part in PARTS:
        expected = reference(batch, part, normalise, length)
        for scale, wanted in zip(token_scales(batch, normalise, length), expected, strict=True):
            np.testing.assert_allclose(getattr(scale, part), wanted, rtol=1e-6)


@laws
@given(st.lists(samples(), min_size=1, max_size=8), NORMALISERS, st.integers(1, 40), SEEDS)
def test_the_loss_is_the_same_sum_however_the_batch_is_cut(batch, normalise, budget, seed):
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(len(one)) for one in batch]  # the loss of each token, whatever it is
    micro_batches = pack(batch, token_scales(batch, normalise, 9), budget)
    for part in PARTS:
        whole = math.fsum(
            w * v
            for ws, vs in zip(reference(batch, part, normalise, 9), values, strict=True)
            for w, v in zip(ws, vs, strict=True)
        )
        pieces = (getattr(m, f"{part}_scale") @ np.concatenate([values[i] for i in m.members]) for m in micro_batches)
        assert math.fsum(pieces) == pytest.approx(whole, rel=1e-5, abs=1e-5)


@laws
@given(st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=3), min_size=1, max_size=4))
def test_each_rollout_weighs_the_same_however_many_samples_it_has(rollouts):
    batch = [
        sample(n, present=set(), loss_mask=np.arange(n) > 0, versions=np.arange(n) - 1, rollout=member)
        for member, lengths in enumerate(rollouts)
        for n in lengths
    ]
    totals = dict.fromkeys(range(len(rollouts)), 0.0)
    for one, scale in zip(batch, token_scales(batch, "sample"), strict=True):
        totals[one.rollout] += scale.rl.sum()
        assert len({*scale.rl[1:]}) == 1
    assert list(totals.values()) == pytest.approx([1 / len(rollouts)] * len(rollouts), rel=1e-5)


@laws
@given(st.lists(samples(), min_size=1, max_size=4), samples(), NORMALISERS)
def test_zero_weights_do_not_count(batch, silent, normalise):
    zeros = np.zeros(len(silent))
    silent = silent.with_streams(rl_weights=zeros, ce_weights=zeros, teacher_kl_weights=zeros)
    for alone, beside in zip(token_scales(batch, normalise), token_scales([*batch, silent], normalise), strict=False):
        for part in PARTS:
            np.testing.assert_array_equal(getattr(alone, part), getattr(beside, part))


# --- cursor


@laws
@given(st.integers(1, 30), SEEDS, st.text(max_size=4), st.integers(0, 70), st.integers(0, 70))
def test_row_order_is_a_pure_function_and_resumes_anywhere(rows, seed, name, before, after):
    unbroken = Cursor(rows, seed, name)
    draws = [unbroken.draw() for _ in range(before + after)]
    first_half = Cursor(rows, seed, name)
    for _ in range(before):
        first_half.draw()
    resumed = Cursor(rows, seed, name)
    resumed.draw()  # whatever it did before, it goes on from the checkpoint
    resumed.load(json.loads(json.dumps(first_half.state())))
    assert [resumed.draw() for _ in range(after)] == draws[before:]
    assert [(epoch, draw) for epoch, draw, _ in draws] == [(i // rows, i) for i in range(len(draws))]
    for start in range(0, len(draws) - rows + 1, rows):
        assert sorted(row for _, _, row in draws[start : start + rows]) == list(range(rows))


@laws
@given(
    st.lists(st.integers(0, 2**63), min_size=2, max_size=2, unique=True),
    st.lists(st.text(max_size=4), min_size=2, max_size=2, unique=True),
)
def test_other_seeds_names_and_epochs_give_other_orders(seeds, names):
    cursors = [Cursor(40, seed, name) for seed in seeds for name in names]
    orders = {tuple(cursor.draw()[2] for _ in range(40)) for cursor in cursors for _ in range(2)}
    assert len(orders) == len(cursors) * 2


# --- ledger


class Books(RuleBasedStateMachine):
    """Any life a run may lead: tickets come and go, a checkpoint is taken, the run falls back to it."""

    def __init__(self):
        super().__init__()
        self.told: list[dict] = []
        self.ledger = Ledger(self.told.append)
        self.state: dict[Ticket, State] = {}
        self.places = 0
        self.reasons: dict[str, int] = {}
        self.step = -1
        self.keep(0)

    def pick(self, data, *states: State) -> Ticket:
        return data.draw(st.sampled_from([t for t, s in self.state.items() if s in states]))

    def some(*states: State):
        return precondition(lambda self: any(s in states for s in self.state.values()))

    def moved(self, ticket: Ticket, state: State, **details):
        self.state[ticket] = state
        assert self.told.pop() == {**ticket._asdict(), "state": state.value, **details, "since": self.step}
        assert not self.told

    @rule(env=st.sampled_from("ab"), row=st.integers(0, 3))
    def draw(self, env, row):
        number = len(self.state)
        ticket = Ticket(number, env, 0, number, row)
        self.ledger.draw(ticket)
        self.state[ticket] = State.WAITING
        for other in (number, number + 2, -1):
            with pytest.raises(LedgerError, match=f"ticket {other} was drawn out of order, {number + 1} was next"):
                self.ledger.draw(ticket._replace(number=other))

    @some(State.WAITING)
    @rule()
    def start(self):
        oldest = min(t for t, s in self.state.items() if s is State.WAITING)
        assert self.ledger.start() == oldest
        self.moved(oldest, State.IN_FLIGHT)

    @some(State.IN_FLIGHT)
    @rule(data=st.data())
    def buffer(self, data):
        ticket = self.pick(data, State.IN_FLIGHT)
        self.ledger.buffer(ticket)
        self.moved(ticket, State.BUFFERED)

    @some(State.BUFFERED)
    @rule(data=st.data(), places=st.integers(1, 8))
    def train(self, data, places):
        ticket = self.pick(data, State.BUFFERED)
        self.ledger.train(ticket, step=5, rollouts=places)
        self.places += places
        self.moved(ticket, State.TRAINED, step=5)

    @some(State.IN_FLIGHT, State.BUFFERED)
    @rule(data=st.data(), reason=st.sampled_from(["stale", "zero_advantage"]))
    def drop(self, data, reason):
        ticket = self.pick(data, State.IN_FLIGHT, State.BUFFERED)
        self.ledger.drop(ticket, reason)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.moved(ticket, State.DROPPED, reason=reason)

    @precondition(lambda self: self.state)
    @rule(data=st.data(), move=st.sampled_from(["buffer", "train", "drop"]))
    def illegal(self, data, move):
        ticket, state = data.draw(st.sampled_from(list(self.state.items())))
        allowed = {State.WAITING: (), State.IN_FLIGHT: ("buffer", "drop"), State.BUFFERED: ("train", "drop")}
        if move not in allowed.get(state, ()):
            with pytest.raises(LedgerError, match=f"ticket {ticket.number} cannot go from"):
                getattr(self.ledger, move)(ticket, *{"buffer": (), "train": (0, 1), "drop": ("stale",)}[move])

    @rule(steps=st.integers(1, 3))
    def keep(self, steps):
        self.step += steps
        model = (self.state, self.places, self.reasons, self.step)
        self.kept = json.loads(json.dumps(self.ledger.state(self.step))), copy.deepcopy(model)

    @rule(data=st.data(), restarted=st.booleans())
    def fall_back(self, data, restarted):
        """Some of the groups that were finished were kept with the books."""
        if restarted:
            self.ledger = Ledger(self.told.append)
        books, model = self.kept
        self.state, self.places, self.reasons, self.step = copy.deepcopy(model)
        finished = [t for t, s in self.state.items() if s is State.BUFFERED]
        groups = data.draw(st.lists(st.sampled_from(finished), unique=True)) if finished else []
        self.ledger.load(books, groups)
        gone = [t for t, s in self.state.items() if s in (State.TRAINED, State.DROPPED)]
        self.state = {t: s if t in gone or t in groups else State.WAITING for t, s in self.state.items()}
        for ticket in gone:
            with pytest.raises(LedgerError, match="do not have open"):
                Ledger().load(books, [ticket])

    @invariant()
    def every_ticket_is_counted_once(self):
        ledger, states = self.ledger, list(self.state.values())
        assert list(ledger.waiting) == sorted(t for t, s in self.state.items() if s is State.WAITING)
        for state in (State.WAITING, State.IN_FLIGHT, State.BUFFERED):
            assert ledger.count(state) == states.count(state)
        assert (ledger.trained, ledger.trained_rollouts) == (states.count(State.TRAINED), self.places)
        assert ledger.dropped == self.reasons
        still_open = sum(ledger.count(s) for s in (State.WAITING, State.IN_FLIGHT, State.BUFFERED))
        assert ledger.drawn == len(states) == ledger.trained + ledger.dropped.total() + still_open

    @invariant()
    def whatever_is_open_waits_again_after_a_restart(self):
        restarted = Ledger()
        restarted.load(json.loads(json.dumps(self.ledger.state())))
        assert list(restarted.waiting) == sorted(
            t for t, s in self.state.items() if s not in (State.TRAINED, State.DROPPED)
        )
        assert restarted.count(State.WAITING) == len(restarted.waiting)
        restarted.load(self.ledger.state(), [t for t, s in self.state.items() if s is State.BUFFERED])
        assert restarted.state() == self.ledger.state()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


# --- rows

FIELDS = ("word", "answer")
WRITERS = {
    "json": lambda file, rows: json.dump(rows, file),
    "jsonl": lambda file, rows: file.writelines(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows),
    "csv": lambda file, rows: csv.writer(file).writerows([FIELDS, *([row[f] for f in FIELDS] for row in rows)]),
}


def read_rows(source):
    """The rows of a file that may hold anything."""
    return list(open_rows(source, prompted=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@laws
@given(st.lists(st.fixed_dictionaries({field: st.text(max_size=9) for field in FIELDS}), min_size=1, max_size=5))
def test_rows_are_the_same_from_every_format(folder, rows):
    for suffix, write in WRITERS.items():
        path = folder / f"rows.{suffix}"
        with path.open("w", encoding="utf-8", newline="") as file:
            write(file, rows)
        assert read_rows(str(path)) == rows


def test_a_spreadsheets_byte_order_mark_is_not_part_of_a_name(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("word,answer\n1,2\n", encoding="utf-8-sig")
    assert read_rows(str(path)) == [{"word": "1", "answer": "2"}]


@pytest.mark.parametrize(
    ("suffix", "good", "bad", "place"),
    [
        *(("jsonl", '{"a": 1}\n', bad, ":{}:") for bad in ("{", "3", "[]", "'a'", "null")),
        *(("csv", "a,b\n", bad, ":{}:") for bad in ("1", "1,2,3", '1,"2')),
        *(("json", "", bad, ", row 1:") for bad in ("[3]", '["a"]')),
        *(("json", "\n", bad, ":{}:") for bad in ("[{]", "{", "")),
    ],
)
def test_a_bad_row_names_its_file_and_line(tmp_path, suffix, good, bad, place):
    for lines in range(1, 4):
        path = tmp_path / f"rows.{suffix}"
        path.write_text(good * lines + bad)
        with pytest.raises(DataError) as caught:
            read_rows(str(path))
        assert str(caught.value).startswith(f"{path}{place.format(lines + 1)}")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.jsonl", None, "no such file, looked in "),
        *((f"empty.{s}", b"[]" if s == "json" else b"", "holds no rows") for s in WRITERS),
        ("header.csv", b"a,b\n", "holds no rows"),
        ("rows", b"x", "not a .json, .jsonl, .csv, .parquet, .arrow file"),
        ("latin.csv", b"a\n\xe9\n", "cannot be read"),
        ("folder.csv", "folder", "cannot be read"),
    ],
)
def test_an_unusable_dataset_is_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(str(path))
    assert str(caught.value).startswith(f"dataset {path}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_of_rows_is_not_an_object(tmp_path):
    (tmp_path / "rows.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="must hold a list of objects, not dict"):
        read_rows(str(tmp_path / "rows.json"))


# --- user code


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    """A folder of modules that can be named as files and as packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    stem = f"user{random.getrandbits(48)}"  # modules outlive a test
    (tmp_path / f"{stem}.py").write_text("class Thing: pass\nNESTED = {'a': 1}\n")
    (tmp_path / f"{stem}_broken.py").write_text("1 / 0")
    (tmp_path / f"{stem}_needy.py").write_text("import no_such_thing")
    yield stem
    for name in [name for name in sys.modules if stem in name]:
        del sys.modules[name]


def test_code_is_found_as_a_module_and_as_a_file(user_code, tmp_path, monkeypatch):
    assert import_object("math:pi") is math.pi
    assert import_object(f"{user_code}:NESTED") == {"a": 1}
    by_file = import_object(f"{tmp_path}/{user_code}.py:Thing")
    monkeypatch.chdir(tmp_path)
    assert import_object(f"{user_code}.py:Thing") is by_file  # one file is one module, however it is named


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        *((path, "write `package.module:name` or `path/to/file.py:name`") for path in ("math", "math:", ":pi", "")),
        ("math:tau_and_pi", "math has no `tau_and_pi`"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        (".relative:x", "TypeError"),
        ("{0}_broken:x", "raised ZeroDivisionError: division by zero"),
        ("{0}_needy:x", "No module named 'no_such_thing'"),
        ("{1}/absent.py:x", "no such file `{1}/absent.py`"),
        ("{1}/{0}.py:absent", "{1}/{0}.py has no `absent`"),
        ("{1}/{0}_broken.py:x", "raised ZeroDivisionError: division by zero"),
        ("{1}/{0}_needy.py:x", "raised ModuleNotFoundError: No module named 'no_such_thing'"),
    ],
)
def test_code_that_cannot_be_loaded_is_a_sentence(user_code, tmp_path, path, sentence):
    path = path.format(user_code, tmp_path)
    for _ in range(2):  # a failed import leaves nothing half-loaded behind
        with pytest.raises(HookError) as caught:
            import_object(path)
        assert str(caught.value).startswith(f"import path `{path}`: ")
        assert sentence.format(user_code, tmp_path) in str(caught.value)
