"""Deltas of weights: the base and the delta give the result, bit for bit, or an error says why not."""

import contextlib
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.weights.delta import (
    BLOCK,
    HEADER,
    MAGIC,
    DeltaEncoder,
    DeltaError,
    WeightDelta,
    _digest,
    decode_positions,
    encode_positions,
)
from paceline.weights.update import ServedPolicy, bits_of, fingerprint

DTYPES = [torch.float32, torch.bfloat16]
SPECIAL = {  # quiet and signalling NaN, -0.0, infinity, the smallest subnormal
    torch.float32: [0x7FC00000, 0x7F800001, -(1 << 31), 0x7F800000, 1],
    torch.bfloat16: [0x7FC0, 0x7F81, -(1 << 15), 0x7F80, 1],
}


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all: NaNs of every kind among them."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    edges = torch.iinfo(width)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(edges.min, edges.max, (numel,), dtype=width, generator=generator).view(dtype)


def delta_between(old, new, share: float = 1e9) -> WeightDelta | None:
    last = DeltaEncoder(share)
    assert last.advance(3, old) is None
    return last.advance(4, new)


def same(one, other) -> bool:
    return all(torch.equal(bits_of(one[name]), bits_of(other[name])) for name in one | other)


def patched(delta: WeightDelta, tensors):
    """New tensors, from ones that must be the base's; both ends are proved by their whole fingerprint."""
    delta.check_fit(tensors)
    if (held := fingerprint((name, tensors[name]) for name in delta.entries)) != delta.base.fingerprint:
        raise DeltaError(f"the delta builds on weights {delta.base.fingerprint}, and these are {held}")
    new = {name: tensors[name].detach().clone() for name in delta.entries}
    delta.write(new)
    if (got := fingerprint(new.items())) != delta.result.fingerprint:
        raise DeltaError(f"the delta leads to weights {got}, not to {delta.result.fingerprint} as it says")
    return new


