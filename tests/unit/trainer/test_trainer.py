"""The trainer's laws: the gradient is a property of the batch, not of how it was cut."""

import asyncio
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from conftest import VOCABULARY, tiny_model
from paceline.config import trainer as config
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import Sample, collate, pack, token_scales
from paceline.model import LMHead, attach_lora, clone_model, head, token_logprobs
from paceline.trainer import TrainerError
from paceline.trainer.backend import LARGEST_SCALE
from paceline.trainer.loss import Loss
from paceline.trainer.torch.optimizer import MasterAdamW
from paceline.trainer.torch.trainer import SMALLEST, largest_fitting
from samples import PLAIN, make_batch, make_sample, near_policy
from trainers import (
    NO_OFFLOAD,
    as_numpy,
    gradient_of,
    tensors_of,
    tokens_of,
    torch_only,
    trainer_of,
    weights_of,
)


def made(model, **settings):
    return trainer_of(model, config.TrainerConfig(threads=1, **settings))


def gradient(batch: list[Sample], budget: int, order: list[int], normalise="token", **settings):
    """The whole gradient of a batch cut at `budget` tokens, its samples in `order`."""
    trainer = made(tiny_model(), **settings)
    chosen = [batch[i] for i in order]
    for micro_batch in pack(chosen, token_scales(chosen, normalise, 32), budget):
        trainer.learner.backward(micro_batch, trainer.version)
    trainer.close()
    return gradient_of(trainer)


@pytest.mark.parametrize("normalise", ["token", "sample", "fixed"])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": config.DPPOConfig()},
        {"loss": config.PPOConfig(), "entropy_coef": 0.1},
        {"loss": config.GSPOConfig(clip_low=0.5, clip_high=0.5)},
        {"loss": config.CISPOConfig(), "kl": config.KLConfig()},
        {"loss": config.PPOConfig(), "clip_skip_threshold": 0.5},
        {"loss": config.PPOConfig(), "proximal": config.ProximalConfig(level="sequence", geometric=True)},
    ],
    ids=lambda s: "-".join([s["loss"].type, *list(s)[1:]]),
)
def test_the_gradient_does_not_depend_on_the_cut(normalise, settings):
    rng = np.random.default_rng(0)
    batch = [s.with_streams(kl_ref_logprobs=-rng.exponential(3.0, len(s))) for s in make_batch(1)]
    if "clip_skip_threshold" in settings:  # half of the samples are by the policy itself, and stay
        batch[::2] = [s.with_streams(logprobs=None) for s in batch[::2]]
    whole = gradient(batch, 10_000, list(range(9)), normalise, **settings)
    for budget, seed in ((1, 0), (64, 1), (150, 2)):
        order = np.random.default_rng(seed).permutation(9).tolist()
        cut = gradient(batch, budget, order, normalise, **settings)
        assert (cut - whole).norm() / whole.norm() < 1e-5


def test_a_mixed_pack_is_the_sum_of_its_components():
    """rl, ce and teacher_kl have a normaliser each: adding one does not bend the others."""
    batch = make_batch(2)
    alone = []
    for keep in ("rl_weights", "ce_weights", "teacher_kl_weights"):
        parts = []
        for s in batch:
            off = {n: np.zeros(len(s)) for n in ("rl_weights", "ce_weights", "teacher_kl_weights")}
            kept = s.rl_token_weights if keep == "rl_weights" else getattr(s, keep)
            parts.append(s.with_streams(**(off | {keep: kept})))
        alone.append(gradient(parts, 10_000, list(range(9))))
    whole = gradient(batch, 10_000, list(range(9)))
    assert (sum(alone) - whole).norm() / whole.norm() < 1e-5


@settings(max_examples=10)
@given(st.integers(0, 10_000), st.sampled_from(["token", "sample", "fixed"]))
def test_observation_tokens_do_not_change_what_rl_tokens_weigh(seed, normalise):
    """Echo-like ce on what the policy did not say: the rl scales are the same to the last bit."""
    batch = make_batch(seed, count=4)
    alone = [s.with_streams(ce_weights=None, teacher_kl_weights=None) for s in batch]
    for one, other in zip(token_scales(batch, normalise, 7), token_scales(alone, normalise, 7), strict=True):
        np.testing.assert_array_equal(one.rl, other.rl)
        np.testing.assert_array_equal(one.regulariser, other.regulariser)


