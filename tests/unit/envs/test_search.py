"""Laws of search: what BM25 ranks first, what an index folder keeps, and a corpus whose questions can be answered."""

import asyncio
import json
import math
import runpy
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_facts import look_up, plan
from paceline.commands import main
from paceline.config import ConfigError
from paceline.config.env import RetrievalConfig
from paceline.config.errors import options_from_flags
from paceline.data import DataError
from paceline.envs import EnvError
from paceline.envs.retrieval import Retrieval as RetrievalEnvironment
from paceline.envs.search import server
from paceline.envs.search.index import (
    BM25,
    BUILT_IN_CORPUS,
    QUESTIONS,
    Document,
    load_corpus,
    open_index,
    save_corpus,
    tokenise,
)
from paceline.envs.search.server import SearchOptions
from paceline.util.connections import listen

laws = settings(max_examples=50, deadline=None)
WORDS = ["alder", "birch", "cedar", "dogwood", "elm", "fir", "gorse", "hazel", "ivy", "juniper"]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join), min_size=1, max_size=12)
QUERIES = st.lists(st.sampled_from([*WORDS, "unheard"]), max_size=5).map(" ".join)


def documents(texts: list[str]) -> list[Document]:
    return [Document(str(number), "", text) for number, text in enumerate(texts)]


def found(index, query: str, top_k: int = 100) -> list[tuple[str, float]]:
    return [(hit.document.id, hit.score) for hit in index.search(query, top_k)]


# --- ranking


@laws
@given(st.sets(st.frozensets(st.sampled_from(WORDS), min_size=4, max_size=4), min_size=2, max_size=12), st.data())
def test_documents_with_all_words_of_the_query_rank_before_others(sets, data):
    """In documents of one length that repeat no word; repetition and brevity may outweigh a common word."""
    held = sorted(sorted(words) for words in sets)
    index = BM25.build(documents([" ".join(words) for words in held]))
    asked = data.draw(st.lists(st.sampled_from(data.draw(st.sampled_from(held))), min_size=1, unique=True))
    whole = {str(i) for i, words in enumerate(held) if set(asked) <= set(words)}
    ranked = found(index, " ".join(asked))
    assert {name for name, _ in ranked[: len(whole)]} == whole
    assert all(score < ranked[0][1] for name, score in ranked if name not in whole)


@laws
@given(TEXTS, QUERIES)
def test_scores_are_those_of_the_formula(texts, query):
    words = [text.split() for text in texts]
    mean = sum(map(len, words)) / len(words)

    def score(document: list[str]) -> float:
        total = 0.0
        for word in query.split():
            holding, times = sum(word in other for other in words), document.count(word)
            idf = math.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
            total += idf * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(document) / mean))
        return total

    expected = {str(i): pytest.approx(score(document), rel=1e-5) for i, document in enumerate(words) if score(document)}
    assert dict(found(BM25.build(documents(texts)), query)) == expected


@laws
@given(TEXTS, QUERIES, st.integers(1, 14))
def test_scores_fall_with_rank_and_fewer_results_are_the_first_of_more(texts, query, top_k):
    index = BM25.build(documents(texts))
    ranked = found(index, query)
    # Of equals the first in the corpus comes first, so that a search always has one answer.
    assert ranked == sorted(ranked, key=lambda hit: (-hit[1], int(hit[0])))
    assert found(index, query, top_k) == ranked[:top_k]
    sharing = {str(i) for i, text in enumerate(texts) if set(text.split()) & set(query.split())}
    assert {name for name, _ in ranked} == sharing
    assert found(index, " ".join(reversed(query.upper().split()))) == ranked


def test_of_many_equals_the_first_in_the_corpus_are_found():
    index = BM25.build(documents(["elm", *["fir"] * 300]))
    assert [int(name) for name, _ in found(index, "fir", 40)] == list(range(1, 41))


def test_words_are_letters_and_digits_whatever_their_case():
    assert tokenise("It's ÉTÉ_1204, ﬁne!") == ["it", "s", "été", "1204", "fine"]
    assert tokenise("... --- !!!") == []
    assert found(BM25.build(documents(["!!!", "?"])), "! ?") == []


# --- the folder


