"""Laws of the datasets of environments: all read through one door, and each row that will not do is named."""

import csv
import importlib.util
import json
import re
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter, ValidationError

from paceline.commands.rollouts import EpisodePlayer
from paceline.config.env import EnvConfig
from paceline.data import DataError, make_cursor, open_rows, register_scheme, skipped_rows
from paceline.data.sampler import Mixture
from paceline.envs import build_environment
from paceline.envs.base import dataset_rows

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

ASKED = {"question": "What is 6 * 7?"}
# Of each type of environment a good row, and what may be wrong with one.
TYPES = {
    "equality": (
        ASKED | {"answer": "42"},
        [({"answer": ""}, "a row needs `answer`"), ({"answer": []}, "`answer` must be a")],
    ),
    "math": (
        ASKED | {"answer": "42"},
        [
            ({"answer": ""}, "a row needs `answer`: if it has another"),
            ({"answer": None, "gt_answer": ""}, "`gt_answer` must not be empty"),
            ({"answer": None, "gt_answer": float("nan")}, "`gt_answer` must be a string"),
            ({"answer": [3]}, "`answer` must be a string"),
        ],
    ),
    "tagged-answer": (ASKED | {"gt_answer": "42"}, [({"gt_answer": " "}, "`gt_answer` must not be empty")]),
    "gsm8k": (
        ASKED | {"answer": "6 * 7 = 42\n#### 42"},
        [({"answer": "42"}, "`answer` must end in `#### 18`"), ({"answer": "#### 4 or 2"}, "`answer` must end in")],
    ),
    "code": (
        ASKED | {"tests": "assert f() == 42"},
        [({"tests": ""}, "a row needs `tests`"), ({"tests": "assert ("}, "a test is not valid Python")],
    ),
    "retrieval": (
        ASKED | {"answer": "42"},
        [({"question": " "}, "a row needs a `question`"), ({"answer": ""}, "a row needs `answer`")],
    ),
    "token-in": (
        {"input_token_ids": [4, 2], "answer": "42"},
        [
            ({"input_token_ids": [4, -2]}, "`input_token_ids` must hold whole numbers from 0, not -2"),
            ({"answer": ""}, "a row needs `answer`"),
        ],
    ),
    "module": (
        {"messages": [{"role": "user", "content": "6 * 7?"}], "answer": "42"},
        [
            ({"answer": ""}, "a row needs `answer`"),
            ({"messages": [{"role": "user", "content": None}]}, "messages[0] has no `content`"),
        ],
    ),
    "custom": (
        {"messages": [{"role": "user", "content": "6 * 7?"}], "word": "42"},
        [({"messages": [{"role": "", "content": "?"}]}, "messages[0] has no `role`")],
    ),
}
CODE = """
def reward_fn(messages, answer):
    return 1.0

async def rollout(row, seat):
    return 1.0
"""


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([v if isinstance(v, str) else json.dumps(v) for v in row.values()] for row in rows)


def write_parquet(path, rows):
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


WRITERS = {"jsonl": write_jsonl, "csv": write_csv, "parquet": write_parquet}
needs_pyarrow = pytest.mark.skipif(pyarrow is None, reason='needs pyarrow: pip install "paceline[data]"')
needs_math = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason='pip install "paceline[tasks]"')
every_format = pytest.mark.parametrize("kind", ["jsonl", "csv", pytest.param("parquet", marks=needs_pyarrow)])
every_type = pytest.mark.parametrize("type_", [pytest.param(t, marks=[needs_math] * (t == "math")) for t in TYPES])


def environment(folder, type_, **settings):
    """An environment as a run file would name it."""
    (folder / "code.py").write_text(CODE)
    (folder / "corpus.jsonl").write_text('{"id": "1", "text": "42"}\n')
    own = {
        "module": {"module": str(folder / "code.py")},
        "custom": {"import_path": f"{folder / 'code.py'}:rollout"},
        "retrieval": {"corpus": str(folder / "corpus.jsonl")},
    }
    section = {"type": type_, "name": type_, **own.get(type_, {}), **settings}
    return build_environment(TypeAdapter(EnvConfig).validate_python(section))