def test_length_normalised_sums_over_a_count_of_samples_are_the_sample_normaliser():
    """Another trainer's loss, with full logits: each sequence's sum over its own length, all over the number of
    sequences, with pi / sg[pi] as the ratio and k3 to a reference."""
    rng = np.random.default_rng(0)
    batch = make_batch(11, ce_weights=None, teacher_kl_weights=None)
    batch = [s.with_streams(kl_ref_logprobs=np.where(s.loss_mask, -rng.exponential(3.0, len(s)), 0)) for s in batch]
    model = tiny_model()
    plain = clone_model(model).requires_grad_(True)
    plain.set_attn_implementation("eager")
    total = torch.zeros(())
    for s in batch:
        logits = plain(torch.from_numpy(s.token_ids)[None]).logits[0, :-1]
        logits = logits / torch.from_numpy(s.temperatures[1:])[:, None]
        logp = logits.log_softmax(-1).gather(-1, torch.from_numpy(s.token_ids[1:])[:, None])[:, 0]
        mask = torch.from_numpy(s.loss_mask[1:])
        pi, a, ref = logp[mask], *(torch.from_numpy(x[1:])[mask] for x in (s.advantages, s.kl_ref_logprobs))
        total = total + (-a * (pi - pi.detach()).exp() + 0.001 * ((ref - pi).exp() - (ref - pi) - 1)).sum() / mask.sum()
    (total / len(batch)).backward()
    wanted = torch.cat([p.grad.view(-1) for _, p in sorted(plain.named_parameters())]).double()
    kl = config.KLConfig(kind="k3", coef=0.001)
    got = gradient(batch, 150, list(range(9)), "sample", loss=config.ReinforceConfig(), kl=kl)
    assert (got - wanted).norm() / wanted.norm() < 1e-4


@pytest.mark.parametrize(
    "c",
    [
        {"loss": config.PPOConfig(clip_low=0.5, clip_high=2.0), "entropy_coef": 0.3, "kl": config.KLConfig(kind="k3")},
        {"loss": config.DPPOConfig(kl_tau=0.1), "kl": config.KLConfig(kind="k2"), "normalise": "sample"},
        {"loss": config.PPOConfig(), "proximal": config.ProximalConfig(), "entropy_coef": 0.1},
    ],
    ids=["ppo", "dppo", "proximal"],
)
@torch_only("needs a model in float64")
def test_the_whole_loss_has_the_slope_it_claims(monkeypatch, c):
    """Finite differences through a tiny model in float64, in random directions of all its weights at once."""
    # Both go through float32 otherwise, whose rounding is larger than the steps taken here.
    monkeypatch.setattr(LMHead, "__call__", lambda self, hidden: self._layer(hidden))
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt(),
    )
    rng = np.random.default_rng(0)
    batch = near_policy(make_batch(12, count=4, longest=20, teacher_kl_weights=None), noise=0.1)
    batch = [s.with_streams(kl_ref_logprobs=np.where(s.loss_mask, -rng.exponential(1.0, len(s)), 0)) for s in batch]
    model = tiny_model(dtype=torch.float64)
    trainer = made(model, **c)
    prox = [np.where(s.loss_mask, s.logprobs + 0.05, 0).astype(np.float32) for s in batch]
    scales = dict(enumerate(token_scales(batch, trainer._config.normalise)))
    micro_batch = collate(range(len(batch)), batch, scales, dict(enumerate(prox)))
    loss_of = Loss(trainer._config)

    def value() -> torch.Tensor:
        tokens, _ = trainer.policy.tokens(micro_batch)
        assert tokens.logprobs.dtype == torch.float64
        return loss_of(tokens, 0)[0]

    value().backward()
    weights = list(model.parameters())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ways = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights]
        claimed = sum((w.grad * way).sum() for w, way in zip(weights, ways, strict=True)).item()
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                for w, way in zip(weights, ways, strict=True):
                    w.add_(way, alpha=sign * 1e-6)
                ends.append(value().item())
                for w, way in zip(weights, ways, strict=True):
                    w.sub_(way, alpha=sign * 1e-6)
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(claimed, rel=1e-5)
    trainer.close()


