"""Laws of the built-in tasks: the right answer pays 1, everything pays something from 0 to 1, tools stop in time."""

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import ConfigError
from paceline.config import env as config
from paceline.config.load import examples_folder, load
from paceline.data import DataError
from paceline.envs import POLICY, EnvError, Outcome
from paceline.envs.alphabet_sort import AlphabetSort
from paceline.envs.answers import extract_boxed, extract_tag, last_number, normalise_spaces, numbers, only_number
from paceline.envs.base import token_limits
from paceline.envs.calculator import MAX_CHARACTERS, BadExpression, Calculator, calculate, format_number
from paceline.envs.gsm8k import GSM8K
from paceline.envs.questions import Equality, TaggedAnswer, TokenIn
from paceline.rollout import Reply
from paceline.util.importing import import_object

laws = settings(max_examples=40, deadline=None)
PROSE = st.text("ab 12.,$-{}<>/\n", max_size=20)


class Speaker:
    """Sits in the policy's seat, says prepared lines one after the other, the last one for ever, and remembers what it
    heard."""

    def __init__(self, *lines: str | Reply) -> None:
        self.lines = list(lines)
        self.heard: list[list[dict]] = []
        self.tools: list[Sequence[dict] | None] = []
        self.prompts: list[list[int]] = []

    async def chat(self, messages, tools=None) -> Reply:
        self.heard.append([dict(message) for message in messages])
        self.tools.append(tools)
        return self._say()

    async def complete(self, token_ids) -> Reply:
        self.prompts.append(list(token_ids))
        return self._say()

    def _say(self) -> Reply:
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        return line if isinstance(line, Reply) else Reply(line, truncated=False)


def play(environment, row: dict, *lines: str | Reply) -> tuple[Outcome, Speaker]:
    speaker = Speaker(*lines)
    outcome = asyncio.run(environment.play(row, {POLICY: speaker}))
    return outcome, speaker


def pays(environment, row: dict, *lines: str | Reply) -> float:
    return play(environment, row, *lines)[0].rewards[POLICY]


def write(folder: Path, rows: list) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


# --- answers


@laws
@given(PROSE, PROSE, PROSE)
def test_the_last_tagged_and_the_last_boxed_answer_are_found_whatever_stands_around_them(before, inside, after):
    assert extract_tag(f"{before}<answer>no</answer>{before}<answer>{inside}</answer>{after}") == inside
    assert extract_tag(f"{before}<answer>{after}") is None
    if re.fullmatch(r"[^{}]*(\{[^{}]*\}[^{}]*)*", inside):
        assert extract_boxed(f"\\boxed{{no}}{before}\\boxed{{{inside}}}{after}") == inside


@laws
@given(st.integers(-(10**12), 10**12), st.sampled_from(["{:d}", "{:,}", "{:,}.00", "{:d}.0", "${:,}", "{:,} apples."]))
def test_a_number_is_read_however_it_is_written(number, form):
    assert only_number(form.format(number)) == last_number(f"3 and {form.format(number)}") == number
    assert numbers(f"{abs(number)}-{abs(number)}") == [abs(number)] * 2


@given(st.integers(10**70, 10**80))
def test_an_absurdly_large_number_is_none(number):
    assert numbers(f"{number}") == []


# --- equality


@laws
@given(st.text("aB.! \n", max_size=6), st.text("aB.! \n", min_size=1, max_size=6).filter(str.strip))
def test_equality_pays_one_for_the_same_letters_and_else_nothing_with_tags_or_without(said, answer):
    def letters(text):
        return re.sub(r"[.!]", "", text.lower()).split() or text.lower().strip()

    environment = Equality(config.EqualityConfig(dataset="rows.jsonl"))
    row = {"messages": [{"role": "user", "content": "?"}], "answer": ["other", answer]}
    same = float(letters(said) == letters(answer))
    for text, tagged in ((said, 0.0), (f"no <Answer>{said}</ANSWER>.", 1.0)):
        outcome, _ = play(environment, row, text)
        assert outcome == Outcome.solo(same, correct=same, format=tagged)


