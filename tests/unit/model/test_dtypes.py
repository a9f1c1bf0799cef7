"""Laws of `model.dtype = "auto"`: the checkpoint's type where it is fast, one type a run, exports in the source's."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from paceline.config import RunConfig, hardware
from paceline.config.hardware import compute_dtype, cpu_half_dtypes, stored_dtype
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.model import attach_lora, load_model, load_tokenizer, resolve, trainable_parameters
from paceline.model.dtypes import export_dtype
from paceline.planner.hardware import parse
from paceline.planner.plan import predict
from paceline.runtime.local import with_settled_dtype
from paceline.trainer.torch.checkpoint import export

QUICKSTART = "paceline:quickstart"


@pytest.fixture(scope="module")
def halved(tmp_path_factory) -> Path:
    """The quickstart model, stored in bfloat16."""
    folder = tmp_path_factory.mktemp("bf16")
    AutoModelForCausalLM.from_pretrained(resolve(QUICKSTART), dtype=torch.bfloat16).save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    return folder


@pytest.fixture
def plain_cpu(monkeypatch):
    """A CPU without bfloat16 instructions, whichever this one is."""
    monkeypatch.setattr(hardware, "_flags", lambda file: frozenset(("avx2",)))


@pytest.fixture
def half_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "_flags", lambda file: frozenset(("avx512f", "avx512_bf16")))


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def tensor_types(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, None),
        ({}, None),
    ],
)
def test_a_checkpoint_tells_its_type(tmp_path: Path, config, told):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_dtype(str(tmp_path)) == told


def test_a_config_without_a_type_leaves_it_to_the_weights(tmp_path: Path, halved: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((halved / "model.safetensors").read_bytes())
    assert stored_dtype(str(tmp_path)) == "bfloat16"
    assert stored_dtype(str(tmp_path / "not-here")) is None


@pytest.mark.parametrize(
    ("line", "halves"),
    [
        ("flags\t: fpu avx512f avx512_bf16", {"bfloat16"}),
        ("Features\t: fp asimd bf16 i8mm", {"bfloat16"}),
        ("flags\t: fpu avx512f avx512_vnni", set()),
    ],
)
def test_instructions_decide_for_a_cpu(tmp_path: Path, line: str, halves):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert cpu_half_dtypes(tmp_path / "cpuinfo") == halves
    assert cpu_half_dtypes(tmp_path / "none") == frozenset()


def test_only_what_is_fast_is_computed_in():
    assert compute_dtype("bfloat16", frozenset(("bfloat16", "float16"))) == "bfloat16"
    assert compute_dtype("bfloat16", frozenset(("float16",))) == "float32"
    assert (
        compute_dtype("float32", frozenset(("bfloat16",))) == compute_dtype(None, frozenset(("bfloat16",))) == "float32"
    )


def test_a_model_is_loaded_in_the_type_its_cpu_computes_fast(halved: Path, half_cpu, monkeypatch):
    assert ModelConfig().dtype == "auto"
    assert load_model(ModelConfig(name=str(halved))).dtype == torch.bfloat16
    assert load_model(ModelConfig()).dtype == torch.float32, "weights of float32 stay that"
    monkeypatch.setattr(hardware, "_flags", lambda file: frozenset())
    assert load_model(ModelConfig(name=str(halved))).dtype == torch.float32


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)], ids=["full", "lora"])
def test_an_export_is_as_large_as_its_source(tmp_path: Path, halved: Path, plain_cpu, lora):
    config = ModelConfig(name=str(halved), lora=lora)
    model = attach_lora(load_model(config), config, seed=0)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(0.01)
    export(model, tmp_path)
    assert model.dtype == torch.float32, "what was computed in"
    assert tensor_types(tmp_path) == {"BF16"}
    assert abs(size(tmp_path) - size(halved)) < 4096, "headers may differ"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_an_export_is_never_wider_than_what_was_trained():
    assert export_dtype(QUICKSTART, "float32") == "float32"
    assert export_dtype(QUICKSTART, "bfloat16") == "bfloat16"
    assert export_dtype("./nowhere", "bfloat16") == "bfloat16", "a source that is gone has no say"
    assert export_dtype("", "float32") == export_dtype(None, "float32") == "float32"


def test_a_resumed_run_keeps_the_type_it_began_with(tmp_path: Path, halved: Path, plain_cpu):
    config = RunConfig.model_validate({"name": "a", "runs": str(tmp_path), "model": {"name": str(halved)}})
    assert with_settled_dtype(config).model.dtype == "float32"
    saved = tmp_path / "a" / "checkpoints" / "step-000003"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    (saved / "trainer.json").write_text(json.dumps({"dtype": "bfloat16"}))
    for resume in ("latest", str(saved)):
        resumed = with_settled_dtype(config.model_copy(update={"resume": resume}))
        assert resumed.model.dtype == "bfloat16", "though this CPU would choose float32"
    (saved / "trainer.json").write_text("{}")
    assert with_settled_dtype(resumed.model_copy(update={"model": config.model})).model.dtype == "float32"
    stated = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float16"})})
    assert with_settled_dtype(stated) is stated


def test_float32_on_a_gpu_names_the_faster_setting(monkeypatch, caplog):
    monkeypatch.setitem(with_settled_dtype.__globals__, "device_of", lambda config: "cuda")
    monkeypatch.setitem(with_settled_dtype.__globals__, "resolve_dtype", lambda model, device: "float32")
    with caplog.at_level(logging.WARNING):
        assert with_settled_dtype(RunConfig()).model.dtype == "float32"
    assert 'model.dtype = "bfloat16"' in caplog.text


def test_a_plan_counts_the_type_that_its_hardware_would_use(halved: Path, plain_cpu):
    config = RunConfig.model_validate({"model": {"name": str(halved)}})

    def planned_bytes(hardware: str, **changes: str) -> float:
        model = config.model.model_copy(update=changes)
        return predict(config.model_copy(update={"model": model}), parse(hardware)).memory.places[0].used

    assert planned_bytes("h200") == planned_bytes("h200", dtype="bfloat16")
    assert planned_bytes("t4") == planned_bytes("t4", dtype="float32") > planned_bytes("t4", dtype="bfloat16")


def test_an_adapter_names_its_base_and_peft_loads_both(tmp_path: Path):
    """By the absolute folder of a local model, wherever the reader stands."""
    from peft import AutoPeftModelForCausalLM

    config = ModelConfig(lora=LoRAConfig(rank=2))
    model = attach_lora(load_model(config), config, seed=0)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.normal_(std=0.1)
    export(model, tmp_path)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(Path(resolve(QUICKSTART)).resolve())
    ids = torch.tensor([[1, 7, 9, 11]])
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