def test_logprobs_do_not_depend_on_neighbours():
    model = tiny_model()
    trainer = made(model)
    batch = make_batch(3)
    by_sample: dict[int, list[np.ndarray]] = {}
    for budget in (1, 120, 10_000):
        for micro_batch in pack(batch, token_scales(batch), budget):
            logprobs = as_numpy(tokens_of(trainer, micro_batch).logprobs)
            trained = (micro_batch.rl_scale != 0) | (micro_batch.ce_scale != 0) | (micro_batch.teacher_kl_scale != 0)
            owners = np.repeat(micro_batch.members, micro_batch.lengths)[trained]
            for member in micro_batch.members:
                by_sample.setdefault(member, []).append(logprobs[owners == member])
    for alone, *packed in by_sample.values():
        assert all(np.allclose(alone, other, atol=1e-5) for other in packed)
    trainer.close()


def reference_loss(sample: Sample, pi: np.ndarray, counts: tuple[int, int, int], loss) -> float:
    """One sample's loss from the formulas of the specification, in float64, token by token."""
    n_rl, n_ce, n_ref = counts
    total = 0.0
    for t in range(1, len(sample)):
        mu, a = float(sample.logprobs[t]), float(sample.advantages[t])
        log_r = min(20.0, max(-20.0, pi[t] - mu))
        r, d = math.exp(log_r), math.exp(pi[t]) - math.exp(mu)
        if sample.loss_mask[t]:
            if isinstance(loss, config.DPPOConfig):
                keep = not ((a > 0 and d > loss.high) or (a < 0 and d < -loss.low))
                total += (-keep * a * r + loss.kl_tau * log_r**2) / n_rl
            else:
                clipped = min(1 + loss.clip_high, max(1 - loss.clip_low, r))
                surrogate = -min(r * a, clipped * a)
                if loss.dual_clip and a < 0:
                    surrogate = min(surrogate, -loss.dual_clip * a)
                total += surrogate / n_rl
        total += float(sample.ce_weights[t]) * -pi[t] / max(1, n_ce)
        if sample.teacher_kl_weights[t]:
            pull = float(sample.teacher_logprobs[t]) - pi[t]
            keep = not (d > 0.2 if pull > 0 else d < -0.2)
            total += -keep * pull * r / n_ref
    return total


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([config.DPPOConfig(), config.PPOConfig(), config.PPOConfig(clip_high=0.4, dual_clip=2.0)]),
)
def test_the_loss_is_what_the_formulas_say(seed, loss):
    model = tiny_model()
    batch = make_batch(seed, count=3, longest=20)
    counts = (
        sum(int(s.loss_mask.sum()) for s in batch),
        sum(int(np.count_nonzero(s.ce_weights)) for s in batch),
        sum(int(np.count_nonzero(s.teacher_kl_weights)) for s in batch),
    )
    expected = 0.0
    for s in batch:
        plain = clone_model(model).double()
        plain.set_attn_implementation("eager")
        logits = plain(torch.from_numpy(s.token_ids)[None]).logits[0].double()
        logits = logits[:-1] / torch.from_numpy(s.temperatures[1:]).double()[:, None]
        logp = logits.log_softmax(-1).gather(-1, torch.from_numpy(s.token_ids[1:])[:, None])[:, 0]
        expected += reference_loss(s, np.concatenate([[0.0], logp.detach().numpy()]), counts, loss)
    trainer = made(model, loss=loss)
    total = Loss(config.TrainerConfig(loss=loss))
    got = sum(total(tokens_of(trainer, m), 0)[0].item() for m in pack(batch, token_scales(batch), 10_000))
    trainer.close()
    assert got == pytest.approx(expected, rel=2e-4, abs=2e-4)


