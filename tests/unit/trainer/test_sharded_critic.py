"""A critic that lies on the ranks as the policy does learns what a whole one learns. Ranks are joined by gloo."""

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from test_context_parallel import whole
from test_sharding import FAST, Case, batch, flat, make_model, make_trainer, share

from child_processes import Launched
from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.trainer import TorchTrainer
from paceline.trainer.torch.optimizer import local_shard
from paceline.trainer.torch.world import destroy_group, join
from run_once import once
from samples import rewarded

PPO = {"loss": config.PPOConfig(), "critic": config.CriticConfig()}
SHORT = {"full": Case({"minibatches": 2, "micro_batch_tokens": 64, **PPO})}
"""What every `make test` runs, on two ranks."""
CASES = {
    "full": Case({"minibatches": 2, "micro_batch_tokens": 64, **PPO}, worlds=(1, 2, 4)),
    "untied, one rank idles": Case({"micro_batch_tokens": 64, **PPO}, model="untied", idle=True, worlds=(2, 4)),
    "hybrid": Case({"normalise": "sample", **PPO}, shard="hybrid", worlds=(4,)),
    "lora": Case(PPO, model="lora", worlds=(2, 4)),
    "tensor": Case(PPO, shard="none", tensor=2, model="qwen3", worlds=(2, 4)),
    "full and tensor": Case({"minibatches": 2, **PPO}, tensor=2, model="qwen3", worlds=(4,)),
    "full and context": Case(PPO, context=2, worlds=(2, 4)),
    "tensor and context": Case(PPO, tensor=2, context=2, worlds=(4,)),
    "clipped": Case({"optimizer": FAST.model_copy(update={"max_grad_norm": 1e-2}), **PPO}),
    "clipped, tensor": Case(
        {"optimizer": FAST.model_copy(update={"max_grad_norm": 1e-2}), **PPO}, shard="none", tensor=2, model="qwen3"
    ),
    "offloaded": Case({"optimizer": FAST.model_copy(update={"offload": True}), **PPO}),
    "recomputed": Case({"gradient_checkpointing": True, **PPO}),
    "policy waits": Case(PPO | {"critic": config.CriticConfig(freeze_steps=2)}, worlds=(2, 4)),
}
SAVED = ("full", "lora", "full and tensor")
"""Cases that write checkpoints and go on from those of one process."""
STEPS = 3


@cache
def samples() -> list:
    """Most bring rewards; of the last two an algorithm has made advantages."""
    return [*rewarded(1, count=6), *batch()[6:]]


def step(trainer: TorchTrainer, own: list) -> dict[str, float]:
    report = asyncio.run(trainer.step(own))
    assert not report.skipped, report.trouble
    return report.metrics


def critic_weights(trainer: TorchTrainer, grad: bool = False) -> torch.Tensor:
    """The value model's masters, or their gradients, whole and in one row."""
    model = trainer.learner._critic.make()
    parts = {name: master.grad if grad else master.detach() for name, master in model.optimizer.masters.items()}
    return torch.cat([model._layout.full_tensor(name, parts[name]).double().flatten() for name in sorted(parts)])


def learnt(case: Case, own: list, group=None, world: int = 1) -> dict:
    """Metrics, gradient and weights of some steps, the policy's too, and the values that follow."""
    trainer = make_trainer(case, group, world)
    critic = trainer.learner._critic
    optimizer = critic.make().optimizer
    gradients, take_step = [], optimizer.step

    def recorded_step() -> None:
        gradients.append(critic_weights(trainer, grad=True))
        take_step()

    optimizer.step = recorded_step
    metrics = [step(trainer, own) for _ in range(STEPS)]
    out = {"metrics": metrics, "gradients": gradients, "weights": critic_weights(trainer), "policy": flat(trainer)}
    targets = critic.credit(trainer.policy.gather(own))[0].value_targets
    out["values"] = {i: torch.from_numpy(one.values) for i, one in targets.items()}
    trainer.close()
    return out