def test_an_index_out_of_its_folder_finds_what_a_new_one_finds(tmp_path):
    folder = str(tmp_path / "index")
    made = open_index(str(BUILT_IN_CORPUS), folder)
    kept = (tmp_path / "index" / "bm25.npz").read_bytes()
    again = open_index(None, folder)
    for query in ("the market of the town", "lens grinder", "leagues long", "", "zzz"):
        assert found(again, query) == found(made, query)
    assert (tmp_path / "index" / "bm25.npz").read_bytes() == kept
    assert list(again.documents) == load_corpus(BUILT_IN_CORPUS)


@pytest.mark.parametrize("harm", [b"", b"no archive", None])
def test_an_index_that_does_not_fit_is_made_anew(tmp_path, harm):
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "index"
    save_corpus(documents(["alder birch", "cedar"]), corpus)
    open_index(str(corpus), str(folder))
    if harm is None:
        save_corpus(documents(["cedar", "alder birch"]), corpus)
    else:
        (folder / "bm25.npz").write_bytes(harm)
    index = open_index(str(corpus), str(folder))
    assert [hit.document.text for hit in index.search("cedar")] == ["cedar"]
    assert [hit.document.text for hit in open_index(None, str(folder)).search("birch")] == ["alder birch"]


def test_a_folder_without_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no documents yet: name them with --corpus"):
        open_index(None, str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used"):
        open_index(str(BUILT_IN_CORPUS), str(tmp_path / "file"))


# --- the corpus


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"id": 1, "text": "a"}\n\n{"id": 1, "text": "b"}', r":3: the id `1` stands in line 1 already"),
        ('{"id": "1", "text": "a"}\n{"id": 2', r":2: not valid JSON"),
        ('{"id": "1", "text": "\\ud800"}', r":1: not valid JSON"),
        ("[1]", r":1: a document must be an object"),
        ('{"text": "a"}', r":1: a document needs an `id`"),
        ('{"id": true, "text": "a"}', r":1: a document needs an `id`"),
        ('{"id": 1}', r":1: a document needs a `text`"),
        ('{"id": 1, "text": " "}', r":1: a document needs a `text`"),
        ('{"id": 1, "text": ["a"]}', r":1: `text` must be a string, not list"),
        ('{"id": 1, "title": 3, "text": "a"}', r":1: `title` must be a string, not int"),
        ("\n\n", r"holds no documents"),
    ],
)
def test_a_bad_document_is_named_by_file_and_line(tmp_path, lines, sentence):
    (tmp_path / "corpus.jsonl").write_text(lines)
    with pytest.raises(DataError, match=rf"corpus\.jsonl.*{sentence}"):
        load_corpus(tmp_path / "corpus.jsonl")


def test_what_is_no_corpus_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_corpus(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        load_corpus(tmp_path)


def test_a_document_needs_no_title_and_its_id_may_be_a_number(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"id": 7, "text": "a", "more": 1}\r\n')
    assert load_corpus(tmp_path / "c.jsonl") == [Document("7", "", "a")]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"top_k": 0}, "--top-k: .*greater than or equal to 1"),
        ({"port": 99_999}, "--port: .*less than or equal to 65535"),
        (
            {"host": "0.0.0.0"},
            r"0\.0\.0\.0 can be reached from other machines: give an API key \(--api-key or PACELINE_S",
        ),
        ({"host": "box", "api_key": ""}, "--api-key: .*at least 1 character"),
        ({"embeddings_url": "http://127.0.0.1:1"}, "needs both --embeddings-endpoint and --embeddings-model"),
    ],
)
def test_options_that_cannot_be_are_refused(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        options_from_flags(SearchOptions, flags)
    assert options_from_flags(SearchOptions, {"top_k": None, "port": None}).top_k == 5
    assert options_from_flags(SearchOptions, {"host": "0.0.0.0", "api_key": "k"}).api_key == "k"


def test_the_command_takes_its_key_from_the_flag_or_else_the_environment(monkeypatch, capsys):
    heard = []
    monkeypatch.setattr(server, "serve_search", lambda options: heard.append(options.api_key))
    off_loopback = ["search-server", "--host", "0.0.0.0"]
    assert main(off_loopback) == 2
    assert "give an API key" in capsys.readouterr().err
    monkeypatch.setenv("PACELINE_SEARCH_API_KEY", "kept")
    assert main(off_loopback) == main([*off_loopback, "--api-key", "given"]) == 0
    assert heard == ["kept", "given"]


# --- the service


@contextmanager
def serving(**options):
    """The service on a free port of this machine, as `paceline search-server` would build it."""
    door = listen("127.0.0.1", 0)
    app = server.build_app(BM25.build(documents(["alder birch", "cedar"])), **options)
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [door]})
    thread.start()  # the socket listens already: an early client waits
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()
        door.close()


