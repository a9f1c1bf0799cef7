"""A file that a full disk or a bad copy spoilt: what can be read is told, what cannot is named, and nobody fails."""

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import main
from paceline.monitor.doctor import examine
from paceline.record import open_run
from paceline.record.layout import LANE, Places
from paceline.ui.lanes import lanes_of
from paceline.ui.opened import Opened
from recorded import Told, torn
from talking import Talking


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
    found = examine(run)
    assert (found.step, found.verdict) == (6, "finished at step 6")
    assert found.problems == [
        "events.jsonl: 2 lines are damaged and left out, the first is line 2",
        "metrics.jsonl: a line is damaged and left out, the first is line 3",
    ]
    assert main(["doctor", str(run)]) == 0
    told = capsys.readouterr().out
    assert "all is well" in told
    assert all(problem in told for problem in found.problems)


@pytest.mark.parametrize("step", ["Infinity", "1e999", "NaN", "9" * 400, '"seven"'])
def test_a_step_that_is_no_number_is_a_gap_and_later_lines_are_still_read(run, step):
    opened = Opened(run)
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
    before = lanes_of(open_run(run), None, None, 2)
    damage(run / "metrics.jsonl", f'{{"step": 3, "time": {time}, "time/train": 2.0, "time/step": 3.0}}')
    assert lanes_of(open_run(run), None, None, 2) == before


@pytest.mark.parametrize("column", ["start", "end", "value"])
def test_a_span_that_is_no_number_is_left_out(run, column):
    talking = Talking(run)
    talking.keeper.spans(1, [("run", "train", 10.0 + n, 10.5 + n) for n in range(9)])
    talking.close()
    before = lanes_of(open_run(run), None, None, 2)
    assert before["source"] == "record"
    path = Places(run).lanes
    odd = np.fromfile(path, LANE)[:1]
    for wrong in (np.nan, np.inf, -np.inf):
        odd[column] = wrong
        with path.open("ab") as file:
            file.write(odd.tobytes())
    assert lanes_of(open_run(run), None, None, 2) == before
