"""The law of `check`: what `train` refuses at its start, `check` refuses in the same words, from files alone."""

import json
import shutil
import struct

import pytest
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conftest import QUICKSTART
from families import FAMILIES, any_config, verdict
from paceline.config import load as load_config
from paceline.config.model import ModelConfig
from paceline.errors import PacelineError
from paceline.model import UnsupportedModel, load_model, load_tokenizer
from paceline.model.support import check_family
from paceline.runtime import train
from paceline.runtime.preflight import PreflightError, preflight

SMALL = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
RECURRENT = "RecurrentGemmaForCausalLM: it has `linear_attention`"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def model(tmp_path):
    """A copy of the quickstart's model folder, to be damaged."""
    return shutil.copytree(QUICKSTART, tmp_path / "model")


@pytest.fixture
def folder(tmp_path):
    """A folder with a model's config and a tokenizer: enough for whatever the config decides. Without `weights` it has
    an empty file of them."""

    def make(config, weights=False, **changes):
        made = tmp_path / "folder"
        config.save_pretrained(made)
        for name in TOKENIZER:
            shutil.copy(QUICKSTART / name, made)
        file = made / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        if weights:
            hf.AutoModelForCausalLM.from_config(config).save_pretrained(made)
        else:
            (made / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        return made

    return make


def problems(*flags):
    return preflight(load_config(None, [str(flag) for flag in flags]).config).problems


# -- models ------------------------------------------------------------------------------------------------------------

BERT = {"architectures": ["BertForMaskedLM"]}
VISION = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("config", "changes", "sentence"),
    [
        (hf.RecurrentGemmaConfig(**SMALL), {}, f"{RECURRENT} layers; not supported"),
        (hf.PhimoeConfig(**SMALL), {}, "PhimoeForCausalLM: its router draws noise in training"),
        (hf.Qwen2_5_VLConfig(), VISION, "Qwen2_5_VLForConditionalGeneration (model type `qwen2_5_vl`) reads images"),
        (hf.BertConfig(**SMALL), BERT, "BertForMaskedLM (model type `bert`) is an encoder"),
        (hf.T5Config(), {}, "type `t5` is an encoder-decoder"),
        (hf.ViTConfig(), {}, "type `vit` is no causal language model"),
        (hf.LlamaConfig(**SMALL), {"model_type": "lama"}, "does not know the model type `lama`"),
        (hf.LlamaConfig(**SMALL), {"model_type": "own", "auto_map": {}}, "set model.trust_remote_code = true"),
        (hf.LlamaConfig(**SMALL), {"quantization_config": {"quant_method": "gptq"}}, "are quantised (gptq)"),
        (hf.LlamaConfig(**SMALL), {"quantization_config": {"quant_method": "fp8"}}, "are quantised (fp8)"),
        (hf.LlamaConfig(**SMALL), {"quantization": {"bits": 4}}, "quantised for mlx"),
    ],
    ids=lambda value: value.model_type if isinstance(value, hf.PreTrainedConfig) else None,
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(folder, config, changes, sentence):
    made = folder(config, **changes)
    (problem,) = problems("--model.name", made)
    assert f"model `{made}`: " in problem
    assert sentence in problem
    with pytest.raises(PacelineError) as refused:
        train(load_config(None, ["--model.name", str(made)]).config)
    assert str(refused.value) == problem


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_loads_passes(family):
    check_family(FAMILIES[family]())


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "olmoe", "gpt_oss", "mamba", "bloom", "gpt_neo", "falcon", "phi", "gpt2"]
)
def test_a_config_alone_gets_the_verdict_that_the_weights_get(kind):
    """`check_family` builds no weights, and says of a model type what `check_supported` says of a loaded model."""
    assert kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = verdict(kind)
    if found.outcome == "exact":
        check_family(any_config(kind))
        return
    assert found.outcome == "refused"
    with pytest.raises(UnsupportedModel) as refused:
        check_family(any_config(kind))
    assert found.detail in str(refused.value)


