"""Laws of datasets: the rows are the same whatever file they lie in and however they are asked for."""

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import paceline
from paceline.commands.show import show_rows
from paceline.data import (
    DataError,
    decontaminate,
    make_cursor,
    open_rows,
    parse_address,
    register_scheme,
    skipped_rows,
    sources,
)
from paceline.data.sampler import Mixture, MixtureCursor, open_dataset
from paceline.data.sources import Scheme
from paceline.rollout import Renderer, RenderError

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

laws = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
needs_pyarrow = pytest.mark.skipif(pyarrow is None, reason='needs pyarrow: pip install "paceline[data]"')

# --- every format

TEXT = st.text(max_size=9)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT})
ROWS = st.lists(
    st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=3), "answer": TEXT}),
    min_size=1,
    max_size=7,
)


def write_json(path, rows, cut):
    path.write_text(json.dumps(rows), encoding="utf-8")


def write_jsonl(path, rows, cut):
    ends = ("\n", "\r\n", "\n \n")
    lines = (json.dumps(row, ensure_ascii=False) + ends[(i + cut) % 3] for i, row in enumerate(rows))
    path.write_bytes("".join(lines).encode())


def write_csv(path, rows, cut):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages", "answer"])
        writer.writerows([json.dumps(row["messages"]), row["answer"]] for row in rows)


def write_parquet(path, rows, cut):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=cut)


def write_arrow(path, rows, cut, new=None, **options):
    table = pyarrow.Table.from_pylist(rows)
    with (new or pyarrow.ipc.new_file)(str(path), table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=cut)


def write_compressed(path, rows, cut):
    write_arrow(path, rows, cut, options=pyarrow.ipc.IpcWriteOptions(compression="zstd"))


def write_stream(path, rows, cut):
    write_arrow(path, rows, cut, new=pyarrow.ipc.new_stream)


TABLES = {"parquet": write_parquet, "arrow": write_arrow, "zstd.arrow": write_compressed, "stream.arrow": write_stream}
WRITERS = {
    "json": write_json,
    "jsonl": write_jsonl,
    "csv": write_csv,
    **(TABLES if pyarrow else {}),
}
every_format = pytest.mark.parametrize("kind", [*WRITERS, *(() if pyarrow else ("parquet", "arrow"))])

OPERATIONS = st.lists(st.integers(-9, 9) | st.slices(9), max_size=8)


@every_format
@laws
@given(rows=ROWS, cut=st.integers(1, 4), limit=st.none() | st.integers(1, 9), asked=OPERATIONS, cache=st.integers(0, 1))
def test_any_way_of_asking_gives_the_rows_of_the_file(tmp_path, monkeypatch, kind, rows, cut, limit, asked, cache):
    if kind not in WRITERS:
        pytest.skip('needs pyarrow: pip install "paceline[data]"')
    monkeypatch.setattr(sources, "CACHE_BYTES", cache * 2**30)  # decoded once, or again for each row
    path = tmp_path / f"rows.{kind}"
    WRITERS[kind](path, rows, cut)
    opened, rows = open_rows(str(path), limit=limit), rows[:limit]
    assert len(opened) == len(rows)
    for ask in asked:
        try:
            wanted = rows[ask]
        except IndexError:
            with pytest.raises(IndexError):
                opened[ask]
        else:
            assert opened[ask] == wanted
    assert list(opened) == rows
    assert list(reversed(opened)) == rows[::-1]


@every_format
def test_what_a_reader_does_to_a_row_stays_with_the_reader(tmp_path, kind):
    if kind not in WRITERS:
        pytest.skip('needs pyarrow: pip install "paceline[data]"')
    row = {"messages": [{"role": "user", "content": "a"}], "answer": "b"}
    WRITERS[kind](tmp_path / f"rows.{kind}", [row], 1)
    opened = open_rows(str(tmp_path / f"rows.{kind}"))
    opened[0]["messages"][0]["content"] = "spoilt"
    opened[0]["messages"].append({})
    opened[0]["new"] = 1
    assert list(opened) == [row]


