"""The trainer's laws: the gradient is a property of the batch, not of how it was cut."""

import asyncio
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from conftest import VOCABULARY, tiny_model
from paceline.config import trainer as config
from paceline.config.model import Lora, Model
from paceline.data import Sample, Ticket, fold, pack
from paceline.model import Head, attach_lora, head, token_logprobs, trainable, twin
from paceline.trainer import TorchTrainer, TrainerError
from paceline.trainer.loss import Loss
from paceline.trainer.optimizer import MasterAdamW


def make_sample(rng: np.random.Generator, length: int, number: int = 0, **streams) -> Sample:
    """A sequence with some sampled tokens, plausible logprobs and all three components mixed in."""
    mask = rng.random(length) < 0.6
    mask[0] = False
    mask[-1] = True
    values = {
        "token_ids": rng.integers(0, VOCABULARY, length),
        "loss_mask": mask,
        "versions": np.where(mask, 0, -1),
        "temperatures": rng.choice([0.7, 1.0, 1.4], length),
        "logprobs": np.where(mask, -rng.exponential(3.0, length), 0),
        "advantages": np.where(mask, rng.normal(size=length), 0),
        "ce_weights": np.where(~mask & (np.arange(length) > 0), 0.1, 0),
        "ref_kl_weights": np.where(mask, rng.random(length) < 0.5, 0),
        "ref_logprobs": np.where(mask, -rng.exponential(3.0, length), 0),
    }
    return Sample(**(values | streams), ticket=Ticket(number, "env", 0, number, number), env="env")


def make_batch(seed: int, count: int = 9, longest: int = 60, **streams) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [make_sample(rng, int(rng.integers(2, longest)), i, **streams) for i in range(count)]


def trainer_of(model, **settings) -> TorchTrainer:
    c = config.Trainer(threads=1, **settings)
    return TorchTrainer(model, c)


def gradient(batch: list[Sample], budget: int, order: list[int], normalise="token", **settings):
    """The whole gradient of a batch cut at `budget` tokens, its samples in `order`."""
    model = tiny_model()
    trainer = trainer_of(model, **settings)
    chosen = [batch[i] for i in order]
    for micro_batch in pack(chosen, fold(chosen, normalise, 32), budget):
        trainer.backward(micro_batch)
    trainer.close()
    return torch.cat([p.grad.view(-1) for p in model.parameters()]).double()


@pytest.mark.parametrize("normalise", ["token", "sample", "fixed"])
@pytest.mark.parametrize("loss", [config.DPPO(), config.PPO()])
def test_the_gradient_does_not_depend_on_the_cut(normalise, loss):
    batch = make_batch(1)
    whole = gradient(batch, 10_000, list(range(9)), normalise, loss=loss)
    for budget, seed in ((1, 0), (64, 1), (150, 2)):
        order = np.random.default_rng(seed).permutation(9).tolist()
        cut = gradient(batch, budget, order, normalise, loss=loss)
        assert (cut - whole).norm() / whole.norm() < 1e-5


def test_a_mixed_pack_is_the_sum_of_its_components():
    """rl, ce and ref_kl have a normaliser each: adding one does not bend the others."""
    batch = make_batch(2)
    alone = []
    for keep in ("rl_weights", "ce_weights", "ref_kl_weights"):
        parts = []
        for s in batch:
            off = {n: np.zeros(len(s)) for n in ("rl_weights", "ce_weights", "ref_kl_weights")}
            kept = s.rl if keep == "rl_weights" else getattr(s, keep)
            parts.append(s.with_streams(**(off | {keep: kept})))
        alone.append(gradient(parts, 10_000, list(range(9))))
    whole = gradient(batch, 10_000, list(range(9)))
    assert (sum(alone) - whole).norm() / whole.norm() < 1e-5


