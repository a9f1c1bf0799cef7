"""The run file of every algorithm: examples load, what cannot work is refused with what to write instead."""

from pathlib import Path
from typing import get_args

import pytest

from paceline.config import ConfigError, RunConfig, dump, load
from paceline.config.algorithm import AlgorithmConfig, EchoConfig, GRPOConfig, SFTConfig
from paceline.config.env import ReverseTextConfig
from paceline.config.fields import type_of
from paceline.config.model import ModelRef

EXAMPLES = Path(__file__).parents[3] / "examples" / "algorithms"
TYPES = [type_of(section) for section in get_args(get_args(AlgorithmConfig)[0])]
TEACHER = '{ name = "m", base_url = "http://there/v1" }'
OTHER = '{ name = "other", base_url = "http://there/v1" }'


@pytest.mark.parametrize("kind", TYPES)
def test_every_algorithm_has_an_example_that_loads(kind):
    loaded = load(EXAMPLES / f"{kind}.toml")
    assert not loaded.warnings
    assert loaded.config.env[0].algo.type == kind


def read(tmp_path, text: str, *overrides: str):
    (tmp_path / "run.toml").write_text(text)
    return load(tmp_path / "run.toml", overrides)


def algo(line: str) -> str:
    return f'[[env]]\ntype = "reverse-text"\nalgo = {{ {line} }}\n'


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('type = "opd"', r"env.0.algo: opd needs a teacher: write \{name = "),
        ('type = "opd", teacher = "policy"', 'zero by construction: write .* or use type = "opsd"'),
        ('type = "opd", teacher = "gpt"', "env.0.algo.teacher: expected"),
        ('type = "opd", teacher = { name = "m" }', "no server serves `m`: start `paceline serve m --scores-only`"),
        ('type = "opd", teacher = { name = "m", api_key_env = "K" }', "give its base_url too, or leave the key out"),
        ('type = "sft", teacher = { name = "m" }', "an sft teacher plays, and the run's own scorers only score"),
        ('type = "opd", teacher = { base_url = "http://there" }', "env.0.algo.teacher: `name` is missing"),
        ('type = "opd", teacher = { name = "m", base_url = "there" }', "`there` is no address: write where"),
        ('type = "opd", teacher = { name = "m", base_url = "http://x", key = 1 }', "there is no key `key`"),
        (f'type = "opd", teacher = {TEACHER}, source = {TEACHER}', "env.0.algo.source: .* leave `source` out"),
        (f'type = "grpo", source = {TEACHER}', "a frozen source leaves nothing to weigh: leave `source` out, or"),
        (f'type = "opsd", source = {TEACHER}', "a frozen source leaves nothing to weigh"),
        ('type = "opsd", block = "look"', "env.0.algo.block: `{demonstration}` is missing"),
        ('type = "sft"', "sft has nothing to learn from: write .* as `teacher`, or set demonstrations = true"),
        ('type = "sft", teacher = "policy"', "sft on what the policy itself says teaches it nothing new"),
        ('type = "sft", source = "policy", demonstrations = true', "sft on what the policy itself says"),
        (f'type = "sft", teacher = {TEACHER}, source = {OTHER}', "`source` and `teacher` differ, leave `source` out"),
        (f'type = "sft", teacher = {TEACHER}, demonstrations = true', "not both: leave one of them out"),
        ('type = "echo", roles = {}', r"env.0.algo.roles: echo learns from no role: write roles = \{tool = 0.1\}"),
        ('type = "echo", roles = { tool = 0.0 }', "echo learns from no role"),
        ('type = "echo", roles = { tool = -1.0 }', "the weight of `tool` is negative"),
        ('type = "gae"', r"environment `reverse-text`: gae needs a critic .*: add a section \[trainer.critic\]"),
        ('type = "grpo", teacher = "policy"', 'it belongs to env.0.algo.type = "opd", "opsd" or "sft"'),
        ('type = "grpo", baseline = "row"', 'expected one of "group" or "batch"'),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(tmp_path, line, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        read(tmp_path, algo(line))
    assert len(caught.value.problems) == 1


def test_a_seat_cannot_be_played_by_another_model(tmp_path):
    text = algo('type = "rae"') + f'[[env.seats]]\nname = "o"\nalgo = {{ type = "sft", teacher = {TEACHER} }}\n'
    with pytest.raises(ConfigError, match=r"seat `o`: sft plays whole episodes.*: give it an \[\[env\]\] of its own"):
        read(tmp_path, text)


def test_who_plays_whole_episodes_has_no_seats_beside_it(tmp_path):
    text = algo(f'type = "sft", teacher = {TEACHER}') + '[[env.seats]]\nname = "o"\nalgo = { type = "rae" }\n'
    with pytest.raises(ConfigError, match=r"`reverse-text`: sft plays whole episodes.*without `seats`"):
        read(tmp_path, text)


def test_the_teacher_fills_its_slot_and_an_equal_value_is_accepted(tmp_path):
    ref = ModelRef(name="m", base_url="http://there/v1")
    for slots in (f"teacher = {TEACHER}", f"source = {TEACHER}", f"teacher = {TEACHER}, source = {TEACHER}"):
        config = read(tmp_path, algo(f'type = "sft", {slots}')).config
        found = config.env[0].algo
        assert (found.teacher, found.source) == (ref, ref)
        assert read(tmp_path, dump(config)).config == config


def test_a_teacher_can_be_named_on_the_command_line(tmp_path):
    flags = ["--env.0.algo.teacher.name", "m", "--env.0.algo.teacher.base-url", "http://there/v1"]
    assert read(tmp_path, algo('type = "opd"'), *flags).config.env[0].algo.teacher.name == "m"


def test_naming_any_role_replaces_the_table(tmp_path):
    assert EchoConfig().roles == {"tool": 0.1}
    assert read(tmp_path, algo('type = "echo", roles = { user = 0.5 }')).config.env[0].algo.roles == {"user": 0.5}


def test_demonstrations_need_no_second_copy_and_a_critic_makes_gae_legal(tmp_path):
    config = read(tmp_path, algo('type = "sft", demonstrations = "answer"')).config
    assert (config.env[0].group_size, config.env[0].min_group_size) == (1, 1)
    assert read(tmp_path, algo('type = "gae"') + "[trainer.critic]\n").config.env[0].algo.type == "gae"


def test_a_group_of_one_is_refused_only_where_it_is_compared_with_its_group():
    with pytest.raises(ValueError, match="grpo compares the tries of one row"):
        RunConfig(group_size=1, env=[ReverseTextConfig(algo=GRPOConfig())])
    ref = ModelRef(name="m", base_url="http://there/v1")
    quiet = [GRPOConfig(baseline="batch"), SFTConfig(teacher=ref), EchoConfig(baseline="batch")]
    envs = [ReverseTextConfig(name=str(at), algo=algo) for at, algo in enumerate(quiet)]
    assert [env.min_group_size for env in RunConfig(group_size=1, env=envs).env] == [1, 1, 1]