def test_a_reply_of_punctuation_is_no_answer_of_other_punctuation_nor_is_an_empty_one():
    environment = Equality(config.EqualityConfig(dataset="rows.jsonl"))
    row = {"messages": [{"role": "user", "content": "the sign?"}], "answer": ["+"]}
    assert [pays(environment, row, said) for said in ("+", " + ", "-", "", "<answer></answer>")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("key", ["ignore_case = true", "format_reward = 0.2"])
def test_the_keys_of_the_strict_comparison_say_where_they_went(tmp_path, key):
    file = tmp_path / "run.toml"
    file.write_text(f"[[env]]\ntype = 'equality'\ndataset = 'a.csv'\n{key}\n")
    with pytest.raises(ConfigError, match=r'it belongs to env\.0\.type = "tagged-answer"'):
        load(file)


@laws
@given(st.text("aB \n", max_size=6), st.text("aB \n", min_size=1, max_size=6), st.booleans())
def test_a_tagged_answer_pays_for_the_same_text_between_tags(said, answer, ignore_case):
    environment = TaggedAnswer(
        config.TaggedAnswerConfig(dataset="rows.jsonl", ignore_case=ignore_case, format_reward=0.25)
    )
    row = {"messages": [{"role": "user", "content": "?"}], "answer": ["other", answer]}
    same = said.split() == answer.split() or (ignore_case and said.lower().split() == answer.lower().split())
    outcome, _ = play(environment, row, f"so <answer>{said}</answer>")
    assert outcome.rewards[POLICY] == (1.0 if same else 0.25)
    assert outcome.metrics == {"correct": float(same), "format": 1.0}
    outcome, _ = play(environment, row, said)
    assert outcome.rewards[POLICY] == outcome.metrics["correct"] == outcome.metrics["format"] == 0.0


def test_equality_takes_rows_of_every_shape_and_tells_the_policy_of_the_tags(tmp_path):
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "q3"}]
    asked = [{"prompt": "q1"}, {"question": "q2"}, {"messages": own}, {"prompt": [own[1]]}]
    rows = [row | {"answer": answer} for row, answer in zip(asked, ["a", ["a", "b"], "a", 4], strict=True)]
    path = write(tmp_path, rows)
    environment = Equality(config.EqualityConfig(dataset=path, eval_dataset=path))
    read = list(environment.examples("train"))
    assert list(environment.examples("eval")) == read
    assert [row["answer"] for row in read] == [["a"], ["a", "b"], ["a"], ["4"]]
    assert [row["messages"][-1]["content"] for row in read] == ["q1", "q2", "q3", "q3"]
    assert ["<answer>" in row["messages"][0]["content"] for row in read] == [True, True, False, True]
    for row in read:
        _, speaker = play(environment, row, "")
        assert speaker.heard == [row["messages"]]
    assert not Equality(config.EqualityConfig(dataset=path)).examples("eval")


@pytest.mark.parametrize(
    ("build", "bad", "complaint"),
    [
        (
            (Equality, config.EqualityConfig),
            {"text": "q", "answer": "a"},
            "a row needs `messages`, `prompt`, `question`",
        ),
        ((Equality, config.EqualityConfig), {"prompt": "q"}, "a row needs `answer`"),
        ((Equality, config.EqualityConfig), {"prompt": "q", "answer": []}, "`answer` must be"),
        ((Equality, config.EqualityConfig), {"prompt": "q", "answer": ["a", " "]}, "`answer` must not be empty"),
        ((TaggedAnswer, config.TaggedAnswerConfig), {"prompt": "q", "gt_answer": " "}, "`gt_answer` must not be empty"),
        ((Equality, config.EqualityConfig), {"prompt": ["q"], "answer": "a"}, "prompt[0] must be an object"),
        ((GSM8K, config.GSM8KConfig), {"question": "q", "answer": "18"}, "must end in `#### 18`"),
        ((GSM8K, config.GSM8KConfig), {"input_token_ids": [5], "answer": "#### 18"}, "set max_turns = 1"),
        ((TokenIn, config.TokenInConfig), {"input_token_ids": ["5"], "answer": "a"}, "`input_token_ids` must hold"),
        ((TokenIn, config.TokenInConfig), {"input_token_ids": [5]}, "a row needs `answer`"),
    ],
)
def test_a_bad_row_is_named_with_what_is_wrong_in_it(tmp_path, build, bad, complaint):
    environment, section = build
    good = {"question": "q", "answer": "#### 1"} | ({"input_token_ids": [1]} if environment is TokenIn else {})
    path = write(tmp_path, [good, bad])
    with pytest.raises(DataError, match=re.escape(complaint)) as error:
        environment(section(dataset=path)).examples("train")
    assert str(error.value).startswith(f"{path}:2: ")


