"""What `benchmarks/gsm8k.py` makes of its seeds: rows are paired, calls are combined, and a mark says what is known."""

import importlib
import json
import sys
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest

ROOT = Path(__file__).parents[3]
# 1: right at the first try, 2: at the second, .: wrong, ?: not played.
SEEDS = {
    "1": {"0": "..1.?.....", "50": "..12.1.2..", "100": "1.12.1.2.."},
    "2": {"0": "..1....2..", "100": "1.1..1.2.."},
}


@pytest.fixture
def gsm8k(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gsm8k")


@pytest.fixture
def command(gsm8k, monkeypatch):
    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["gsm8k.py", *map(str, words)])
        return gsm8k.main()

    return call


def result(file: Path, seed: str) -> Path:
    """What a call that trained one seed writes."""
    whole = {"settings": {"quick": False, "tune": False}, "warm_up_seconds": 60.0, "grpo_seconds": 300.0}
    whole |= {"evaluations": SEEDS[seed], "rewards": [0.1] * 10 + [0.3] * 90, "staleness_max": 1.0}
    whole |= dict.fromkeys(("machine", "torch", "python", "date", "commit"), "there") | {"cores": 16}
    file.write_text(json.dumps({"title": "", "seeds": {seed: whole | {"wait_time_ratio": 0.2}}}))
    return file


def test_two_calls_become_one_result_and_one_picture(command, tmp_path, capsys):
    parts = [result(tmp_path / f"{seed}.json", seed) for seed in "21"]
    both = tmp_path / "made" / "both.json"
    assert command("--add", parts[0], "--add", parts[1], "--json", both) == 1  # ten rows prove nothing
    assert both.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(both.read_text())
    assert {seed: found["seeds"][seed]["evaluations"] for seed in "12"} == SEEDS
    assert (list(found["seeds"]), found["machine"], found["complete"]) == (["1", "2"], "there", True)
    lines = {line["what"]: line["value"] for line in found["lines"]}
    before, after = ([[mark in "12" for mark in seed[step]] for seed in SEEDS.values()] for step in ("0", "100"))
    rises = [fmean(a) - fmean(b) for b, a in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)]
    del rises[4]  # seed 1 has not played it
    assert lines["mean of 2 seeds: rise in up to two tries"] == pytest.approx(fmean(rises))
    low = fmean(rises) - 1.96 * stdev(rises) / sqrt(9)
    assert lines["mean of 2 seeds: lower end of its 95% interval in up to two tries"] == pytest.approx(low)
    assert lines["seed 1: exact match in up to two tries, after the warm-up"] == pytest.approx(1 / 9)
    assert lines["seed 1: exact match in up to two tries, after grpo"] == pytest.approx(0.5)
    assert lines["seed 1: exact match at the first try, after grpo"] == pytest.approx(0.3)
    assert lines["seed 1: reward in training, last tenth"] == pytest.approx(0.3)
    assert "?" not in capsys.readouterr().out.splitlines()[-1]  # the last line is short


def test_what_is_missing_is_named_before_anything_is_trained(command, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"lines": []}')
    for words, said in (
        ((), "MODEL and DATA are missing"),
        ((tmp_path,), "MODEL and DATA are missing"),
        ((tmp_path, tmp_path), f"{tmp_path}/config.json does not exist"),
        (("--add", tmp_path / "no.json"), "no.json does not exist"),
        (("--add", other), "other.json is no result of this benchmark"),
    ):
        with pytest.raises(SystemExit):
            command(*words)
        assert said in capsys.readouterr().err


def test_the_figures_of_the_page_are_those_of_the_kept_result():
    kept = json.loads((ROOT / "benchmarks" / "results" / "gsm8k-h200.json").read_text())
    page = (ROOT / "docs" / "seeds" / "async_rl_loop.md").read_text()
    value = {line["what"]: line["value"] for line in kept["lines"]}
    for who in ("seed 1", "seed 2", "mean of 2 seeds"):
        for tries in ("in up to two tries", "at the first try"):
            rise, low, high = (
                value[f"{who}: {end} {tries}"]
                for end in ("rise", "lower end of its 95% interval", "upper end of its 95% interval")
            )
            assert f"{rise:.3f} ({low:.3f} to {high:.3f})" in page
    assert kept["cleared"]