def test_rows_stay_on_disk(tmp_path):
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"prompt": f"{i} " * 500, "answer": i}) + "\n" for i in range(4000))
    tracemalloc.start()
    rows = open_rows(str(path))
    assert rows[3999]["answer"] == 3999
    assert sum(row["answer"] for row in rows) == sum(range(4000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 8 * 2**20
    assert peak < path.stat().st_size / 20


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    rows = open_rows(str(path))
    path.write_text('{"prompt": "longer"}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="changed while it was in use"):
        rows[1]
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        rows[1]


@every_format
def test_a_relative_path_is_meant_where_it_was_opened(tmp_path, monkeypatch, kind):
    if kind not in WRITERS:
        pytest.skip('needs pyarrow: pip install "paceline[data]"')
    monkeypatch.setattr(sources, "CACHE_BYTES", 0)
    rows = [{"messages": [{"role": "user", "content": str(i)}], "answer": ""} for i in range(3)]
    (tmp_path / "elsewhere").mkdir()
    WRITERS[kind](tmp_path / f"rows.{kind}", rows, 1)
    monkeypatch.chdir(tmp_path)
    opened = open_rows(f"rows.{kind}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert list(opened) == rows


# --- fields


def jsonl(path: Path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@laws
@given(
    st.dictionaries(st.sampled_from("abcdef"), TEXT, min_size=1),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["prompt", "answer", "a", "b"]), max_size=4),
)
def test_fields_rename_all_at_once_and_lose_nothing_else(tmp_path, row, fields):
    fields = {old: new for old, new in fields.items() if old in row}
    fields = {old: new for new, old in {new: old for old, new in fields.items()}.items()}
    path = jsonl(tmp_path / "rows.jsonl", {**row, "question": "q"})
    (found,) = open_rows(path, fields)
    wanted = {**{k: v for k, v in row.items() if k not in fields}, **{new: row[old] for old, new in fields.items()}}
    prompt = wanted.get("prompt", "q")
    assert found == {**wanted, "question": "q", "messages": [{"role": "user", "content": prompt}]}


def test_names_other_datasets_use(tmp_path):
    user = [{"role": "user", "content": "2+2?"}]
    gsm8k = jsonl(tmp_path / "gsm8k.jsonl", {"question": "2+2?", "gt_answer": 4})
    assert open_rows(gsm8k, {"gt_answer": "answer"})[0] == {"question": "2+2?", "answer": 4, "messages": user}
    nested = jsonl(tmp_path / "nested.jsonl", {"prompt": user, "reward_model": {"ground_truth": "4"}})
    row = open_rows(nested, {"reward_model.ground_truth": "answer"})[0]
    assert (row["messages"], row["answer"]) == (user, "4")
    tokens = jsonl(tmp_path / "tokens.jsonl", {"input_token_ids": [5, 6], "gt_answer": ["4"]})
    assert open_rows(tokens, {"gt_answer": "answer"})[0] == {"input_token_ids": [5, 6], "answer": ["4"]}


def test_demonstrations_end_in_what_the_assistant_said(tmp_path):
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = jsonl(tmp_path / "rows.jsonl", {"messages": said}, {"question": "q", "completion": "a"})
    assert [row["messages"] for row in open_rows(path, demonstrations=True)] == [said, said]
    path = jsonl(tmp_path / "rows.jsonl", {"messages": said}, {"messages": said[:1]})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: a demonstration must end in an assistant message"):
        open_rows(path, demonstrations=True)


@needs_pyarrow
def test_keys_a_table_fills_in_are_not_there(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    write_parquet(tmp_path / "rows.parquet", [{"messages": messages}], 1)
    assert open_rows(str(tmp_path / "rows.parquet"))[0]["messages"] == messages


# --- what is wrong, and where

GOOD = {"messages": [{"role": "user", "content": "q"}]}
BAD = [
    ({"text": "q"}, "a row needs `messages`, `prompt`, `question` or `input_token_ids` and has `text`: name the right"),
    ({}, "and has nothing"),
    ({"messages": []}, "`messages` must be a list of messages, not an empty list"),
    ({"messages": "hello"}, "`messages` is text, but not valid JSON"),
    ({"messages": "3"}, "`messages` must be a list of messages, not int"),
    ({"prompt": 3}, "`prompt` must be a list of messages, not int"),
    ({"messages": ["hello"]}, "messages[0] must be an object with `role` and `content`, not str"),
    ({"messages": [*GOOD["messages"], {"content": "x"}]}, "messages[1] has no `role`"),
    ({"messages": [{"role": "user"}]}, "messages[0] has no `content`"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0]: `content` must be text, not int"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0]: the parts of `content` must be objects"),
    ({"input_token_ids": []}, "`input_token_ids` must be a list of whole numbers, not an empty list"),
    ({"input_token_ids": [1, -1]}, "`input_token_ids` must hold whole numbers from 0, not -1"),
    ({"input_token_ids": [1, True]}, "`input_token_ids` must hold whole numbers from 0, not True"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD)
def test_a_bad_row_names_its_file_and_line(tmp_path, bad, sentence):
    for kind, place in (("jsonl", ":{}: "), ("json", ", row {}: ")):
        for before in (0, 3):
            path = tmp_path / f"rows.{kind}"
            WRITERS[kind](path, [*[GOOD] * before, bad, GOOD], 1)
            line = before + 1 + (before // 2 if kind == "jsonl" else 0)  # every third row has an empty line after it
            if before:  # one of five is left out
                (found,) = skipped_rows(rows := open_rows(str(path)))
                assert len(rows) == 4
                told = str(found).removeprefix("1 row is skipped, of 5: ")
            else:  # half of them are too many
                with pytest.raises(DataError) as caught:
                    open_rows(str(path))
                told = str(caught.value)
            assert told.startswith(f"{path}{place.format(line)}{sentence}"[:60])
            assert sentence in told
            assert "\n" not in told


LIMITS = [(19, 60, False), (20, 60, True), (20, 2000, False), (21, 2000, True)]


@pytest.mark.parametrize(("bad", "rows", "ends"), LIMITS)
def test_bad_rows_are_too_many_from_twenty_on_and_above_one_in_a_hundred(tmp_path, bad, rows, ends):
    path = jsonl(tmp_path / "rows.jsonl", *[GOOD] * (rows - bad), *[{}] * bad)
    if not ends:
        (found,) = skipped_rows(opened := open_rows(path))
        assert (len(opened), len(found)) == (rows - bad, bad)
        return
    with pytest.raises(DataError, match=f"rows.jsonl:{rows - bad + 1}: .*; {bad} of the first {rows} rows are bad"):
        open_rows(path)


def test_twenty_bad_rows_from_the_first_on_are_enough(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", *[{}] * 20, *[GOOD] * 9980)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*; 20 of the first 20 rows are bad; .*rows\.jsonl:2: "):
        open_rows(path)


@needs_pyarrow
@pytest.mark.parametrize("kind", TABLES)
def test_a_bad_row_of_a_table_is_named_by_its_number(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    TABLES[kind](path, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": None}, {"prompt": "c"}], 2)
    rows = open_rows(str(path))
    assert [row["prompt"] for row in rows] == ["a", "b", "c"]
    (found,) = skipped_rows(rows)
    assert str(found).startswith(f"1 row is skipped, of 4: {path}, row 3: a row needs `messages`")
    assert len(open_rows(str(path), limit=2)) == 2


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', {}, ":2: not valid UTF-8"),
        (b'{"prompt": "a"}\n{"prompt"\n', {}, ":2: not valid JSON"),
        (b'{"prompt": "a"}\n[1]\n', {}, ":2: a row must be an object, not list"),
        (b'{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n', {"require": ["answer"]}, ":2: a row needs `answer`"),
        (b'{"x": "a"}\n{"y": "b"}\n', {"fields": {"x": "prompt"}}, ":2: there is no field `x`, which fields names"),
        (b'{"prompt": "a"}\n', {"fields": {"prompt.x": "answer"}}, ":1: there is no field `prompt.x`"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, options, sentence):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_rows(str(path), **options)
    assert str(caught.value).startswith(f"{path}{sentence}")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        *((f"absent.{kind}", None, "no such file, looked in ") for kind in WRITERS),
        *((f"empty.{kind}", b"[]" if kind == "json" else b"", "holds no rows") for kind in ("json", "jsonl", "csv")),
        ("header.csv", b"prompt,answer\n", "holds no rows"),
        ("rows.txt", b"x", "not a .json, .jsonl, .csv, .parquet, .arrow file, nor `split@owner/name`"),
        ("@rows", None, "not a .json"),
        *((f"torn.{kind}", b"PAR1 or not", "cannot be read: ") for kind in ("parquet", "arrow") if kind in WRITERS),
    ],
)
def test_an_unusable_dataset_is_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name if "@" not in name else "no-such-kind"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_rows(str(path))
    assert str(caught.value).startswith(f"dataset {path}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_pyarrow
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_without_rows_is_one_sentence(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    table = pyarrow.Table.from_pylist([{"prompt": "a"}]).slice(0, 0)
    TABLES[kind](path, [], 1) if kind != "parquet" else pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=re.escape(f"dataset {path}: holds no rows")):
        open_rows(str(path))


def test_settings_that_make_no_sense_are_refused(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "a", "b": "c"})
    with pytest.raises(DataError, match="the limit must be at least 1, not 0"):
        open_rows(path, limit=0)
    with pytest.raises(DataError, match="fields: `answer` is given by more than one field"):
        open_rows(path, {"prompt": "answer", "b": "answer"})


# --- schemes and the hub


def counting(address):
    start = address.integer("start", 0, least=0)
    return [{"question": f"{address.name} {i}", "answer": str(i)} for i in range(start, address.integer("size", 5))]


def test_a_scheme_is_opened_by_the_code_that_registered_it(monkeypatch):
    monkeypatch.setattr("paceline.data.sources._SCHEMES", {})
    with pytest.raises(DataError, match="there is no scheme `count:`; schemes: none"):
        open_rows("count:sheep")
    register_scheme("count", counting, options=["size", "start"])
    assert [row["answer"] for row in open_rows("count:sheep")] == list("01234")
    assert [row["messages"][0]["content"] for row in open_rows("count:sheep?size=9&start=7")] == ["sheep 7", "sheep 8"]
    for uri, limit in (("count:sheep?limit=2", None), ("count:sheep?limit=2", 4), ("count:sheep", 2)):
        assert len(open_rows(uri, limit=limit)) == 2
    for uri, sentence in {
        "count:sheep?size=many": "`size` must be a whole number from 1, not `many`",
        "count:sheep?start=-1": "`start` must be a whole number from 0, not `-1`",
        "count:sheep?limit=0": "`limit` must be a whole number from 1",
        "count:sheep?wolves=1": "there is no option `wolves`; `count:` knows `limit`, `size`, `start`",
        "count:sheep?start=5": "holds no rows",
        "sheep:count": "there is no scheme `sheep:`; schemes: `count:`",
    }.items():
        with pytest.raises(DataError, match=re.escape(f"dataset {uri}: {sentence}")):
            open_rows(uri)
    mine = {"count": Scheme(lambda address: [{"prompt": "mine"}])}
    assert open_rows("count:sheep", schemes=mine)[0]["prompt"] == "mine"
    with pytest.raises(DataError, match=r"dataset count:sheep, row 1: a row needs `messages`"):
        open_rows("count:sheep", schemes={"count": Scheme(lambda address: [{}])})


@pytest.mark.parametrize("uri", ["rows", "train@owner/name", "train@owner/name:main", "a/b.jsonl", "http://x/y"])
def test_files_and_hub_names_are_no_schemes(uri):
    assert parse_address(uri) is None


def test_a_file_with_an_at_sign_is_a_file(tmp_path):
    assert open_rows(jsonl(tmp_path / "train@2.jsonl", {"prompt": "a"}))[0]["prompt"] == "a"


HUB = """
import sys
from paceline.data import DataError, open_rows
try:
    import datasets
except ImportError:
    sys.exit(77)
folder = sys.argv[1]
rows = open_rows(f"train@{folder}", {"gt": "answer"}, limit=2)
print([(row["prompt"], row["answer"]) for row in rows], len(rows), rows[-1]["messages"][0]["content"])
for uri in ("test@" + folder, "train@nobody/has-this", "train@", "train@nobody/has-this:main"):
    try:
        open_rows(uri)
    except DataError as error:
        print(error)
"""


def test_the_hub_without_a_network_is_one_sentence_and_a_folder_needs_none(tmp_path):
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", *({"prompt": str(i), "gt": i} for i in range(3)))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", HUB, str(tmp_path / "set")],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode == 77:
        pytest.skip('needs datasets: pip install "paceline[data]"')
    assert ran.returncode == 0, ran.stderr
    first, *errors = ran.stdout.splitlines()
    assert first == "[('0', 0), ('1', 1)] 2 1"
    assert len(errors) == 4
    for error, uri in zip(errors, (f"test@{tmp_path}/set", "train@nobody/", "train@:", "train@nobody/"), strict=True):
        assert error.startswith(f"dataset {uri}")
    assert all("cannot be loaded" in error for error in (errors[0], errors[1], errors[3]))


# --- mixtures

PARTS = st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=5)


@laws
@given(PARTS, st.integers(0, 2**32), st.integers(0, 120), st.integers(0, 60), st.booleans())
def test_a_mixture_keeps_its_proportions_at_every_draw_and_resumes_anywhere(parts, seed, before, after, curriculum):
    sizes, weights = zip(*parts, strict=True)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def fresh():
        return MixtureCursor(sizes, weights, seed, "mix", curriculum=curriculum)

    def draw(cursor, n):
        drawn = []
        for _ in range(n):
            drawn.append(cursor.draw())
            cursor.update(drawn[-1][2], [drawn[-1][1] % 3])  # how a row goes matters to a curriculum
        return drawn

    whole, first = fresh(), fresh()
    draws = draw(whole, before + after)
    draw(first, before)
    resumed = fresh()
    draw(resumed, 3)
    resumed.load(json.loads(json.dumps(first.state())))
    assert resumed.draws == before
    assert draw(resumed, after) == draws[before:]
    assert [(epoch, index) for epoch, index, _ in draws] == [(i // sum(sizes), i) for i in range(len(draws))]
    for n in range(len(draws) + 1):
        for start, size, weight in zip(starts, sizes, weights, strict=True):
            mine = [row for _, _, row in draws[:n] if start <= row < start + size]
            fair = n * weight / sum(weights)
            # Webster's apportionment: rounding is off by a half in each part, and what all owe is shared by weight.
            assert abs(len(mine) - fair) <= 0.5 + len(parts) / 2 * weight / sum(weights) + 1e-6
            if not curriculum and n % 7 == 0:
                epochs = [sorted(mine[i : i + size]) for i in range(0, len(mine) - size + 1, size)]
                assert all(epoch == list(range(start, start + size)) for epoch in epochs)


@laws
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), OPERATIONS)
def test_a_mixture_is_all_its_rows(sizes, asked):
    parts = {str(p): [{"prompt": f"{p}.{i}"} for i in range(size)] for p, size in enumerate(sizes)}
    mixture = Mixture(parts, dict.fromkeys(parts, 1.0))
    rows = [row for part in parts.values() for row in part]
    assert list(mixture) == rows
    for ask in asked:
        if isinstance(ask, slice) or -len(rows) <= ask < len(rows):
            assert mixture[ask] == rows[ask]


def test_datasets_are_mixed_by_uri(tmp_path):
    easy = jsonl(tmp_path / "easy.jsonl", *({"q": f"e{i}"} for i in range(10)))
    hard = jsonl(tmp_path / "hard.jsonl", *({"q": f"h{i}"} for i in range(2)))
    mixture = open_dataset({easy: 1, hard: 3}, {"q": "prompt"})
    order = make_cursor(mixture, 0, "env")
    drawn = [mixture[order.draw()[2]]["prompt"] for _ in range(40)]
    assert sum(name.startswith("h") for name in drawn) == 30
    for weights in ({easy: 0}, {easy: -1}, {easy: math.nan}, {easy: math.inf}):
        with pytest.raises(DataError, match="its weight must be a number above 0"):
            open_dataset(weights, {"q": "prompt"})
    with pytest.raises(DataError, match="at least one dataset"):
        open_dataset({})
    with pytest.raises(DataError, match="the checkpoint mixes 1 datasets, the run file 2"):
        order.load([0])


# --- rows as the model will see them

SHARED = Path(__file__).parents[4] / "shared"
GSM8K = SHARED / "data" / "gsm8k" / "test.jsonl"
QUICKSTART = Path(paceline.__file__).parent / "quickstart"


def screen(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=width)


def speech(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


ENDS = {
    "quickstart": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("name", ENDS)
def test_what_is_shown_as_trained_is_what_the_assistant_said(load, name):
    tokenizer = load(name)
    demonstration = {"messages": speech("one a", "two", "three assistant", "four user four")}
    prompt = {"messages": demonstration["messages"][:3], "answer": ["four"]}
    shown = show_rows([demonstration, prompt], tokenizer, 9, console := screen())
    whole = tokenizer.apply_chat_template(demonstration["messages"], tokenize=False)
    assert shown[0].text == whole
    replies = [whole[start:end] for start, end in shown[0].trained_spans]
    assert [reply.removeprefix("<think>\n\n</think>\n\n") for reply in replies] == [
        "two" + ENDS[name],
        "four user four" + ENDS[name],
    ]
    assert shown[0].tokens == len(tokenizer.encode(whole, add_special_tokens=False))
    assert shown[0].trained_tokens == sum(len(tokenizer.encode(r, add_special_tokens=False)) for r in replies)
    assert shown[1].tokens == len(Renderer(tokenizer, ()).prompt(prompt["messages"]))
    assert (shown[1].trained_spans, shown[1].trained_tokens) == ([], 0)
    text = console.file.getvalue()
    assert "\x1b[1;32mtwo" in text or "</think>\x1b[0m" in text
    assert f"row 1: {shown[0].tokens} tokens, {shown[0].trained_tokens} trained" in text
    assert '["four"]' in text


def test_thoughts_a_template_strips_are_not_trained(load):
    messages = speech("q", "<think>\nhm\n</think>\n\nfirst", "r", "<think>\nwell\n</think>\n\nsecond")
    (shown,) = show_rows([{"messages": messages}], load("qwen3"), 1, screen())
    trained = [shown.text[start:end] for start, end in shown.trained_spans]
    assert trained == ["first<|im_end|>", "<think>\nwell\n</think>\n\nsecond<|im_end|>"]


def test_only_as_many_rows_as_asked_for_are_read(load, tmp_path):
    rows = [{"messages": speech(f"reverse: {i}")} for i in range(9)]
    read = []

    class Watched(list):
        def __iter__(self):
            return (read.append(row) or row for row in super().__iter__())

    assert len(show_rows(Watched(rows), load("quickstart"), 2, console := screen())) == 2
    assert read == rows[:2]
    assert "2 of 9 rows" in console.file.getvalue()


def test_other_peoples_text_cannot_speak_to_the_terminal(load):
    row = {"messages": speech("a\x1b[2Jb\x07[red]c[/red]\x9b"), "answer": "\x1b]0;x\x07"}
    show_rows([row], load("quickstart"), 1, console := screen())
    text = console.file.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert not {"\x07", "\x9b"} & set(text)
    assert "[red]c[/red]" in text


def test_tokens_are_shown_as_text_and_long_rows_without_their_middle(load):
    tokenizer = load("quickstart")
    ids = tokenizer.encode("reverse: abc", add_special_tokens=False)
    long = {"messages": speech("x" * 9000 + "THE END")}
    shown = show_rows([{"input_token_ids": ids}, long], tokenizer, 2, console := screen())
    assert (shown[0].text, shown[0].tokens) == (tokenizer.decode(ids), len(ids))
    text = console.file.getvalue()
    assert "characters left out" in text
    assert "THE END" in text
    assert len(text) < 9000


def test_a_row_the_template_cannot_express_is_named(load):
    rows = [{"messages": speech("a")}, {"messages": [{"role": "judge", "content": "b"}]}]
    with pytest.raises(RenderError, match="row 2: the model's chat template cannot express this conversation"):
        show_rows(rows, load("quickstart"), 2, screen())


@pytest.mark.skipif(not GSM8K.exists(), reason="needs the original files of shared/data/gsm8k")
def test_gsm8k_as_it_was_published():
    rows = open_rows(str(GSM8K))
    assert len(rows) == 1319
    assert rows[0]["messages"][0]["content"].startswith("Janet")
    kept, report = decontaminate(open_rows(str(GSM8K.with_name("train.jsonl"))), rows)
    assert (len(kept) + report.dropped, report.checked) == (7473, 7473)
    assert 0 < report.dropped < 100
