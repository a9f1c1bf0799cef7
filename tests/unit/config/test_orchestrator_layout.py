"""Each key of the layout with an [orchestrator] table is answered with a line that can be typed here."""

import re
import tomllib
from pathlib import Path

import pytest

from paceline.config import ConfigError, load, orchestrator_layout
from paceline.config.fields import key_paths
from paceline.config.orchestrator_layout import ROWS, translate_layout

T = '{name = "big", base_url = "http://there/v1"}'
PRINTED = [
    # table and key as that layout prints them, and the line to write here
    ("[orchestrator.algo.advantage]\ntype = 'grpo'", '[algo] type = "grpo"'),
    ("[orchestrator.algo.advantage]\ntype = 'max_rl'", '[algo] type = "max_rl"'),
    ("[orchestrator.algo.advantage]\ntype = 'reward'", '[algo] type = "reward"'),
    ("[orchestrator.algo.advantage]\ntype = 'echo'", '[algo] type = "echo"'),
    ("[orchestrator.algo.advantage]\ntype = 'opsd'\ndemo_key = 'demo'", '[algo] type = "opsd"'),
    ("[orchestrator.algo.advantage]\ntype = 'opsd'\ndemo_key = 'demo'", '[algo] demo_key = "demo"'),
    ("[orchestrator.algo.advantage]\ntype = 'group_norm'", '[algo] type = "grpo"'),
    ("[orchestrator.algo.advantage]\ntype = 'ref_kl'", '[algo] type = "opd"'),
    ("[orchestrator.algo.advantage]\ntype = 'demo_ref_kl'", '[algo] type = "opsd"'),
    ("[orchestrator.algo.advantage]\ntype = 'supervised'", '[algo] type = "sft"'),
    ("[orchestrator.algo.advantage]\nmodel = " + T, f"[algo] teacher = {T}"),
    ("[orchestrator.algo.advantage]\nroles = {tool = {alpha = 0.1}}", "[algo] roles = {tool = 0.1}"),
    ("[orchestrator.algo.advantage.roles.user]\nalpha = 0.5", "[algo] roles = {user = 0.5}"),
    ("[orchestrator.algo.advantage]\nfilter = {import_path = 'a.py:f'}", '[algo] filter = {import_path = "a.py:f"}'),
    ("[orchestrator.algo.advantage]\nimport_path = 'a.py:f'", '[algo] import_path = "a.py:f"'),
    ("[orchestrator.algo.advantage]\nlength_penalty = {type = 'tokens'}", '[algo] length_bonus = "tokens"'),
    ("[orchestrator.algo.advantage]\nlength_penalty = {type = 'turns'}", '[algo] length_bonus = "turns"'),
    ("[orchestrator.advantage]\ntype = 'default'", '[algo] type = "grpo"'),
    ("[orchestrator]\nadvantage = {type = 'max_rl'}", '[algo] type = "max_rl"'),
    ("[orchestrator.algo]\nmodel = " + T, f"[algo] teacher = {T}"),
    ("[orchestrator.algo.teacher]\nname = 'big'\nbase_url = 'http://there/v1'", f"[algo] teacher = {T}"),
    ("[orchestrator.algo]\nteacher = 'policy'", '[algo] teacher = "policy"'),
    ("[orchestrator.algo.sampling]\nsource = 'policy'", "leave it out: the policy samples"),
    (f"[orchestrator.algo.sampling]\nsource = {T}", f'[algo] teacher = {T} with type = "sft"'),
    ("[orchestrator.algo]\nloss = 'ce'", "leave it out: the algorithm's type decides"),
    ("[orchestrator.algorithm.token_scorer]\ntype = 'logprobs'", "leave it out: the algorithm's type decides"),
    ("[orchestrator]\ntraining_mode = 'rl'", '[algo] type = "grpo"'),
    ("[orchestrator]\ntraining_mode = 'opd'", '[algo] type = "opd", teacher = {name = "MODEL"'),
    ("[orchestrator]\ntraining_mode = 'sft'", '[algo] type = "sft", teacher = {name = "MODEL"'),
    (
        "[orchestrator.teacher.model]\nname = 'big'\n[orchestrator.teacher.client]\nbase_url = 'http://there/v1'",
        f"[algo] teacher = {T}",
    ),
    ("[orchestrator.model]\nname = 'Qwen/Q'", '[model] name = "Qwen/Q"'),
    ("[orchestrator.student]\nname = 'Qwen/Q'", '[model] name = "Qwen/Q"'),
    ("[orchestrator.model]\nlora = {rank = 8}", "[model] lora = {rank = 8}"),
    ("[orchestrator.model]\ntrust_remote_code = true", "[model] trust_remote_code = true"),
    ("[orchestrator.model.client]\nbase_url = ['http://x/v1']", "the run starts its own engine"),
    ("[orchestrator.client]\nbase_url = ['http://x/v1']", "the run starts its own engine"),
    ("[orchestrator.renderer]\nname = 'auto'", '[model] renderer = "renderers"'),
    ("[orchestrator]\nfilters = [{type = 'zero_advantage'}]", "[filters] zero_advantage = true"),
    ("[[orchestrator.filters]]\ntype = 'gibberish'", "for gibberish: [filters] group = {import_path"),
    ("[orchestrator.sampling]\nmax_tokens = 128", "[sampling] max_tokens = 128"),
    ("[orchestrator]\nbatch_size = 128", "batch_size = 128 at the top"),
    ("[orchestrator]\nrollouts_per_example = 16", "group_size = 16 at the top"),
    ("[orchestrator]\nmax_off_policy_steps = 8", "staleness = 8 at the top"),
    ("[orchestrator]\ngroup_size = 16", "group_size = 16 at the top"),
    ("[orchestrator]\nmax_async_level = 2", "staleness = 2 at the top"),
    ("[orchestrator]\nmax_inflight_rollouts = 64", "max_inflight = 64 at the top"),
    ("[orchestrator]\nmax_steps = 20", "steps = 20 at the top"),
    ("[orchestrator]\nseed = 4", "seed = 4 at the top"),
    ("[orchestrator]\nlength_penalty = 'turns'", '[algo] length_bonus = "turns"'),
    ("[orchestrator.model]\nvlm = true", "leave it out: conversations are text"),
    ("[orchestrator.model.model]\nname = 'Qwen/Q'", '[model] name = "Qwen/Q"'),
    ("[orchestrator.algo]\nadvantage = 'grpo'", '[algo] type = "grpo"'),
    ("[orchestrator.algo.advantage]\nteacher = " + T, f"[algo] teacher = {T}"),
    ("[orchestrator.algo.sampling]\ntemperature = 0.7", "[sampling] temperature = 0.7"),
    ("[orchestrator.algo]\ntype = 'grpo'", '[algo] type = "grpo"'),
    (f"[[orchestrator.env]]\nsampling = {{source = {T}}}", f"[env.algo] teacher = {T}"),
    ("[[orchestrator.env]]\nratio = 0.5", "[[env]] weight = 0.5"),
    (
        "[orchestrator]\nodd = 1",
        "there is no [orchestrator], and no key `odd`: `paceline config` lists",
    ),
    ("[[orchestrator.env]]\nid = 'reverse-text'", '[[env]] type = "reverse-text"'),
    ("[[orchestrator.train.env]]\nid = 'mine'", '[[env]] type = "verifiers", id = "mine"'),
    ("[[orchestrator.env]]\nargs = {n = 3}", "[[env]] args = {n = 3}"),
    ("[[orchestrator.env]]\nadvantage = {type = 'opd'}", '[env.algo] type = "opd"'),
    (f"[[orchestrator.env]]\nalgo = {{teacher = {T}}}", f"[env.algo] teacher = {T}"),
    ("[[env]]\ntype = 'reverse-text'\nadvantage = {type = 'max_rl'}", '[env.algo] type = "max_rl"'),
    ("[[env]]\ntype = 'reverse-text'\nalgo = {advantage = {type = 'opsd'}}", '[env.algo] type = "opsd"'),
    (f"[[env]]\ntype = 'reverse-text'\nalgo = {{model = {T}, type = 'opd'}}", f"[env.algo] teacher = {T}"),
    (f"[[env]]\ntype = 'reverse-text'\nalgo.type = 'sft'\nalgo.sampling.source = {T}", f"[env.algo] teacher = {T}"),
    ("[algo.advantage]\ntype = 'echo'", '[algo] type = "echo"'),
    ("[advantage]\ntype = 'custom'", '[algo] type = "custom"'),
    ("training_mode = 'opd'", '[algo] type = "opd", teacher'),
    ("[orchestrator.algo]\nname = 'self_distill'", '[algo] type = "opsd"'),
    ("[orchestrator.algo.advantage]\ntype = 'logprobs'", '[algo] type = "opd"'),
    ("[orchestrator.algo.advantage]\ntype = 'none'", "leave it out: opd, opsd and sft give no advantage"),
    ("[orchestrator.algo.advantage]\ntype = 'strange'", '[algo] type = "grpo", "max_rl", '),
    ("[orchestrator.algo.advantage]\nobservations = 'all'", "[algo] roles = {system = 0.1, user = 0.1, tool = 0.1}"),
    ("[orchestrator.algo.advantage]\nobservation_weight = 0.3", "[algo] roles = {tool = 0.3}"),
    ("[orchestrator.algo.advantage]\naction_loss_type = 'ce'", "leave it out: the algorithm's type decides"),
    ("[orchestrator.algo.advantage]\ntool_names = ['search']", '[algo] tools = ["search"]'),
    (
        "[orchestrator.algo.advantage.roles.tool]\nalpha = 0.2\ntool_names = ['search']",
        '[algo] roles = {tool = 0.2}, tools = ["search"]',
    ),
    (
        "[orchestrator.algo.advantage]\nlength_penalty = {type = 'tokens', tool_weight = 0.5}",
        '[algo] length_bonus = "tokens", in which all tokens weigh alike',
    ),
    ("[orchestrator.algo]\nroles = {tool = {alpha = 0.1}}", "[algo] roles = {tool = 0.1}"),
    ("[orchestrator.models.big]\nname = 'big'", "name a frozen model where it is used: [algo] teacher = "),
    ("[orchestrator.model.client]\ntimeout = 3", "the run starts its own engine, and [engine] sets it up"),
    ("[orchestrator]\ntoken_batch_size = 4096", "leave it out: a batch is counted in rollouts, by batch_size"),
    ("[orchestrator]\noversampling_factor = 1.5", "oversample = 0.5 at the top"),
    ("[orchestrator]\nbatch_sise = 8", "did you mean `batch_size`?"),
    ("[orchestrator.eval]\ninterval = 10", "[eval] every = 10"),
    ("[[orchestrator.eval.env]]\nid = 'reverse-text'", "leave it out: each environment is evaluated on its own"),
    ("[[env]]\nid = 'reverse-text'", '[[env]] type = "reverse-text"'),
    ("[algo]\nname = 'opd'", '[algo] type = "opd"'),
    ("[algo]\ntype = 'supervised'", '[algo] type = "sft"'),
    ("[algo]\ntype = 'echo'\nroles = {tool = {alpha = 0.2}}", "[algo] roles = {tool = 0.2}"),
    ("[trainer.loss]\ntype = 'default'", '[trainer.loss] type = "dppo"'),
]


