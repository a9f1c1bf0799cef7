"""Judges in a run file: what cannot work is refused with what to write instead."""

import pytest

from paceline.config import ConfigError, load
from paceline.runtime.preflight import preflight

MODEL = '{ name = "m", base_url = "http://there/v1" }'


def read(tmp_path, *judges: str, env: str = 'type = "reverse-text"'):
    text = f"[[env]]\n{env}\n" + "".join(f"[[env.judges]]\n{judge}\n" for judge in judges)
    (tmp_path / "run.toml").write_text(text)
    return load(tmp_path / "run.toml").config


def judge(name: str = "good", prompt: str = 'prompt = "{reply}"', model: str = MODEL, more: str = "") -> str:
    return f'name = "{name}"\n{prompt}\nmodel = {model}\n{more}'


@pytest.mark.parametrize(
    ("judges", "sentence"),
    [
        ([judge(model='{ name = "m" }')], "a judge is never started by the run: serve `m` and write where"),
        ([judge(model='{ name = "m", base_url = "there" }')], "`there` is no address"),
        ([judge(model='{ name = "m", base_url = "http://" }')], "`http://` is no address"),
        ([judge(model='{ name = "m", base_url = "http://h/v1?x=y" }')], "an address has no `\\?`"),
        (
            [judge(model='"m"')],
            'model: expected a table, got "m"; write {name = "m", base_url = "http://HOST:PORT/v1"}',
        ),
        (
            [judge(more='base_url = "http://h"')],
            r"no key `base_url` in \[\[env.judges\]\]; did you mean .*model.base_url`",
        ),
        ([judge(model='{ name = "m", base_url = "http://h", rpm = 3 }')], "did you mean .*model.requests_per_minute`"),
        ([judge(more='key = "grade"')], '`key` is for verdict = "json", not "number"'),
        (
            [judge(more="extra_body = { messages = [] }")],
            "`messages` .write `prompt` and `system`. cannot be given here",
        ),
        ([judge(more="extra_body = { stream = true }")], "`stream` .an answer is read whole. cannot be given here"),
        ([judge(prompt="")], "a judge needs its question: write `prompt`, or name a text file with `prompt_file`"),
        ([judge(prompt='prompt = "x"\nprompt_file = "x.txt"')], "a judge needs its question"),
        ([judge(), judge()], "two judges are named `good`: give each its own `name`"),
        ([judge(name="task")], "a judge's name is part of a metric's: not empty, no '/' and not 'task'"),
        ([judge(name="a/b")], "a judge's name is part of a metric's"),
        ([judge(more="scale = [5, 5]")], "the worst and the best grade are both 5"),
        ([judge(more="scale = [5]")], "scale"),
        ([judge(more='verdict = "words"')], "verdict: expected"),
        ([judge(more="atempts = 2")], "there is no key `atempts`.*did you mean `env.0.judges.0.attempts`"),
        ([judge(more='extra_body = { api_key = "sk-123456789" }')], "is a secret"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(tmp_path, judges, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, *judges)


def test_rewards_that_no_judge_or_none_but_zero_makes_are_refused(tmp_path):
    weighed = 'type = "reverse-text"\ntask_weight = 0'
    for judges, sentence in (
        ([], "task_weight = 0 weighs .* and there are none"),
        ([judge(more="automatic = false")], "task_weight = 0 weighs .* and there are none"),
        ([judge(more="weight = 0")], "the weight of every judge are 0, so each reward is 0"),
    ):
        with pytest.raises(ConfigError, match=f"env.0: .*{sentence}"):
            read(tmp_path, *judges, env=weighed)
    assert read(tmp_path, judge(), judge("other", more="weight = 0"), env=weighed).env[0].task_weight == 0
    (tmp_path / "run.toml").write_text(f"[[env]]\n{weighed}\n[env.judges]\nname = 'x'\n")
    with pytest.raises(ConfigError, match=r"write the header in double brackets, \[\[env.judges\]\]"):
        load(tmp_path / "run.toml")


def test_a_prompt_that_names_a_field_no_row_has_fails_the_check(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    env = 'type = "equality"\ndataset = "rows.jsonl"'
    config = read(tmp_path, judge(prompt='prompt = "{reply} {anser}"'), env=env)
    (problem,) = preflight(config).problems
    assert "judge `good` of environment `equality`: its prompt names `{anser}`" in problem
    assert "did you mean `{answer}`?" in problem
    assert not preflight(read(tmp_path, judge(prompt='prompt = "{reply} {answer}"'), env=env)).problems
    (problem,) = preflight(read(tmp_path, judge(prompt='prompt = "{reply} {anser}"'))).problems
    assert "judge `good` of environment `reverse-text`: its prompt names `{anser}`" in problem


def test_a_key_that_is_not_set_and_a_file_that_is_not_there_fail_the_check(tmp_path, monkeypatch):
    monkeypatch.delenv("PACELINE_TEST_JUDGE", raising=False)
    keyed = MODEL.replace(" }", ', api_key_env = "PACELINE_TEST_JUDGE" }')
    (problem,) = preflight(read(tmp_path, judge(model=keyed))).problems
    assert "environment `reverse-text`, judge `good`: model.api_key_env" in problem
    assert "PACELINE_TEST_JUDGE is not set" in problem
    (problem,) = preflight(read(tmp_path, judge(prompt='prompt_file = "gone.txt"'))).problems
    assert f"prompt_file {tmp_path}/gone.txt cannot be read" in problem


def test_a_prompt_file_is_relative_to_the_run_file(tmp_path, monkeypatch):
    (tmp_path / "ask.txt").write_text("How good is {reply}?")
    monkeypatch.chdir("/")
    assert read(tmp_path, judge(prompt='prompt_file = "ask.txt"')).env[0].judges[0].prompt_file == f"{tmp_path}/ask.txt"