def written(folder, kind, rows, name="rows"):
    path = folder / f"{name}.{kind}"
    WRITERS[kind](path, rows)
    return str(path)


def place(path, kind, number):
    """Where the user has to look. A table has rows and no lines."""
    return {"jsonl": f"{path}:{number}: ", "csv": f"{path}:{number + 1}: "}.get(kind, f"{path}, row {number}: ")


def fits_a_column(change, good):
    return all(type(value) is type(good[name]) for name, value in change.items())


@every_format
@every_type
def test_a_bad_row_is_skipped_and_named_by_file_and_place_and_many_are_an_error(tmp_path, type_, kind):
    good, wrong = TYPES[type_]
    good = {name: value.replace("\n", " ") if isinstance(value, str) else value for name, value in good.items()}
    fitting = [(change, why) for change, why in wrong if kind == "jsonl" or fits_a_column(change, good)]
    assert fitting
    for change, sentence in fitting:
        path = written(tmp_path, kind, [good, good, good | change, good])
        for split in ("train", "eval"):
            rows = environment(tmp_path, type_, dataset=path, eval_dataset=path).examples(split)
            assert [row == rows[0] for row in rows] == [True] * 3
            assert next(str(bad) for bad in skipped_rows(rows)).startswith(
                f"1 row is skipped, of 4: {place(path, kind, 3)}{sentence}"
            )
        path = written(tmp_path, kind, [good | change, good, good, good | change])
        with pytest.raises(DataError) as caught:
            environment(tmp_path, type_, dataset=path).examples("train")
        assert str(caught.value).startswith(place(path, kind, 1) + sentence)
        assert f"; 2 of the first 4 rows are bad; {place(path, kind, 4)}{sentence}" in str(caught.value)
        assert "\n" not in str(caught.value)


@every_format
@every_type
def test_a_dataset_without_a_row_is_one_sentence(tmp_path, type_, kind):
    good, _ = TYPES[type_]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([good]).slice(0, 0), path)
    else:
        path.write_text("\n" if kind == "jsonl" else ",".join(good))
    with pytest.raises(DataError, match=f"^{re.escape(f'dataset {path}: holds no rows')}$"):
        environment(tmp_path, type_, dataset=str(path)).examples("train")


@every_format
@every_type
def test_rows_are_the_same_whatever_their_fields_are_called(tmp_path, type_, kind):
    good, _ = TYPES[type_]
    ours = written(tmp_path, kind, [good] * 3, "ours")
    theirs = written(tmp_path, kind, [{f"their_{name}": value for name, value in good.items()}] * 3, "theirs")
    fields = {f"their_{name}": name for name in good}
    rows = list(environment(tmp_path, type_, dataset=ours).examples("train"))
    assert len(rows) == 3
    assert rows == list(environment(tmp_path, type_, dataset=theirs, fields=fields).examples("train"))
    assert rows == list(environment(tmp_path, type_, dataset=theirs, eval_dataset=ours, fields={}).examples("eval"))


@every_type
def test_several_datasets_mix_by_weight(tmp_path, type_):
    good, _ = TYPES[type_]
    few, many = (written(tmp_path, "jsonl", [good | {"of": n}] * n, str(n)) for n in (2, 5))
    for dataset, ones in (({few: 3.0, many: 1.0}, (6, 2)), ([few, many], (4, 4))):
        rows = environment(tmp_path, type_, dataset=dataset).examples("train")
        assert isinstance(rows, Mixture)
        order = make_cursor(rows, seed=0, name=type_)
        drawn = Counter(rows[order.draw()[2]]["of"] for _ in range(8))
        assert (drawn[2], drawn[5]) == ones