def test_a_service_with_a_key_answers_only_who_sends_it(monkeypatch):
    monkeypatch.delenv("PACELINE_SEARCH_API_KEY", raising=False)
    with serving(api_key="open sesame") as url:
        assert httpx.get(f"{url}/health", timeout=60).json()["documents"] == 2
        for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "open sesame"}):
            answer = httpx.post(f"{url}/search", json={"query": "cedar"}, headers=headers, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(EnvError, match=r"answered 401: .*API key is missing or wrong.*PACELINE_SEARCH_API_KEY"):
            asyncio.run(searched(RetrievalConfig(url=url), "cedar"))
        monkeypatch.setenv("PACELINE_SEARCH_API_KEY", "open sesame")
        assert asyncio.run(searched(RetrievalConfig(url=url), "cedar")) == ["cedar"]
        monkeypatch.setenv("MINE", "wrong")
        with pytest.raises(EnvError, match=r"answered 401: .*MINE"):
            asyncio.run(searched(RetrievalConfig(url=url, api_key_variable="MINE"), "cedar"))


def test_a_service_without_a_key_answers_everybody(monkeypatch):
    monkeypatch.setenv("PACELINE_SEARCH_API_KEY", "unneeded")
    with serving() as url:
        assert (
            httpx.post(f"{url}/search", json={"query": "birch"}, timeout=60).json()["results"][0]["text"]
            == "alder birch"
        )
        assert asyncio.run(searched(RetrievalConfig(url=url), "birch")) == ["alder birch"]


async def searched(config: RetrievalConfig, query: str) -> list[str]:
    """What the environment's own client finds."""
    searcher = RetrievalEnvironment(config)._searcher
    try:
        return [hit["text"] for hit in await searcher.search(query)]
    finally:
        await searcher.aclose()


# --- the package's own


def rows() -> list[dict]:
    return [json.loads(line) for line in QUESTIONS.read_text().splitlines()]


def test_the_files_are_what_the_script_makes():
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "make_corpus.py"))
    made, asked = script["make"]()
    assert [json.loads(line) for line in BUILT_IN_CORPUS.read_text().splitlines()] == made
    assert rows() == asked
    assert len(made) == 200


def test_a_search_for_a_title_finds_its_document_first():
    corpus = load_corpus(BUILT_IN_CORPUS)
    index = BM25.build(corpus)
    assert [index.search(d.title, 1)[0].document.title for d in corpus] == [d.title for d in corpus]


def test_every_question_is_answered_by_the_documents_it_names():
    """They are read in the order they are named, and each but the last says what the next one is about."""
    corpus = {document.id: document for document in load_corpus(BUILT_IN_CORPUS)}
    for row in rows():
        names = iter(row["documents"])

        def read(title: str, names=names) -> str:
            document = corpus[next(names)]
            assert document.title == title
            return document.text

        assert look_up(row["question"], read) == row["answer"], row
        assert next(names, None) is None
        assert row["answer"] not in row["question"]


def test_no_document_answers_both_splits_and_both_ask_every_form():
    used: dict[str, set[str]] = {"train": set(), "eval": set()}
    forms: dict[str, Counter] = {"train": Counter(), "eval": Counter()}
    for row in rows():
        used[row["split"]].update(row["documents"])
        forms[row["split"]][tuple(plan(row["question"])[1])] += 1
    assert used["train"].isdisjoint(used["eval"])
    assert forms["train"].keys() == forms["eval"].keys()
    assert len({row["question"] for row in rows()}) == len(rows())
    assert sum(forms["eval"].values()) >= 100
