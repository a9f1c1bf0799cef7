"""The MLX trainer beside torch's: the same steps, checkpoints either goes on from, and exports that anybody loads."""

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("mlx.core", reason="needs mlx")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as load_mlx_lm
from mlx_lm.utils import quantize_model, save_model
from pairs import apart, mlx_model, pair, samples

from conftest import QUICKSTART
from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.model.mlx.loading import load_model
from paceline.model.mlx.lora import attach_lora
from paceline.trainer import TrainerError
from paceline.trainer.mlx.optimizer import MlxAdamW, MlxTensors
from paceline.trainer.mlx.trainer import MlxTrainer
from paceline.weights import mlx_arrays as files
from paceline.weights.tensors import to_host

LORA = LoRAConfig(rank=4)
SMOOTH = config.OptimizerConfig(lr=1e-2, eps=1e-2)
"""AdamW's first step is nearly lr times a sign, which rounding may turn around; a large eps makes it smooth."""


def as_torch(tensors) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(np.asarray(to_host(array)))) for name, array in tensors.items()}


def rewarded(seed: int) -> list:
    """Half of the samples earn something at their end."""
    alone = {"advantages": None, "ce_weights": None, "teacher_kl_weights": None, "teacher_logprobs": None}
    return [
        s.with_streams(rewards=np.where(np.arange(len(s)) == len(s) - 1, float(i % 2), 0.0), **alone)
        for i, s in enumerate(samples(seed))
    ]


def step(trainer, seed: int, **streams):
    return asyncio.run(trainer.step([sample.with_streams(**streams) for sample in samples(seed)]))


class One(nn.Module):
    def __init__(self, value: mx.array) -> None:
        super().__init__()
        self.w = value


@pytest.mark.parametrize(
    "c",
    [config.OptimizerConfig(lr=1e-2), config.OptimizerConfig(lr=0.1, betas=(0.5, 0.9), eps=0.1, weight_decay=0.3)],
    ids=["plain", "decayed"],
)
def test_the_update_is_torchs_adamw(c):
    rng = np.random.default_rng(0)
    start, *gradients = rng.normal(size=(7, 5, 3)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    adam = torch.optim.AdamW([parameter], c.lr, c.betas, c.eps, c.weight_decay)
    net = One(mx.array(start))
    optimizer = MlxAdamW(MlxTensors(net), c, None, half=False)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())  # which is clipped where it lies
        norm = torch.nn.utils.clip_grad_norm_([parameter], c.max_grad_norm)
        adam.step()
        optimizer.add({"w": mx.array(gradient)})
        assert optimizer.clip() == pytest.approx(float(norm), rel=1e-6)
        optimizer.step()
        np.testing.assert_allclose(np.array(net.w), parameter.detach().numpy(), rtol=1e-6, atol=1e-6)