def test_logprobs_do_not_depend_on_neighbours():
    model = tiny_model()
    trainer = trainer_of(model)
    batch = make_batch(3)
    by_sample: dict[int, list[torch.Tensor]] = {}
    for budget in (1, 120, 10_000):
        for micro_batch in pack(batch, fold(batch), budget):
            tokens, _ = trainer._forward(micro_batch)
            trained = (micro_batch.rl_scale != 0) | (micro_batch.ce_scale != 0) | (micro_batch.ref_kl_scale != 0)
            owners = np.repeat(micro_batch.members, micro_batch.lengths)[trained]
            for member in micro_batch.members:
                by_sample.setdefault(member, []).append(tokens.logprobs[torch.from_numpy(owners == member)])
    for alone, *packed in by_sample.values():
        assert all(torch.allclose(alone, other, atol=1e-5) for other in packed)
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
            if isinstance(loss, config.DPPO):
                keep = not ((a > 0 and d > loss.high) or (a < 0 and d < -loss.low))
                total += (-keep * a * r + loss.kl_tau * log_r**2) / n_rl
            else:
                clipped = min(1 + loss.clip_high, max(1 - loss.clip_low, r))
                surrogate = -min(r * a, clipped * a)
                if loss.dual_clip and a < 0:
                    surrogate = min(surrogate, -loss.dual_clip * a)
                total += surrogate / n_rl
        total += float(sample.ce_weights[t]) * -pi[t] / max(1, n_ce)
        if sample.ref_kl_weights[t]:
            pull = float(sample.ref_logprobs[t]) - pi[t]
            keep = not (d > 0.2 if pull > 0 else d < -0.2)
            total += -keep * pull * r / n_ref
    return total


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([config.DPPO(), config.PPO(), config.PPO(clip_high=0.4, dual_clip=2.0)]))
def test_the_loss_is_what_the_formulas_say(seed, loss):
    model = tiny_model()
    batch = make_batch(seed, count=3, longest=20)
    counts = (
        sum(int(s.loss_mask.sum()) for s in batch),
        sum(int(np.count_nonzero(s.ce_weights)) for s in batch),
        sum(int(np.count_nonzero(s.ref_kl_weights)) for s in batch),
    )
    expected = 0.0
    for s in batch:
        plain = twin(model).double()
        plain.set_attn_implementation("eager")
        logits = plain(torch.from_numpy(s.token_ids)[None]).logits[0].double()
        logits = logits[:-1] / torch.from_numpy(s.temperatures[1:]).double()[:, None]
        logp = logits.log_softmax(-1).gather(-1, torch.from_numpy(s.token_ids[1:])[:, None])[:, 0]
        expected += reference_loss(s, np.concatenate([[0.0], logp.detach().numpy()]), counts, loss)
    trainer = trainer_of(model, loss=loss)
    got = sum(Loss(loss)(trainer._forward(m)[0], 0)[0].item() for m in pack(batch, fold(batch), 10_000))
    trainer.close()
    assert got == pytest.approx(expected, rel=2e-4, abs=2e-4)


def test_a_frozen_sampler_has_ratio_one():
    """Without logprobs the ratio is 1, so ppo's gradient is the plain policy gradient and nothing is clipped."""
    batch = make_batch(4, logprobs=None, ce_weights=None, ref_kl_weights=None)
    plain = gradient(batch, 10_000, list(range(9)), loss=config.PPO(clip_low=0, clip_high=0))
    assert plain.isfinite().all()
    assert plain.norm() > 0


def test_nothing_to_train_still_runs_backward():
    batch = make_batch(5, rl_weights=None, ce_weights=None, ref_kl_weights=None)
    batch = [s.with_streams(rl_weights=np.zeros(len(s))) for s in batch]
    assert gradient(batch, 10_000, list(range(9))).abs().max() == 0


def test_rl_tokens_need_credit():
    with pytest.raises(TrainerError, match="no advantages"):
        asyncio.run(trainer_of(tiny_model()).step(make_batch(6, advantages=None)))