@pytest.mark.parametrize(("printed", "line"), PRINTED)
def test_each_key_is_answered_with_the_line_to_write(tmp_path, printed, line):
    (tmp_path / "run.toml").write_text(printed)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.toml")
    assert line in str(refused.value)
    assert "there is no key" not in str(refused.value), "said once, and not again in other words"
    assert all(problem.startswith(f"{tmp_path}/run.toml: ") for problem in refused.value.problems)


def test_the_lines_are_run_files():
    """Every line that begins with a table is TOML, and its keys are keys of the run file."""
    for printed, line in PRINTED:
        for answer in translate_layout(tomllib.loads(printed)).values():
            ends = r", which is|, in which|, where| with type|; |$"
            for found in re.findall(rf"write (\[+[\w.]+\]+ [^;]*?)(?:{ends})", answer):
                header, _, keys = found.partition(" ")
                if " or " in keys:
                    continue  # all the types there are
                text = "\n".join(f"{key}" for key in re.split(r", (?=\w+ = )(?![^{]*\})", keys))
                table = tomllib.loads(f"{'[[env]]' if 'env' in header else ''}\n{header}\n{text}")
                assert table, line
                known = {".".join(str(key) for key in path if key != 0) for path, _ in key_paths()}
                unknown = {f"{header.strip('[]')}.{key}" for key in tomllib.loads(text)} - known
                assert not unknown, line