# --- alphabet sort

SORTS = [
    config.AlphabetSortConfig(train_examples=60, eval_examples=30),
    config.AlphabetSortConfig(items="words", min_turns=2, min_names=2, train_examples=60, eval_examples=30),
    config.AlphabetSortConfig(
        items="letters", max_turns=2, max_names=3, power=1.0, train_examples=60, eval_examples=30
    ),
    config.AlphabetSortConfig(items="letters", mark="!", min_turns=3, max_names=2, train_examples=60, eval_examples=30),
]
sorts = pytest.mark.parametrize("section", SORTS, ids=lambda c: f"{c.items}{c.mark or ''}")


def replies(environment: AlphabetSort, row: dict) -> list[str]:
    """The right ones."""
    return [environment.answer(row["turns"][: n + 1], row["by"]) for n in range(len(row["turns"]))]


@sorts
def test_sorting_pays_one_for_the_right_lists_and_less_when_any_is_wrong(section):
    environment = AlphabetSort(section)
    for row in environment.examples("train"):
        right = replies(environment, row)
        outcome, speaker = play(environment, row, *right)
        assert outcome.rewards[POLICY] == outcome.metrics["exact"] == outcome.metrics["similarity"] == 1.0
        assert len(speaker.heard) == len(right)
        for turn in range(len(right)):
            outcome, _ = play(environment, row, *right[:turn], "", *right[turn + 1 :], "")
            assert outcome.rewards[POLICY] == pytest.approx(1 - 1 / len(right))
            assert outcome.metrics["exact"] == 0.0


@sorts
def test_each_turn_tells_the_new_names_only_and_goes_on_from_what_was_said(section):
    environment = AlphabetSort(section)
    for row in environment.examples("eval"):
        _, speaker = play(environment, row, "what?")
        assert speaker.heard[0] == row["messages"]
        whole = speaker.heard[-1]
        assert [m["role"] for m in whole] == ["user", "assistant"] * (len(row["turns"]) - 1) + ["user"]
        assert all(heard == whole[: len(heard)] for heard in speaker.heard)
        for turn, message in zip(row["turns"], whole[::2], strict=True):
            listed = message["content"].split(":" if section.items != "names" else "\n\n")[-1]
            assert (
                environment._items.read(f"<sorted>\n{listed}</sorted>" if section.items == "names" else listed) == turn
            )


@sorts
def test_lists_are_of_the_asked_size_repeatable_and_of_one_split(section):
    rows = {split: AlphabetSort(section).examples(split) for split in ("train", "eval")}
    assert rows == {split: AlphabetSort(section).examples(split) for split in ("train", "eval")}
    assert (len(rows["train"]), len(rows["eval"])) == (section.train_examples, section.eval_examples)
    names = {split: {" ".join(chain(*row["turns"])) for row in found} for split, found in rows.items()}
    assert names["train"].isdisjoint(names["eval"])
    for row in rows["train"]:
        assert section.min_turns <= len(row["turns"]) <= section.max_turns
        assert all(section.min_names <= len(turn) <= section.max_names for turn in row["turns"])
        flat = list(chain(*row["turns"]))
        assert len(set(flat)) == len(flat)


@laws
@given(st.lists(st.text("abc d\n", max_size=8), min_size=1, max_size=4), st.floats(0.1, 8))
def test_a_higher_power_pays_no_more_and_all_pay_from_zero_to_one(lines, power):
    row = {"turns": [["c", "a"], ["b"]], "by": "first"}
    low, high = (
        AlphabetSort(config.AlphabetSortConfig(items="letters", max_turns=2, power=p)) for p in (power, 2 * power)
    )
    assert 0 <= pays(high, row, *lines) <= pays(low, row, *lines) <= 1


