"""Our own CPU kernels compute what torch computes: exactly, or as closely as they promise."""

import asyncio
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from families import VOCABULARY, packed_logprobs, tiny
from paceline.config.inference import EngineConfig
from paceline.engine import EmbeddedEngine, GenerateRequest
from paceline.engine.cpu import native
from paceline.engine.cpu.native import has_half_products, kernels
from paceline.errors import PacelineError
from paceline.model import WeightUpdate

built = pytest.mark.skipif(kernels() is None, reason="no kernels for this machine")
half = pytest.mark.skipif(not has_half_products(), reason="no float16 arithmetic here")

SHAPES = [(2, 4, 4), (3, 5, 7), (16, 33, 64), (7, 130, 201), (31, 64, 576), (65, 12, 40)]
"""Rows, outputs and inputs, on and off the kernels' multiples of four and eight."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@built
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_torchs(shape, biased):
    m, n, k = shape
    x, weight, bias = numbers(m, k), numbers(n, k, seed=1), numbers(n, seed=2) if biased else None
    mine = native.NativeLinear(kernels(), weight, bias)(x)
    torch.testing.assert_close(mine, F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@half
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_half_product_is_closer_than_bfloat16(shape, biased):
    """Half the error that rounding only the inputs to bfloat16 would make, whatever the size of a row."""
    m, n, k = shape
    x, weight = numbers(m, k) * torch.logspace(-20, 20, m)[:, None], numbers(n, k, seed=1).bfloat16().float()
    bias = torch.zeros(n) if biased else None
    mine, exact = native.HalfLinear(kernels(), weight, bias)(x).double(), x.double() @ weight.double().T
    rounded = x.bfloat16().double() @ weight.double().T

    def error(result: torch.Tensor) -> torch.Tensor:
        return ((result - exact).square().mean(-1) / exact.square().mean(-1)).sqrt()

    assert error(mine).max() < 3e-3
    assert error(mine).mean() < 0.75 * error(rounded).mean()


@half
def test_a_half_product_adds_its_bias_and_hides_nothing():
    weight, bias = numbers(6, 24, seed=1), numbers(6, seed=2)
    product = native.HalfLinear(kernels(), weight, bias)
    assert torch.equal(product(torch.zeros(3, 24)), bias.expand(3, 6))
    for bad in (torch.nan, torch.inf):
        x = numbers(5, 24)
        x[2, 11] = bad
        assert not product(x)[2].isfinite().any()
        assert product(x)[[0, 1, 3, 4]].isfinite().all()


@built
@pytest.mark.parametrize("kind", [native.NativeLinear, pytest.param(native.HalfLinear, marks=half)])
def test_a_rows_bits_do_not_depend_on_its_neighbours(kind):
    x, product = numbers(29, 77), kind(kernels(), numbers(50, 77, seed=1), None)
    whole = product(x)
    for rows in ([0, 1], [28, 3, 17], list(range(5, 25))):
        assert torch.equal(product(x[rows]), whole[rows])


@built
@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 1, 32), (2, 1, 256)])
def test_attention_over_slots_is_torchs(window, heads, kv_heads, dim):
    keys, values = numbers(6, 90, kv_heads, dim), numbers(6, 90, kv_heads, dim, seed=1)
    slots, last = torch.tensor([5, 0, 3, 1]), torch.tensor([0, 89, 15, 44])
    q = 3 * numbers(4, heads, dim, seed=2)
    mine = native.attend(keys, values, q, slots, last, 0.3, window)
    for row, (slot, end) in enumerate(zip(slots.tolist(), last.tolist(), strict=True)):
        seen = slice(max(0, end + 1 - window) if window else 0, end + 1)
        k, v = (x[slot, seen].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (keys, values))
        expected = F.scaled_dot_product_attention(q[row][:, None], k, v, scale=0.3)[:, 0]
        torch.testing.assert_close(mine[row], expected, rtol=1e-4, atol=1e-5)


@built
def test_keeping_writes_the_named_places_and_no_other():
    keys, values = torch.zeros(3, 8, 2, 16), torch.zeros(3, 8, 2, 16)
    slots, positions = torch.tensor([2, 0, 2]), torch.tensor([7, 3, 0])
    k, v = numbers(3, 2, 16), numbers(2, 3, 16, seed=1).transpose(0, 1)
    native.write_cache(keys, values, k, v, slots, positions)
    expected = torch.zeros(3, 8, 2, 16), torch.zeros(3, 8, 2, 16)
    expected[0][slots, positions], expected[1][slots, positions] = k, v
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


class RMSNorm(nn.Module):
    """By its name a norm that the kernel knows."""

    def __init__(self, formula: str) -> None:
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(numbers(20)), 1e-6, formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return {"plain": normed * self.weight, "plus one": normed * (1 + self.weight), "other": normed}[self.formula]


@built
@pytest.mark.parametrize("formula", ["plain", "plus one", "other"])
def test_a_norm_is_taken_only_if_it_computes_the_same(formula):
    norm = RMSNorm(formula)
    found = [c for c in native.norm_candidates(kernels(), norm) if c.agrees(norm)]
    assert len(found) == (formula != "other")
    for candidate in found:
        x = numbers(2, 11, 20, seed=4)
        torch.testing.assert_close(candidate.forward(x), norm(x), rtol=1e-5, atol=1e-6)


@built
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gemma3", "phi3", "gpt-neox"])
def test_a_family_with_kernels_everywhere_gives_what_it_gave(family, monkeypatch):
    """However small the layers are, under an engine that answers a crowd."""
    monkeypatch.setattr(native, "SMALL_WEIGHT", 0)
    model = tiny(family)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(3, VOCABULARY) for _ in range(length)) for length in (1, 4, 9, 30)]
    requests = [GenerateRequest(prompt_ids=p, max_tokens=12, noise=i) for i, p in enumerate(prompts)]

    async def play() -> list:
        engine = EmbeddedEngine(tiny(family), EngineConfig(max_running=4))
        engine.start()
        try:
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            engine.close()

    answers = asyncio.run(play())
    sequences = [torch.tensor([*p, *a.token_ids]) for p, a in zip(prompts, answers, strict=True)]
    with torch.no_grad():
        expected = packed_logprobs(model, sequences)
    for prompt, answer, logprobs in zip(prompts, answers, expected, strict=True):
        begin = len(prompt) - 1
        rows = logprobs[begin : begin + len(answer.token_ids)]
        theirs = rows.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (theirs - torch.tensor(answer.logprobs)).abs().max() < 1e-4


@half
def test_half_products_follow_new_weights(monkeypatch):
    """The float16 copy is made anew with every update, so samples come from the weights they name."""
    monkeypatch.setattr(native, "SMALL_WEIGHT", 0)
    before, after = tiny("llama"), tiny("llama")
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.mul_(1.2)
    text = tuple(range(3, 40))

    async def scores(model: nn.Module, update: WeightUpdate | None, products: str) -> list[float]:
        engine = EmbeddedEngine(model, EngineConfig(products=products))
        engine.start()
        try:
            if update is not None:
                await engine.load_weights(update)
            return (await engine.score([text]))[0]
        finally:
            engine.close()

    update = WeightUpdate(1, {name: p.detach().clone() for name, p in after.named_parameters()})
    old = asyncio.run(scores(tiny("llama"), None, "half"))
    mine = asyncio.run(scores(before, update, "half"))
    exact = asyncio.run(scores(after, None, "exact"))

    def gap(scores: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(scores, exact, strict=True)) / len(exact)

    assert gap(mine) < 5e-2
    assert gap(old) > 20 * gap(mine)


def test_without_kernels_torch_does_the_work_and_half_is_refused(monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)
    monkeypatch.setattr(native, "has_half_products", lambda: False)
    model = tiny("llama")
    native.install(model)
    assert all("forward" not in vars(module) for module in model.modules())
    with pytest.raises(PacelineError, match="float16 arithmetic and a C compiler"):
        native.install(model, "half")
