"""The trainer's fast path on CUDA says what the plain one says."""

import asyncio

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from conftest import VOCABULARY, tiny_model
from paceline.config import trainer as config
from paceline.data import Sample
from paceline.model.attention import PackedPlan, Scores, VarlenPlan
from paceline.model.head import logprobs_and_entropy
from paceline.trainer.torch.trainer import TorchTrainer


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (14, 2)])
def test_sequences_attend_as_if_padded(window, heads):
    torch.manual_seed(0)
    lengths, dim = [1, 7, 30, 64, 3], 64
    given = [torch.randn(sum(lengths), n, dim, device="cuda") for n in (heads[0], heads[1], heads[1])]
    weight = torch.randn(sum(lengths), heads[0], dim, device="cuda")
    results = []
    for make, dtype in ((VarlenPlan, torch.bfloat16), (PackedPlan, torch.float32)):
        q, k, v = (x.to(dtype).requires_grad_() for x in given)
        out = make(lengths, "cuda").attend(0, q, k, v, Scores(dim**-0.5, window))
        (out.float() * weight).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for fast, exact in zip(*results, strict=True):
        assert (fast.float() - exact).abs().mean() < 0.02 * exact.abs().mean() + 1e-3


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_log_probabilities_and_entropies_are_those_of_whole_logits(dtype, bound):
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64, device="cuda") / 8, torch.randn(20_011, 64, device="cuda")
    targets, temperatures = torch.randint(20_011, (300,), device="cuda"), torch.rand(300, device="cuda") + 0.5
    mixing = torch.randn(2, 300, device="cuda")
    h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    ours = torch.stack(logprobs_and_entropy(h, w, targets, temperatures))
    (ours * mixing).sum().backward()
    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    logp = torch.log_softmax(h64 @ w64.T / temperatures[:, None], -1)
    exact = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    (exact * mixing).sum().backward()
    assert (ours - exact).abs().max() < 5 * bound
    for fast, true in ((h.grad, h64.grad), (w.grad, w64.grad)):
        assert (fast.double() - true).norm() < bound * true.norm()


def batch(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        length = int(rng.integers(2, 90))
        mask = np.arange(length) > rng.integers(0, length - 1)
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCABULARY, length),
                loss_mask=mask,
                logprobs=mask * np.float32(-4),
                versions=np.where(mask, 0, -1),
                temperatures=np.ones(length),
                advantages=mask * rng.normal(),
            )
        )
    return samples


def test_a_compiled_packed_step_in_bf16_is_near_the_plain_one_in_fp32():
    norms = []
    for dtype, compiled in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        trainer = TorchTrainer(
            tiny_model().to(dtype).cuda(), config.TrainerConfig(micro_batch_tokens=512, compile=compiled)
        )
        reports = [asyncio.run(trainer.step(batch(40))).metrics for _ in range(2)]
        trainer.close()
        norms.append((reports[0]["grad_norm"], reports[0]["entropy"]))
    for norm, entropy in norms[:2]:
        assert norm == pytest.approx(norms[2][0], rel=0.03)
        assert entropy == pytest.approx(norms[2][1], rel=0.01)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_batch_that_is_fed_has_the_gradient_of_the_whole(compiled):
    """Two components, so that one forward pass has two backward passes, compiled layers included."""
    samples = [s.with_streams(ce_weights=np.float32(0.3) * (np.arange(len(s)) > 0)) for s in batch(40)]
    norms = []
    for stream in (False, True):
        settings = config.TrainerConfig(micro_batch_tokens=512, compile=compiled, stream=stream)
        trainer = TorchTrainer(tiny_model().to(torch.bfloat16).cuda(), settings)

        async def step(trainer: TorchTrainer = trainer, stream: bool = stream) -> float:
            if stream:
                await trainer.feed(samples[:25])
            return (await trainer.step(samples)).metrics["grad_norm"]

        norms.append(asyncio.run(step()))
        trainer.close()
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_a_budget_found_by_trying_is_used_and_large():
    trainer = TorchTrainer(tiny_model().to(torch.bfloat16).cuda(), config.TrainerConfig(micro_batch_tokens="auto"))
    report = asyncio.run(trainer.step(batch(40))).metrics
    trainer.close()
    assert report["micro_batches"] == 1
    assert np.isfinite(report["grad_norm"])


def test_masters_on_the_host_take_the_steps_of_masters_on_the_card():
    settings = {"lr": 1e-3}
    ends = []
    for offload in (False, True):
        model = tiny_model().to(torch.bfloat16).cuda()
        start = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        c = config.TrainerConfig(micro_batch_tokens=512, optimizer=config.OptimizerConfig(**settings, offload=offload))
        trainer = TorchTrainer(model, c)
        for _ in range(4):
            asyncio.run(trainer.step(batch(40)))
        ends.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]) - start)
        trainer.close()
    apart = (ends[1] - ends[0]).norm() / ends[0].norm()
    print(f"offloaded masters end {apart:.4f} of the update away")
    assert apart < 0.1