def test_a_frozen_sampler_has_ratio_one():
    """Without logprobs the ratio is 1, so ppo's gradient is the plain policy gradient and nothing is clipped."""
    batch = make_batch(4, logprobs=None, ce_weights=None, teacher_kl_weights=None)
    plain = gradient(batch, 10_000, list(range(9)), loss=config.PPOConfig(clip_low=0, clip_high=0))
    assert plain.isfinite().all()
    assert plain.norm() > 0


def test_nothing_to_train_still_runs_backward():
    batch = make_batch(5, rl_weights=None, ce_weights=None, teacher_kl_weights=None)
    batch = [s.with_streams(rl_weights=np.zeros(len(s))) for s in batch]
    assert gradient(batch, 10_000, list(range(9))).abs().max() == 0


@pytest.mark.parametrize(
    "c",
    [
        {},
        {"loss": config.GSPOConfig(), "minibatches": 2, "kl": config.KLConfig(), "entropy_coef": 0.1},
        {"clip_skip_threshold": 0.3, "kl": config.KLConfig(how="advantage")},
        {"kl": config.KLConfig(how="advantage"), "critic": config.CriticConfig()},
    ],
    ids=["plain", "gspo", "shaped", "critic"],
)
@pytest.mark.parametrize("case", ["nothing", "masked", "one component", "cut off"])
def test_batches_without_some_or_all_components_step_with_a_zero_gradient(c, case):
    """No samples, no weights, ce alone, or a truncation that cuts off all that would train."""
    zero = {"rl_weights": np.zeros(20), "ce_weights": None, "teacher_kl_weights": None}
    rng = np.random.default_rng(0)
    batch = [make_sample(rng, 20, i) for i in range(4)]
    if case == "masked":
        batch = [s.with_streams(**zero) for s in batch]
    elif case == "one component":
        batch = [s.with_streams(**zero | {"ce_weights": s.ce_weights}) for s in batch]
    elif case == "cut off":
        late = np.arange(20) >= 10
        only = {"loss_mask": late, "versions": np.where(late, 0, -1), "ce_weights": None}
        batch = [s.with_streams(**only).truncated_to(5) for s in batch]
    trainer = made(tiny_model(), optimizer=config.OptimizerConfig(lr=1.0), **c)
    before = weights_of(trainer)
    report = asyncio.run(trainer.step([] if case == "nothing" else batch))
    trainer.close()
    assert not report.skipped
    assert trainer.version == 1
    assert "loss/rl" not in report.metrics
    moved = any(not torch.equal(before[name], new) for name, new in weights_of(trainer).items())
    assert moved == (case == "one component")
    if not moved:
        assert report.metrics.get("grad_norm", 0.0) == 0


def test_what_trains_nothing_moves_nothing_even_with_momentum():
    """AdamW answers a gradient of zero with nearly its last step once more."""
    trainer = made(tiny_model(), optimizer=config.OptimizerConfig(lr=1e-2))
    asyncio.run(trainer.step(make_batch(1)))
    before = weights_of(trainer)
    off = {"ce_weights": None, "teacher_kl_weights": None}
    empty = [s.with_streams(rl_weights=np.zeros(len(s)), **off) for s in make_batch(2)]
    for batch in ([], empty):
        report = asyncio.run(trainer.step(batch))
        assert not report.skipped
        assert report.metrics["grad_norm"] == 0
    assert all(torch.equal(before[name], new) for name, new in weights_of(trainer).items())
    assert (trainer.version, trainer.learner.optimizer.schedule.steps) == (3, 1)
    trainer.close()