def test_new_names_are_marked_and_sorted_by_the_name_that_was_asked_for():
    environment = AlphabetSort(config.AlphabetSortConfig())
    turns = [["Ada Zo", "Bob Ax"], ["Cy Mi"]]
    assert environment.answer(turns[:1], "last") == "<sorted>\nBob Ax\nAda Zo\n</sorted>"
    assert environment.answer(turns, "last") == "<sorted>\nBob Ax\nCy Mi (new)\nAda Zo\n</sorted>"
    assert environment.answer(turns, "first") == "<sorted>\nAda Zo\nBob Ax\nCy Mi (new)\n</sorted>"
    assert environment.similarity(turns, "last", "Bob Ax\nCy Mi (new)\nAda Zo") == 0  # no tags, no list


def test_a_reply_that_was_cut_off_ends_the_episode():
    environment = AlphabetSort(config.AlphabetSortConfig(items="letters", max_turns=3))
    row = {"turns": [["b", "a"], ["c"]], "by": "first"}
    outcome, speaker = play(environment, row, Reply("ab", truncated=True))
    assert len(speaker.heard) == 1
    assert outcome.rewards[POLICY] == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_turns": 4},
        {"min_names": 6},
        {"items": "letters", "max_names": 9},
        {"letters": "aa"},
        {"letters": "a b"},
        {"power": 0.0},
    ],
)
def test_a_list_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        config.AlphabetSortConfig(**wrong)


def test_too_few_lists_for_a_split_is_said():
    environment = AlphabetSort(config.AlphabetSortConfig(items="letters", letters="a", max_turns=1, max_names=1))
    with pytest.raises(EnvError, match="raise `max_names`"):
        [environment.examples(split) for split in ("train", "eval")]


# --- the calculator

NUMBERS = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", " + ", " ** "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_the_calculator_says_what_python_says(expression):
    try:
        value = calculate(expression)
    except BadExpression:
        return
    python = eval(expression)
    assert (type(value), value) == (type(python), python)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_the_calculator_refuses_no_sum_of_a_school_book(terms):
    expression = "1" + "".join(f"{op}{number}" for op, number in terms)
    assert calculate(expression) == eval(expression)
    assert Fraction(format_number(calculate(expression))) == eval(expression)


@pytest.mark.parametrize(
    "bomb",
    [
        "9**9**9", "9**9**9**9", "2**1000000", "-2**99999", "9**-99999999", "(9**80)**80", "9.5**9**9",
        "(1+" * 45 + "1" + ")" * 45, "-" * 150 + "1", "(" * 90, "1+" * 99 + "1", "9" * MAX_CHARACTERS, "1" * 10_000_000,
        "1/0", "1%0", "0**-1", "(-8)**0.5", "", " ", "1 2", "1,2", "1..2", "()", "~1", "1<2", "1if 1 else 2",
        "1_0", "x", "__import__('os')", "[1]*9**9", "'a'*9", "1e400", "0x10", "1j", "True", "(1).real", "1\n2",
        "1\x002", "\ud800",
    ],
    ids=lambda text: ascii(text[:12]),
)  # fmt: skip
def test_the_calculator_refuses_bombs_and_everything_that_is_not_arithmetic(bomb):
    with pytest.raises(BadExpression):
        calculate(bomb)


@laws
@given(st.text("0123456789+-*/%(). ", max_size=MAX_CHARACTERS))
def test_the_calculator_answers_or_refuses_whatever_it_is_asked(text):
    try:
        value = calculate(text)
    except BadExpression:
        return
    assert float(format_number(value)) == pytest.approx(float(value))


def tool_call(arguments: str, at: str = "call_1", name: str = "calculator") -> dict:
    return {"id": at, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*expressions: str) -> Reply:
    calls = [tool_call(json.dumps({"expression": text}), f"call_{n}") for n, text in enumerate(expressions)]
    return Reply("<tool_call>", False, {"role": "assistant", "content": "", "tool_calls": calls})


