"""Laws of the questions judges get and of the grades read from their answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.env.judges import JudgeConfig
from paceline.envs import EnvError
from paceline.envs.verdicts import fill_prompt, instruction, prompt_fields, read_grade, transcript

MODEL = {"name": "m", "base_url": "http://there/v1"}


def judge(**more) -> JudgeConfig:
    return JudgeConfig(**{"name": "good", "model": MODEL, "prompt": "{reply}", **more})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("Score: 8/10", 8),
        ("**Score:** 6.5", 6.5),
        ("I take 3 points for a and 2 for b.\nScore: 5\nThe reply has 4 mistakes.", 5),
        ("Score: 2. On reflection, the score is 9 out of 10.", 9),
        ("<think>Score: 1</think>Score: 4", 4),
        ("A fair 3 out of 10, I think.", 3),
        ("Score - 7", 7),
    ],
)
def test_a_number_is_read_after_the_last_score_or_alone(text, value):
    assert read_grade(judge(), text) == (value, value / 10)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("<think>Score: 4", "its thoughts do not end"),
        ("<think>Score: 4</think>  ", "it is empty"),
        ("Good!", "it holds no numbers"),
        ("3 of these and 4 of those", "it holds 2 numbers, and none stands after `Score:`"),
        ("Score: 11", "11 lies outside the scale from 0 to 10"),
        ("Score: -1", "-1 lies outside the scale"),
        ("Score: 4/5", "is of 5, and the scale ends at 10"),
        ("Score: 1.2.3", "no numbers"),
        ("Score: " + "9" * 400, "outside|cannot|no number"),
    ],
)
def test_what_holds_no_clear_number_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        read_grade(judge(), text)


def test_a_json_field_is_read_from_the_last_object_that_has_it():
    config = judge(verdict="json", key="grade", scale=[1, 5])
    text = 'First {"grade": 1}, then ```json\n{"reason": "fine } {", "more": {"grade": 2}, "grade": "5"}\n``` {"x": 0}'
    assert read_grade(config, text) == (5, 1.0)
    assert read_grade(config, '{"grade": true}') == (5, 1.0)
    for wrong, why in [
        ('{"score": 3}', "no JSON object with the field `grade`"),
        ('{"grade": "very good"}', "which is no number"),
        ('{"grade": NaN}', "which is no number"),
        ('{"grade": null}', "which is no number"),
        (f'{{"grade": 1{"0" * 400}}}', "which is no number"),
        ('{"grade": 3', "no JSON object"),
        ("{" * 5000, "no JSON object"),
        ('{"a":' * 5000, "no JSON object"),
    ]:
        with pytest.raises(ValueError, match=why):
            read_grade(config, wrong)


def test_yes_and_no_are_the_ends_of_the_scale():
    config = judge(verdict="yes-no", scale=[-1, 1])
    assert read_grade(config, "Yes, it is.") == (1, 1.0)
    assert read_grade(config, "There is no doubt: yes.\n**Verdict: No**") == (-1, 0.0)
    for wrong, why in [("There is no doubt: yes.", "both yes and no"), ("Perhaps; I know nothing.", "neither yes")]:
        with pytest.raises(ValueError, match=why):
            read_grade(config, wrong)


@given(st.sampled_from(["number", "json", "yes-no"]), st.text(max_size=60))
def test_a_grade_is_always_within_its_bounds_or_refused(verdict, text):
    try:
        value, score = read_grade(judge(verdict=verdict, scale=[5, 1]), text)
    except ValueError:
        return
    assert 1 <= value <= 5
    assert 0 <= score <= 1


@given(st.sampled_from(["number", "json"]), st.integers(0, 20))
def test_an_answer_as_the_judge_is_told_to_write_it_is_read(verdict, half):
    config = judge(verdict=verdict)
    asked = instruction(config)
    written = asked.partition("`Score: N`")[1].strip("`") or json.dumps({"reason": "x", "score": "N"})
    assert read_grade(config, written.replace('"N"', "N").replace("N", str(half / 2)))[0] == half / 2


def test_a_worst_grade_above_the_best_turns_the_scale_round():
    assert read_grade(judge(scale=[10, 0]), "Score: 10") == (10, 0.0)


@given(st.text("ab{}\"': reply", max_size=30), st.text("{}reply answer", max_size=20))
def test_a_prompt_is_filled_once_and_other_braces_stay(around, said):
    """What the policy says cannot name a field of its own."""
    template = f'{{"score": {{"n": 1}}}} {around.replace("{", "").replace("}", "")}[{{reply}}] {{{{reply}}}}'
    filled = fill_prompt(template, {"reply": said, "answer": "secret"}, "judge")
    assert filled == template.replace("[{reply}]", f"[{said}]").replace("{{reply}}", "{reply}")


def test_a_field_that_no_row_has_is_named_with_those_there_are():
    assert prompt_fields("{conversation} {reply} {answer} {{not}} {0}") == ["answer"]
    fields = {"answer": ["a", 1], "messages": []}
    assert fill_prompt("{answer}", fields, "") == '["a", 1]'
    with pytest.raises(EnvError, match=r"judge `x`: its prompt names `{anser}`.*did you mean `{answer}`"):
        fill_prompt("{anser}", fields, "judge `x`")


def test_a_conversation_is_written_with_roles_and_tool_calls():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "Add "}, {"type": "text", "text": "one."}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert transcript(messages) == 'user: Add one.\n\nassistant: add({"a": 1})'