def test_components_report_under_their_own_names():
    rng = np.random.default_rng(0)
    batch = [s.with_streams(kl_ref_logprobs=-rng.exponential(3.0, len(s))) for s in make_batch(8)]
    trainer = made(tiny_model(), kl=config.KLConfig(), entropy_coef=0.1, clip_skip_threshold=0.99)
    metrics = asyncio.run(trainer.step(batch)).metrics
    trainer.close()
    parts = ("rl", "ce", "teacher_kl", "kl", "entropy")
    assert metrics["loss"] == pytest.approx(sum(metrics[f"loss/{part}"] for part in parts))
    named = {
        "kl",
        "ratio",
        "ppo_kl",
        "sampler_kl",
        "clip_fraction",
        "mismatch_kl",
        "nll",
        "teacher_kl",
        "skipped_samples",
    }
    assert named <= metrics.keys()


def test_rl_tokens_need_credit():
    with pytest.raises(TrainerError, match="neither advantages nor rewards"):
        asyncio.run(made(tiny_model()).step(make_batch(6, advantages=None)))


def test_a_pull_to_a_teacher_needs_its_scores():
    """Without them the teacher would seem certain of every token."""
    with pytest.raises(TrainerError, match=r"ticket 0, rollout 0: .*carry no `teacher_logprobs`"):
        asyncio.run(made(tiny_model()).step(make_batch(6, teacher_logprobs=None)))


@torch_only("of torch's own head")
def test_logits_in_chunks_are_the_same_logits(monkeypatch):
    model = tiny_model()
    hidden = torch.randn(50, 32, requires_grad=True)
    targets, temperatures = torch.randint(0, VOCABULARY, (50,)), torch.rand(50) + 0.5
    rows = []
    whole, entropy = token_logprobs(LMHead(model), hidden, targets, temperatures, entropy=True)
    (grad,) = torch.autograd.grad(whole.sum(), hidden)
    monkeypatch.setattr(head, "LOGIT_ELEMENTS", 7 * VOCABULARY)
    call = LMHead.__call__
    monkeypatch.setattr(LMHead, "__call__", lambda self, h: (rows.append(len(h)), call(self, h))[1])
    chunked, chunked_entropy = token_logprobs(LMHead(model), hidden, targets, temperatures, entropy=True)
    (chunked_grad,) = torch.autograd.grad(chunked.sum(), hidden)
    assert max(rows) == 7
    for a, b in ((whole, chunked), (entropy, chunked_entropy), (grad, chunked_grad)):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_bad_gradient_skips_the_step_and_keeps_the_batch(tmp_path):
    from paceline.data import decode

    trainer = trainer_of(tiny_model(), config.TrainerConfig(threads=1, max_bad_steps=2), dumps=tmp_path)
    before = weights_of(trainer)
    batch = make_batch(7, count=2)
    bad = [batch[0].with_streams(advantages=np.full(len(batch[0]), np.nan)), batch[1]]
    assert asyncio.run(trainer.step(bad)).skipped
    assert all(torch.equal(before[name], new) for name, new in weights_of(trainer).items())
    with pytest.raises(TrainerError, match="bad-batch"):
        asyncio.run(trainer.step(bad))
    assert len(decode((tmp_path / "bad-batch-000001.msgpack").read_bytes())) == 2
    trainer.close()


