"""However a model lies on its ranks, the update is the same. The ranks are real processes, joined by gloo."""

import asyncio
import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from child_processes import Launched
from conftest import tiny_model
from paceline.config import ConfigError, RunConfig
from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.model import attach_lora, fingerprint, trainable_parameters
from paceline.runtime.torch_parts import LoadedTrainer, build_trainer
from paceline.trainer import TorchTrainer, TrainerError
from paceline.trainer.torch import checkpoint
from paceline.trainer.torch.optimizer import local_shard
from paceline.trainer.torch.world import destroy_group, join
from run_once import once
from samples import make_batch, near_policy

# A large eps: AdamW would turn the rounding of vanishing gradients into whole steps. No clipping: it hides a factor.
FAST = config.OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=1e3)
WORLDS = (2, 4)


@dataclass(frozen=True)
class Case:
    """One trainer, and how its samples are spread."""

    settings: dict
    shard: str = "full"
    model: str = "tied"
    idle: bool = False
    """One rank brings all samples, and it is not the first."""
    samples: int = 8
    worlds: tuple[int, ...] = (2,)
    tensor: int = 1
    context: int = 1

    def parallel(self, world: int) -> ParallelConfig:
        replicas = 2 if self.shard == "hybrid" else 1
        return ParallelConfig(
            ranks=world, shard=self.shard, replicas=replicas, tensor=self.tensor, context=self.context
        )


PPO = {"loss": config.PPOConfig()}
SCORED = {
    "minibatches": 2,
    "proximal": config.ProximalConfig(),
    "kl": config.KLConfig(how="advantage", reference="ema"),
    **PPO,
}
CASES = {
    "none": Case({"kl": config.KLConfig(), **PPO}, shard="none", worlds=WORLDS),
    "full": Case({"kl": config.KLConfig(), **PPO}, worlds=WORLDS),
    "hybrid": Case({"normalise": "sample", **PPO}, shard="hybrid", worlds=(4,)),
    "scored": Case(SCORED | {"micro_batch_tokens": 64}, worlds=WORLDS),
    "scored whole": Case(SCORED | {"micro_batch_tokens": 64}, shard="none"),
    "fewer samples than ranks": Case(SCORED, samples=1, worlds=WORLDS),
    "one rank idles": Case({"micro_batch_tokens": 64}, idle=True),
    "one rank idles, scored": Case(SCORED | {"micro_batch_tokens": 64}, idle=True, worlds=WORLDS),
    "untied, one rank idles": Case(PPO, model="untied", idle=True),
    "clipped": Case({"optimizer": FAST.model_copy(update={"max_grad_norm": 1e-2}), "spike": 3.0}),
    "offloaded": Case({"optimizer": FAST.model_copy(update={"offload": True})}),
    "recomputed": Case({"gradient_checkpointing": True}),
    "lora": Case({"kl": config.KLConfig(), **PPO}, model="lora", worlds=WORLDS),
    "bf16": Case({"micro_batch_tokens": 1}, model="bf16"),
}

SAVED = ("full", "lora")
"""Cases that write checkpoints and exports."""
LOADED = ("tied", "untied", "lora")
"""Models that are loaded from a folder."""


def before(world: int) -> list[int]:
    """Whose checkpoints are there when so many ranks start."""
    return [others for others in (1, *WORLDS) if others < world]


def make_model(kind: str) -> PreTrainedModel:
    if kind == "bf16":
        return tiny_model(dtype=torch.bfloat16)
    model = tiny_model()
    if kind == "qwen3":  # its heads have norms, and with biases everything that can be cut or whole
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= {"vocab_size": model.config.vocab_size, "num_hidden_layers": 2, "head_dim": 8}
        settings = Qwen3Config(**shape, attention_bias=True, tie_word_embeddings=True)
        torch.manual_seed(2)
        model = Qwen3ForCausalLM._from_config(settings, attn_implementation=model.config._attn_implementation).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, std=0.3)
    if kind == "untied":
        settings = type(model.config).from_dict(model.config.to_dict() | {"tie_word_embeddings": False})
        torch.manual_seed(1)
        model = LlamaForCausalLM._from_config(settings, attn_implementation=model.config._attn_implementation).eval()
    return attach_lora(model, ModelConfig(name="tiny", lora=LoRAConfig(rank=3)), 0) if kind == "lora" else model