def test_a_model_of_any_size_is_checked_without_its_memory():
    """A config of 400 billion parameters: on the meta device they take none."""
    check_family(hf.LlamaConfig(hidden_size=16384, intermediate_size=53248, num_attention_heads=128, vocab_size=128256))
    assert torch.empty(0).device.type == "cpu", "and the default device is what it was"


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def index(folder, *files):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    table = {f"tensor.{at}": file for at, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def only(folder, **files):
    for file in folder.iterdir():
        file.unlink()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: cut(f / "config.json", 80), "config.json is cut off or damaged: not valid JSON at line"),
        (lambda f: (f / "config.json").unlink(), "there is no config.json in it"),
        (lambda f: (f / "config.json").write_text("{}"), "its config.json has no `model_type`"),
        (lambda f: (f / "model.safetensors").unlink(), "there are no weights in it: model.safetensors is missing"),
        (lambda f: cut(f / "model.safetensors", 5000), "model.safetensors is cut off: 5000 of "),
        (lambda f: cut(f / "model.safetensors", 4), "model.safetensors is no safetensors file"),
        (lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
        (lambda f: index(f, *PARTS), f"names {PARTS[1]}, which is not there"),
        (lambda f: (f / "model.safetensors").rename(f / PARTS[0]), "model.safetensors.index.json, which says what is"),
        (lambda f: only(f, model__gguf="GGUF"), "is a GGUF file"),
        (
            lambda f: only(f, adapter_config__json='{"base_model_name_or_path": "org/base"}'),
            "set model.name to `org/base`",
        ),
        (lambda f: only(f), "(it is empty)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_folder_is_refused_with_what_is_wrong_in_it(model, damage, sentence):
    """By `check` and, before any weights are read, by whatever loads a model: `serve` and `rollout` too."""
    damage(model)
    found = problems("--model.name", model, "--model.tokenizer", QUICKSTART)
    assert len(found) == 1
    assert sentence in found[0]
    assert str(model) in found[0]
    with pytest.raises(PacelineError) as refused:
        load_model(ModelConfig(name=str(model)))
    assert str(refused.value) == found[0]


def test_a_folder_in_parts_is_whole(model):
    index(model, PARTS[0])
    assert problems("--model.name", model) == []


def test_a_gguf_file_is_told_how_to_become_a_folder(tmp_path):
    file = tmp_path / "model.Q4.gguf"
    file.write_text("GGUF")
    (problem,) = problems("--model.name", file)
    assert f"from_pretrained('{tmp_path}', gguf_file='model.Q4.gguf', " in problem
    assert "save_pretrained" in problem
    (other,) = problems("--model.name", QUICKSTART / "config.json")
    assert f"give the Hugging Face folder it belongs to ({QUICKSTART})" in other


def test_a_run_directory_names_its_export(model, tmp_path):
    (tmp_path / "run").mkdir()
    model.rename(tmp_path / "run" / "export")
    (problem,) = problems("--model.name", tmp_path / "run", "--model.tokenizer", QUICKSTART)
    assert f"the model it trained is in {tmp_path / 'run' / 'export'}" in problem


def test_a_model_of_the_hub_is_a_note_and_no_refusal():
    found = preflight(load_config(None, ["--model.name", "nobody/knows-this"]).config)
    assert found.problems == []
    assert ["`nobody/knows-this`" in note for note in found.notes] == [True]


# -- tokenizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [hf.LlamaConfig, hf.Qwen2Config, hf.GPT2Config])
def test_a_folder_without_a_tokenizer_says_so(folder, kind):
    """transformers makes an empty tokenizer for some families, and the run then said that the prompt is empty."""
    made = folder(kind(**SMALL, num_key_value_heads=4), weights=True)
    for name in TOKENIZER:
        (made / name).unlink()
    with pytest.raises(PacelineError, match=r"there is no tokenizer in .*folder .*set model.tokenizer to") as refused:
        load_tokenizer(ModelConfig(name=str(made)))
    assert problems("--model.name", made) == [str(refused.value)]
    assert problems("--model.name", made, "--model.tokenizer", QUICKSTART) == []


def test_a_tokenizer_without_a_chat_template_is_refused(model, tmp_path):
    (model / "chat_template.jinja").unlink()
    assert problems("--model.name", model) == ["the tokenizer has no chat template: name one with model.chat_template"]
    template = str(QUICKSTART / "chat_template.jinja")
    assert problems("--model.name", model, "--model.chat_template", template) == []
    (absent,) = problems("--model.name", model, "--model.chat_template", tmp_path / "absent.jinja")
    assert "model.chat_template: no such file" in absent


def test_a_real_tokenizer_passes_where_the_model_has_its_ids(load, folder):
    tokenizer = load("qwen3").name_or_path
    sizes = SMALL | {"vocab_size": 151936, "hidden_size": 8}
    made = folder(hf.Qwen3Config(**sizes, num_key_value_heads=4, head_dim=4), weights=True)
    assert problems("--model.name", made, "--model.tokenizer", tokenizer) == []
    (problem,) = problems("--model.tokenizer", tokenizer)
    assert "has ids up to 151668 ('</think>'), and the model `paceline:quickstart` has embeddings for 103" in problem


# -- data and user code ------------------------------------------------------------------------------------------------

CODE = """
import pathlib

import paceline

pathlib.Path("ran").touch()

async def play(row, seat):
    return 1.0

def plain(row, seat):
    return 1.0

class Mine(paceline.Environment):
    pass

def reward_fn(messages, answer): ...

loss = credit = plain

try:
    import surely_not_installed
except ImportError:
    async def sometimes(row, seat): ...
"""
CUSTOM = ("--env.0.type", "custom", "--env.0.name", "mine")
EQUALITY = ("--env.0.type", "equality")
ROW = '{"question": "1+1?", "answer": "2"}\n'


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user's folder with code and rows, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import no_such_module\n\ndef play(): ...\n")
    (tmp_path / "typo.py").write_text("def play(:\n")
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "renamed.jsonl").write_text('{"question": "1+1?", "gold": "2"}\n')
    (tmp_path / "image.jsonl").write_text(
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "answer": "2"}'
    )
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((*EQUALITY, "--env.0.dataset", "absent.jsonl"), "dataset absent.jsonl: no such file"),
        ((*EQUALITY, "--env.0.dataset", "rows.xyz"), "dataset rows.xyz: not a .json, .jsonl, .csv"),
        ((*EQUALITY, "--env.0.dataset", "renamed.jsonl"), "renamed.jsonl:1: a row needs `answer`"),
        ((*EQUALITY, "--env.0.dataset", "image.jsonl"), "training row 0: messages[1]: images are not supported"),
        (
            (*EQUALITY, "--env.0.dataset", "rows.jsonl", "--env.0.eval_dataset", "gone.jsonl"),
            "dataset gone.jsonl: no such file",
        ),
        ((*CUSTOM, "--env.0.import_path", "absent.py:play"), "no such file `absent.py`"),
        ((*CUSTOM, "--env.0.import_path", "mine.py:paly"), "mine.py has no `paly`: did you mean `play`?"),
        ((*CUSTOM, "--env.0.import_path", "broken.py:play"), "line 1 imports `no_such_module`, which is not installed"),
        ((*CUSTOM, "--env.0.import_path", "no_such.package:play"), "there is no package `no_such` here"),
        ((*CUSTOM, "--env.0.import_path", "paceline.envs:plya"), "paceline.envs has no `plya`"),
        ((*CUSTOM, "--env.0.import_path", "typo.py:play"), "typo.py, line 1: "),
        ((*CUSTOM, "--env.0.import_path", "mine.py:play"), "a function needs rows"),
        ((*CUSTOM, "--env.0.import_path", "mine.py:plain"), "must be `async def rollout(row, seat)`"),
        (("--trainer.loss.type", "custom", "--trainer.loss.import_path", "absent.py:loss"), "no such file `absent.py`"),
        (("--algo.type", "custom", "--algo.import_path", "mine.py:scores"), "mine.py has no `scores`"),
        (("--env.0.type", "module", "--env.0.module", "m.py", "--env.0.dataset", "rows.jsonl"), "no such file `m.py`"),
        (("--env.0.type", "retrieval", "--env.0.corpus", "absent.jsonl"), "corpus absent.jsonl: no such file"),
        (("--device", "cuda"), "torch sees no GPU here"),
        (("--model.renderer", "renderers", "--model.known_as", "x"), "renderers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_run_file_names_must_be_there(user, flags, sentence):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (problem,) = problems(*flags)
    assert sentence in problem


USES = [
    (*CUSTOM, "--env.0.import_path", "mine.py:Mine"),
    (*CUSTOM, "--env.0.import_path", "mine.py:play", "--env.0.dataset", "rows.jsonl"),
    (*CUSTOM, "--env.0.import_path", "mine.py:sometimes", "--env.0.dataset", "rows.jsonl"),
    ("--env.0.type", "module", "--env.0.module", "mine.py", "--env.0.dataset", "rows.jsonl"),
    ("--env.0.type", "arena", "--env.0.name", "a", "--env.0.import_path", "mine.py:Mine"),
    ("--trainer.loss.type", "custom", "--trainer.loss.import_path", "mine.py:loss"),
    ("--algo.type", "custom", "--algo.import_path", "mine.py:credit"),
]


@pytest.mark.parametrize("flags", USES)
def test_user_code_is_read_and_never_run(user, flags):
    """A run file from elsewhere is safe to check first."""
    assert problems(*flags) == []
    assert not (user / "ran").exists()


def test_a_template_whose_markers_are_no_tokens_is_noted(tmp_path):
    template = tmp_path / "chatml.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}")
    found = preflight(load_config("quickstart", ["--model.chat_template", str(template)]).config)
    assert found.problems == []
    assert "writes `<|im_start|>` or `<|im_end|>`, which the tokenizer" in found.notes[0]