def expression_of(row: dict) -> str:
    return re.search(r"\d+(?:[+*-]\d+)+", row["messages"][-1]["content"]).group()


TOOLS = Calculator(config.CalculatorConfig(train_examples=50, eval_examples=50))
TEXT = Calculator(config.CalculatorConfig(style="text", train_examples=50, eval_examples=50))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_right_answer_to_every_question_pays_one_with_or_without_calls(split):
    for environment in (TOOLS, TEXT):
        for row in environment.examples(split):
            expression = expression_of(row)
            call = calling(expression) if environment is TOOLS else f"let me see\ncalc: {expression}"
            for lines, calls in (([row["answer"]], 0), ([call, f"it is {row['answer']}."], 1)):
                outcome, speaker = play(environment, row, *lines)
                assert outcome.rewards[POLICY] == 1.0
                assert outcome.metrics == {"correct": 1.0, "calls": calls, "tool_errors": 0.0}
            assert speaker.heard[-1][-1]["content"] == row["answer"]
            assert pays(environment, row, str(int(row["answer"]) + 1)) == 0.0
            assert pays(environment, row, "I do not know") == 0.0


@laws
@given(st.integers(1, 5), st.booleans(), st.sampled_from(["1+1", "1/0", "import 9", "9**9**9"]), st.integers(1, 3))
def test_no_call_is_run_after_the_last_turn(max_turns, text, expression, at_once):
    style = "text" if text else "tools"
    environment = Calculator(config.CalculatorConfig(style=style, max_turns=max_turns, train_examples=1))
    (row,) = environment.examples("train")
    line = "\n".join([f"calc: {expression}"] * at_once) if text else calling(*[expression] * at_once)
    outcome, speaker = play(environment, row, line)
    assert len(speaker.heard) == max_turns
    assert outcome.rewards[POLICY] == 0.0
    assert outcome.metrics["calls"] == at_once * (max_turns - 1)
    assert outcome.metrics["tool_errors"] == (0 if expression == "1+1" else outcome.metrics["calls"])
    told = [m for m in speaker.heard[-1][1:] if m["role"] != "assistant"]
    assert sum(len(m["content"].splitlines()) for m in told) == outcome.metrics["calls"]


def test_the_example_with_tools_answers_right_and_wrong_calls():
    environment = import_object(f"{examples_folder()}/environments/tools.py:Customers")()
    (row, *_), (held_out, *_) = environment.examples("train"), environment.examples("eval")
    assert row["name"] != held_out["name"]

    def using(name: str, arguments: object) -> Reply:
        call = tool_call(json.dumps(arguments), name=name)
        return Reply("", False, {"role": "assistant", "content": "", "tool_calls": [call]})

    for asked in (row, held_out):
        found = using("find_customer", {"name": asked["name"]})
        _, speaker = play(environment, asked, found, "x")
        number = speaker.heard[-1][-1]["content"]
        outcome, speaker = play(environment, asked, found, using("city_of", {"customer": number}), asked["city"])
        assert speaker.heard[-1][-1] == {"role": "tool", "tool_call_id": "call_1", "content": asked["city"]}
        assert (outcome.rewards[POLICY], outcome.metrics) == (1.0, {"right": True, "calls": 2})
    wrong = [("find_customer", {"name": "?"}), ("find_customer", ["?"]), ("city_of", {"customer": "x"}), ("x", {})]
    for name, arguments in wrong:
        outcome, speaker = play(environment, row, using(name, arguments), "?")
        assert speaker.heard[-1][-1]["content"].startswith("error: ")
        assert outcome.rewards[POLICY] < 1