def make_trainer(case: Case, group=None, world: int = 1) -> TorchTrainer:
    parallel = case.parallel(world) if group is not None else ParallelConfig()
    settings = config.TrainerConfig(**({"threads": 1, "optimizer": FAST, "parallel": parallel} | case.settings))
    return TorchTrainer(make_model(case.model), settings, group=group)


@cache
def batch(number: int = 8) -> list:
    """Two rollouts of two samples each, which lie apart when there are four ranks; the other samples are alone."""
    samples = near_policy(make_batch(5, count=8))
    for first in (1, 4):
        samples[first + 1] = replace(samples[first + 1], ticket=samples[first].ticket)
    return samples[:number]


def share(case: Case, rank: int, world: int, samples: list | None = None) -> list:
    """Neighbours, in the order of the ranks. Ranks that share sequences or matrices have the same."""
    data, ranks = rank // (case.tensor * case.context), case.parallel(world).data_ranks
    samples = batch(case.samples) if samples is None else samples
    if case.idle:
        return samples if data == 1 else []
    return [samples[i] for i in np.array_split(np.arange(len(samples)), ranks)[data]]


def step(trainer: TorchTrainer, samples: list, times: int = 1) -> dict[str, float]:
    reports = [asyncio.run(trainer.step(samples)) for _ in range(times)]
    assert not any(report.skipped for report in reports), reports[-1].trouble
    return reports[-1].metrics


def flat(trainer: TorchTrainer) -> torch.Tensor:
    tensors = asyncio.run(trainer.weights()).tensors.values()
    return torch.cat([t.double().view(-1) for t in tensors]) if tensors else torch.zeros(0)


def trained(case: Case, samples: list, group=None, world: int = 1) -> tuple[torch.Tensor, dict[str, float]]:
    trainer = make_trainer(case, group, world)
    metrics = step(trainer, samples, times=2)
    out = flat(trainer), metrics
    trainer.close()
    return out


# -- on the ranks ---------------------------------------------------------------------------------------------------


def go_on(folder: Path, case: Case, rank: int, world: int, group) -> torch.Tensor:
    """Resume a checkpoint that another world size wrote, and take a step."""
    trainer = make_trainer(case, group, world)
    asyncio.run(trainer.load(folder))
    step(trainer, share(case, rank, world))
    weights = flat(trainer)
    trainer.close()
    return weights


def written(folder: Path, case: Case, rank: int, world: int, group) -> dict:
    """What a trainer publishes, exports and saves; and the step it takes after saving."""
    trainer = make_trainer(case, group, world)
    first = asyncio.run(trainer.weights())
    published = {name: tensor.clone() for name, tensor in first.tensors.items()}  # they may be the trainer's own
    step(trainer, share(case, rank, world))
    folder.mkdir(exist_ok=True)
    torch.manual_seed(100 + rank)
    asyncio.run(trainer.save(folder))
    drawn = torch.rand(3)
    step(trainer, share(case, rank, world))
    unbroken = flat(trainer)
    asyncio.run(trainer.export(folder / "export"))
    asyncio.run(trainer.load(folder))
    again = torch.rand(3)
    step(trainer, share(case, rank, world))
    out = {"first": published, "canary": first.canary.logprobs, "unbroken": unbroken}
    out |= {"drawn": drawn, "again": again, "resumed": flat(trainer)}
    trainer.close()
    return out


def built(folder: Path, kind: str, world: int, group=None) -> LoadedTrainer:
    """As a run builds its trainer, from a model's folder."""
    parallel = ParallelConfig(ranks=world, shard="none" if group is None else "full")
    lora = LoRAConfig(rank=3) if kind == "lora" else None
    model = ModelConfig(name=str(folder / f"{kind} model"), lora=lora, dtype="bfloat16")
    trainer = config.TrainerConfig(threads=1, parallel=parallel)
    place = "local" if group is None else "ray"
    return build_trainer(RunConfig(name="loaded", device="cpu", placement=place, model=model, trainer=trainer), group)


def parts(folder: Path, kind: str, world: int, group) -> dict[str, torch.Tensor]:
    """All a rank has of a model when it is loaded."""
    one = built(folder, kind, world, group)
    tensors = one.model.state_dict() | dict(one.model.named_buffers())
    one.trainer.close()
    return {name: local_shard(tensor.detach()).clone() for name, tensor in tensors.items()}