def test_code_of_a_model_is_not_run_either(folder, tmp_path):
    made = folder(hf.LlamaConfig(**SMALL), model_type="own", auto_map={"AutoConfig": "code.Config"})
    (made / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    found = preflight(load_config(None, ["--model.name", str(made), "--model.trust_remote_code", "true"]).config)
    assert found.problems == []
    assert "has Python code of its own, which is not run here" in found.notes[0]
    assert not (tmp_path / "ran").exists()


def test_only_the_first_rows_are_read(user):
    """`train` reads them all, before its first batch; `check` answers at once, however large the file."""
    (user / "long.jsonl").write_text(ROW * 1000 + "{\n")
    assert problems(*EQUALITY, "--env.0.dataset", "long.jsonl") == []


def test_rows_of_the_hub_are_a_note(user):
    for flags in (EQUALITY, (*CUSTOM, "--env.0.import_path", "mine.py:play")):
        found = preflight(load_config(None, [*flags, "--env.0.dataset", "train@openai/gsm8k"]).config)
        assert found.problems == []
        assert found.notes == ["dataset train@openai/gsm8k is on the hub: its rows are checked when the run loads them"]


@pytest.mark.parametrize(
    ("flags", "package", "sentence"),
    [
        (("--placement", "ray"), "ray", 'pip install "paceline[ray]"'),
        (("--backend", "mlx"), "mlx", "pip install 'paceline[mlx]'"),
        (("--record.exporters", '["wandb"]'), "wandb", "pip install 'paceline[wandb]'"),
        (("--env.0.type", "verifiers", "--env.0.id", "x"), "verifiers", 'pip install "paceline[verifiers]"'),
        (("--env.0.type", "math", "--env.0.dataset", "rows.jsonl"), "math_verify", 'pip install "paceline[tasks]"'),
    ],
)
def test_a_package_that_is_missing_is_named(user, monkeypatch, flags, package, sentence):
    import importlib.util
    import sys

    find = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None if name == package else find(name, *at))
    (problem,) = problems(*flags)
    assert sentence in problem
    elsewhere = preflight(load_config(None, list(flags)).config, elsewhere=True)
    if "--env.0.type" not in flags:  # rows cannot be looked at without their package, on whatever machine
        assert elsewhere.problems == []
        assert sentence in elsewhere.notes[0]