def test_masters_keep_what_bf16_would_lose():
    """A hundred updates, each too small for bf16 to see, add up in the float32 masters."""
    net = One(mx.ones((4,), mx.bfloat16))
    optimizer = MlxAdamW(MlxTensors(net), config.OptimizerConfig(lr=1e-4), None, half=False)
    for _ in range(100):
        optimizer.add({"w": mx.ones((4,), mx.bfloat16)})
        optimizer.step()
    assert net.w.dtype == mx.bfloat16
    assert net.w[0].item() == pytest.approx(0.99, abs=2e-3)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": config.DPPOConfig(), "micro_batch_tokens": 64},
        {"loss": config.PPOConfig(), "minibatches": 3, "proximal": config.ProximalConfig(), "entropy_coef": 0.01},
        {"loss": config.GSPOConfig(), "kl": config.KLConfig(reference="ema", decay=0.5), "minibatches": 2},
        {"loss": config.CISPOConfig(), "kl": config.KLConfig(how="advantage", reference="snapshot", every=1)},
    ],
    ids=["dppo", "ppo", "gspo", "cispo"],
)
def test_steps_are_torchs(settings, lora):
    both = pair(lora, optimizer=SMOOTH, **settings)
    canaries = [asyncio.run(trainer.weights()).canary for trainer in both]
    assert canaries[0].token_ids == canaries[1].token_ids
    np.testing.assert_allclose(canaries[1].logprobs, canaries[0].logprobs, atol=canaries[0].tolerance / 10)
    for seed in range(2):
        wanted, got = (step(trainer, seed, kl_ref_logprobs=None).metrics for trainer in both)
        assert got.keys() == wanted.keys()
        for name in wanted.keys() - {"train_tokens/s"}:
            assert got[name] == pytest.approx(wanted[name], rel=2e-3, abs=2e-3), name
    updates = [asyncio.run(trainer.weights()) for trainer in both]
    theirs, ours = (as_torch(update.tensors) for update in updates)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4
    assert updates[0].adapter == updates[1].adapter
    both.close()


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_critics_steps_are_torchs(tmp_path, lora):
    """Values, advantages, both updates; and either goes on from what the other saved."""
    critic = config.CriticConfig(lr=1e-2, freeze_steps=1, gamma=0.9, lam=0.8)
    both = pair(lora, optimizer=SMOOTH, loss=config.PPOConfig(), critic=critic, minibatches=2)
    for seed in range(3):
        if seed == 2:
            for name, trainer in both._asdict().items():
                (tmp_path / name).mkdir()
                asyncio.run(trainer.save(tmp_path / name))
            asyncio.run(both.torch.load(tmp_path / "mlx"))
            asyncio.run(both.mlx.load(tmp_path / "torch"))
        wanted, got = (asyncio.run(trainer.step(rewarded(seed))).metrics for trainer in both)
        assert got.keys() == wanted.keys() >= {"critic/loss", "critic/value", "critic/explained_variance"}
        for name in wanted.keys() - {"train_tokens/s"}:
            assert got[name] == pytest.approx(wanted[name], rel=2e-3, abs=2e-3), name
    theirs, ours = (as_torch(trainer.learner.tensors()) for trainer in both)
    masters = [name for name in theirs if "master/" in name]
    assert {"critic/master/value.weight", "critic/master/value.bias"} < set(masters)
    assert theirs.keys() == ours.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in masters) < 1e-4
    both.close()


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("way", ["from torch to mlx", "from mlx to torch"])
def test_a_run_goes_on_under_the_other_library(tmp_path, way, lora):
    """The very masters and moments, counters and reference; and then the same next step."""
    both = pair(lora, optimizer=SMOOTH, kl=config.KLConfig(reference="ema", decay=0.5), spike=1e6)
    first, second = both if way == "from torch to mlx" else reversed(both)
    for seed in range(2):
        step(first, seed)
    asyncio.run(first.save(tmp_path))
    asyncio.run(second.load(tmp_path))
    held = [as_torch(trainer.learner.tensors()) for trainer in (first, second)]
    assert apart(held[1], held[0]) == 0
    assert second.version == 2
    kept = ("optimizer_steps", "base", "grad_norms", "loss_scale")
    states = [trainer.learner.state() for trainer in (first, second)]
    assert [states[0][name] for name in kept] == [states[1][name] for name in kept]
    updates = [asyncio.run(trainer.weights()) for trainer in (first, second)]
    assert updates[0].fingerprint() == updates[1].fingerprint()
    reports = [step(trainer, 2).metrics for trainer in (first, second)]
    assert reports[1]["loss"] == pytest.approx(reports[0]["loss"], rel=1e-3)
    one, two = (as_torch(trainer.learner.tensors()) for trainer in (first, second))
    assert apart(two, one) < 1e-4
    both.close()


def test_the_base_a_run_started_from_is_the_same_in_both(tmp_path):
    both = pair(kl=config.KLConfig())
    step(both.torch, 0)
    asyncio.run(both.torch.save(tmp_path))
    asyncio.run(both.mlx.load(tmp_path))
    other = mlx_model()
    other.net.model.norm.weight = other.net.model.norm.weight * 2
    wrong = MlxTrainer(other, config.TrainerConfig(kl=config.KLConfig()))
    with pytest.raises(TrainerError, match=r"model\.name now holds other weights"):
        asyncio.run(wrong.load(tmp_path))
    wrong.close()
    both.close()


def test_what_several_ranks_wrote_is_torchs(tmp_path):
    trainer = MlxTrainer(mlx_model(), config.TrainerConfig())
    asyncio.run(trainer.save(tmp_path))
    (tmp_path / "trainer.safetensors").unlink()
    (tmp_path / "trainer").mkdir()
    with pytest.raises(TrainerError, match="several ranks"):
        asyncio.run(trainer.load(tmp_path))
    trainer.close()


