"""A file that a full disk or a bad copy spoilt: what can be read is shown, what cannot is named, and nothing fails."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from conversations import Talking
from paceline.commands import main
from paceline.config import load
from paceline.observe.analysis.timeline import lanes
from paceline.observe.monitor import RunPlan, RunRecorder, Screen
from paceline.observe.monitor.doctor import diagnose
from paceline.observe.record import open_run
from paceline.observe.record.layout import LANE, RecordFiles
from paceline.planner.compare import compare
from paceline.planner.plan import write_plan
from recorded_runs import Told, torn


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Told(tmp_path, "spoilt").step(6).note("all is well").end().path


def damage(path: Path, *lines: str) -> None:
    """Lines of another kind in the middle of a file."""
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, *(f"{line}\n" for line in lines), *rest]))


def test_the_doctor_tells_the_rest_of_a_damaged_file(run, capsys):
    torn(run / "metrics.jsonl")
    damage(run / "events.jsonl", "[]", '{"time": 3}', '{"event": "note", "time": 5}')
    found = diagnose(run)
    assert (found.step, found.verdict) == (6, "finished at step 6")
    assert found.problems == [
        "events.jsonl: 2 lines are damaged and left out, the first is line 2",
        "metrics.jsonl: a line is damaged and left out, the first is line 3",
    ]
    assert main(["doctor", str(run)]) == 0
    told = capsys.readouterr().out
    assert "all is well" in told
    assert all(problem in told for problem in found.problems)


ODD = ("[]", "[" * 100_000, "{}", '{"step": "six", "time/step": 1.0}', '{"step": 6, "time/step": "long", "length": []}')


def test_a_plan_is_compared_with_what_can_be_read(run, capsys):
    write_plan(load(str(run / "config.toml")).config, run)
    before = compare(run)
    damage(run / "metrics.jsonl", *ODD[:3], ODD[4], "no line")
    after = compare(run)
    assert (after.steps, after.lines) == (before.steps, before.lines)
    assert after.problems == ["metrics.jsonl: 3 lines are damaged and left out, the first is line 2"]
    assert main(["check", str(run)]) == 0
    assert "metrics.jsonl: 3 lines" in capsys.readouterr().out
    (run / "plan.json").write_text("{")
    assert main(["check", str(run)]) == 2
    assert "plan.json cannot be read" in capsys.readouterr().err


def test_a_run_that_goes_on_shows_the_curve_that_can_be_read(run):
    damage(run / "metrics.jsonl", *ODD)
    with Screen(Console(width=140, height=40, file=io.StringIO())) as screen:
        screen.begin(RunPlan("spoilt", run, 40, 5, {}, ("env",), "cpu", 1))
        screen.roll_back(4)
        shown = Console(width=140, file=io.StringIO())
        shown.print(screen.frame())
    assert "4 lines are damaged and left out, the first is line 2" in shown.file.getvalue()


def test_a_run_that_goes_on_leaves_damaged_lines_to_their_readers(run):
    before = open_run(run).metrics()["step"]
    damage(run / "metrics.jsonl", *ODD)
    damage(run / "events.jsonl", "[]")
    (run / "tickets.jsonl").write_text('nonsense\n{"since": "noon"}\n{"since": 5}\n{"state": "trained", "step": []}\n')
    with RunRecorder(run) as recorder:
        recorder.begin(RunPlan("spoilt", run, 40, 4, {}, ("env",), "cpu", 1))
    steps = open_run(run).metrics()["step"]
    assert [step for step in steps if step is not None] == [step for step in before if step <= 4]
    assert set(ODD[:4]) <= set((run / "metrics.jsonl").read_text().splitlines())
    assert '{"since": 5}' not in (run / "tickets.jsonl").read_text()


@pytest.mark.parametrize("step", ["Infinity", "1e999", "NaN", "9" * 400, '"seven"'])
def test_a_step_that_is_no_number_is_a_gap_and_later_lines_are_still_read(run, step):
    opened = open_run(run)
    before = opened.metrics()["step"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "time": 1.0, "loss": 1.0}}\n')
    opened.metrics()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "time": 2.0, "loss": 0.5}) + "\n")
    steps = opened.metrics()["step"]
    assert [step for step in steps if step is not None] == [*before, 7]
    assert [step for step in open_run(run).metrics()["step"] if step is not None] == [*before, 7]


@pytest.mark.parametrize("time", ["NaN", "Infinity", "null", '"noon"'])
def test_a_time_that_is_no_number_leaves_the_other_steps_their_lanes(run, time):
    before = lanes(open_run(run), None, None, 2)
    damage(run / "metrics.jsonl", f'{{"step": 3, "time": {time}, "time/train": 2.0, "time/step": 3.0}}')
    assert lanes(open_run(run), None, None, 2) == before


@pytest.mark.parametrize("column", ["start", "end", "value"])
def test_a_span_that_is_no_number_is_left_out(run, column):
    talking = Talking(run)
    talking.keeper.spans(1, [("run", "train", 10.0 + n, 10.5 + n) for n in range(9)])
    talking.close()
    before = lanes(open_run(run), None, None, 2)
    assert before["source"] == "record"
    path = RecordFiles(run).lanes
    odd = np.fromfile(path, LANE)[:1]
    for wrong in (np.nan, np.inf, -np.inf):
        odd[column] = wrong
        with path.open("ab") as file:
            file.write(odd.tobytes())
    assert lanes(open_run(run), None, None, 2) == before