def test_a_key_that_is_not_set_is_named(user, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    teacher = '{name = "t", base_url = "http://127.0.0.1:1/v1", api_key_env = "NO_SUCH_KEY"}'
    (problem,) = problems("--algo.type", "opd", "--algo.teacher", teacher)
    assert "teacher.api_key_env: the environment variable NO_SUCH_KEY is not set" in problem


def test_a_teacher_that_the_run_serves_is_checked_like_the_policy(folder):
    made = folder(hf.RecurrentGemmaConfig(**SMALL))
    flags = ("--placement", "ray", "--algo.type", "opd", "--algo.teacher.name", made)
    (problem,) = problems(*flags)
    assert f"model `{made}`: {RECURRENT} layers" in problem


# -- the command -------------------------------------------------------------------------------------------------------

BAD = """
name = "bad"
[model]
name = "./nowhere"
[[env]]
type = "equality"
dataset = "absent.jsonl"
[[env]]
type = "custom"
name = "mine"
import_path = "mine.py:paly"
[trainer.loss]
type = "custom"
import_path = "absent.py:loss"
"""


def test_check_and_train_refuse_all_of_it_at_once_in_the_same_words(user, here):
    (user / "bad.toml").write_text(BAD)
    checked, trained = here("check", "bad.toml"), here("train", "bad.toml")
    assert (checked.returncode, trained.returncode) == (2, 2)
    assert checked.stderr.endswith(trained.stderr)
    assert "is valid" not in checked.stderr
    for sentence in (
        "nowhere`: no such folder",
        "absent.jsonl: no such file",
        "no `paly`: did you mean `play`?",
        "absent.py`",
    ):
        assert trained.stderr.count(sentence) == 1
    assert not (user / "runs").exists(), "and no run directory is left"
    compared = here("ab", "bad.toml", "--model.lora.rank", "4", "--b.seed", "0", "--b.trainer.optimizer.lr", "1e-3")
    assert compared.returncode == 2
    assert "nowhere`: no such folder" in compared.stderr


@pytest.mark.parametrize(("model", "sentence"), [("states", RECURRENT), ("model.gguf", "gguf_file='model.gguf'")])
def test_the_command_refuses_layers_with_states_and_a_gguf_file(user, folder, here, model, sentence):
    (user / "quick.toml").write_text("steps = 1\n")
    (user / "model.gguf").write_text("GGUF")
    folder(hf.RecurrentGemmaConfig(**SMALL)).rename(user / "states")
    done = here("check", "quick.toml", "--model.name", str(user / model))
    assert (done.returncode, "is valid" in done.stderr) == (2, False)
    assert sentence in done.stderr


def test_serve_and_rollout_say_the_same(folder, here):
    """A tokenizer that is missing is found before weights are read, a model that reads images before that."""
    made = folder(hf.Qwen2_5_VLConfig(), **VISION)
    for command in (("serve", str(made), "--port", "0"), ("rollout", "reverse-text", "--model.name", str(made))):
        done = here(*command)
        assert (done.returncode, "(model type `qwen2_5_vl`) reads images" in done.stderr) == (2, True)
        assert done.stderr == f"paceline: {problems('--model.name', made)[0]}\n"
    for name in TOKENIZER:
        (made / name).unlink()
    for command in (("serve", str(made), "--port", "0"), ("rollout", "reverse-text", "--model.name", str(made))):
        done = here(*command)
        assert done.returncode == 2
        assert done.stderr.startswith(f"paceline: there is no tokenizer in {made} ")


def test_a_truncated_config_is_no_traceback_of_the_plan(user, model, here):
    cut(model / "config.json", 80)
    (user / "quick.toml").write_text("steps = 1\n")
    done = here("check", "quick.toml", "--model.name", str(model))
    assert done.returncode == 2
    assert "not valid JSON" in done.stderr


def test_objects_given_from_python_stand_for_what_the_run_file_names(user):
    config = load_config(None, [*CUSTOM, "--env.0.import_path", "absent.py:play"]).config
    assert preflight(config, {"mine"}).problems == []
    with pytest.raises(PreflightError, match=r"absent\.py"):
        train(config)