def test_results_answer_the_calls_they_belong_to_in_the_form_of_openai():
    (row,) = Calculator(config.CalculatorConfig(train_examples=1)).examples("train")
    _, speaker = play(TOOLS, row, calling("1+1", "2**3", "1/4"), "9")
    assert [tool["function"]["name"] for tool in speaker.tools[0]] == ["calculator"]
    assert speaker.heard[1][-3:] == [
        {"role": "tool", "tool_call_id": f"call_{n}", "name": "calculator", "content": text}
        for n, text in enumerate(["2", "8", "0.25"])
    ]
    _, speaker = play(TEXT, row, "calc: 84/2\ncalc: 1//0", "9")
    assert speaker.heard[1][-1] == {"role": "user", "content": "42\nerror: division by zero"}
    assert speaker.tools == [None, None]


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"expression": 3}', "nonsense", '{"expression": "x"}'])
def test_a_call_that_cannot_be_read_is_an_error_the_policy_hears_of(arguments):
    (row,) = Calculator(config.CalculatorConfig(train_examples=1)).examples("train")
    said = Reply("", False, {"role": "assistant", "content": "", "tool_calls": [tool_call(arguments)]})
    outcome, speaker = play(TOOLS, row, said, row["answer"])
    assert speaker.heard[1][-1]["content"].startswith("error: ")
    assert outcome.metrics == {"correct": 1.0, "calls": 1.0, "tool_errors": 1.0}


def test_a_call_in_a_reply_that_was_cut_off_is_not_run():
    (row,) = Calculator(config.CalculatorConfig(train_examples=1)).examples("train")
    outcome, speaker = play(TEXT, row, Reply("calc: 1+", truncated=True))
    assert len(speaker.heard) == 1
    assert outcome.metrics["calls"] == 0.0


def test_a_call_without_a_number_is_about_the_question():
    section = config.CalculatorConfig(style="text", call="c", train_examples=20)
    for row in Calculator(section).examples("train"):
        for call in ("c", "calc", " c ?"):
            _, speaker = play(Calculator(section), row, call, "")
            assert speaker.heard[1][-1]["content"] == row["answer"]


@laws
@given(st.lists(st.sampled_from(["calc: 1/0", "calc: 1+1", "calc: 5+7", "9", "12", ""]), min_size=3), st.floats(0, 0.5))
def test_a_wrong_answer_earns_less_than_one_however_it_is_consoled(lines, most):
    section = config.CalculatorConfig(style="text", partial_credit=most, call_reward=0.4)
    row = {"messages": [{"role": "user", "content": "7+5"}], "expression": "7+5", "answer": "12"}
    outcome, speaker = play(Calculator(section), row, *lines)
    shown = {"role": "user", "content": "12"} in speaker.heard[-1]
    reward = outcome.rewards[POLICY]
    assert reward == 1.0 if outcome.metrics["correct"] else 0.4 * shown <= reward <= (0.4 + most) * shown


@pytest.mark.parametrize(
    "wrong",
    [
        {"question": "what?"},
        {"result": "done"},
        {"call": ""},
        {"min_terms": 4},
        {"max_operand": 5, "min_operand": 6},
        {"partial_credit": 0.5, "call_reward": 0.5},
    ],
)
def test_a_calculator_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        config.CalculatorConfig(**wrong)


def test_questions_are_repeatable_of_the_asked_kind_and_of_one_split():
    section = config.CalculatorConfig(
        question="{expression}=", operators=["*"], min_terms=3, max_terms=3, min_operand=10, max_operand=12
    )

    def asked(split: str) -> list[str]:
        return [row["messages"][0]["content"] for row in Calculator(section).examples(split)]

    assert all(re.fullmatch(r"1[012]\*1[012]\*1[012]=", text) for text in asked("train"))
    assert set(asked("train")).isdisjoint(asked("eval"))
    assert asked("train") == asked("train")
    one = Calculator(section.model_copy(update={"max_operand": 10}))
    with pytest.raises(EnvError, match="raise `max_operand`"):
        [one.examples(split) for split in ("train", "eval")]


# --- tokens in


def half(row: dict, text: str, share: float = 0.5) -> float:
    return share if text == row["wish"] else 0.0


async def later(row: dict, text: str) -> None:
    await asyncio.sleep(0)


def test_exact_tokens_reach_the_policy_and_equality_pays_one(tmp_path):
    path = write(tmp_path, [{"input_token_ids": [5, 0, 12], "answer": ["a b", "c"]}])
    environment = TokenIn(config.TokenInConfig(dataset=path))
    (row,) = environment.examples("train")
    for said, reward in (("a b", 1.0), (" c\n", 1.0), ("ab", 0.0), ("", 0.0)):
        outcome, speaker = play(environment, row, said)
        assert speaker.prompts == [[5, 0, 12]]
        assert outcome.rewards[POLICY] == outcome.metrics["correct"] == reward