def go_on(folder: Path, case: Case, own: list, group=None, world: int = 1) -> dict[str, torch.Tensor]:
    """Resume a checkpoint, of however many ranks, and take a step."""
    trainer = make_trainer(case, group, world)
    asyncio.run(trainer.load(folder))
    step(trainer, own)
    out = {"weights": critic_weights(trainer), "policy": flat(trainer)}
    trainer.close()
    return out


def written(folder: Path, case: Case, own: list, group=None, world: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    """A step, a checkpoint and another step; then the same from the checkpoint, and from before there was a critic."""
    trainer = make_trainer(case, group, world)
    for place in ("start", "half"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    asyncio.run(trainer.save(folder / "start"))
    seen = {}
    for name, back in (("first", ""), ("unbroken", ""), ("resumed", "half"), ("restarted", "start")):
        if back:
            asyncio.run(trainer.load(folder / back))
        step(trainer, own)
        seen[name] = {"weights": critic_weights(trainer), "policy": flat(trainer)}
        if name == "first":
            asyncio.run(trainer.save(folder / "half"))
    trainer.close()
    return seen


def copied(case: Case, own: list, group, world: int) -> dict[str, bool]:
    """Of each of the policy's frozen tensors whether the value model has a copy, instead of the same memory."""
    trainer = make_trainer(case, group, world)
    step(trainer, own)
    body = trainer.learner._critic.make().body
    out = {
        name: local_shard(body.get_parameter(name).detach()).data_ptr() != local_shard(p.detach()).data_ptr()
        for name, p in trainer.policy.net.named_parameters()
        if not p.requires_grad
    }
    trainer.close()
    return out


def rank_main(rank: int, world: int, folder: Path, cases: Mapping[str, Case], saved: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    group = join(rank, world, f"file://{folder}/meeting{world}", "gloo", seconds=120)
    seen: dict = {}
    for name, case in cases.items():
        if world not in case.worlds:
            continue
        own = share(case, rank, world, samples())
        seen[name] = learnt(case, own, group, world)
        if name in saved and world > 1:
            seen[f"{name} written"] = written(folder / f"{name}{world}", case, own, group, world)
            seen[f"{name} from one"] = go_on(folder / f"{name}1" / "half", case, own, group, world)
        if case.model == "lora":
            seen["copied"] = copied(case, own, group, world)
    torch.save(seen, folder / f"rank{rank}of{world}.pt")
    destroy_group()


def run_ranks(folder: Path, which: str) -> None:
    cases, saved = (SHORT, ("full",)) if which == "SHORT" else (CASES, SAVED)
    for name in saved:
        torch.save(written(folder / f"{name}1", whole(cases[name]), samples()), folder / f"{name}1.pt")
    code = "import sys; import test_sharded_critic as t; from pathlib import Path; "
    code += f"t.rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), t.{which}, {saved!r})"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    for world in sorted({world for case in cases.values() for world in case.worlds}):
        commands = [[sys.executable, "-c", code, str(rank), str(world), str(folder)] for rank in range(world)]
        processes = [Launched(command, env=environment) for command in commands]
        assert [process.wait(900) for process in processes] == [0] * world


def ranks_of(folder: Path, world: int) -> list[dict]:
    return [torch.load(folder / f"rank{rank}of{world}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    return once(tmp_path_factory, "sharded-critic", lambda at: run_ranks(at, "SHORT"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if os.environ.get("PACELINE_SCALE") != "1":
        pytest.skip("every layout of a critic takes a minute: `make scale`")
    return once(tmp_path_factory, "sharded-critics", lambda at: run_ranks(at, "CASES"))


def apart(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> float:
    """How far two results differ, as a share of how far the first is from where it started."""
    away = (one - start).norm()
    assert away > 0
    return float((one - other).norm() / away)


def starts(case: Case) -> dict[str, torch.Tensor]:
    trainer = make_trainer(whole(case))
    out = {"weights": critic_weights(trainer), "policy": flat(trainer)}
    trainer.close()
    return out


def check_learnt(case: Case, name: str, folder: Path) -> None:
    alone, start = learnt(whole(case), samples()), starts(case)
    assert set(alone["values"]) == set(range(6))
    for world in case.worlds:
        ranks = ranks_of(folder, world)
        first = ranks[0][name]
        for key in ("weights", "policy"):
            if key == "weights" or not case.settings["critic"].freeze_steps:
                assert apart(alone[key], first[key], start[key]) < 1e-5, (world, key)
        assert len(first["gradients"]) == len(alone["gradients"])
        for ours, theirs in zip(alone["gradients"], first["gradients"], strict=True):
            assert apart(ours, theirs, torch.zeros_like(ours)) < 1e-5, world
        for ours, theirs in zip(alone["metrics"], first["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            for key in ("critic/loss", "critic/grad_norm", "critic/value", "critic/return"):
                assert theirs[key] == pytest.approx(ours[key], rel=1e-5, abs=1e-5), (world, key)
        values: dict[int, torch.Tensor] = {}
        for rank in ranks:
            values |= rank[name]["values"]
            # Whoever holds a part of the model has the same critic, whole, bit for bit.
            assert torch.equal(rank[name]["weights"], first["weights"])
        assert values.keys() == alone["values"].keys()
        for i, ours in alone["values"].items():
            assert ours.abs().max() > 1e-3
            torch.testing.assert_close(values[i], ours, atol=1e-5, rtol=0)


def check_resumed(case: Case, name: str, folder: Path) -> None:
    """To the bit on the same ranks; from one process to many and back within rounding."""
    alone, start = torch.load(folder / f"{name}1.pt"), starts(case)
    for world in case.worlds:
        if world == 1:
            continue
        first = ranks_of(folder, world)[0]
        seen = first[f"{name} written"]
        back = go_on(folder / f"{name}{world}" / "half", whole(case), samples())
        for key in ("weights", "policy"):
            assert torch.equal(seen["resumed"][key], seen["unbroken"][key])
            assert torch.equal(seen["restarted"][key], seen["first"][key])
            for other in (seen["unbroken"], first[f"{name} from one"], back):
                assert apart(alone["unbroken"][key], other[key], start[key]) < 1e-5, (world, key)


def test_a_critic_sharded_on_two_ranks_learns_what_a_whole_one_does(short):
    check_learnt(SHORT["full"], "full", short)


def test_a_sharded_critics_checkpoint_goes_on_bit_for_bit(short):
    check_resumed(SHORT["full"], "full", short)


def test_each_rank_writes_its_part_of_the_critic(short):
    """Not every rank the whole of it: the files are of like size."""
    sizes = [path.stat().st_size for path in (short / "full2" / "half" / "trainer").iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("name", CASES)
def test_however_a_critic_lies_on_the_ranks_it_learns_the_same(folder, name):
    check_learnt(CASES[name], name, folder)


@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_of_critics_fit_any_number_of_ranks(folder, name):
    check_resumed(CASES[name], name, folder)


def test_under_lora_a_sharded_critic_shares_the_frozen_base(folder):
    """But for a part smaller than the others', where ranks do not divide the rows: FSDP keeps it padded."""
    frozen = {name: p.shape[0] for name, p in make_model("lora").named_parameters() if not p.requires_grad}
    for number, rank in enumerate(ranks_of(folder, 2)):
        assert rank["copied"] == {name: rows % 2 == 1 and number == 1 for name, rows in frozen.items()}


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"shard": "full"}, {"shard": "full", "tensor": 2, "ranks": 4}])
def test_run_files_may_shard_a_critic(parallel):
    made = ParallelConfig(**({"ranks": 2} | parallel))
    assert config.TrainerConfig(critic=config.CriticConfig(), parallel=made).critic is not None