@pytest.mark.parametrize("critic", [None, config.CriticConfig()], ids=["plain", "critic"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_noise_goes_on_where_a_checkpoint_left_it(tmp_path, again, critic):
    optimizer = config.OptimizerConfig(lr=1e-2)
    c = config.TrainerConfig(loss=config.PPOConfig(), optimizer=optimizer, gradient_checkpointing=again, critic=critic)

    def fresh() -> MlxTrainer:
        return MlxTrainer(mlx_model(LoRAConfig(rank=4, dropout=0.5)), c)

    unbroken, resumed = fresh(), fresh()
    batches = [samples(seed) if critic is None else rewarded(seed) for seed in range(3)]
    for number, batch in enumerate(batches):
        asyncio.run(unbroken.step(batch))
        if number == 1:
            asyncio.run(unbroken.save(tmp_path))
    asyncio.run(resumed.load(tmp_path))
    asyncio.run(resumed.step(batches[-1]))
    marks = [asyncio.run(trainer.weights()).fingerprint() for trainer in (unbroken, resumed)]
    assert marks[0] == marks[1]
    for trainer in (unbroken, resumed):
        trainer.close()


def test_weights_can_be_used_by_another_thread_while_the_trainer_goes_on():
    trainer = MlxTrainer(mlx_model(), config.TrainerConfig(optimizer=config.OptimizerConfig(lr=1e-2)))
    step(trainer, 0)
    update = asyncio.run(trainer.weights())
    mark = update.fingerprint()
    step(trainer, 1)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: float(sum(array.sum() for array in update.tensors.values()).item())).result()
        assert other.submit(update.fingerprint).result() == mark
    assert asyncio.run(trainer.weights()).fingerprint() != mark
    trainer.close()


def test_a_watch_callback_gets_what_trains_and_changes_nothing():
    """Dropout's noise is the same in the pass that is watched and in the one that trains."""
    marks, heard = [], []
    for watched in (False, True):
        c = config.TrainerConfig(
            loss=config.PPOConfig(), optimizer=config.OptimizerConfig(lr=1e-2), micro_batch_tokens=64
        )
        trainer = MlxTrainer(mlx_model(LoRAConfig(rank=4, dropout=0.5)), c)
        step(trainer, 0)
        if watched:
            trainer.learner.watch = lambda _, __, judged: heard.append(judged.scaled()["rl"].sum().item())
        report = step(trainer, 1)
        marks.append(asyncio.run(trainer.weights()).fingerprint())
        trainer.close()
    assert marks[0] == marks[1]
    assert len(heard) > 1
    assert sum(heard) == pytest.approx(report.metrics["loss/rl"], rel=1e-4, abs=1e-6)


# -- exports ----------------------------------------------------------------------------------------------------------

IDS = np.arange(1, 41)[None]


def logits_of(trainer: MlxTrainer) -> np.ndarray:
    model = trainer.policy._model
    return np.array(model.logits(model.hidden(mx.array(IDS))))[0]


def exported(folder, model, seeds=2) -> np.ndarray:
    """What a trainer's own model says after a few steps, which are exported."""
    trainer = MlxTrainer(model, config.TrainerConfig(optimizer=config.OptimizerConfig(lr=1e-2)))
    for seed in range(seeds):
        step(trainer, seed)
    asyncio.run(trainer.export(folder, AutoTokenizer.from_pretrained(QUICKSTART)))
    trainer.close()
    return logits_of(trainer)


def plain_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits[0].float().numpy()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["model.layers.1.mlp.up_proj"]], ids=str)
def test_an_adapter_is_exported_merged_for_peft_and_for_mlx_lm(tmp_path, targets):
    from peft import PeftModel

    wanted = exported(tmp_path, mlx_model(LoRAConfig(rank=4, targets=targets)))
    np.testing.assert_allclose(plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), wanted, atol=1e-3)
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART)
    assert np.abs(plain_logits(base) - wanted).max() > 0.1
    np.testing.assert_allclose(plain_logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), wanted, atol=1e-3)
    net, _ = load_mlx_lm(QUICKSTART, model_config={"rope_theta": 100.0})
    load_adapters(net, str(tmp_path / "adapter-mlx"))
    net.eval()
    np.testing.assert_allclose(np.array(net(mx.array(IDS)))[0], wanted, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size


def test_what_is_exported_can_be_trained_on(tmp_path):
    exported(tmp_path, mlx_model())
    again = MlxTrainer(load_model(ModelConfig(name=str(tmp_path))), config.TrainerConfig())
    assert not step(again, 0).skipped
    again.close()
    assert not (tmp_path / "adapter").exists()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).is_file()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The quickstart model as mlx-lm quantises it, its embedding too."""
    folder = tmp_path_factory.mktemp("packed")
    net, described = load_mlx_lm(QUICKSTART)
    net, described = quantize_model(net, described, group_size=32, bits=8)
    save_model(folder, net)
    (folder / "config.json").write_text(json.dumps(described))
    return ModelConfig(name=str(folder))


def test_adapters_beside_a_quantised_base_are_exported_into_plain_weights(tmp_path, packed):
    model = attach_lora(load_model(packed), LORA, 0)
    assert model.quantised
    wanted = exported(tmp_path, model)
    described = json.loads((tmp_path / "config.json").read_text())
    assert not [name for name in described if "quant" in name]
    np.testing.assert_allclose(plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), wanted, atol=2e-3)


def test_a_quantised_base_alone_does_not_train(packed):
    with pytest.raises(TrainerError, match=r"a quantised model cannot be trained whole: write \[model\.lora\]"):
        MlxTrainer(load_model(packed), config.TrainerConfig())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_saves_and_exports_in_its_own_type(tmp_path, dtype):
    trainer = MlxTrainer(
        load_model(ModelConfig(dtype=dtype)), config.TrainerConfig(optimizer=config.OptimizerConfig(lr=1e-3))
    )
    assert not step(trainer, 0).skipped
    assert {array.dtype for array in asyncio.run(trainer.weights()).tensors.values()} == {getattr(mx, dtype)}
    asyncio.run(trainer.save(tmp_path))
    asyncio.run(trainer.load(tmp_path))
    asyncio.run(trainer.export(tmp_path / "export"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert again.dtype == getattr(torch, dtype)
    trainer.close()


def test_arrays_are_saved_as_they_are_read_and_not_as_they_lie(tmp_path):
    arrays = {"turned": mx.arange(6.0).reshape(2, 3).T, "half": mx.array([1.5, -2.0], mx.bfloat16), "one": mx.array(3)}
    files.save_file(arrays, tmp_path / "arrays.safetensors")
    for again in (files.load_file(tmp_path / "arrays.safetensors"), files.load(files.save(arrays))):
        assert again.keys() == arrays.keys()
        assert all(mx.array_equal(again[name], array) for name, array in arrays.items())
        assert again["half"].dtype == mx.bfloat16


# -- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel": ParallelConfig(ranks=2)}, "trainer.parallel is for several processes of torch"),
        ({"optimizer": config.OptimizerConfig(offload=True)}, "trainer.optimizer.offload has nowhere to move to"),
        ({"kl": config.KLConfig(offload=True)}, "trainer.kl.offload has nowhere to move to"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_there_is_refused_by_name(settings, words):
    with pytest.raises(TrainerError, match=words):
        MlxTrainer(mlx_model(), config.TrainerConfig(**settings))


def test_samples_that_were_fed_train_with_their_batch():
    batch = list(samples(0))
    ends = []
    for fed in ([], batch[:3]):
        trainer = MlxTrainer(mlx_model(), config.TrainerConfig(optimizer=SMOOTH))
        asyncio.run(trainer.feed(fed))
        asyncio.run(trainer.step(batch))
        ends.append(as_torch(trainer.learner.optimizer.masters))
        asyncio.run(trainer.feed(batch[:1]))
        with pytest.raises(TrainerError, match="1 samples were fed and are not in the batch"):
            asyncio.run(trainer.step(batch[1:]))
        trainer.close()
    assert apart(*ends) < 1e-6


ALONE = """
import sys
sys.modules["torch"] = sys.modules["peft"] = None
import asyncio, numpy as np
from pathlib import Path
from paceline.config import trainer as config
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import Sample
from paceline.model.mlx.loading import load_model
from paceline.model.mlx.lora import attach_lora
from paceline.trainer.mlx.trainer import MlxTrainer

mask = np.arange(9) > 3
sample = Sample(token_ids=np.arange(1, 10), loss_mask=mask, versions=np.where(mask, 0, -1), temperatures=np.ones(9),
                logprobs=np.where(mask, -3.0, 0), advantages=np.where(mask, 1.0, 0))
folder = Path(sys.argv[1])
for lora in (None, LoRAConfig(rank=2)):
    c = config.TrainerConfig(loss=config.GSPOConfig(), minibatches=2, kl=config.KLConfig())
    trainer = MlxTrainer(attach_lora(load_model(ModelConfig()), lora, 0), c)
    for work in (trainer.step([sample]), trainer.save(folder), trainer.load(folder), trainer.export(folder)):
        asyncio.run(work)
    print(asyncio.run(trainer.weights()).fingerprint())
    trainer.close()
"""


def test_all_of_it_works_where_torch_is_not(tmp_path):
    done = subprocess.run([sys.executable, "-c", ALONE, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