@every_type
def test_a_scheme_is_a_dataset_like_any_other(tmp_path, type_):
    good, wrong = TYPES[type_]
    register_scheme("three-of", lambda address: [good, good, good | (wrong[-1][0] if address.name == "bad" else {})])
    assert len(environment(tmp_path, type_, dataset="three-of:good?limit=2").examples("train")) == 2
    (bad,) = skipped_rows(environment(tmp_path, type_, dataset="three-of:bad").examples("train"))
    assert str(bad).startswith(f"1 row is skipped, of 3: dataset three-of:bad, row 3: {wrong[-1][1]}")


@every_type
@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([], "name at least one dataset"),
        ({}, "name at least one dataset"),
        (["a.jsonl", "b.jsonl", "a.jsonl"], "`a.jsonl` is named twice: to draw it more often write"),
        ({"a.jsonl": 1.0, "b.jsonl": 0.0}, "the weight of `b.jsonl` is 0: it must be above 0"),
    ],
)
def test_datasets_that_cannot_be_mixed_are_refused(tmp_path, type_, dataset, sentence):
    for key in ("dataset", "eval_dataset"):
        with pytest.raises(ValidationError, match=re.escape(sentence)):
            environment(tmp_path, type_, **{"dataset": "rows.jsonl", key: dataset})


def test_a_users_function_is_given_whatever_a_row_holds(tmp_path):
    rows = [{"word": "a"}, {}, {"n": 1, "deep": {"x": [None]}}]
    path = written(tmp_path, "jsonl", rows)
    assert list(environment(tmp_path, "custom", dataset=path).examples("train")) == rows


def test_what_an_environment_does_to_a_row_stays_with_its_reader(tmp_path):
    good, _ = TYPES["equality"]
    rows = environment(tmp_path, "equality", dataset=written(tmp_path, "csv", [good])).examples("train")
    rows[0]["messages"].clear()
    rows[0]["answer"].append("43")
    assert rows[0]["answer"] == ["42"]
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user"]


def open_file(path, text: str | bytes):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_rows(str(path), prompted=False)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path, name):
    row = '{"word": "hat"}'
    marked = f"\ufeff[{row}]" if name.endswith(".json") else f"\ufeff\n{row}\n"
    assert list(open_file(tmp_path / name, marked)) == [{"word": "hat"}]


@pytest.mark.parametrize("bad", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_unreadable_json_is_a_sentence(tmp_path, name, bad):
    with pytest.raises(DataError, match=rf"{name}.*(cannot be read|not valid JSON)"):
        open_file(tmp_path / name, bad)


def test_a_field_of_a_table_may_be_long(tmp_path):
    (row,) = open_file(tmp_path / "rows.csv", "word\n" + "x" * 200_000 + "\n")
    assert len(row["word"]) == 200_000


def test_episodes_that_are_only_looked_at_are_drawn_as_in_a_run(tmp_path):
    for name, count in (("a.jsonl", 10), ("b.jsonl", 90)):
        (tmp_path / name).write_text("".join(json.dumps({"of": name, "n": n}) + "\n" for n in range(count)))
    weights = {str(tmp_path / "a.jsonl"): 9.0, str(tmp_path / "b.jsonl"): 1.0}
    section = TypeAdapter(EnvConfig).validate_python(
        {"type": "custom", "name": "mine", "import_path": "x.py:y", "dataset": weights}
    )
    rows = dataset_rows(section, "train", prompted=False)
    cursor = make_cursor(rows, 0, "mine", None)
    player = EpisodePlayer(section, SimpleNamespace(examples=lambda split: rows), None)
    drawn = [ticket.row for ticket, _ in islice(player.draw(None), 50)]
    assert drawn == [cursor.draw()[2] for _ in range(50)]
    assert Counter(rows[index]["of"] for index in drawn)["a.jsonl"] > 35
