"""`paceline diff` without flags: settings, whether bits may differ, and curves within their noise."""

import json

import numpy as np
import pytest

from paceline.commands import main
from paceline.observe.record import open_run
from paceline.observe.record.curve_difference import DRAWS, HELD_OUT, ROUNDING, _widest, compare_curves
from paceline.observe.record.paired import ALPHA
from recorded_runs import Told, record_rewards

STEPS, PAIRS = 60, 400


def told(runs, name, steps=40, **changes):
    return Told(runs, name, **changes).step(steps).end().path


def shift(folder, name, since, by):
    """Add to a metric from a step on."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["step"] >= since and name in line:
            line[name] += by
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def curves(seed, noise=0.03):
    """Two runs that learn alike: the same slow curve, each with its own noise."""
    dice, steps = np.random.default_rng(seed), np.arange(1, STEPS + 1)
    level = 0.2 + 0.7 / (1 + np.exp(-(steps - 25) / 6))
    return steps, *(level + dice.normal(0, noise, STEPS) for _ in range(2))


def test_equals_are_rarely_told_apart():
    found = [_widest("reward", *curves(seed), metrics=1).is_real for seed in range(PAIRS)]
    assert np.mean(found) <= ALPHA + 2 * (ALPHA * (1 - ALPHA) / PAIRS) ** 0.5


@pytest.mark.parametrize("since", [1, 31, 53], ids=["throughout", "half", "last steps"])
def test_a_shift_is_found_wherever_it_begins_and_its_steps_are_named(since):
    for seed in range(20):
        steps, one, other = curves(seed)
        found = _widest("reward", steps, one, other - 0.2 * (steps >= since), metrics=12)
        assert found.is_real
        assert found.steps[1] >= since
        assert found.other - found.one == pytest.approx(-0.2, abs=0.1)


def test_rounding_is_no_difference_even_of_a_curve_without_noise():
    steps = np.arange(1, STEPS + 1)
    level = np.full(STEPS, 0.5)
    assert not _widest("lr", steps, level, level * (1 + ROUNDING / 2), metrics=1).is_real
    assert _widest("lr", steps, level, level * 2, metrics=1).is_real


def test_runs_that_differ_by_chance_have_their_settings_listed_and_nothing_more(tmp_path):
    one, other = told(tmp_path, "one"), told(tmp_path, "other", seed=1)
    found = compare_curves(open_run(one), open_run(other))
    assert found.settings == [("seed", 0, 1)]
    assert found.real == []
    assert {"reward/reverse-text/mean", "entropy", "loss"} <= {curve.name for curve in found.curves}
    assert not [curve.name for curve in found.curves if curve.name.startswith(("time/", "dropped/", "tokens"))]


def test_a_collapse_of_the_last_steps_leads_the_list(tmp_path):
    one, other = told(tmp_path, "one"), told(tmp_path, "other", seed=1)
    shift(other, "reward/reverse-text/mean", 36, -0.7)
    found = compare_curves(open_run(one), open_run(other))
    assert [curve.name for curve in found.real] == ["reward/reverse-text/mean"]
    assert found.curves[0] is found.real[0]
    assert found.real[0].steps == (36, 40)


def test_draws_and_held_out_rows_of_both_are_compared_pair_by_pair(tmp_path):
    dice = np.random.default_rng(0)
    paths = [told(tmp_path, name) for name in ("one", "other")]
    for path, better in zip(paths, (0.0, 0.4), strict=True):
        record_rewards(path, 40, "trained", np.clip(dice.normal(0.3, 0.1, 120), 0, 1))
        record_rewards(path, 40, "evaluated", np.clip(dice.normal(0.3 + better, 0.1, 64), 0, 1))
    found = compare_curves(*map(open_run, paths))
    assert {curve.name: curve.is_real for curve in found.curves if curve.pairs} == {DRAWS: False, HELD_OUT: True}
    assert [curve.name for curve in found.curves[:1]] == [HELD_OUT]


def test_pairs_of_which_too_few_differ_are_shown_and_not_judged(tmp_path):
    paths = [told(tmp_path, name) for name in ("one", "other")]
    for path, rewards in zip(paths, ([0.0] * 64, [0.0] * 60 + [1.0] * 4), strict=True):
        record_rewards(path, 40, "evaluated", rewards)
    answer = compare_curves(*map(open_run, paths)).as_json()
    shown = next(curve for curve in answer["curves"] if curve["name"] == HELD_OUT)
    assert (shown["noise"], shown["is_real"], shown["other"]) == (None, False, 4 / 64)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, ["`deterministic = false` in one and other", "`staleness` above 0 in one and other"]),
        ({"deterministic": "true"}, ["`staleness` above 0 in one and other"]),
        ({"staleness": 0}, ["`deterministic = false` in one and other"]),
        ({"deterministic": "true", "staleness": 0}, []),
    ],
)
def test_it_is_said_whether_bit_differences_are_expected(tmp_path, changes, reasons, capsys):
    one, other = (told(tmp_path, name, 8, **changes) for name in ("one", "other"))
    expected = compare_curves(open_run(one), open_run(other)).expected
    assert len(expected) == len(reasons)
    assert all(found.startswith(reason) for found, reason in zip(expected, reasons, strict=True))
    main(["diff", str(one), str(other)])
    shown = " ".join(capsys.readouterr().out.split())
    assert ("not deterministic, so bit differences are expected" in shown) == bool(reasons)


def test_another_device_is_a_reason(tmp_path):
    one, other = told(tmp_path, "one", 8), told(tmp_path, "other", 8)
    events = other / "events.jsonl"
    events.write_text(events.read_text().replace('"cpu"', '"cuda"'))
    assert compare_curves(open_run(one), open_run(other)).expected[-1] == "one ran on cpu, other on cuda"


def test_a_run_that_ended_early_is_named_and_too_few_steps_are_not_judged(tmp_path):
    one = told(tmp_path, "one")
    other = Told(tmp_path, "other").step(3).end("failed", "why").path
    found = compare_curves(open_run(one), open_run(other))
    assert found.curves == []
    assert found.remarks[0] == "other failed at step 3, one is at step 40: common steps are compared"
    assert "have fewer than 8 common steps and are not compared: reward/" in found.remarks[1]


def test_the_command_compares_bits_only_where_it_is_told_to(tmp_path, capsys):
    one, other = told(tmp_path, "one"), told(tmp_path, "other")
    shift(other, "loss/rl", 2, 5e-7)
    assert main(["diff", str(one), str(other)]) == 0
    assert "no difference: all" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", str(one), str(other), "--exact"]) == 1
    assert "loss/rl" in capsys.readouterr().out
    assert main(["diff", str(one), str(other), "--tolerance", "1e-3"]) == 0
    capsys.readouterr()
    shift(other, "reward/reverse-text/mean", 20, -0.5)
    assert main(["diff", str(one), str(other), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [curve["name"] for curve in answer["curves"] if curve["is_real"]] == ["reward/reverse-text/mean"]
    assert answer["expected"]
