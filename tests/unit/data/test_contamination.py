"""Laws of contamination: a row goes exactly when it shares words with a held-out one, and the report says which."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.env import ContaminationConfig
from paceline.data import DataError, clean_rows, decontaminate, open_dataset
from paceline.data.contamination import normalise_text
from paceline.data.sampler import Mixture


def said(*texts: str) -> dict:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


WORDS = st.lists(st.sampled_from("abc"), max_size=12).map(" ".join)
DOCUMENTS = st.lists(st.lists(WORDS, min_size=1, max_size=2).map(lambda texts: said(*texts)), min_size=1, max_size=6)


def runs(rows: list[dict], length: int) -> set[tuple[str, ...]]:
    texts = [normalise_text(message["content"]) for row in rows for message in row["messages"]]
    return {tuple(words[i : i + length]) for words in texts for i in range(len(words) - length + 1)}


def whole(row: dict) -> tuple[str, ...]:
    return tuple(word for message in row["messages"] for word in normalise_text(message["content"]))


def copied(row: dict, held_out: list[dict], length: int) -> bool:
    """Rows of too few words for a run are copies where all of their words are the same."""
    if runs([row], length):
        return bool(runs([row], length) & runs(held_out, length))
    short = [whole(other) for other in held_out if not runs([other], length)]
    return bool(whole(row)) and whole(row) in short


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, DOCUMENTS, st.integers(1, 6))
def test_a_row_is_dropped_exactly_when_it_shares_a_run_of_words_or_is_a_short_copy(rows, held_out, length):
    clean = [row for row in rows if not copied(row, held_out, length)]
    if not clean:
        with pytest.raises(DataError, match=f"all {len(rows)} training rows overlap the evaluation split"):
            decontaminate(rows, held_out, length)
        return
    kept, report = decontaminate(rows, held_out, length)
    assert list(kept) == clean
    assert (report.checked, report.dropped) == (len(rows), len(rows) - len(clean))
    assert report.too_short == sum(not runs([row], length) for row in clean)
    for _, number, words in report.rows:
        shared = runs([rows[number - 1]], length) & runs(held_out, length)
        assert tuple(words.split()) in (shared or {whole(rows[number - 1])})


def test_thirteen_words_in_a_row_are_too_many_and_twelve_are_not():
    text = "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning, and bakes."
    words = normalise_text(text)
    others = [f"other{i}" for i in range(20)]
    share = [said(" ".join([*others, *words[2 : 2 + n], *others])) for n in (12, 13)]
    loud = said(text.upper().replace(" ", "\n--  "))
    split = said(" ".join(words[:8]), " ".join(words[8:]))
    system = {"messages": [{"role": "system", "content": text}, *said("hello")["messages"]]}
    kept, report = decontaminate([*share, loud, split, system], [said(text)])
    assert list(kept) == [share[0], split, system]
    assert str(report) == (
        "2 of 5 training rows overlap the evaluation split; "
        f'row 2 has "{" ".join(words[2:15])}"; 2 have fewer than 13 words and are no copies'
    )
    assert decontaminate(share[:1], [said(text)])[0] == share[:1]


def test_rows_of_tokens_are_compared_by_token_and_never_with_words():
    tokens = [{"input_token_ids": list(range(n, n + 20))} for n in (0, 7, 8)]
    words = said(" ".join(map(str, range(20))))
    kept, _ = decontaminate([*tokens[1:], words], tokens[:1])
    assert list(kept) == [tokens[2], words]


def test_a_mixture_stays_one_when_rows_are_dropped():
    parts = {"x": [said("a b c"), said("d")], "y": [said("e"), said("a b c d"), said("f")]}
    kept, report = decontaminate(Mixture(parts, {"x": 1, "y": 2}), [said("a b c")], length=3)
    assert isinstance(kept, Mixture)
    assert (kept.sizes, kept.weights, report.dropped) == ((1, 2), (1, 2), 2)
    assert list(kept) == [said("d"), said("e"), said("f")]


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, DOCUMENTS, st.integers(1, 4), st.floats(0, 1))
def test_more_overlap_than_is_allowed_is_refused_and_no_less(rows, held_out, length, allowed):
    copies = sum(copied(row, held_out, length) for row in rows)
    if copies == len(rows) or copies > allowed * len(rows) + 1e-9:
        with pytest.raises(DataError, match=f"{len(rows)} training rows"):
            decontaminate(rows, held_out, length, allowed)
    else:
        assert decontaminate(rows, held_out, length, allowed)[1].dropped == copies


def test_the_refusal_names_the_share_the_row_the_words_and_what_to_do():
    rows = [said("q w"), said("a b c d"), said("e"), said("x a b c"), said("x b c d y")]
    setting = ContaminationConfig(words=3, max_share=0.4)
    with pytest.raises(DataError) as refusal:
        clean_rows(rows, [said("a b c d")], setting)
    assert str(refusal.value) == (
        "3 of 5 training rows (60.0%) overlap the evaluation split, and contamination.max_share = 0.4 allows 40.0%: "
        'row 2 has "a b c", and 2 rows have "a b c". Take them out of one of the two sets, or raise max_share'
    )
    kept, report = clean_rows(rows, [said("a b c d")], setting.model_copy(update={"max_share": 0.6}))
    assert list(kept) == [rows[0], rows[2]]
    assert report is not None
    assert json.loads(json.dumps(report.table())) == {
        "words": 3,
        "checked": 5,
        "held_out": 1,
        "dropped": 3,
        "share": 0.6,
        "too_short": 2,
        "shared": [{"words": "a b c", "rows": 2}, {"words": "b c d", "rows": 1}],
        "rows": [{"row": 2, "words": "a b c"}, {"row": 4, "words": "a b c"}, {"row": 5, "words": "b c d"}],
    }
    assert clean_rows(rows, [said("a b c d")], False) == (rows, None)


def test_a_report_names_the_dataset_of_a_mixtures_row():
    mixture = Mixture(
        {"x.jsonl": [said("a"), said("p q r")], "y.jsonl": [said("a b c"), said("d")]}, {"x.jsonl": 1, "y.jsonl": 1}
    )
    held_out = [said("a b c p q r")]
    _, report = decontaminate(mixture, held_out, 3)
    assert report.table()["rows"] == [
        {"dataset": "x.jsonl", "row": 2, "words": "p q r"},
        {"dataset": "y.jsonl", "row": 1, "words": "a b c"},
    ]
    with pytest.raises(DataError, match=r': row 2 of x.jsonl has "p q r", and'):
        decontaminate(mixture, held_out, 3, 0.1)


def test_rows_of_any_shape_are_compared_and_odd_ones_end_nothing():
    """Those of `verifiers` hold a prompt as text; a user's own may hold anything."""
    held_out = [{"split": "eval", "index": 0, "prompt": "how many eggs lay the ducks"}]
    taken = [
        {"split": "train", "index": 0, "prompt": "Tell: how many eggs lay the ducks?"},
        {"question": "many eggs lay the"},
    ]
    odd = [{}, {"messages": [None, {"role": "user"}, {"role": "user", "content": None}]}, {"row": 3}, {"text": None}]
    parts = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "many eggs lay the"}, {"type": "image"}]}]
    }
    kept, report = decontaminate([*taken, *odd, parts], held_out, 4)
    assert list(kept) == odd
    assert report.dropped == 3


def test_without_held_out_rows_the_report_says_that_nothing_was_compared():
    kept, report = clean_rows([said("a b")], [], True)
    assert list(kept) == [said("a b")]
    assert str(report) == "contamination compares nothing: there are no held-out rows beside 1 training rows"


def test_a_short_row_goes_when_it_is_a_copy_and_a_files_rows_are_counted_with_the_bad_ones(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = ['{"prompt": "reverse: ab"}', '{"text": "bad"}', '{"prompt": "Reverse  AB!"}', '{"prompt": "reverse: abc"}']
    file.write_text("\n".join(lines))
    kept, report = decontaminate(open_dataset(str(file)), [said("reverse ab")])
    assert [row["prompt"] for row in kept] == ["reverse: abc"]
    assert report.table()["rows"] == [{"row": 1, "words": "reverse ab"}, {"row": 3, "words": "reverse ab"}]
    assert report.too_short == 1


def test_rows_without_words_are_no_copies_of_one_another():
    assert decontaminate([said("?"), said("")], [said("!")])[1].dropped == 0