def where(row: dict, text: str) -> float:
    return float(threading.current_thread().name.startswith("asyncio"))


def test_a_scorer_keeps_away_from_the_threads_of_the_event_loop(tmp_path):
    """Weights are published on those: one that hangs must not hold them."""
    hook = {"import_path": f"{__file__}:where"}
    path = write(tmp_path, [{"input_token_ids": [5]}])
    environment = TokenIn(config.TokenInConfig.model_validate({"dataset": path, "scorer": hook}))
    (row,) = environment.examples("train")
    assert pays(environment, row, "yes") == 0.0


def test_a_scorer_of_the_users_own_judges_instead(tmp_path):
    path = write(tmp_path, [{"input_token_ids": [5], "wish": "yes"}])
    hook = {"import_path": f"{__file__}:half", "kwargs": {"share": 0.75}}
    environment = TokenIn(config.TokenInConfig.model_validate({"dataset": path, "scorer": hook}))
    (row,) = environment.examples("train")
    assert (pays(environment, row, "yes"), pays(environment, row, "no")) == (0.75, 0.0)
    dropping = TokenIn(
        config.TokenInConfig.model_validate({"dataset": path, "scorer": {"import_path": f"{__file__}:later"}})
    )
    assert play(dropping, row, "yes")[0] is None
    with pytest.raises(EnvError, match="must be a function"):
        TokenIn(config.TokenInConfig.model_validate({"dataset": path, "scorer": {"import_path": f"{__file__}:TOOLS"}}))


def test_any_question_may_be_asked_in_exact_tokens_and_its_answer_be_called_gt_answer(tmp_path):
    path = write(tmp_path, [{"input_token_ids": [5, 0, 12], "gt_answer": "#### 4"}])
    sections = {
        Equality: config.EqualityConfig(dataset=path),
        TaggedAnswer: config.TaggedAnswerConfig(dataset=path),
        GSM8K: config.GSM8KConfig(dataset=path, max_turns=1),
    }
    for kind, section in sections.items():
        (row,) = (environment := kind(section)).examples("train")
        outcome, speaker = play(environment, row, "<answer>#### 4</answer>")
        assert (speaker.prompts, speaker.heard) == ([[5, 0, 12]], [])
        assert outcome.rewards[POLICY] == outcome.metrics["correct"] == 1.0


def test_a_token_that_the_policy_does_not_have_makes_a_bad_row(tmp_path):
    rows = [{"input_token_ids": [token], "answer": "a"} for token in (9, 10, 3)]
    environment = TokenIn(config.TokenInConfig(dataset=(path := write(tmp_path, rows))))
    with token_limits(10):
        found = environment.examples("train")
    assert [row["input_token_ids"] for row in found] == [[9], [3]]
    assert f"{path}:2: `input_token_ids` holds 10, and the model's vocabulary ends at 9" in str(found.bad)
    assert len(environment.examples("train")) == 3  # where the vocabulary is not known, the engine says so


def test_exact_tokens_that_leave_no_room_for_a_reply_make_a_bad_row(tmp_path):
    rows = [{"input_token_ids": [3] * length, "answer": "a"} for length in (7, 8, 9, 1, 1)]
    environment = TokenIn(config.TokenInConfig(dataset=(path := write(tmp_path, rows))))
    with token_limits(10, context=8):
        found = environment.examples("train")
    assert [len(row["input_token_ids"]) for row in found] == [7, 1, 1]
    for line, length in ((2, 8), (3, 9)):
        sentence = f"`input_token_ids` has {length} tokens, and engine.max_context = 8 leaves no room for a reply"
        assert f"{path}:{line}: {sentence}" in str(found.bad)


@laws
@given(PROSE, PROSE)
def test_white_space_never_decides(left, right):
    assert (normalise_spaces(left) == normalise_spaces(right)) == (left.split() == right.split())