def test_logits_in_chunks_are_the_same_logits(monkeypatch):
    model = tiny_model()
    hidden = torch.randn(50, 32, requires_grad=True)
    targets, temperatures = torch.randint(0, VOCABULARY, (50,)), torch.rand(50) + 0.5
    largest = []
    whole, entropy = token_logprobs(Head(model), hidden, targets, temperatures, entropy=True)
    (grad,) = torch.autograd.grad(whole.sum(), hidden)
    monkeypatch.setattr(head, "LOGIT_ELEMENTS", 7 * VOCABULARY)
    call = Head.__call__
    monkeypatch.setattr(Head, "__call__", lambda self, h: (largest.append(len(h)), call(self, h))[1])
    chunked, chunked_entropy = token_logprobs(Head(model), hidden, targets, temperatures, entropy=True)
    (chunked_grad,) = torch.autograd.grad(chunked.sum(), hidden)
    assert max(largest) == 7
    for a, b in ((whole, chunked), (entropy, chunked_entropy), (grad, chunked_grad)):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_bad_gradient_skips_the_step_and_keeps_the_batch(tmp_path):
    from paceline.data import decode

    model = tiny_model()
    c = config.Trainer(threads=1, max_bad_steps=2)
    trainer = TorchTrainer(model, c, dumps=tmp_path)
    before = {name: p.detach().clone() for name, p in trainable(model).items()}
    batch = make_batch(7, count=2)
    bad = [batch[0].with_streams(advantages=np.full(len(batch[0]), np.nan)), batch[1]]
    assert asyncio.run(trainer.step(bad)).skipped
    assert all(torch.equal(before[name], p) for name, p in trainable(model).items())
    with pytest.raises(TrainerError, match="bad-batch"):
        asyncio.run(trainer.step(bad))
    assert len(decode((tmp_path / "bad-batch-000001.msgpack").read_bytes())) == 2
    trainer.close()


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_saved_and_loaded_goes_on_bit_for_bit(tmp_path, lora):
    settings = Model(lora=lora)

    def fresh():
        model = attach_lora(tiny_model(), settings, seed=0)
        c = config.Trainer(threads=1, optimizer=config.Optimizer(lr=1e-2, schedule="cosine", warmup_steps=2))
        return TorchTrainer(model, c, total_steps=6)

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
    trainer = trainer_of(tiny_model())
    asyncio.run(trainer.save(tmp_path))
    with pytest.raises(TrainerError, match="another model"):
        asyncio.run(trainer_of(tiny_model(layers=3)).load(tmp_path))


def test_masters_keep_what_bf16_would_lose():
    """A hundred updates, each too small for bf16 to see, add up in the float32 masters."""
    parameter = torch.nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": parameter}, config.Optimizer(lr=1e-4), None)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.gather()
        optimizer.step()
    assert parameter[0].item() == pytest.approx(0.99, abs=2e-3)


def test_learning_rate_follows_its_schedule():
    def rates(**settings):
        optimizer = MasterAdamW({"w": torch.nn.Parameter(torch.zeros(1))}, config.Optimizer(lr=1.0, **settings), 10)
        out = []
        for _ in range(10):
            out.append(optimizer.lr)
            optimizer.steps += 1
        return out

    assert rates() == [1.0] * 10
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = rates(schedule="linear", warmup_steps=2, final_lr_ratio=0.5)
    assert linear[2] == 1.0
    assert linear[-1] == pytest.approx(0.5 + 0.5 / 8)
    assert rates(schedule="cosine")[5] == pytest.approx(0.5)


def test_lora_trains_adapters_alone_and_exports_merged(tmp_path):
    model = attach_lora(tiny_model(), Model(lora=Lora(rank=4)), seed=0)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = trainer_of(model, optimizer=config.Optimizer(lr=1e-2))

    async def work():
        for seed in range(2):
            await trainer.step(make_batch(seed))
        update = await trainer.weights()
        await trainer.export(tmp_path)
        return update

    update = asyncio.run(work())
    assert all("lora_" in name for name in update.tensors)
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in frozen.items())
    ids = torch.arange(30)[None]
    adapted = twin(model)
    adapted.set_attn_implementation("eager")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
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
    model = tiny_model()
    trainer = trainer_of(model, optimizer=config.Optimizer(lr=1e-2))
    asyncio.run(trainer.step(make_batch(0)))
    asyncio.run(trainer.export(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, dict(again.named_parameters())[name]) for name, p in model.named_parameters())
    trainer.close()


def test_twins_share_the_frozen_base_and_nothing_else():
    model = attach_lora(tiny_model(), Model(lora=Lora(rank=2)), seed=0)
    other = twin(model)
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert (theirs[name].data_ptr() == parameter.data_ptr()) == (not parameter.requires_grad)
    assert other.config is not model.config


def test_the_entropy_is_of_the_tempered_distribution():
    model = tiny_model()
    hidden = torch.randn(5, 32)
    _, entropy = token_logprobs(Head(model), hidden, torch.zeros(5, dtype=torch.long), torch.full((5,), 0.5), True)
    p = torch.softmax(Head(model)(hidden) / 0.5, -1)
    assert torch.allclose(entropy, -(p * p.log()).sum(-1), atol=1e-4)
