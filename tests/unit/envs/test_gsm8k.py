r"""Laws of GSM8K: the right value pays however it is written, the last try counts, solutions are demonstrations."""

import asyncio
import json
import logging
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tasks import laws, play, write

from paceline.algorithms import build_algorithm
from paceline.config import env as config
from paceline.config.algorithm import SFTConfig
from paceline.data import DataError
from paceline.envs import POLICY, gsm8k
from paceline.envs.answers import only_number
from paceline.envs.gsm8k import GSM8K, final_answer
from paceline.envs.workers import Workers
from paceline.rollout import Reply

SHARED = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
ROW = {"messages": [{"role": "user", "content": "q"}], "answer": "18"}


def environment(**settings) -> GSM8K:
    return GSM8K(config.GSM8KConfig(dataset="rows.jsonl", **{"workers": 1, **settings}))


@pytest.fixture
def no_workers(monkeypatch):
    """Any expression that reaches a worker process fails the test."""

    async def call(self, function, args, timeout):
        raise AssertionError(f"{args} went to a worker")

    monkeypatch.setattr(Workers, "call", call)


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_every_worked_solution_pays_one_and_so_does_its_demonstration(name, no_workers):
    file = SHARED / name
    if not file.exists():
        pytest.skip("needs the GSM8K files, which are not beside this checkout")
    solutions = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    task = GSM8K(config.GSM8KConfig(dataset=str(file)))
    rows = task.examples("train")
    assert len(rows) == len(solutions)

    async def pay() -> None:
        for row, solution in zip(rows, solutions, strict=True):
            right = only_number(row["answer"])
            for said in (solution, row["completion"], f"\\boxed{{\\${row['answer']}.00}}."):
                assert await task.check(final_answer(said), right) == (True, True)
            assert await task.check(f"{right + 1}", right) == (False, True)
            assert "<<" not in row["completion"]
            assert row["completion"].endswith(f"\n\\boxed{{{row['answer']}}}")

    asyncio.run(pay())


PLAIN = [
    ("\\boxed{18}", 1), ("#### 18", 1), ("\\boxed{\\$18{,}000.00}", 0), ("\\boxed{-18}", 0), ("\\boxed{18.}", 1),
    ("\\boxed{18\\text{ eggs}}", 1), ("#### 18 eggs\nDone in 3 steps.", 1), ("#### 17\n#### 18", 1), ("#### 18.", 1),
    ("\\boxed{18\\%}", 1), ("\\boxed{\\$18.00}", 1), ("\\boxed{18 dollars}", 1), ("\\boxed{18 km/h}", 1),
    ("\\boxed{\\$18/\\text{day}}", 1), ("\\boxed{18-year-old}", 1), ("\\boxed{17} \\boxed{18}", 1), ("\\boxed{$18}", 1),
    ("18", 0), ("\\boxed{17, 18}", 0), ("\\boxed{17 or 18}", 0), ("\\boxed{18", 0), ("####", 0), ("\\boxed{}", 0),
    ("\\boxed{eighteen}", 0), ("\\boxed{17}", 0), ("", 0),
]  # fmt: skip
EXPRESSIONS = [
    ("\\boxed{\\frac{36}{2}}", 1), ("\\boxed{36/2}", 1), ("\\boxed{2 \\times 9}", 1), ("\\boxed{3 + 15 = 18}", 1),
    ("\\boxed{x = 18}", 1),
    ("\\boxed{\\sqrt{324}}", 1), ("\\boxed{20 - 2}", 1), ("#### 36/2", 1), ("\\boxed{18=17}", 0),
    ("\\boxed{\\frac{36}{3}}", 0), ("\\boxed{18^2}", 0), ("\\boxed{\\sqrt{18}}", 0), ("\\boxed{18 + x}", 0),
    ("\\boxed{x=17 \\text{ or } x=18}", 0), ("\\boxed{17+1, 17}", 0),
]  # fmt: skip


def test_plain_numbers_are_compared_without_a_worker(no_workers):
    for said, reward in PLAIN:
        outcome, _ = play(environment(max_turns=1), ROW, said)
        assert outcome.rewards[POLICY] == reward, said


def test_expressions_pay_by_their_value():
    pytest.importorskip("math_verify")

    async def pay(task: GSM8K) -> None:
        right = only_number("18")
        for said, reward in EXPRESSIONS:
            assert (await task.check(final_answer(said), right))[0] == bool(reward), said

    asyncio.run(pay(environment()))


