"""Laws of the retrieval environment: when it searches, what it shows, what it pays, and what of it is trained."""

import asyncio
import json
import re
import socket
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import paceline
from corpus_facts import plan
from paceline.clients import Pool
from paceline.config.env import RetrievalConfig as Config
from paceline.config.inference import SamplingConfig
from paceline.data import DataError, Ticket
from paceline.engine import Completion, GenerateRequest
from paceline.envs import POLICY, EnvError, Outcome
from paceline.envs.retrieval import HINT, Retrieval, f1, format_results, normalise, read_move
from paceline.rollout import Renderer, Rollout, SamplingClient, Seat, SessionMap, assemble

laws = settings(max_examples=30, deadline=None)
TOKENIZER = AutoTokenizer.from_pretrained(Path(paceline.__file__).parent / "quickstart", local_files_only=True)
END = TOKENIZER.eos_token_id
WORDS = st.text(string.ascii_letters + string.digits + " .,'-", max_size=20)


class Puppet:
    """An engine that says what a function of the prompt's text says, in the real tokens of a real tokenizer."""

    busy_seconds = 0.0

    def __init__(self, speak: Callable[[str], str], cut: bool = False) -> None:
        self._speak, self._cut = speak, cut

    async def generate(self, request: GenerateRequest) -> Completion:
        text = self._speak(TOKENIZER.decode(request.prompt_ids, skip_special_tokens=False))
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), *([] if self._cut else [END])]
        many = len(ids)
        finish = "length" if self._cut else "stop"
        return Completion(token_ids=ids, logprobs=[-1.0] * many, versions=[0] * many, finish=finish)

    async def policy(self): ...


def play(speak, row: dict, cut: bool = False, **changes) -> tuple[Outcome, Seat]:
    """One episode with the policy in a puppet's hands."""
    environment = Retrieval(Config(**changes))
    client = SamplingClient(Pool([Puppet(speak, cut)]), Renderer(TOKENIZER, [END]), SamplingConfig(), frozenset([END]))
    table = SessionMap(client, (0,), 0, environment.actors)
    outcome = asyncio.run(environment.play(row, table))
    assert outcome is not None
    return outcome, table[POLICY]


def saying(*lines: str) -> Callable[[str], str]:
    """Speaks these lines, one a turn; being asked for more is an error."""
    rest = list(lines)
    return lambda prompt: rest.pop(0)


def row(answer: str | list[str] = "412", question: str = "When?") -> dict:
    return {
        "messages": [{"role": "user", "content": question}],
        "answer": [answer] if isinstance(answer, str) else answer,
    }


def heard(seat: Seat) -> list[dict]:
    """The conversation as the policy saw it at its last turn."""
    return seat.turns[-1].messages


# --- an episode


def looks_up(question: str) -> Callable[[str], str]:
    """Plays by reading: searches for a thing, reads its document among the results, goes on from there."""
    name, rest = plan(question)

    def speak(prompt: str) -> str:
        nonlocal name
        if "<information>" in prompt.partition("Question:")[2]:
            results = prompt.rpartition("<information>\n")[2].partition("</information>")[0]
            (text,) = re.findall(rf"^\[\d+\] {name}: (.*)$", results, re.MULTILINE)
            (name,) = re.findall(rest.pop(0), text)
        return f"<search>{name}</search>" if rest else f"I see. <answer>{name}</answer>"

    return speak


def test_who_looks_up_and_reads_answers_every_question_of_the_eval_split():
    environment = Retrieval(Config())
    questions = environment.examples("eval")
    for example in questions[::7]:
        outcome, seat = play(looks_up(example["question"]), example)
        hops = len(example["documents"])
        assert outcome == Outcome.solo(1.0, correct=1.0, searches=float(hops), format=1.0), example
        assert len(seat.turns) == hops + 1