def test_every_row_is_tried(monkeypatch):
    found, seen = orchestrator_layout._row, set()
    monkeypatch.setattr(orchestrator_layout, "_row", lambda path: seen.add(found(path)) or found(path))
    for printed, _ in PRINTED:
        translate_layout(tomllib.loads(printed))
    assert seen - {None} == ROWS.keys()


def test_a_run_file_of_ours_has_none_of_it():
    ours = "[algo]\ntype = 'opd'\nteacher = {name = 'm', base_url = 'http://x'}\n[filters]\nzero_advantage = true\n"
    ours += "[model]\nrenderer = 'auto'\n[[env]]\ntype = 'reverse-text'\nalgo = {type = 'echo', roles = {tool = 0.1}}\n"
    assert translate_layout(tomllib.loads(ours)) == {}


def test_the_sentences_of_the_docs_are_what_is_said(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "seeds" / "algorithms.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?m)^run.toml: .*", page)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        "[orchestrator]\ntraining_mode = 'rl'\n[orchestrator.model]\nname = 'Qwen/Qwen3-0.6B'\n"
        "[orchestrator.algo.advantage]\ntype = 'max_rl'\n"
    )
    with pytest.raises(ConfigError) as refused:
        load("run.toml")
    assert sorted(refused.value.problems) == sorted(shown)
