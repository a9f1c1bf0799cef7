"""The headline figures: a fixed baseline, held-out values as they were measured, the same figure wherever it stands."""

import json

import pytest

from headline_run import falling_lines, is_exact, is_reward, recorded_means, written_run
from paceline.observe.analysis.vitals import TREND_STEPS, MetricTrend, headline, reward_trends, table_row
from paceline.observe.record import open_run
from paceline.observe.report.page import render_report
from paceline.observe.terminal import snapshot
from paceline.observe.web.overview import read_metrics


def _ends(lines: list[dict[str, float]]) -> dict:
    names = {name for line in lines for name in line}
    return headline(*reward_trends({name: [line.get(name) for line in lines] for name in names}))


def test_the_baseline_does_not_move_while_the_run_goes_on():
    lines = falling_lines(40)
    seen = [_ends(lines[: done + 1]) for done in range(TREND_STEPS, 41)]
    assert len({ends["reward"]["first"] for ends in seen}) == 1
    assert {ends["reward"]["first_steps"] for ends in seen} == {"mean of steps 1 to 5"}
    assert len({ends["eval"]["first"] for ends in seen}) == 1
    assert {ends["eval"]["first_steps"] for ends in seen} == {"step 0"}


def test_a_fall_is_shown_in_full():
    points = [(step, 0.84 if step <= 5 else 0.56) for step in range(1, 31)]
    trend = MetricTrend.of(points, TREND_STEPS)
    assert trend.last - trend.first == pytest.approx(-0.28)
    assert (trend.first_steps, trend.last_steps) == ("mean of steps 1 to 5", "mean of steps 26 to 30")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_run_shorter_than_the_window_has_one_mean_and_no_change(count):
    trend = MetricTrend.of([(step, float(step)) for step in range(1, count + 1)], TREND_STEPS)
    assert trend.first == trend.last == (1 + count) / 2
    assert not trend.has_moved
    assert trend.last_steps == ("step 1" if count == 1 else f"mean of steps 1 to {count}")


def test_held_out_values_are_the_first_and_the_last_evaluation_exactly():
    ends = _ends(falling_lines(39))["eval"]
    assert (ends["first_steps"], ends["last_steps"]) == ("step 0", "step 30")
    assert ends["first"] == pytest.approx(0.8)
    assert ends["last"] == pytest.approx(0.8 - 30 * (0.0137 + 0.0091) / 2)


def test_table_page_terminal_and_report_show_the_record_s_own_figures(tmp_path):
    path = written_run(tmp_path, "falling", falling_lines())
    run = open_run(path)
    rewards, held_out = recorded_means(path, is_reward), recorded_means(path, is_exact)
    first, last = (sum(value for _, value in part) / 5 for part in (rewards[:5], rewards[-5:]))
    row, sent = table_row("falling", run, []), read_metrics(run)[0]["ends"]
    json.dumps(sent)
    assert row["reward"] == sent["reward"]
    assert row["eval"] == sent["eval"]
    assert (sent["reward"]["first"], sent["reward"]["last"]) == pytest.approx((first, last))
    assert (sent["eval"]["first"], sent["eval"]["last"]) == pytest.approx((held_out[0][1], held_out[-1][1]))
    text = snapshot(run)
    for value, start in ((last, first), (held_out[-1][1], held_out[0][1])):
        line = next(line for line in text.splitlines() if f"from {start:.3f} {value - start:+.3f}" in line)
        assert f" {value:.3f} " in line
    assert "mean of steps 26 to 30, from mean of steps 1 to 5" in text
    assert "step 30, from step 0" in text
    report = render_report(run, 0)
    for value, start, now, then in (
        (last, first, "mean of steps 26 to 30", "mean of steps 1 to 5"),
        (held_out[-1][1], held_out[0][1], "step 30", "step 0"),
    ):
        assert f"<dd>{value:.3f}</dd><dd>{now}, {value - start:+.3f} from {start:.3f} ({then})</dd>" in report


def test_the_terminal_names_the_window_of_an_environment_that_began_later(tmp_path):
    lines = falling_lines()
    for line in lines[:12]:
        line.pop("reward/sums/mean", None)
    text = snapshot(open_run(written_run(tmp_path, "late", lines)))
    assert "from mean of steps 1 to 5" in text
    assert "from mean of steps 12 to 16" in text
