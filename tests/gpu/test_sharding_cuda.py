"""A model that is cut up comes to the GPU in parts: at no time is all of it there."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config.cluster import ParallelConfig
from paceline.config.model import ModelConfig
from paceline.model import load_model
from paceline.trainer.torch.optimizer import local_shard
from paceline.trainer.torch.sharding import shard
from paceline.trainer.torch.world import Ranks

WORLD, RANK = 8, 3
HERE = torch.device("cuda", 0)


@contextmanager
def ranks(parallel: ParallelConfig):
    """One rank of eight whose collectives do nothing: cutting a model needs none."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield Ranks(dist.group.WORLD, HERE, parallel)
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("offload", [False, True])
def test_the_gpu_never_holds_more_than_a_share_and_a_layer(tmp_path, tied, offload):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    settings = ModelConfig(name=str(tmp_path), dtype="bfloat16")
    whole, model = load_model(settings), load_model(settings)
    sizes = [4 * sum(p.numel() for p in layer.parameters()) for layer in whole.model.layers]
    share = 4 * sum(p.numel() for p in whole.parameters()) // WORLD
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    parallel = ParallelConfig(ranks=WORLD, shard="full", cpu_offload=offload)
    with ranks(parallel) as all_of_them:
        shard(model, all_of_them, parallel)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.1 * (share + max(sizes))
    assert peak < 0.5 * WORLD * share
    assert torch.cuda.memory_allocated() - before < (0.1 if offload else 1.1) * share
    check_cut(model, whole, "cpu" if offload else "cuda")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def check_cut(model, whole, device: str) -> None:
    """Each part is a slice of the whole, widened, and buffers are all there."""
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        rows = wanted[name].detach().float().chunk(WORLD)
        mine = local_shard(parameter.detach())
        assert mine.device.type == device
        assert torch.equal(mine.cpu(), rows[RANK]), name
    for (name, buffer), (_, other) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert buffer.device == HERE, name
        assert torch.equal(buffer.cpu(), other), name
