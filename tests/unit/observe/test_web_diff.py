"""The diff page's server: the first difference in words, both sides of it, and what was the same before."""

import json
import shutil
import threading
from pathlib import Path

import httpx
import pytest
from test_web import Client

from paceline.observe.record import open_run
from paceline.observe.record.first_difference import MISSING, compare
from paceline.observe.web import build_app
from paceline.observe.web import compare as comparing
from paceline.observe.web.compare import (
    CAUSAL_CHAIN,
    KIND_MEANINGS,
    AbandonableCounter,
    ComparisonAbandoned,
    ComparisonJob,
    describe_difference,
)
from recorded_runs import Told
from replayable_run import replayable


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replayable(tmp_path_factory)


@pytest.fixture
def runs(run, tmp_path) -> Path:
    """A folder with the run twice."""
    for name in ("one", "other"):
        shutil.copytree(run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints", "batches", "export"))
    return tmp_path


class App:
    def __init__(self, folder: Path) -> None:
        self.app = build_app(folder)

    def ask(self, **params) -> httpx.Response:
        return Client(self.app).get("/api/diff", params=params)

    def diff(self, **params) -> dict:
        """The answer to a comparison of bits, however often one must ask."""
        answer = self.ask(**params, exact=True).json()
        while answer["state"] == "working":
            assert answer["total_steps"] == 3
            answer = self.ask(job=answer["job"]).json()
        return answer


def change(folder: Path, step: int, **values) -> None:
    """Write other figures into the metrics of a step."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | (values if line["step"] == step else {})) + "\n" for line in lines))


def state_of(answer: dict, what: str) -> str:
    return next(link["state"] for link in answer["chain"] if link["what"].startswith(what))


def test_the_same_run_twice_has_no_difference(runs):
    answer = App(runs).diff(a="one", b="other")
    assert answer["first"] is None
    assert answer["same"] == {"steps": 3, "rollouts": answer["rollouts"], "said": False}
    assert answer["rollouts"] >= 48


def test_a_loss_that_differs_comes_after_rollouts_that_are_the_same(runs):
    change(runs / "other", 2, **{"loss/rl": 7.0, "grad_norm": 9.0})
    answer = App(runs).diff(a="one", b="other")
    assert (answer["first"]["kind"], answer["first"]["step"]) == ("loss", 2)
    assert answer["meaning"] == KIND_MEANINGS["loss"]
    assert [side["value"] for side in answer["sides"]][1] == 7.0
    assert state_of(answer, "the sampled tokens") == "same"
    assert state_of(answer, "the loss") == "differs"
    assert state_of(answer, "gradient norm") == "later"
    assert answer["same"]["steps"] == 1


def test_a_sampled_token_is_shown_among_its_neighbours_on_both_sides(runs, monkeypatch):
    one, other = open_run(runs / "one"), open_run(runs / "other")
    index = other.rollouts.find().rows[0].index
    get = other.rollouts.get

    def changed(at):
        found = get(at)
        if at == index:
            ids = found.turns[0].completion_ids.copy()
            ids[2] += 1
            object.__setattr__(found.turns[0], "completion_ids", ids)
        return found

    monkeypatch.setattr(other.rollouts, "get", changed)
    compared = compare(one, other)
    answer = describe_difference(one, other, compared)
    first = compared.first
    assert (first.kind, first.token, first.indices) == ("token", 2, (index, index))
    assert answer["same"]["rollouts"] == compared.rollouts - 1
    for run, side in zip((one, other), answer["sides"], strict=True):
        turn = run.rollouts.get(index).turns[0]
        place = len(turn.prompt_ids) + 2
        assert side["place"] == {"turn": 0, "at": place}
        assert side["tokens"][side["marked"]]["id"] == turn.full_ids[place] == side["value"]
        assert all(token["text"] for token in side["tokens"])
        assert side["said"] == turn.text


def test_a_stream_of_a_sample_leads_to_its_place_in_the_sample(runs, monkeypatch):
    one, other = open_run(runs / "one"), open_run(runs / "other")
    get = other.rollouts.get

    def changed(at):
        found = get(at)
        for number, sample in enumerate(found.samples):
            advantages = sample.advantages.copy()
            advantages[sample.loss_mask.nonzero()[0][1]] += 1
            found.samples[number] = sample.with_streams(advantages=advantages)
        return found

    monkeypatch.setattr(other.rollouts, "get", changed)
    answer = describe_difference(one, other, compare(one, other))
    index = answer["first"]["indices"][0]
    place = int(one.rollouts.get(index).samples[0].loss_mask.nonzero()[0][1])
    assert answer["first"]["stream"] == "advantages"
    assert answer["same"]["said"], "of the step's other credit nothing is known"
    assert [side["place"] for side in answer["sides"]] == [{"sample": 0, "at": place}] * 2


def test_runs_without_a_record_say_what_could_not_be_compared(tmp_path):
    for name, seed in (("one", 0), ("other", 1)):
        Told(tmp_path, name, seed=seed).step(3).end()
    answer = App(tmp_path).diff(a="one", b="other")
    assert any("kept no record" in remark for remark in answer["remarks"])
    assert state_of(answer, "the row") == "unknown"
    assert {"key": "seed", "one": 0, "other": 1} in answer["settings"]


def test_a_run_that_ended_early_is_told_without_a_chain(runs):
    file = runs / "other" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    answer = App(runs).diff(a="one", b="other")
    assert answer["first"]["kind"] == "length"
    assert answer["chain"] == []
    assert answer["meaning"]


def test_a_key_that_one_run_lacks_is_shown_as_not_set(runs):
    text = (runs / "other" / "config.toml").read_text()
    (runs / "other" / "config.toml").write_text(text.replace("[trainer.kl]\n", "[trainer.kl]\nstrange = 1\n"))
    answer = App(runs).diff(a="one", b="other")
    assert {"key": "trainer.kl.strange", "one": MISSING, "other": 1} in answer["settings"]


def test_what_cannot_be_asked_is_refused_with_a_sentence(runs):
    app = App(runs)
    assert app.ask().json() == {"state": "idle"}
    for params, status in (
        ({"a": "one", "b": "nobody"}, 404),
        ({"a": "one", "b": "../one"}, 404),
        ({"a": "one", "b": "one"}, 400),
        ({"a": "one", "b": "other", "tolerance": "nan"}, 400),
        ({"a": "one", "b": "other", "tolerance": "-1"}, 400),
        ({"job": 77}, 404),
    ):
        answer = app.ask(**params)
        assert answer.status_code == status, params
        assert answer.json()["error"]


def test_a_tolerance_looks_past_rounding(runs):
    change(runs / "other", 2, **{"loss": 1e-9})
    change(runs / "one", 2, **{"loss": 2e-9})
    app = App(runs)
    assert app.diff(a="one", b="other")["first"]["kind"] == "loss"
    assert app.diff(a="one", b="other", tolerance=1e-6)["first"] is None


def test_without_a_switch_curves_are_compared_and_rounding_is_none(runs):
    change(runs / "other", 2, **{"loss": 1e-9})
    change(runs / "one", 2, **{"loss": 2e-9})
    answer = App(runs).ask(a="one", b="other").json()
    assert answer["state"] == "done"
    assert "first" not in answer
    assert answer["settings"] == []
    assert not any(curve["is_real"] for curve in answer["curves"])


def test_a_comparison_without_a_page_is_abandoned(runs, monkeypatch):
    seen = AbandonableCounter()
    seen["rollouts"] += 1
    monkeypatch.setattr(comparing, "ABANDON_SECONDS", -1.0)
    with pytest.raises(ComparisonAbandoned):
        seen["rollouts"] += 1
    comparison = ComparisonJob(open_run(runs / "one"), open_run(runs / "other"), 0.0, threading.Semaphore(1))
    assert comparison.progress(60)["state"] == "failed"


def test_every_kind_of_difference_has_a_meaning():
    kinds = {name for name, _ in CAUSAL_CHAIN}
    assert kinds <= KIND_MEANINGS.keys()
    assert {"version", "logprob", "finish", "metric", "length"} <= KIND_MEANINGS.keys()