def rank_main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = join(rank, world, f"file://{folder}/meeting{world}", "gloo", seconds=120)
    results: dict = {}
    for name, case in CASES.items():
        if world in case.worlds:
            results[name] = trained(case, share(case, rank, world), group, world)
    results["loaded"] = {kind: parts(folder, kind, world, group) for kind in LOADED}
    for name in SAVED:
        results[f"{name} written"] = written(folder / f"{name}{world}", CASES[name], rank, world, group)
        for others in before(world):
            results[f"{name} {others}"] = go_on(folder / f"{name}{others}", CASES[name], rank, world, group)
    torch.save(results, folder / f"rank{rank}of{world}.pt")
    destroy_group()


# -- here -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints of one process, two ranks and four, in this order, and what the ranks have seen."""
    if os.environ.get("PACELINE_SCALE") != "1":
        pytest.skip("ranks that share a model take half a minute: `make scale`; test_ranks.py has two that do not")
    return once(tmp_path_factory, "sharding", fill)


def fill(folder: Path) -> None:
    for name in SAVED:
        torch.save(written(folder / f"{name}1", CASES[name], 0, 1, None), folder / f"{name}.pt")
    for kind in LOADED:
        plain = make_model("untied" if kind == "untied" else "tied").to(torch.bfloat16)
        plain.save_pretrained(folder / f"{kind} model")
    code = "import sys; from test_sharding import *; rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    for world in WORLDS:
        commands = [[sys.executable, "-c", code, str(rank), str(world), str(folder)] for rank in range(world)]
        processes = [Launched(command, env=environment) for command in commands]
        assert [process.wait(240) for process in processes] == [0] * world


@pytest.fixture(scope="module")
def ranks(folder):
    return {world: [torch.load(folder / f"rank{r}of{world}.pt") for r in range(world)] for world in WORLDS}


def moved(case: Case, a: torch.Tensor, b: torch.Tensor) -> float:
    """How far apart two results are, as a share of how far the first is from the start."""
    start = make_trainer(case)
    away = (a - flat(start)).norm()
    start.close()
    assert away > 0
    return float((a - b).norm() / away)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_makes_the_update_of_one(ranks, name):
    case = CASES[name]
    alone, metrics = trained(case, batch(case.samples))
    for world in case.worlds:
        weights, theirs = ranks[world][0][name]
        assert moved(case, alone, weights) < 1e-5
        assert theirs.keys() == metrics.keys()
        for key in metrics.keys() - {"train_tokens/s", "micro_batches"}:
            assert theirs[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-5), key
        for other in ranks[world][1:]:
            others, same = other[name]
            assert not len(others)  # weights leave from the first rank
            assert {**same, "train_tokens/s": 0} == {**theirs, "train_tokens/s": 0}
        assert np.isfinite(list(theirs.values())).all()


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_run_equally_many_micro_batches(ranks, name):
    for world in CASES[name].worlds:
        assert len({rank[name][1]["micro_batches"] for rank in ranks[world]}) == 1


def test_all_ranks_train_the_samples_whichever_rank_brings_them(ranks):
    """Only one rank had any, and yet each runs a part."""
    name = "one rank idles, scored"
    _, metrics = trained(CASES[name], batch())
    counts = [ranks[world][0][name][1]["micro_batches"] for world in WORLDS]
    assert metrics["micro_batches"] > counts[0] > counts[1] >= 2


@pytest.mark.parametrize("kind", LOADED)
def test_a_model_loaded_in_parts_is_the_whole_one_cut(ranks, folder, kind):
    """To the bit, with tied tensors once and buffers whole, whatever is trained in float32 widened."""
    one = built(folder, kind, 1)
    whole = one.model.state_dict() | dict(one.model.named_buffers())
    adapters = kind == "lora"
    assert any("inv_freq" in name for name in whole)
    for world in WORLDS:
        for rank, seen in enumerate(ranks[world]):
            mine = seen["loaded"][kind]
            assert mine.keys() == whole.keys()
            for name, tensor in whole.items():
                if "inv_freq" not in name and "lora_" not in name:
                    rows = tensor.chunk(world)
                    tensor = rows[rank] if rank < len(rows) else tensor[:0]
                    tensor = tensor if adapters else tensor.float()
                assert mine[name].dtype == tensor.dtype
                assert torch.equal(mine[name], tensor), name
    one.trainer.close()