def test_a_bad_minibatch_leaves_the_others_and_their_metrics_alone(tmp_path):
    """The same weights, moments and metrics as without it; what is saved then goes on bit for bit."""
    batch = near_policy(make_batch(7, count=6))
    bad = [s.with_streams(advantages=np.full(len(s), np.nan)) for s in batch[2:4]]
    settings = {
        "proximal": config.ProximalConfig(),
        "loss": config.PPOConfig(),
        "optimizer": config.OptimizerConfig(lr=1e-2),
    }
    broken = made(tiny_model(), minibatches=3, **settings)
    report = asyncio.run(broken.step([*batch[:2], *bad, *batch[4:]]))
    assert report.skipped
    whole = made(tiny_model(), minibatches=2, **settings)
    wanted = asyncio.run(whole.step([*batch[:2], *batch[4:]])).metrics
    for name in wanted.keys() - {"train_tokens/s"}:
        assert report.metrics[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name
    asyncio.run(broken.save(tmp_path))
    again = made(tiny_model(), minibatches=3, **settings)
    asyncio.run(again.load(tmp_path))
    for one, two in zip(*(tensors_of(t).items() for t in (broken, again)), strict=True):
        assert one[0] == two[0]
        assert torch.equal(one[1], two[1])
        assert one[1].isfinite().all()
    for trainer in (broken, whole, again):
        trainer.close()


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_saved_and_loaded_goes_on_bit_for_bit(tmp_path, lora):
    settings = ModelConfig(lora=lora)

    def fresh():
        model = attach_lora(tiny_model(), settings, seed=0)
        c = config.TrainerConfig(
            threads=1, optimizer=config.OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=2)
        )
        return trainer_of(model, c, total_steps=6)

    async def steps(trainer, seeds):
        for seed in seeds:
            await trainer.step(make_batch(seed))
        return (await trainer.weights()).fingerprint()

    unbroken = asyncio.run(steps(fresh(), range(6)))
    first = fresh()
    asyncio.run(steps(first, range(3)))
    asyncio.run(first.save(tmp_path))
    second = fresh()
    asyncio.run(second.load(tmp_path))
    assert second.version == 3
    assert asyncio.run(steps(second, range(3, 6))) == unbroken


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer = made(tiny_model())
    asyncio.run(trainer.save(tmp_path))
    with pytest.raises(TrainerError, match="another model"):
        asyncio.run(made(tiny_model(layers=3)).load(tmp_path))


@torch_only("of torch's own optimizer")
def test_masters_keep_what_bf16_would_lose():
    """A hundred updates, each too small for bf16 to see, add up in the float32 masters."""
    parameter = torch.nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": parameter}, config.OptimizerConfig(lr=1e-4), None)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.gather()
        optimizer.step()
    assert parameter[0].item() == pytest.approx(0.99, abs=2e-3)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_half_precision_does_not_lose_the_gradients_of_a_large_batch(lora):
    """A token's share of a million is below what float16 can hold."""
    ends, batch = {}, make_batch(1, logprobs=None, **PLAIN)
    for dtype in (torch.float32, torch.float16):
        model = attach_lora(tiny_model().to(dtype), ModelConfig(lora=lora), seed=0)
        trainer = made(model, loss=config.PPOConfig(), normalise="fixed", fixed_length=200_000)
        for micro_batch in pack(batch, token_scales(batch, "fixed", 200_000), 10_000):
            trainer.learner.backward(micro_batch, trainer.version)
        trainer.learner.optimizer.clip()
        ends[dtype] = gradient_of(trainer)
        trainer.close()
    assert (ends[torch.float16] - ends[torch.float32]).norm() / ends[torch.float32].norm() < 0.02


def test_half_precision_retreats_from_a_scale_that_is_too_large(tmp_path):
    """The batch that shows it trains all the same, and a resumed run does not have to find out again."""
    large = [s.with_streams(advantages=300 * s.advantages) for s in make_batch(1, logprobs=None, **PLAIN)]
    moved = {}
    for dtype in (torch.float32, torch.float16):
        trainer = made(tiny_model().to(dtype), loss=config.PPOConfig(), optimizer=config.OptimizerConfig(lr=1e-2))
        report = asyncio.run(trainer.step(large))
        assert not report.skipped
        moved[dtype] = report.metrics["grad_norm"]
        trainer.close()
    assert moved[torch.float16] == pytest.approx(moved[torch.float32], rel=0.05)
    assert 1 < trainer.learner.optimizer.schedule.scale < LARGEST_SCALE
    again = made(tiny_model().half())
    trainer._save(tmp_path)
    again._load(tmp_path)
    assert again.learner.optimizer.schedule.scale == trainer.learner.optimizer.schedule.scale
    bad = [s.with_streams(advantages=np.full(len(s), np.nan)) for s in large]
    assert asyncio.run(again.step(bad)).skipped
    assert again.learner.optimizer.schedule.scale == trainer.learner.optimizer.schedule.scale
    again.close()


