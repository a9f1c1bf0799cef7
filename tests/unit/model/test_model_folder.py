"""A model folder is used as it was written, or refused with the name of what is wrong in it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import QUICKSTART
from paceline.config import load as load_config
from paceline.config.model import ModelConfig
from paceline.data import row_digest
from paceline.model import ModelError, load_model, load_tokenizer
from paceline.runtime.preflight import preflight

LAYER = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(QUICKSTART, tmp_path / "model")


def write(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refusal(folder):
    with pytest.raises(ModelError) as error:
        load_model(ModelConfig(name=str(folder)))
    assert "\n" not in str(error.value)
    return str(error.value)


def from_files(folder):
    """What `paceline check` says, which reads no weights."""
    return preflight(load_config(None, ["--model.name", str(folder)]).config).problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(LAYER), f"its weight files lack {LAYER}: download"),
        (
            lambda t: t.update({"model.layers.9.extra": torch.zeros(2)}),
            "hold model.layers.9.extra, which its config.json",
        ),
        (lambda t: t.update({LAYER: t[LAYER][:7].clone()}), f"{LAYER} is 7x128 in the files and"),
    ],
    ids=["missing", "surplus", "shape"],
)
def test_tensors_that_are_not_the_models_are_refused_by_name(folder, change, words, capfd):
    write(folder, change)
    said = refusal(folder)
    assert words in said
    assert from_files(folder) == [said]
    assert "LOAD REPORT" not in "".join(capfd.readouterr()), "one sentence is enough"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder, value):
    write(folder, lambda tensors: tensors[LAYER][3, 5].fill_(value))
    assert f"{LAYER} holds NaN or infinity" in refusal(folder)


def test_weights_whose_sum_is_too_large_are_finite_all_the_same(folder):
    write(folder, lambda tensors: tensors[LAYER].fill_(3e38))
    assert torch.isfinite(dict(load_model(ModelConfig(name=str(folder))).named_parameters())[LAYER]).all()


def test_tables_that_a_model_computes_itself_and_tied_weights_are_no_surplus(folder):
    def older(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name in ("self_attn.rotary_emb.inv_freq", "self_attn.attn.bias", "self_attn.masked_bias"):
            tensors[f"model.layers.0.{name}"] = torch.zeros(4)

    write(folder, older)
    load_model(ModelConfig(name=str(folder)))
    assert from_files(folder) == []


@pytest.mark.parametrize("kept", [4, 40, -100])
def test_a_truncated_file_is_a_sentence(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors is" in refusal(folder)


@pytest.mark.parametrize("header", [b"[1]", b'{"a": 3}', b'{"a": {"data_offsets": "x"}}'])
def test_a_header_of_nonsense_is_a_sentence(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "is no safetensors file" in refusal(folder)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(folder):
    def narrower(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:90].clone()

    write(folder, narrower)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    with pytest.raises(ModelError, match=r"ids up to 10\d .*has embeddings for 90: set model.tokenizer") as error:
        load_tokenizer(ModelConfig(name=str(folder)))
    assert str(error.value) in from_files(folder)


def test_pickled_weights_are_refused_with_how_to_convert_them(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    said = refusal(folder)
    assert "in pytorch_model.bin, a pickle" in said
    assert ".save_pretrained(FOLDER)" in said
    assert from_files(folder) == [said]


# -- rows --------------------------------------------------------------------------------------------------------------


class Foreign:
    """A sequence of another library, which may be slow."""

    def __init__(self, total):
        self.total, self.asked = total, []

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        self.asked.append(index)
        return {"row": index}


def test_of_rows_that_may_be_slow_a_few_are_hashed_with_the_first_and_the_last():
    rows = Foreign(100_000)
    assert row_digest(rows)["rows"] == 100_000
    assert (len(rows.asked), rows.asked[0], rows.asked[-1]) == (64, 0, 99_999)


def test_a_row_is_hashed_by_its_content_and_not_by_its_place_in_memory():
    def rows():
        return [{"b": 1, "a": object(), "t": (1, 2)}, {"x": torch.ones(2), "y": b"z", 3: None}]

    assert row_digest(rows()) == row_digest(rows())
    assert row_digest(rows()) != row_digest(rows()[::-1])