@pytest.mark.parametrize("name", SAVED)
def test_a_sharded_model_publishes_the_very_bits_of_the_whole_one(ranks, folder, name):
    alone = torch.load(folder / f"{name}.pt")
    for world in WORLDS:
        seen = ranks[world][0][f"{name} written"]
        assert list(seen["first"]) == list(alone["first"])
        assert fingerprint(seen["first"].items()) == fingerprint(alone["first"].items())
        for rank in ranks[world]:
            assert rank[f"{name} written"]["canary"] == pytest.approx(alone["canary"], abs=1e-4)


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_goes_on_at_any_number_of_ranks(ranks, folder, name):
    case = CASES[name]
    unbroken = torch.load(folder / f"{name}.pt")["unbroken"]
    for world in WORLDS:
        first = ranks[world][0]
        assert moved(case, unbroken, first[f"{name} written"]["unbroken"]) < 1e-5
        assert torch.equal(first[f"{name} written"]["unbroken"], first[f"{name} written"]["resumed"])
        for others in before(world):
            assert moved(case, unbroken, first[f"{name} {others}"]) < 1e-5
        assert moved(case, unbroken, go_on(folder / f"{name}{world}", case, 0, 1, None)) < 1e-5


def test_each_rank_goes_on_with_its_own_noise(ranks):
    for world in WORLDS:
        seen = [rank["full written"] for rank in ranks[world]]
        assert all(torch.equal(one["drawn"], one["again"]) for one in seen)
        assert len({tuple(one["drawn"].tolist()) for one in seen}) == world


def test_ranks_write_a_file_each_and_no_pickle(folder):
    for world in WORLDS:
        files = sorted((folder / f"full{world}" / "trainer").iterdir())
        assert len(files) == world
        assert {file.suffix for file in files} == {".safetensors"}
        sizes = [file.stat().st_size for file in files]
        assert max(sizes) < 2 * min(sizes)


def test_a_lost_file_is_noticed(folder, tmp_path):
    source, copy = folder / "full4", tmp_path / "copy"
    (copy / "trainer").mkdir(parents=True)
    (copy / "trainer.json").write_bytes((source / "trainer.json").read_bytes())
    for file in sorted((source / "trainer").iterdir())[::3]:
        (copy / "trainer" / file.name).write_bytes(file.read_bytes())
    trainer = make_trainer(CASES["full"])
    with pytest.raises(TrainerError, match="written by 4 ranks but has the files of 2"):
        asyncio.run(trainer.load(copy))
    trainer.close()


@pytest.mark.parametrize("name", SAVED)
def test_masters_are_read_whole_whichever_world_size_wrote_them(folder, name):
    wanted = trainable_parameters(make_model(CASES[name].model))
    one, *others = (checkpoint.masters(folder / f"{name}{world}") for world in (1, *WORLDS))
    assert {k: t.shape for k, t in one.items()} == {k: t.shape for k, t in wanted.items()}
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.allclose(other[key], one[key], atol=1e-5) for key in one)


@pytest.mark.parametrize("name", SAVED)
def test_a_sharded_export_loads_with_transformers(folder, name):
    exports = [folder / f"{name}{world}" / "export" for world in (1, *WORLDS)]
    one, *others = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in exports)
    start = make_model("tied").state_dict()
    assert any(not torch.equal(t, start[key]) for key, t in one.state_dict().items())
    for other in others:
        assert other.state_dict().keys() == one.state_dict().keys()
        for key, tensor in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[key], tensor, atol=1e-5, rtol=1e-5)


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ranks": 4, "shard": "hybrid"}, "set replicas to 2 or more"),
        ({"ranks": 4, "shard": "hybrid", "replicas": 3}, "a divisor of ranks, not 3"),
        ({"ranks": 4, "shard": "full", "replicas": 2}, 'is for shard = "hybrid"'),
        ({"cpu_offload": True}, "trainer.optimizer.offload = true"),
        ({"ranks": 3, "context": 2}, "set ranks to a multiple of 2, not 3"),
        ({"ranks": 6, "tensor": 2, "context": 2}, "set ranks to a multiple of 4, not 6"),
        ({"ranks": 4, "context": 4, "shard": "hybrid", "replicas": 2}, r"a divisor of ranks / \(tensor \* context\)"),
        ({"ranks": 2, "tensor": 2, "shard": "full", "cpu_offload": True}, "set tensor = 1, or"),
    ],
)
def test_parallel_settings_that_do_not_fit(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stream": True}, "leave stream out"),
        ({"micro_batch_tokens": "auto"}, "give a number"),
    ],
)
def test_what_a_sharded_trainer_cannot_do(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config.TrainerConfig(parallel=ParallelConfig(ranks=2, shard="full"), **settings)


def test_a_rank_without_a_place_says_what_is_missing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainerError, match="RANK is not set"):
        join()
    with pytest.raises(TrainerError, match="rank 3 is not one of 2"):
        join(3, 2, "localhost:1")