def test_what_was_found_is_context_and_only_what_was_said_is_trained():
    lines = ["<search>lens grinder</search>", "<search>market</search>", "<answer>412</answer>"]
    _, seat = play(saying(*lines), row())
    (sample,) = assemble(Rollout(ticket=Ticket(0, "retrieval", 0, 0, 0), member=0, turns=seat.turns))
    trained = TOKENIZER.decode(sample.token_ids[sample.loss_mask].tolist(), skip_special_tokens=False)
    assert trained == "".join(f"{line}{TOKENIZER.decode([END])}" for line in lines)
    assert "[5]" in TOKENIZER.decode(sample.token_ids.tolist())


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_no_search_is_run_after_the_last_turn(turns):
    """No server listens at this address: a search that is run is an error."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        outcome, seat = play(
            saying(*["no idea"] * (turns - 1), "<search>x</search>"),
            row(),
            max_turns=turns,
            url=f"http://127.0.0.1:{door.getsockname()[1]}",
        )
    assert outcome.metrics["searches"] == 0
    assert len(seat.turns) == turns


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "http://127.0.0.1:{}/search/"])
def test_a_dead_service_is_an_error_that_names_it(url):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        url = url.format(door.getsockname()[1])
        at = re.escape(url.rstrip("/").removesuffix("/search"))
        with pytest.raises(EnvError, match=rf"the search service at {at}/search does not answer: .*search-server"):
            play(saying("<search>x</search>"), row(), url=url)


def test_a_reply_that_does_nothing_gets_a_hint_and_an_empty_search_too():
    outcome, seat = play(saying("Hm.", "<search> </search>", "<answer>412</answer>"), row())
    assert [m["content"] for m in heard(seat) if m["role"] == "user"] == ["When?", HINT, HINT]
    assert outcome == Outcome.solo(1.0, correct=1.0, searches=0.0, format=0.0)


def test_a_reply_cut_short_ends_the_episode():
    outcome, seat = play(saying("<search>market</search> and"), row(), cut=True)
    assert len(seat.turns) == 1
    assert outcome == Outcome.solo(0.0, correct=0.0, searches=0.0, format=0.0)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_results_come_in_the_role_and_number_that_were_asked_for(role):
    lines = ["<search>leagues</search>", "<search>zzz</search>", "<answer>4</answer>"]
    _, seat = play(saying(*lines), row(), results_role=role, top_k=2, max_result_chars=30)
    many, none = (m for m in heard(seat) if "<information>" in m["content"])
    assert many["role"] == none["role"] == role
    assert [line[:3] for line in many["content"].splitlines()[1:-1]] == ["[1]", "[2]"]
    assert all(line.endswith(" ...") for line in many["content"].splitlines()[1:-1])
    assert "Nothing was found." in none["content"]


# --- reading and scoring


@pytest.mark.parametrize(
    ("text", "kind", "content", "formed"),
    [
        ("<answer> 412 </answer>\n", "answer", "412", True),
        ("Well. <search>a\nb</search>", "search", "a\nb", True),
        ("<think><answer>1</answer></think><search>x</search>", "search", "x", True),
        ("<search>x</search><answer>made up</answer>", "search", "x", False),
        ("<search>x</search><information>made up</information>", "search", "x", False),
        ("<information>made up</information><answer>y</answer>", "answer", "y", False),
        ("<answer></answer>", "answer", "", True),
    ],
)
def test_the_first_thing_a_reply_does_counts(text, kind, content, formed):
    move = read_move(text)
    assert (move.kind, move.text, move.formed) == (kind, content, formed)


@pytest.mark.parametrize("text", ["", "412", "<answer>412", "<search>x</answer>", "answer>412</answer>"])
def test_a_reply_may_do_nothing(text):
    assert read_move(text) is None


@laws
@given(WORDS, WORDS)
def test_answers_are_compared_without_case_punctuation_and_articles(first, second):
    first = f"x{first}"
    assert normalise(f" the {first.upper()}! ") == normalise(first)
    assert 0 <= f1(first, second) == f1(second, first) <= 1
    assert f1(first, first) == 1
    if normalise(first) == normalise(second):
        assert f1(first, second) == 1


@pytest.mark.parametrize(
    ("said", "wanted", "exact", "shared"),
    [
        ("The Sea of Brand.", "sea of brand", 1, 1),
        ("Sea of Brond", ["Sea of Brand", "sea brand"], 0, 2 / 3),
        ("412", ["411", "412"], 1, 1),
        ("", "a", 0, 0),
        ("4 1 2", "412", 0, 0),
    ],
)
def test_the_score_is_the_best_over_all_accepted_answers(said, wanted, exact, shared):
    outcome, _ = play(saying(f"<answer>{said}</answer>"), row(wanted))
    assert outcome == Outcome.solo(exact, correct=exact, searches=0, format=1)
    outcome, _ = play(saying(f"<answer>{said}</answer>"), row(wanted), score="f1")
    assert outcome.rewards[POLICY] == outcome.metrics["f1"] == pytest.approx(shared)
    assert outcome.metrics["correct"] == exact


def test_results_need_no_title():
    found = [{"id": "1", "title": "Ash", "text": "a\n b"}, {"id": "2", "title": "", "text": "c"}, {"text": "d"}]
    assert format_results(found, 10) == "<information>\n[1] Ash: a b\n[2] c\n[3] d\n</information>"


# --- rows


def test_the_packages_questions_begin_with_instructions_and_end_with_the_question():
    environment = Retrieval(Config())
    for split in ("train", "eval"):
        for example in environment.examples(split):
            (message,) = example["messages"]
            assert message["content"].endswith(f"Question: {example['question']}")
            assert "<search>" in message["content"]


def test_rows_of_ones_own(tmp_path):
    own = [
        {"question": "How {many}?", "answer": 3},
        {"messages": [{"role": "user", "content": "And?"}], "answer": ["a", "b"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "And?"}]}], "answer": 4.5},
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(one) + "\n" for one in own))
    environment = Retrieval(Config(dataset=str(tmp_path / "own.jsonl")))
    first, *others = environment.examples("train")
    assert first["messages"][0]["content"].endswith("Question: How {many}?")
    assert first["answer"] == ["3"]
    assert [other["messages"] for other in others] == [one["messages"] for one in own[1:]]
    assert environment.examples("eval") == []


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"question": "When?"}, "a row needs `answer`"),
        ({"question": "When?", "answer": []}, "a question needs an `answer`"),
        ({"question": "When?", "answer": [{}]}, "a question needs an `answer`"),
        ({"answer": "412"}, "a row needs `messages`, `prompt`, `question`"),
        ({"question": "  ", "answer": "412"}, "a row needs a `question`, or `messages`"),
        ({"messages": [], "answer": "412"}, "`messages` must be a list of messages"),
    ],
)
def test_a_row_that_asks_nothing_is_named(tmp_path, bad, sentence):
    good = {"question": "When?", "answer": "412"}
    (tmp_path / "own.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(DataError, match=rf"own\.jsonl:2: {sentence}"):
        Retrieval(Config(dataset=str(tmp_path / "own.jsonl"))).examples("train")