def test_without_math_verify_numbers_alone_decide_and_the_start_says_so(monkeypatch, caplog, no_workers):
    monkeypatch.setattr(gsm8k.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        task = environment(max_turns=1)
    assert 'pip install "paceline[tasks]"' in caplog.text
    assert play(task, ROW, "\\boxed{\\frac{36}{2}}")[0].rewards[POLICY] == 0.0
    assert play(task, ROW, "\\boxed{x = 18}")[0].rewards[POLICY] == 1.0


def test_an_expression_that_takes_for_ever_pays_nothing_and_is_counted():
    pytest.importorskip("math_verify")
    began = time.monotonic()
    outcome, _ = play(environment(max_turns=1, check_timeout=0.5), ROW, "\\boxed{(9^{9^9})! + 1}")
    assert outcome.rewards[POLICY] == 0.0
    assert outcome.metrics["check_failed"] == 1.0
    assert time.monotonic() - began < 120


@laws
@given(st.lists(st.sampled_from(["\\boxed{18}", "#### 17", "18", "#### 18", "", "\\boxed{17 or 18}"]), min_size=5))
def test_the_last_try_counts_and_a_right_one_ends_the_episode(lines):
    section = config.GSM8KConfig(dataset="rows.jsonl", max_turns=4, discount=0.5)
    outcome, speaker = play(GSM8K(section), ROW, *lines)
    tries = [line in ("\\boxed{18}", "#### 18") for line in lines[:4]]
    at = tries.index(True) + 1 if any(tries) else 4
    assert len(speaker.heard) == outcome.metrics["tries"] == at
    assert outcome.rewards[POLICY] == (0.5 ** (at - 1) if any(tries) else 0.0)
    assert outcome.metrics["correct"] == float(any(tries))
    assert outcome.metrics["first"] == float(tries[0])
    asked = [m["content"] for m in speaker.heard[-1] if m["role"] == "user"][1:]
    assert asked == [section.retry_prompt] * (at - 1)


def test_a_truncated_try_is_the_last():
    outcome, speaker = play(environment(), ROW, Reply("let me", truncated=True))
    assert len(speaker.heard) == 1
    assert outcome.rewards[POLICY] == outcome.metrics["format"] == 0.0


def test_a_demonstration_is_the_worked_solution_with_or_without_calculator_marks(tmp_path):
    solution = "She has 48/2 = <<48/2=24>>24 clips.\nThat is $<<24>>24.\n#### 24"
    path = write(tmp_path, [{"question": "q", "answer": solution}, {"question": "q", "answer": "#### 1,080"}])
    for marks, shown in ((False, "She has 48/2 = 24 clips.\nThat is $24."), (True, solution.removesuffix("\n#### 24"))):
        first, second = GSM8K(config.GSM8KConfig(dataset=path, calculator_marks=marks)).examples("train")
        assert first["completion"] == f"{shown}\n\\boxed{{24}}"
        assert second["completion"] == "\\boxed{1,080}"


def test_sft_learns_the_solutions_and_is_examined_by_playing(tmp_path):
    path = write(tmp_path, [{"question": "q", "answer": "9 + 9 = <<9+9=18>>18\n#### 18"}])
    task = build_algorithm(SFTConfig(demonstrations=True)).stage(GSM8K(config.GSM8KConfig(dataset=path, system="s")))
    (row,) = task.examples("train")
    said = [("system", "s"), ("user", "q"), ("assistant", "9 + 9 = 18\n\\boxed{18}")]
    assert [(m["role"], m["content"]) for m in task.conversation(row, "row")] == said
    held_out = asyncio.run(task.prepare(row))
    outcome, speaker = play(task, held_out, "\\boxed{17}", "\\boxed{18}")
    assert [m["role"] for m in speaker.heard[0]] == ["system", "user"]
    assert (outcome.rewards[POLICY], outcome.metrics["tries"]) == (1.0, 2)


@pytest.mark.parametrize("answer", ["", "18", "####", "#### none", "#### 17 or 18", None, 7, {}])
def test_a_row_without_a_final_number_is_named(tmp_path, answer):
    path = write(tmp_path, [{"question": "q", "answer": "#### 1"}, {"question": "q", "answer": answer}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*`answer`"):
        GSM8K(config.GSM8KConfig(dataset=path)).examples("train")