@torch_only("of torch's own optimizer")
def test_learning_rate_follows_its_schedule():
    def rates(**settings):
        optimizer = MasterAdamW(
            {"w": torch.nn.Parameter(torch.zeros(1))}, config.OptimizerConfig(lr=1.0, **settings), 10
        )
        out = []
        for _ in range(10):
            out.append(optimizer.schedule.lr)
            optimizer.schedule.steps += 1
        return out

    assert rates() == [1.0] * 10
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = rates(schedule="linear", warmup_steps=2, final_lr_ratio=0.5)
    assert linear[2] == 1.0
    assert linear[-1] == pytest.approx(0.5 + 0.5 / 8)
    assert rates(schedule="cosine")[5] == pytest.approx(0.5)


def test_lora_trains_adapters_alone_and_exports_merged(tmp_path):
    model = attach_lora(tiny_model(), ModelConfig(lora=LoRAConfig(rank=4)), seed=0)
    base = tiny_model().state_dict()
    trainer = made(model, optimizer=config.OptimizerConfig(lr=1e-2))

    async def work():
        for seed in range(2):
            await trainer.step(make_batch(seed))
        update = await trainer.weights()
        await trainer.export(tmp_path)
        return update

    update = asyncio.run(work())
    assert all("lora_" in name for name in update.tensors)
    ids = torch.arange(30)[None]
    adapted = attach_lora(tiny_model(), ModelConfig(lora=LoRAConfig(rank=4)), seed=0)
    adapted.load_state_dict(weights_of(trainer), strict=False)
    adapted.set_attn_implementation("eager")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, base[name]) for name, p in merged.named_parameters() if "_proj" not in name)
    plain = tiny_model()
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-4)
        assert not torch.allclose(merged(ids).logits, plain(ids).logits, atol=1e-2)
    from peft import PeftModel

    again = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, adapted(ids).logits, atol=1e-5)
    trainer.close()


def test_full_export_is_the_trained_model(tmp_path):
    trainer = made(tiny_model(), optimizer=config.OptimizerConfig(lr=1e-2))
    asyncio.run(trainer.step(make_batch(0)))
    asyncio.run(trainer.export(tmp_path))
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert again.keys() == weights_of(trainer).keys()
    assert all(torch.equal(p, again[name]) for name, p in weights_of(trainer).items())
    trainer.close()


@torch_only("of torch's own models")
def test_twins_share_the_frozen_base_and_nothing_else():
    model = attach_lora(tiny_model(), ModelConfig(lora=LoRAConfig(rank=2)), seed=0)
    other = clone_model(model)
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert (theirs[name].data_ptr() == parameter.data_ptr()) == (not parameter.requires_grad)
    assert other.config is not model.config


@torch_only("of torch's own head")
def test_the_entropy_is_of_the_tempered_distribution():
    model = tiny_model()
    hidden = torch.randn(5, 32)
    _, entropy = token_logprobs(LMHead(model), hidden, torch.zeros(5, dtype=torch.long), torch.full((5,), 0.5), True)
    p = torch.softmax(LMHead(model)(hidden) / 0.5, -1)
    assert torch.allclose(entropy, -(p * p.log()).sum(-1), atol=1e-4)


@NO_OFFLOAD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_makes_the_same_update(dtype):
    ends = []
    for offload in (False, True):
        settings = config.TrainerConfig(
            optimizer=config.OptimizerConfig(lr=1e-2, offload=offload), micro_batch_tokens=64
        )
        model = tiny_model().to(dtype)
        trainer = trainer_of(model, settings)
        for _ in range(2):
            asyncio.run(trainer.step(make_batch(3)))
        trainer.close()
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_budget_is_found_that_fits():
    assert largest_fitting(lambda tokens: 1000 + 2 * tokens, room=100_000) == 49152
    assert largest_fitting(lambda tokens: 1000 + 2 * tokens, room=10_000) == SMALLEST
    assert largest_fitting(lambda tokens: 1000 + 2 * tokens, room=6_000) == SMALLEST // 2
    assert largest_fitting(lambda tokens: tokens**2 // 1000, room=10_000_000) < 100_000
