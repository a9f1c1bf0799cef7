"""Ranks that share matrices make the update of one that has them whole. They are real processes, joined by gloo."""

import os
from pathlib import Path

import pytest
import torch
from test_context_parallel import HELD, cases_main, check_checkpoints, check_update, run_ranks, seen
from test_sharding import SCORED, Case, make_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from conftest import VOCABULARY, tiny_model
from paceline.config import ConfigError
from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.model import ATTENTION, UnsupportedModel
from paceline.trainer import TrainerError
from paceline.trainer.torch.sharding import TensorParallelPlan, check_same
from paceline.trainer.torch.world import destroy_group
from run_once import once

CASES = {
    "scored": Case(SCORED | {"micro_batch_tokens": 128}, shard="none", tensor=2),
    "held": Case(HELD, shard="none", tensor=2, model="untied"),
    "norms of heads, biases": Case(HELD, shard="none", tensor=2, model="qwen3"),
    "recomputed": Case({"gradient_checkpointing": True}, shard="none", tensor=2),
    "full": Case(SCORED, tensor=2, model="qwen3", worlds=(4,)),
    "none": Case(HELD, shard="none", tensor=2, worlds=(4,)),
    "with context": Case(HELD, tensor=2, context=2, worlds=(4,)),
}
SAVED = {2: "norms of heads, biases", 4: "with context"}


def rank_main(rank: int, world: int, folder: Path) -> None:
    torch.save(cases_main(rank, world, folder, CASES, SAVED), folder / f"rank{rank}of{world}.pt")
    destroy_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if os.environ.get("PACELINE_SCALE") != "1":
        pytest.skip("ranks that share a model take half a minute: `make scale`")
    return once(tmp_path_factory, "tensor", lambda at: run_ranks("test_tensor_parallel", at, CASES, SAVED))


@pytest.fixture(scope="module")
def ranks(folder):
    return seen(folder, SAVED)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_matrices_make_the_update_of_one(ranks, name):
    check_update(CASES[name], ranks, name)


@pytest.mark.parametrize("world", SAVED)
def test_checkpoints_go_from_shared_matrices_to_whole_ones_and_back(ranks, folder, world):
    check_checkpoints(CASES[SAVED[world]], folder, world, ranks[world])


@pytest.mark.parametrize("world", SAVED)
def test_exports_hold_whole_matrices(ranks, folder, world):
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder / f"{who}{world}" / "export", dtype="auto").state_dict()
        for who in ("ranks", "one")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5)


# -- settings -------------------------------------------------------------------------------------------------------


def gpt2() -> GPT2LMHeadModel:
    settings = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    return GPT2LMHeadModel._from_config(settings, attn_implementation=ATTENTION).eval()


@pytest.mark.parametrize(
    ("model", "ranks", "sentence"),
    [
        (tiny_model, 4, "has 2 key and value heads, which cannot be dealt evenly; set tensor to a divisor of 2"),
        (gpt2, 2, "transformers has no tensor plan for GPT2LMHeadModel; set tensor = 1"),
        (lambda: make_model("lora"), 2, r"leave \[model.lora\] out, or set tensor = 1"),
    ],
)
def test_models_whose_matrices_cannot_be_shared(model, ranks, sentence):
    with pytest.raises(TrainerError, match=sentence):
        TensorParallelPlan(model(), ranks)


def test_a_weight_that_the_plan_forgot_is_refused():
    model = make_model("qwen3")
    model.config.base_model_tp_plan.pop("layers.*.self_attn.q_norm")
    with pytest.raises(TrainerError, match=r"says nothing of `model.layers.0.self_attn.q_norm.weight`"):
        TensorParallelPlan(model, 2)


def test_an_unknown_layout_is_refused():
    model = make_model("qwen3")
    model.config.base_model_tp_plan["layers.*.mlp.down_proj"] = "diagonal"
    with pytest.raises(TrainerError, match="laid out as `diagonal`, which is not supported"):
        TensorParallelPlan(model, 2)


def test_a_plan_that_computes_something_else_is_refused():
    check_same("Model", (0.0, -1.0), (0.0, -1.001), 1e-2)
    with pytest.raises(UnsupportedModel, match=r"set trainer\.parallel\.tensor = 1"):
        check_same("Model", (0.0, -1.0), (0.0, -1.2), 1e-2)


@pytest.mark.parametrize(
    ("parallel", "settings", "sentence"),
    [
        ({"tensor": 2}, {"stream": True}, "leave stream out, or set tensor = 1 and context = 1"),
        ({"context": 2}, {"stream": True}, "leave stream out, or set tensor = 1 and context = 1"),
        ({"context": 2}, {"micro_batch_tokens": "auto"}, "give a number"),
    ],
)
def test_what_ranks_that_share_a_sample_cannot_do(parallel, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config.TrainerConfig(parallel=ParallelConfig(ranks=2, **parallel), **settings)


def test_ranks_that_share_a_sample_are_one_data_rank():
    assert ParallelConfig(ranks=8, tensor=2, context=2).data_ranks == 2
    assert ParallelConfig(ranks=8, shard="hybrid", replicas=2, tensor=4).data_ranks == 2