@st.composite
def weights(draw):
    """Two versions of a few tensors; any share of each is changed, from nothing to everything."""
    old, new = {"always": torch.ones(1)}, {"always": torch.ones(1)}
    for place in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(1,), (7,), (256,), (3, 5), (40, 33), (2, 3, 100), (0,), ()]))
        numel = torch.Size(shape).numel()
        old[f"layers.{place}"] = random_bits(numel, dtype, draw(st.integers(0, 99))).view(shape)
        bits = bits_of(old[f"layers.{place}"]).clone()
        share = draw(st.sampled_from([0.0, 0.003, 0.05, 0.3, 1.0]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        where = torch.rand(numel, generator=generator) < share
        bits[where] ^= torch.randint(1, 1 << 14, (int(where.sum()),), generator=generator).to(bits.dtype)
        for special in draw(st.lists(st.sampled_from(SPECIAL[dtype]), max_size=3)) if numel else []:
            bits[draw(st.integers(0, numel - 1))] = special
        new[f"layers.{place}"] = bits.view(dtype).view(shape)
    return old, new


@given(weights())
@settings(max_examples=40)
def test_the_base_and_the_delta_are_the_result_bit_for_bit(pair):
    old, new = pair
    made = delta_between(old, new)
    assert made is not None
    delta = WeightDelta(made.data)  # as its receiver reads it
    assert (delta.base, delta.result) == (
        ServedPolicy(3, fingerprint(old.items())),
        ServedPolicy(4, fingerprint(new.items())),
    )
    before = {name: tensor.clone() for name, tensor in old.items()}
    assert same(patched(delta, old), new)
    assert same(old, before)
    assert delta.result_fingerprint(old) == fingerprint(new.items())
    delta.write(before)
    assert same(before, new)
    changed = {name for name in old if not torch.equal(bits_of(old[name]), bits_of(new[name]))}
    assert delta.changes().keys() == changed


@given(st.integers(0, 1 << 41), st.lists(st.integers(1, 1 << 30) | st.integers(1, 300), max_size=60))
@settings(max_examples=60)
def test_positions_come_back_however_far_apart(first, steps):
    positions = torch.tensor([first, *steps]).cumsum(0)
    form, data = encode_positions(positions)
    assert torch.equal(decode_positions(form, data, len(positions), int(positions[-1]) + 1), positions)
    with pytest.raises(DeltaError):
        decode_positions(form, data, len(positions), int(positions[-1]))


@pytest.mark.parametrize("gap", [0, 127, 128, 1 << 14, 1 << 16, (1 << 16) + 1, 1 << 24, (1 << 24) + 1, 1 << 35])
def test_large_gaps_at_the_edges_of_their_coding(gap):
    """No tensor of that size is needed: positions are packed before anybody looks at one."""
    positions = torch.tensor([5, 5 + gap + 1, 5 + 2 * (gap + 1)])
    form, data = encode_positions(positions)
    assert form == "gaps"
    assert torch.equal(decode_positions(form, data, 3, 1 << 42), positions)


def test_a_tensor_with_gaps_beyond_2_to_the_24():
    """One real one, with three changes far apart: 34 MB of zeros."""
    old = {"w": torch.zeros((1 << 24) + 70_000, dtype=torch.bfloat16)}
    new = {"w": old["w"].clone()}
    new["w"][[0, 65_537, (1 << 24) + 69_999]] = torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    delta = delta_between(old, new)
    assert delta is not None
    assert len(delta) < 400
    assert same(patched(WeightDelta(delta.data), old), new)


def test_the_shorter_form_is_taken():
    """Every 200th: gaps. Every third: bitmaps. A few rows of an embedding, all of each: bitmaps of these blocks."""
    sparse, dense = torch.arange(0, 1 << 20, 200), torch.arange(0, 1 << 18, 3)
    clustered = torch.cat([torch.arange(row, row + 1024) for row in (4096, 70_000, 1 << 22)])
    sizes = {}
    for name, positions in (("sparse", sparse), ("dense", dense), ("clustered", clustered)):
        form, data = encode_positions(positions)
        sizes[name] = form, len(data) / len(positions)
    assert [form for form, _ in sizes.values()] == ["gaps", "blocks", "blocks"]
    assert sizes["sparse"][1] < 2.001
    assert sizes["dense"][1] < 3 * (1 + 8 / BLOCK) / 8 + 0.01
    assert sizes["clustered"][1] < 0.15


def pair(numel: int = 4000, share: float = 0.05):
    old = {"a": random_bits(numel, torch.bfloat16, 1), "b": random_bits(50, torch.float32, 2)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    where = torch.rand(numel, generator=torch.Generator().manual_seed(3)) < share
    bits_of(new["a"])[where] ^= 1
    return old, new


def test_another_base_is_refused_and_left_alone():
    old, new = pair()
    delta = delta_between(old, new)
    other = old | {"a": old["a"].clone()}
    bits_of(other["a"])[7] ^= 1
    before = other["a"].clone()
    with pytest.raises(DeltaError, match=f"builds on weights {fingerprint(old.items())}, and these are"):
        patched(delta, other)
    assert same({"a": before}, {"a": other["a"]})
    with pytest.raises(DeltaError, match="does not have: \\['b'\\]"):
        patched(delta, {"a": old["a"]})
    with pytest.raises(DeltaError, match=r"`a` is torch\.bfloat16"):
        patched(delta, old | {"a": old["a"].view(2, -1)})


@given(st.data())
@settings(max_examples=50)
def test_damaged_bytes_are_refused_with_a_sentence(data):
    old, new = pair(300)
    whole = delta_between(old, new).data
    broken = bytearray(whole)
    if data.draw(st.booleans()):
        del broken[data.draw(st.integers(0, len(broken) - 1)) :]
    else:
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DeltaError, match=r"\w+ \w+ \w+"):
        patched(WeightDelta(bytes(broken)), old)


@given(st.data())
@settings(max_examples=60)
def test_a_sender_that_lies_with_a_good_digest_is_refused_too(data):
    """The digest finds accidents. A valid digest over nonsense meets the other checks: never a crash, and never
    weights that are not what the delta says."""
    old, new = pair(300, share=data.draw(st.sampled_from([0.02, 0.5])))
    whole = delta_between(old, new).data
    body = bytearray(whole[HEADER.size :])
    _, length, _ = HEADER.unpack_from(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    forged = HEADER.pack(MAGIC, length, _digest(body)) + bytes(body)
    got = new
    with contextlib.suppress(DeltaError):
        got = patched(WeightDelta(forged), old)
    assert same(got, new)


def forged(delta: WeightDelta, change) -> bytes:
    _, length, _ = HEADER.unpack_from(delta.data)
    header = json.loads(delta.data[HEADER.size : HEADER.size + length])
    change(header)
    written = json.dumps(header).encode()
    body = written + delta.data[HEADER.size + length :]
    return HEADER.pack(MAGIC, len(written), _digest(body)) + body


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h["tensors"][0].__setitem__(4, -1), "makes no sense"),
        (lambda h: h["tensors"][0].__setitem__(4, 10**9), "makes no sense"),
        (lambda h: h["tensors"][0].__setitem__(1, "object"), "makes no sense"),
        (lambda h: h["tensors"][0].__setitem__(2, [1 << 70]), "not in the model"),
        (lambda h: h["tensors"][0].__setitem__(3, "pickle"), "no form `pickle`"),
        (lambda h: h["tensors"][0].__setitem__(4, 3), "is not whole"),
        (lambda h: h["tensors"].append(h["tensors"][0]), "makes no sense"),
        (lambda h: h.pop("base"), "makes no sense"),
        (lambda h: h.update(base=[3, "zz"]), "makes no sense"),
        (lambda h: h.update(result=[4, "0" * 16]), "not to 0000000000000000 as it says"),
    ],
)
def test_headers_that_lie(change, said):
    old, new = pair()
    with pytest.raises(DeltaError, match=re.escape(said)):
        patched(WeightDelta(forged(delta_between(old, new), change)), old)


def test_above_half_of_a_full_update_there_is_none():
    """And the next one builds on what was sent in full."""
    old, new = pair(share=0.0)
    last = DeltaEncoder()
    assert last.advance(1, old) is None
    most = sum(tensor.numel() * tensor.element_size() for tensor in old.values()) / 2
    bits_of(new["a"])[:3000] ^= 1
    assert last.advance(2, new) is None
    assert last.policy == ServedPolicy(2, fingerprint(new.items()))
    newer = {name: tensor.clone() for name, tensor in new.items()}
    bits_of(newer["a"])[:1000] ^= 1
    delta = last.advance(3, newer)
    assert delta is not None
    assert len(delta) <= most
    assert delta.base.version == 2
    assert same(patched(delta, new), newer)
    assert last.advance(4, {"a": newer["a"]}) is None, "other tensors than before go as a whole"


def test_a_chain_of_deltas_leads_where_each_said():
    last, held = DeltaEncoder(), None
    for version in range(6):
        _, new = pair(share=0.01 * version)
        new = {name: tensor.clone() for name, tensor in new.items()}
        delta = last.advance(version, new)
        held = {name: tensor.clone() for name, tensor in new.items()} if delta is None else patched(delta, held)
        assert same(held, new)
        assert last.policy == ServedPolicy(version, fingerprint(new.items()))
