"""The laws of adapter slots: what peft computes, several at once, and nothing leaks from one to another."""

import asyncio
import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from conftest import tiny_model
from engines import merge
from families import FAMILIES, STATEFUL, eager_logprobs, largest_gap, packed_logprobs, sequences, tiny
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.config.trainer import TrainerConfig
from paceline.model import (
    PackedPlan,
    attach_lora,
    clone_for_engine,
    clone_model,
    fingerprint,
    hidden_states,
    trainable_parameters,
)
from paceline.model.adapter_names import AdapterError, canonical_name
from paceline.model.adapters import (
    SlotLinear,
    adapter_scale,
    install,
    read_adapter,
    target_layers,
)
from paceline.model.loading import trained_adapter
from paceline.trainer import TorchTrainer
from paceline.trainer.torch.checkpoint import export

RANK, SLOTS, TOKENS = 8, 3, 256


def trained(model, seed=1, size=0.2, **lora):
    """A peft-injected twin with random adapters: what a trainer holds after some steps."""
    adapted = attach_lora(clone_model(model), ModelConfig(lora=LoRAConfig(**({"rank": 4} | lora))), seed=0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(adapted).values():
            parameter.normal_(0.0, size)
    return adapted


def slotted(model, targets="all-linear", **settings):
    plain = clone_model(model.requires_grad_(False))
    return plain, install(plain, targets, **({"slots": SLOTS, "rank": RANK, "max_tokens": TOKENS} | settings))


@torch.no_grad()
def run(model, adapters, slots, rows=None):
    rows = sequences([9, 30, 17]) if rows is None else rows
    each = [slots] * len(rows) if isinstance(slots, int) else slots
    adapters.route(torch.cat([torch.full((len(row),), slot) for row, slot in zip(rows, each, strict=True)]))
    return packed_logprobs(model, rows)


@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL])
def test_a_slot_computes_what_peft_computes(family):
    """For every family's target set, in float32 and in bfloat16."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        model = tiny(family, dtype=dtype)
        peft_model = trained(model)
        plain, adapters = slotted(model)
        tensors, scale = trained_adapter(peft_model)
        adapters.load(2, tensors, scale)
        assert {name.rpartition(".lora_")[0] for name in tensors} == set(adapters.layers)
        with torch.no_grad():
            hidden = {}
            for name, module in (("peft", peft_model), ("ours", plain)):
                adapters.route(torch.full((20,), 2))
                ids = sequences([20])[0]
                positions = torch.arange(20)
                plan = PackedPlan([20], "cpu")
                hidden[name] = hidden_states(module.get_decoder(), ids, positions, plan).float()
            base = packed_logprobs(model, sequences([20]))
            assert largest_gap(run(plain, adapters, 2, sequences([20])), base) > 0.1, "the adapter does nothing"
        gap = (hidden["peft"] - hidden["ours"]).norm() / hidden["peft"].norm()
        assert gap <= bound


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["model.layers.1.self_attn.v_proj"]])
def test_targets_mean_what_they_mean_to_peft(targets):
    model = tiny_model()
    tensors, _ = trained_adapter(trained(model, targets=targets))
    assert set(target_layers(model, targets)) == {name.rpartition(".lora_")[0] for name in tensors}


def three(model):
    """A model with three different adapters: ranks 4, 8 and 1."""
    plain, adapters = slotted(model)
    held = []
    for slot, rank in ((1, 4), (2, 8), (3, 1)):
        tensors, scale = trained_adapter(trained(model, seed=slot, rank=rank))
        adapters.load(slot, tensors, scale)
        held.append((tensors, scale))
    return plain, adapters, held


def test_tokens_of_different_slots_in_one_pass_equal_separate_passes():
    plain, adapters, _ = three(tiny_model())
    rows = sequences([9, 30, 17, 5])
    together = run(plain, adapters, [2, 0, 3, 1], rows)
    for slot, row, mine in zip([2, 0, 3, 1], rows, together, strict=True):
        assert largest_gap([mine], run(plain, adapters, slot, [row])) < 1e-4
        assert largest_gap([mine], run(plain, adapters, (slot + 1) % 4, [row])) > 0.1


def test_an_empty_slot_is_the_base_bit_for_bit():
    model = tiny_model()
    plain, adapters, _ = three(model)
    adapters.clear(2)
    expected = packed_logprobs(model, sequences([9, 30, 17]))
    for slot in (0, 2):
        for mine, base in zip(run(plain, adapters, slot), expected, strict=True):
            assert mine.equal(base)
    assert adapters.tensors(2) == {}
    assert not adapters._table[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_never_feels_what_happens_in_another(dtype):
    model = tiny_model(dtype=dtype)
    plain, adapters, _ = three(model)
    before = run(plain, adapters, [1, 0, 1])
    tensors, scale = trained_adapter(trained(model, seed=9, size=30.0, rank=8))
    huge = {name: torch.full_like(t, 3e38) for name, t in tensors.items()}  # finite, but its products are not
    for step in (
        lambda: adapters.load(2, tensors, scale),
        lambda: adapters.load(2, huge, scale),
        lambda: adapters.clear(3),
    ):
        step()
        for was, now in zip(before, run(plain, adapters, [1, 0, 1]), strict=True):
            assert now.equal(was)


def test_a_load_leaves_nothing_of_the_former():
    """Neither higher ranks nor layers the new adapter lacks; the tensors stay where they were."""
    model = tiny_model()
    plain, adapters, held = three(model)
    where = {name: (layer.lora_a.data_ptr(), layer.lora_b.data_ptr()) for name, layer in adapters.layers.items()}
    tensors, scale = trained_adapter(trained(model, seed=5, rank=2, targets=["q_proj"]))
    adapters.load(2, tensors, scale)
    fresh, others = slotted(model)
    others.load(2, tensors, scale)
    assert all(a.equal(b) for a, b in zip(run(plain, adapters, 2), run(fresh, others, 2), strict=True))
    assert fingerprint(adapters.tensors(2).items()) == fingerprint(tensors.items())
    for slot in (1, 3):
        assert fingerprint(adapters.tensors(slot).items()) == fingerprint(held[slot - 1][0].items())
    assert where == {
        name: (layer.lora_a.data_ptr(), layer.lora_b.data_ptr()) for name, layer in adapters.layers.items()
    }


def test_parameters_keep_their_names_and_the_state_is_the_models_own():
    model = tiny_model()
    plain, _ = slotted(model)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert plain.state_dict().keys() == model.state_dict().keys()


Q = "model.layers.0.self_attn.q_proj"


def broken(name):
    good, _ = trained_adapter(trained(tiny_model()))
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    return {
        "no adapted layer `model.layers.7": good | {"model.layers.7.mlp.up_proj.lora_A.weight": good[a]},
        "no LoRA matrix": good | {f"{Q}.lora_magnitude_vector": torch.zeros(1)},
        "no adapted layer `lm_head`": good | {"base_model.model.lm_head.lora_A.weight": good[a]},
        "has lora_A but no lora_B": {n: t for n, t in good.items() if n != b},
        "has lora_B but no lora_A": {n: t for n, t in good.items() if n != a},
        r"\[rank, 32\] and \[32, rank\]": good | {a: torch.zeros(4, 31)},
        r"lora_B \[32, 3\]": good | {b: torch.zeros(32, 3)},
        r"lora_A is \[0, 32\]": good | {a: torch.zeros(0, 32), b: torch.zeros(32, 0)},
        "rank 9, but the slots hold rank 8": good | {a: torch.zeros(9, 32), b: torch.zeros(32, 9)},
        f"`{Q}` has values that are not finite": good | {b: torch.full_like(good[b], math.nan)},
        "layers.1.mlp.down_proj` has values that are not finite": good
        | {"model.layers.1.mlp.down_proj.lora_A.weight": torch.full((4, 64), math.inf)},
        "only floating point": good | {a: torch.zeros(4, 32, dtype=torch.int32)},
        "twice": good | {f"base_model.model.{Q}.lora_A.default.weight": good[a]},
        "holds no tensors": {},
    }[name]


@pytest.mark.parametrize(
    "complaint",
    [
        "no adapted layer `model.layers.7",
        "no LoRA matrix",
        "no adapted layer `lm_head`",
        "has lora_A but no lora_B",
        "has lora_B but no lora_A",
        r"\[rank, 32\] and \[32, rank\]",
        r"lora_B \[32, 3\]",
        r"lora_A is \[0, 32\]",
        "rank 9, but the slots hold rank 8",
        f"`{Q}` has values that are not finite",
        "layers.1.mlp.down_proj` has values that are not finite",
        "only floating point",
        "twice",
        "holds no tensors",
    ],
)
def test_a_bad_adapter_is_refused_and_changes_nothing(complaint):
    plain, adapters, _ = three(tiny_model())
    before = run(plain, adapters, [1, 2, 3])
    with pytest.raises(AdapterError, match=complaint):
        adapters.load(1, broken(complaint), 1.0)
    assert all(a.equal(b) for a, b in zip(before, run(plain, adapters, [1, 2, 3]), strict=True))


def test_bad_slots_scales_and_sizes_are_refused():
    model = tiny_model()
    _, adapters = slotted(model)
    good, _ = trained_adapter(trained(model))
    for slot in (0, 4, -1):
        with pytest.raises(AdapterError, match="slots are 1 to 3"):
            adapters.load(slot, good, 1.0)
    for scale in (0.0, math.nan, math.inf):
        with pytest.raises(AdapterError, match="scale"):
            adapters.load(1, good, scale)
    with pytest.raises(AdapterError, match="257 tokens in one pass"):
        adapters.route(torch.zeros(257, dtype=torch.long))
    with pytest.raises(AdapterError, match="1 at least"):
        install(clone_model(model), "all-linear", 0, 4, 16)


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        (["lm_head"], "output layer"),
        (["embed_tokens"], "embedding"),
        (["mlp"], "LlamaMLP, not a plain linear layer"),
        (["nobody"], "no layer of LlamaForCausalLM is called `nobody`"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets, complaint):
    model = tiny_model()
    with pytest.raises(AdapterError, match=complaint):
        install(model, targets, 1, 4, 16)
    assert not any(isinstance(module, SlotLinear) for module in model.modules())


def test_names_have_one_canonical_form():
    plain = f"{Q}.lora_B.weight"
    for name in (
        f"base_model.model.{Q}.lora_B.default.weight",
        f"{Q}.lora_B.policy.weight",
        plain,
        f"_orig_mod.{plain}",
    ):
        assert canonical_name(name) == plain
    assert canonical_name("model.norm.weight") == "model.norm.weight"


def test_a_scale_that_bf16_cannot_hold_is_still_exact():
    """alpha / rank = 1/3 must not become 0.333984: engine and trainer would drift apart."""
    model = tiny_model(dtype=torch.bfloat16)
    _, adapters = slotted(model)
    tensors, _ = trained_adapter(trained(model))
    adapters.load(1, tensors, 1 / 3)
    assert float(adapters._table[1].max()) == pytest.approx(1 / 3, abs=1e-8)


def test_bf16_keeps_unmerged_what_merging_loses():
    """One small update: unmerged it arrives almost whole, rounded into the weights most of it is gone."""
    torch.manual_seed(0)
    base = torch.nn.Linear(256, 256, bias=False).bfloat16()
    model = tiny_model(dtype=torch.bfloat16)
    model.model.layers[0].self_attn.q_proj = base
    a, b = torch.randn(8, 256).bfloat16(), (torch.randn(256, 8) * 2e-6).bfloat16()
    wanted = b.double() @ a.double()

    merged = merge(base.weight.detach(), a, b, 1.0)
    kept_by_merging = _kept(merged.double() - base.weight.double(), wanted)

    adapters = install(model, [Q], 1, 8, 256)
    adapters.load(1, {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}, 1.0)
    held = adapters.tensors(1)
    kept_in_the_slot = _kept(held[f"{Q}.lora_B.weight"].double() @ held[f"{Q}.lora_A.weight"].double(), wanted)
    assert kept_in_the_slot > 0.999
    assert kept_by_merging < 0.3
    exact = base.weight.double() + wanted
    assert merged.equal(exact.float().to(torch.bfloat16)), "merging is in float32 and rounds once"


def _kept(update, wanted):
    """The share of the wanted update that is there: 1 minus the relative error, at least 0."""
    return max(0.0, 1 - float((update - wanted).norm() / wanted.norm()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_gives_the_same_and_follows_loads(backend):
    """Nothing is rebuilt when adapters or routes change: they are read from tensors that stay in place."""
    model = tiny_model()
    _, adapters, _ = three(model)
    torch._dynamo.reset()
    layer = adapters.layers[Q]
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(1, 12, 32)
    adapters.route(torch.tensor([0, 1, 2, 3] * 3))
    with torch.no_grad():
        assert torch.allclose(compiled(x), layer(x), atol=1e-6)
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        adapters.route(torch.tensor([3, 3, 0, 0] * 3))
        adapters.load(3, *trained_adapter(trained(model, seed=8)))
        assert torch.allclose(compiled(x), layer(x), atol=1e-6)
        assert not torch.allclose(compiled(x)[:, 0], torch.nn.functional.linear(x, layer.weight)[:, 0], atol=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames


def test_the_trainers_update_is_what_the_engine_holds():
    """`weights()` speaks canonical names, and the slot's fingerprint equals the update's; the base is shared."""
    for dtype in (torch.float32, torch.bfloat16):
        settings = ModelConfig(lora=LoRAConfig(rank=4, alpha=12.0))
        base = tiny_model(dtype=dtype)
        plain = clone_for_engine(base, settings)
        adapters = install(plain, "all-linear", SLOTS, RANK, TOKENS)
        model = attach_lora(base, settings, seed=0)
        with torch.no_grad():
            for parameter in trainable_parameters(model).values():
                parameter.normal_(0.0, 0.2)
        trainer = TorchTrainer(model, TrainerConfig())
        try:
            update = asyncio.run(trainer.weights())
        finally:
            trainer.close()
        assert update.adapter is not None
        assert (update.adapter.name, update.adapter.scale) == ("", 3.0)
        assert all(canonical_name(name) == name for name in update.tensors)
        adapters.load(1, update.tensors, update.adapter.scale)
        assert fingerprint(adapters.tensors(1).items()) == update.fingerprint()
        with torch.no_grad():
            expected = torch.cat(packed_logprobs(model, sequences([9, 30])))
        gap = (torch.cat(run(plain, adapters, 1, sequences([9, 30]))) - expected).abs().mean()
        assert gap < (1e-5 if dtype == torch.float32 else 2e-2)
        assert base.model.embed_tokens.weight is plain.model.embed_tokens.weight
        shared = base.model.layers[0].mlp.up_proj.base_layer.weight
        assert shared is plain.model.layers[0].mlp.up_proj.weight


def test_without_lora_the_engine_has_tensors_of_its_own():
    base = tiny_model()
    plain = clone_for_engine(base, ModelConfig())
    assert base.model.embed_tokens.weight is not plain.model.embed_tokens.weight
    assert base.model.embed_tokens.weight.requires_grad


def test_files_of_peft_and_of_our_export_load(tmp_path):
    """Both folders give the same slot, and it computes what the merged export computes."""
    model = tiny_model()
    ours = trained(model, alpha=10.0)
    export(ours, tmp_path / "ours")
    theirs = get_peft_model(
        clone_model(model), LoraConfig(r=4, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        values, _ = trained_adapter(ours)
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(values[canonical_name(name)])
    theirs.save_pretrained(tmp_path / "theirs")
    plain, adapters = slotted(model)
    for slot, folder in ((1, tmp_path / "ours" / "adapter"), (2, tmp_path / "theirs")):
        tensors, scale = read_adapter(folder)
        assert scale == 2.5
        adapters.load(slot, tensors, scale)
        assert fingerprint(adapters.fit_to_slot(tensors).items()) == fingerprint(adapters.tensors(slot).items())
    assert fingerprint(adapters.tensors(1).items()) == fingerprint(adapters.tensors(2).items())
    merged = type(model).from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert largest_gap(run(plain, adapters, 1), eager_logprobs(merged, sequences([9, 30, 17]))) < 1e-4


def test_adapter_folders_that_cannot_be_served_are_refused(tmp_path):
    good = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    assert adapter_scale(good) == 2
    assert adapter_scale(good | {"use_rslora": True}) == 4
    for bad, complaint in (
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"bias": "all"}, "bias"),
        ({"r": 0}, "no scale"),
        ({"peft_type": "IA3"}, "peft_type"),
    ):
        with pytest.raises(AdapterError, match=complaint):
            adapter_scale(good | bad)
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text(json.dumps(good))
    save_file({"x": torch.zeros(100)}, tmp_path / "adapter_model.safetensors")
    assert load_file(tmp_path / "adapter_model.safetensors")
    cut = (tmp_path / "adapter_model.safetensors").read_bytes()[:-50]
    (tmp_path / "adapter_model.safetensors").write_bytes(cut)
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(tmp_path)


def test_a_fingerprint_sees_two_layers_trade_places():
    """The whole name counts: `layers.0...weight` and `layers.1...weight` are as long and end alike."""
    tensors, _ = trained_adapter(trained(tiny_model()))
    first, second = f"{Q}.lora_A.weight", f"{Q}.lora_A.weight".replace("layers.0", "layers.1")
    traded = tensors | {first: tensors[second], second: tensors[first]}
    assert fingerprint(traded.items()) != fingerprint(tensors.items())
