"""What a run shows and keeps: laws of recorder, run directory, screen, plot, summary and exporters."""

import io
import json
import math
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline
from paceline.errors import PacelineError
from paceline.observe.monitor import (
    Monitor,
    Monitors,
    PlainLines,
    RunDirectory,
    RunOutcome,
    RunPlan,
    RunRecorder,
    Screen,
    choose_view,
    exporter,
    plot_rewards,
    read_jsonl,
    summary,
)
from paceline.observe.monitor.plain import block_chars
from paceline.observe.monitor.summary import MetricHistory, smooth
from paceline.observe.monitor.text import format_change, format_clock, format_count, format_seconds

TOTAL = 40


def plan(directory: Path, start_step: int = 0, envs: tuple[str, ...] = ("reverse-text",)) -> RunPlan:
    return RunPlan("demo", directory, TOTAL, start_step, {"seed": 0}, envs, "cpu", 1_240_000)


def metrics(step: int, envs: tuple[str, ...] = ("reverse-text",)) -> dict[str, float]:
    """A run that learns, with some noise, as the orchestrator would report it."""
    noise = random.Random(step)
    values: dict[str, float] = {}
    for env in envs:
        level = 0.2 + 0.7 / (1 + math.exp(-6 * (step / TOTAL - 0.5)))
        if step:
            values |= {f"reward/{env}/mean": level + noise.gauss(0, 0.02), f"reward/{env}/std": 0.2}
        if step % 10 == 0:
            values |= {f"eval/{env}/reward": level, f"eval/{env}/exact": level - 0.1}
    if step:
        values |= {"staleness/mean": 0.8, "staleness/max": 1.0, "tokens/s": 4132.0, "time/step": 0.31}
        values |= {"busy/trainer": 0.82, "busy/sampler": 0.93, "dropped/zero_advantage": 2.0, "length": 31.0}
        values |= {"loss": 0.01, "grad_norm": 0.4, "entropy": 1.2, "lr": 1e-5}
    return values


def reward_at(step: int) -> float:
    """The mean over five steps, the last of them this one."""
    return statistics.fmean(metrics(at)["reward/reverse-text/mean"] for at in range(step - 4, step + 1))


def record(directory: Path, steps: range, start_step: int = 0) -> None:
    recorder = RunRecorder(directory)
    recorder.begin(plan(directory, start_step))
    for step in steps:
        recorder.step(step, metrics(step))
        recorder.rollouts(step, [{"text": f"a{step}"}, {"text": f"b{step}"}])
        recorder.tickets(
            [
                {"ticket": step, "state": "drawn", "step": step},
                {"ticket": step, "state": "trained", "step": step},
            ]
        )


def python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Another process with the same paceline, so that what dies there dies for real."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def succeeds(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


class Spy(Monitor):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []
        self.closed = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.closed += 1


class Broken(Spy):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        raise ConnectionError("the network is down")


class TestMonitors:
    def test_a_failing_exporter_is_reported_once_and_hears_no_more(self) -> None:
        broken, spy = Broken(), Spy()
        monitors = Monitors(broken, spy)
        for step in (1, 2, 3):
            monitors.step(step, {})
        assert broken.steps == [1]
        assert spy.steps == [1, 2, 3]
        assert len(spy.notes) == 1
        assert "Broken" in spy.notes[0]
        assert "the network is down" in spy.notes[0]

    def test_a_monitor_that_fails_on_the_report_of_another_is_disabled_too(self) -> None:
        class Deaf(Spy):
            def note(self, text: str) -> None:
                raise ValueError("cannot take notes")

        spy = Spy()
        monitors = Monitors(Broken(), Deaf(), spy)
        monitors.step(1, {})
        assert spy.steps == [1]
        assert sorted(note.split()[0] for note in spy.notes) == ["Broken", "Deaf"]

    def test_the_recorder_stops_the_run_and_the_others_are_still_closed(self, tmp_path: Path) -> None:
        recorder, spy = RunRecorder(tmp_path / "gone"), Spy()
        monitors = Monitors(recorder, spy)
        with pytest.raises(OSError):
            monitors.step(1, {})
        with pytest.raises(OSError):
            monitors.end(RunOutcome("failed", 1))
        assert spy.closed == 1

    def test_a_disabled_monitor_is_closed_all_the_same(self) -> None:
        broken = Broken()
        with Monitors(broken) as monitors:
            monitors.step(1, {})
        assert broken.closed == 1


class TestRecorder:
    def test_every_record_comes_back(self, tmp_path: Path) -> None:
        record(tmp_path, range(4))
        lines = read_jsonl(tmp_path / "metrics.jsonl")
        assert [line["step"] for line in lines] == [0, 1, 2, 3]
        assert all(line["time"] > 1e9 for line in lines)
        assert {key: value for key, value in lines[2].items() if key not in ("step", "time")} == metrics(2)
        assert [line["text"] for line in read_jsonl(tmp_path / "rollouts.jsonl")][:2] == ["a0", "b0"]

    def test_values_json_cannot_write(self, tmp_path: Path) -> None:
        import numpy as np

        recorder = RunRecorder(tmp_path)
        values: dict[str, Any] = {
            "loss": math.nan,
            "grad_norm": math.inf,
            "lr": np.float32(0.5),
            "n": np.int64(3),
        }
        recorder.step(1, values)
        recorder.rollouts(1, [{"text": "\udce4 \u2028 ok", "ids": np.arange(3), "rewards": [math.nan, 1.0]}])
        (line,) = read_jsonl(tmp_path / "metrics.jsonl")
        assert (line["loss"], line["grad_norm"], line["lr"], line["n"]) == (None, None, 0.5, 3)
        (rollout,) = read_jsonl(tmp_path / "rollouts.jsonl")
        assert rollout["text"] == "\udce4 \u2028 ok"
        assert rollout["ids"] == [0, 1, 2]
        assert rollout["rewards"] == [None, 1.0]

    @pytest.mark.parametrize("cut", [1, 7, 60])
    def test_a_line_torn_by_a_crash_is_skipped_and_the_file_goes_on_cleanly(self, tmp_path: Path, cut: int) -> None:
        record(tmp_path, range(4))
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-cut])
        assert [line["step"] for line in read_jsonl(path)] == [0, 1, 2]
        recorder = RunRecorder(tmp_path)
        recorder.step(3, {"loss": 1.0})
        assert [line["step"] for line in read_jsonl(path)] == [0, 1, 2, 3]

    def test_a_file_that_holds_nothing_but_a_torn_line(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        path.write_text('{"text": "' + "x" * 200_000)
        assert read_jsonl(path) == []
        RunRecorder(tmp_path).note("again")
        assert [line["text"] for line in read_jsonl(path)] == ["again"]

    def test_a_broken_line_in_the_middle_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
            read_jsonl(path)

    @pytest.mark.parametrize("start", [1, 3, 6])
    def test_resuming_takes_out_exactly_what_came_later(self, tmp_path: Path, start: int) -> None:
        record(tmp_path, range(7))
        before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        RunRecorder(tmp_path).begin(plan(tmp_path, start))
        assert (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True) == before[: start + 1]
        assert {line["step"] for line in read_jsonl(tmp_path / "rollouts.jsonl")} == set(range(start + 1))
        tickets = read_jsonl(tmp_path / "tickets.jsonl")
        assert [line["ticket"] for line in tickets if line["state"] == "drawn"] == list(range(7))
        assert [line["step"] for line in tickets if line["state"] == "trained"] == list(range(start + 1))
        assert not list(tmp_path.glob(".*.tmp"))

    def test_a_resumed_run_has_every_step_once(self, tmp_path: Path) -> None:
        record(tmp_path, range(7))
        record(tmp_path, range(4, 9), start_step=3)
        assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(9))

    def test_starting_over_leaves_no_step_of_the_earlier_try(self, tmp_path: Path) -> None:
        record(tmp_path, range(5))
        record(tmp_path, range(3))
        assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]

    def test_events_tell_the_story_without_counters(self, tmp_path: Path) -> None:
        recorder = RunRecorder(tmp_path)
        recorder.phase("loading model")
        recorder.begin(plan(tmp_path))
        for number in range(5):
            recorder.phase(f"evaluating {number}/5")
        recorder.note("low on memory")
        recorder.end(RunOutcome("failed", 3, "no room", checkpoint=tmp_path / "checkpoints" / "3"))
        events = read_jsonl(tmp_path / "events.jsonl")
        assert [event["event"] for event in events] == ["phase", "begin", "phase", "note", "end"]
        assert events[2]["text"] == "evaluating"
        assert events[-1]["status"] == "failed"
        assert events[-1]["checkpoint"].endswith("3")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_an_error(self, tmp_path: Path) -> None:
        recorder = RunRecorder(tmp_path)
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            recorder.step(1, {"loss": 1.0})

    def test_a_write_that_runs_out_of_room_leaves_whole_lines(self, tmp_path: Path) -> None:
        code = """
            import resource, sys
            from pathlib import Path
            from paceline.observe.monitor import RunRecorder
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            recorder = RunRecorder(Path(sys.argv[1]))
            try:
                for step in range(100):
                    recorder.step(step, {"loss": 1.0})
            except OSError:
                print("full")
        """
        assert succeeds(python(code, tmp_path)) == "full\n"
        data = (tmp_path / "metrics.jsonl").read_bytes()
        assert data.endswith(b"\n")
        assert 900 < len(data) <= 1000
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == data.count(b"\n")

    def test_what_a_killed_process_was_writing_goes_with_the_next_start(self, tmp_path: Path) -> None:
        """SIGKILL in the middle of a batch: the file never counts, and does not stay beside those that do."""
        killed = """
            import os, sys
            from pathlib import Path
            from paceline.observe.monitor import RunRecorder
            recorder = RunRecorder(Path(sys.argv[1]), keep_batches=3)
            recorder.batch(1, b"whole")
            os.fsync = lambda descriptor: os.kill(os.getpid(), 9)
            recorder.batch(2, b"half")
        """
        process = python(killed, tmp_path)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
        left = [path.read_bytes() for path in sorted((tmp_path / "batches").iterdir())]
        assert left == [b"half", b"whole"]
        RunRecorder(tmp_path, keep_batches=3).begin(plan(tmp_path, start_step=1))
        assert [path.name for path in (tmp_path / "batches").iterdir()] == ["step-000001.msgpack"]


def test_a_file_that_goes_while_it_is_looked_at_has_no_records(tmp_path, monkeypatch):
    """A supervisor counts steps while the orchestrator it started begins anew and removes them."""
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


class TestRunDirectory:
    def test_a_claimed_directory_is_ready(self, tmp_path: Path) -> None:
        with RunDirectory.claim(tmp_path / "runs" / "x") as directory:
            directory.begin("seed = 1\n")
            assert directory.checkpoints.is_dir()
            assert directory.config_file.read_text() == "seed = 1\n"

    def test_one_process_cannot_claim_twice(self, tmp_path: Path) -> None:
        with (
            RunDirectory.claim(tmp_path / "x"),
            pytest.raises(PacelineError, match=f"in use by process {os.getpid()}"),
        ):
            RunDirectory.claim(tmp_path / "x")
        RunDirectory.claim(tmp_path / "x").release()  # nothing was recorded, so there is no run to protect

    def test_the_refusal_names_all_three_ways_on(self, tmp_path: Path) -> None:
        with RunDirectory.claim(tmp_path / "x") as directory:
            directory.begin("")
        with pytest.raises(PacelineError) as refusal:
            RunDirectory.claim(tmp_path / "x")
        for word in ("already holds a run", "--resume latest", "--name NAME", "--overwrite"):
            assert word in str(refusal.value)
        RunDirectory.claim(tmp_path / "x", resume=True).release()  # a refusal leaves no lock behind
        assert directory.config_file.exists()

    def test_overwrite_leaves_nothing_of_the_old_run(self, tmp_path: Path) -> None:
        with RunDirectory.claim(tmp_path / "x") as directory:
            directory.begin("")
            (directory.checkpoints / "1").mkdir()
            directory.metrics_file.write_text("{}\n")
        with RunDirectory.claim(tmp_path / "x", overwrite=True) as directory:
            assert directory.metrics_file.exists()  # a run that cannot start replaces nothing
            directory.begin("")
            assert sorted(path.name for path in directory.root.iterdir()) == ["checkpoints", "config.toml", "run.lock"]
            assert not list(directory.checkpoints.iterdir())

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_folder_that_is_no_run_is_never_touched(self, tmp_path: Path, overwrite: bool) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(PacelineError, match="files that are not a run's"):
            RunDirectory.claim(tmp_path, overwrite=overwrite)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_overwrite_follows_no_links_out_of_the_directory(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "keep").write_text("")
        with RunDirectory.claim(tmp_path / "x") as directory:
            (directory.root / "link").symlink_to(tmp_path / "elsewhere")
        with RunDirectory.claim(tmp_path / "x", overwrite=True) as directory:
            directory.begin("")
        assert (tmp_path / "elsewhere" / "keep").exists()

    def test_a_live_process_keeps_its_directory_and_a_killed_one_loses_it(self, tmp_path: Path) -> None:
        code = """
            import sys, time
            from pathlib import Path
            from paceline.observe.monitor import RunDirectory
            directory = RunDirectory.claim(Path(sys.argv[1]))
            directory.begin("")
            print("held", flush=True)
            time.sleep(600)
        """
        holder = python(code, tmp_path / "x")
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for choice in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(PacelineError, match=f"in use by process {holder.pid}"):
                RunDirectory.claim(tmp_path / "x", **choice)
        assert (tmp_path / "x" / "config.toml").exists()
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=240)
        with RunDirectory.claim(tmp_path / "x", resume=True) as directory:
            assert directory.lock_file.read_text() == f"{os.getpid()}\n"

    def test_resume_and_overwrite_exclude_each_other(self, tmp_path: Path) -> None:
        with pytest.raises(PacelineError, match="exclude"):
            RunDirectory.claim(tmp_path / "x", resume=True, overwrite=True)

    def test_a_place_that_cannot_be_written_is_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PacelineError, match=r"cannot use .* as run directory: Not a directory") as error:
            RunDirectory.claim(tmp_path / "file" / "x")
        assert "\n" not in str(error.value)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_parent_without_permission_is_one_sentence(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(PacelineError, match="Permission denied"):
            RunDirectory.claim(tmp_path / "x")


class TestPlainLines:
    def test_a_step_is_one_line_with_its_numbers(self, tmp_path: Path) -> None:
        stream = io.StringIO()
        lines = PlainLines(stream)
        lines.begin(plan(tmp_path))
        values = {**metrics(10), "reward/reverse-text/mean": 0.6119, "eval/reverse-text/exact": 0.43}
        lines.step(10, {key: value for key, value in values.items() if not key.startswith("dropped")})
        line = stream.getvalue().splitlines()[-1]
        assert line == "step  10/40  reward 0.612  eval 0.43  stale 0.8  4.1k tok/s  0.31 s"

    def test_several_environments_are_told_apart(self) -> None:
        stream = io.StringIO()
        PlainLines(stream).step(1, {"reward/a/mean": 0.5, "reward/b/c/mean": 0.25, "eval/a/reward": math.nan})
        assert "reward a 0.500, b/c 0.250" in stream.getvalue()
        assert "eval" not in stream.getvalue()

    def test_progress_is_announced_once_and_again_after_silence(self) -> None:
        now = [0.0]
        stream = io.StringIO()
        lines = PlainLines(stream, clock=lambda: now[0])
        for number in range(25):
            lines.phase(f"evaluating {number}/25")
            now[0] += 1.0
        assert stream.getvalue().splitlines() == [f"... evaluating {number}/25" for number in (0, 11, 22)]

    def test_an_evaluation_that_was_announced_also_shows_its_end(self) -> None:
        stream = io.StringIO()
        lines = PlainLines(stream, clock=lambda: 0.0)
        for _ in range(2):  # the second one is known and stays silent: its result is in the step's line
            for number in range(1, 129):
                lines.phase(f"evaluating rows {number}/128")
        assert stream.getvalue().splitlines() == ["... evaluating rows 1/128", "... evaluating rows 128/128"]

    def test_notes_and_outcome_are_lines_on_any_encoding(self) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        lines = PlainLines(stream)
        lines.note("two\nlines — and a dash")
        lines.end(RunOutcome("interrupted", 7, "Ctrl-C"))
        stream.seek(0)
        assert stream.read().splitlines() == [
            r"note: two lines \u2014 and a dash",
            "interrupted at step 7",
        ]

    def test_what_is_no_terminal_gets_plain_lines(self) -> None:
        assert isinstance(choose_view(io.StringIO()), PlainLines)


class TestScreen:
    def picture(self, directory: Path, width: int, height: int = 40, envs: tuple[str, ...] = ("reverse-text",)) -> str:
        console = Console(record=True, width=width, height=height, file=io.StringIO())
        with Screen(console, clock=lambda: 0.0) as screen:
            screen.phase("loading model")
            screen.begin(plan(directory, envs=envs))
            for step in range(28):
                screen.step(step, metrics(step, envs))
            screen.note("the disk is [bold]nearly full")
            screen.phase("evaluating 37/128")
            picture = screen.frame()
        still = Console(record=True, width=width, height=height, file=io.StringIO())
        still.print(picture)
        return still.export_text()

    @pytest.mark.parametrize("width", [60, 80, 120, 200])
    def test_it_shows_everything_at_any_width(self, width: int) -> None:
        text = self.picture(Path("runs/demo"), width)
        assert all(len(line) <= min(width, 120) for line in text.splitlines())
        for word in (
            *("demo", "runs/demo", "cpu", "1.2M parameters", "step 27/40", "reverse-text"),
            *(f"{reward_at(27):.3f}", f"+{reward_at(27) - reward_at(5):.3f}", "reward, 5 steps"),
            f"{metrics(20)['eval/reverse-text/exact']:.3f}",
            *("held-out exact", "held-out reward", "4.1k", "0.31 s", "82%", "93%", "0.8 (max 1)"),
            *("54 zero advantage", "[bold]nearly full", "evaluating 37/128", "█"),
        ):
            assert word in text, word

    def test_a_count_advances_and_is_gone_once_its_step_is_over(self, tmp_path: Path) -> None:
        console = Console(width=100, height=40, file=io.StringIO())
        shown = []

        def look() -> None:
            still = Console(record=True, width=100, height=40, file=io.StringIO())
            still.print(screen.frame())
            shown.append(still.export_text())

        with Screen(console, clock=lambda: 0.0) as screen:
            screen.begin(plan(tmp_path))
            for number in (1, 128):
                screen.phase(f"evaluating rows {number}/128")
                look()
            screen.step(10, metrics(10))
            look()
        assert "evaluating rows 1/128" in shown[0]
        assert "evaluating rows 128/128" in shown[1]
        assert "evaluating" not in shown[2]
        assert "training" in shown[2]

    def test_many_environments_fit_the_height(self) -> None:
        for number, all_fit in ((2, True), (4, True), (8, True), (30, False)):
            envs = tuple(f"env-{index}" for index in range(number))
            text = self.picture(Path("runs/demo"), 80, height=24, envs=envs)
            assert len(text.splitlines()) < 24
            assert "evaluating" in text
            assert all(env in text for env in envs) == all_fit
            assert ("and 22 more" in text) != all_fit

    def test_a_resumed_run_shows_its_whole_curve(self, tmp_path: Path) -> None:
        record(tmp_path, range(15))
        console = Console(width=80, file=io.StringIO())
        with Screen(console) as screen:
            screen.begin(plan(tmp_path, start_step=12))
            frame = screen.frame()
        still = Console(record=True, width=80, file=io.StringIO())
        still.print(frame)
        text = still.export_text()
        assert "step 12/40" in text
        assert f"{reward_at(12):.3f}" in text

    @pytest.mark.parametrize("back", [0, 12])
    def test_a_run_that_goes_back_shows_what_is_left(self, tmp_path: Path, back: int) -> None:
        screen = Screen(Console(width=80, file=io.StringIO()))
        with screen, Monitors(RunRecorder(tmp_path), screen) as monitors:
            monitors.begin(plan(tmp_path))
            for step in range(15):
                monitors.step(step, metrics(step))
            monitors.roll_back(back)
            history = screen._history
            assert history.step == back
            assert [step for step, _ in history.rewards["reverse-text"]] == list(range(1, back + 1))
            assert [step for step, _ in history.exact.get("reverse-text", [])] == ([0, 10] if back else [])
            assert history.dropped.total() == 2 * back
            monitors.step(back + 1, metrics(back + 1))
            assert history.step == back + 1

    @pytest.mark.parametrize("way_out", ["end", "exception", "exit"])
    def test_the_terminal_is_given_back(self, tmp_path: Path, way_out: str) -> None:
        code = """
            import sys
            from pathlib import Path
            from rich.console import Console
            from paceline.observe.monitor import RunOutcome, RunPlan, Screen
            screen = Screen(Console(force_terminal=True))
            screen.begin(RunPlan("demo", Path("."), 3, 0, {}, ("a",), "cpu", 1))
            if sys.argv[1] == "end":
                screen.end(RunOutcome("finished", 3))
                screen.end(RunOutcome("finished", 3))
            elif sys.argv[1] == "exception":
                with screen:
                    raise SystemExit(0)
        """
        shown = succeeds(python(code, way_out))
        assert shown.count("\x1b[?25l") == 1
        assert shown.rfind("\x1b[?25h") > shown.find("\x1b[?25l")

    def test_sparklines_keep_shape_and_width(self) -> None:
        assert block_chars([], 10) == ""
        assert block_chars([0.5], 10) == "▁"
        assert block_chars(range(8), 10) == "▁▂▃▄▅▆▇█"
        assert block_chars(range(1000), 8) == "▁▂▃▄▅▆▇█"
        assert set(block_chars([0.5, 0.5001, 0.4999], 10)) == {"▁"}


class TestPlot:
    @pytest.mark.parametrize("envs", [(), ("reverse-text",), ("a", "b", "c")])
    def test_it_is_a_png(self, tmp_path: Path, envs: tuple[str, ...]) -> None:
        lines = [{"step": step, **metrics(step, envs)} for step in range(TOTAL)] if envs else []
        plot_rewards(lines, tmp_path / "rewards.png", "demo")
        data = (tmp_path / "rewards.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert data.endswith(b"IEND\xaeB`\x82")
        assert struct.unpack(">II", data[16:24]) == (1200, 675)

    def test_missing_values_leave_no_point(self, tmp_path: Path) -> None:
        lines = [{"step": 1, "reward/a/mean": None}, {"step": 2, "reward/a/mean": -3.5}]
        plot_rewards(lines, tmp_path / "rewards.png", "demo")
        assert MetricHistory.of(lines).rewards == {"a": [(2, -3.5)]}
        assert (tmp_path / "rewards.png").is_file()

    def test_smoothing_keeps_a_straight_line_and_its_ends(self) -> None:
        line = [(step, 0.1 * step) for step in range(100)]
        assert [value for _, value in smooth(line)] == pytest.approx([value for _, value in line])

    def test_no_global_state_is_touched(self) -> None:
        code = """
            import sys, tempfile
            from pathlib import Path
            from paceline.observe.monitor import plot_rewards
            assert "matplotlib" not in sys.modules and "rich.live" in sys.modules
            plot_rewards([], Path(tempfile.mkdtemp()) / "x.png", "x")
            assert not {"matplotlib.pyplot", "torch", "transformers"} & set(sys.modules)
        """
        succeeds(python(code))


class TestSummary:
    def lines(self, last: int) -> list[dict[str, float]]:
        return [{"step": step, "time": 100.0 + step, **metrics(step)} for step in range(last + 1)]

    def test_a_finished_run(self, tmp_path: Path) -> None:
        (tmp_path / "rewards.png").write_bytes(b"")
        outcome = RunOutcome("finished", 40, export=tmp_path / "export")
        reached, places, following = summary(self.lines(40), outcome, tmp_path)
        first, last = reward_at(5), reward_at(40)
        start, final = metrics(0)["eval/reverse-text/exact"], metrics(40)["eval/reverse-text/exact"]
        assert reached == (
            f"reverse-text: exact {start:.2f} -> {final:.2f} on held-out rows, "
            f"reward {first:.2f} -> {last:.2f} over 40 steps in 12 s"
        )
        assert all(str(tmp_path / name) in places for name in ("rewards.png", "export"))
        assert following.endswith(f"{tmp_path}/config.toml --resume latest --steps 80")

    @pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
    @pytest.mark.parametrize("last", [None, 0, 1, 20])
    def test_it_is_three_lines_whatever_happened(self, tmp_path: Path, status, last: int | None) -> None:
        lines = [] if last is None else self.lines(last)
        texts = summary(lines, RunOutcome(status, last or 0, "first\nsecond"), tmp_path)
        assert len(texts) == 3
        assert all(text and "\n" not in text for text in texts)

    def test_a_broken_run_says_how_to_go_on(self, tmp_path: Path) -> None:
        saved = RunOutcome("interrupted", 20, checkpoint=tmp_path / "checkpoints" / "20")
        assert "--resume latest" in summary(self.lines(20), saved, tmp_path)[2]
        lost = RunOutcome("failed", 2, "out of memory")
        assert "failed at step 2" in summary(self.lines(2), lost, tmp_path)[0]
        assert summary(self.lines(2), lost, tmp_path)[2].endswith("config.toml --name NAME"), "two steps are kept"
        unborn = RunOutcome("failed", 0, "out of memory")
        assert summary([], unborn, tmp_path)[2].endswith("--overwrite")
        (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
        assert "--overwrite" not in summary([], unborn, tmp_path)[2], "there is a checkpoint, if a damaged one"


class TestTensorBoard:
    def events(self, directory: Path):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(directory / "tensorboard"))
        events.Reload()
        return events

    def run(self, directory: Path, steps: range, start_step: int = 0) -> None:
        pytest.importorskip("tensorboard")
        monitor = exporter("tensorboard", "paceline")
        monitor.begin(plan(directory, start_step))
        for step in steps:
            monitor.step(step, {**metrics(step), "loss": math.nan})
        monitor.end(RunOutcome("finished", steps[-1]))
        monitor.end(RunOutcome("finished", steps[-1]))

    def test_what_was_written_is_read_back(self, tmp_path: Path) -> None:
        self.run(tmp_path, range(5))
        events = self.events(tmp_path)
        rewards = events.Scalars("reward/reverse-text/mean")
        assert [event.step for event in rewards] == [1, 2, 3, 4]
        wanted = [metrics(step)["reward/reverse-text/mean"] for step in range(1, 5)]
        assert [event.value for event in rewards] == pytest.approx(wanted)
        assert [event.step for event in events.Scalars("eval/reverse-text/exact")] == [0]
        assert "loss" not in events.Tags()["scalars"]

    def test_a_roll_back_undoes_what_came_later(self, tmp_path: Path) -> None:
        self.run(tmp_path, range(7))
        self.run(tmp_path, range(4, 6), start_step=3)
        assert [event.step for event in self.events(tmp_path).Scalars("tokens/s")] == [1, 2, 3, 4, 5]

    def test_so_does_one_within_the_run(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        with exporter("tensorboard", "paceline") as monitor:
            monitor.begin(plan(tmp_path))
            for step in range(7):
                monitor.step(step, metrics(step))
            monitor.roll_back(3)
            for step in (4, 5):
                monitor.step(step, metrics(step))
        assert [event.step for event in self.events(tmp_path).Scalars("tokens/s")] == [1, 2, 3, 4, 5]

    def test_it_needs_no_torch(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        code = """
            import sys
            from paceline.observe.monitor import exporter
            exporter("tensorboard", "paceline")
            assert "torch" not in sys.modules
        """
        succeeds(python(code))


class TestExtras:
    @pytest.mark.parametrize("kind", ["wandb", "tensorboard", "trackio"])
    def test_a_missing_package_is_one_sentence_with_its_extra(self, kind, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in [name for name in sys.modules if name.split(".")[0] == kind]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, kind, None)
        with pytest.raises(PacelineError) as error:
            exporter(kind, "paceline")
        assert f"pip install 'paceline[{kind}]'" in str(error.value)
        assert "\n" not in str(error.value)

    def test_a_folder_named_wandb_is_not_wandb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "wandb").mkdir()
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        with pytest.raises(PacelineError):
            exporter("wandb", "paceline")
        sys.modules.pop("wandb", None)

    def test_wandb_offline_keeps_one_id_over_a_resumption(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("wandb")
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        for start in (0, 2):
            with exporter("wandb", "paceline") as monitor:
                monitor.begin(plan(tmp_path, start))
                monitor.step(start + 1, {**metrics(start + 1), "loss": math.nan})
                monitor.end(RunOutcome("finished", start + 1))
        runs = list((tmp_path / "wandb").glob("offline-run-*"))
        identity = (tmp_path / "wandb-id").read_text()
        assert len(runs) == 2
        assert all(run.name.endswith(identity) for run in runs)

    def test_trackio_keeps_the_steps(self, tmp_path: Path) -> None:
        pytest.importorskip("trackio")
        code = """
            import sys
            from pathlib import Path
            from paceline.observe.monitor import RunOutcome, RunPlan, exporter
            with exporter("trackio", "paceline") as monitor:
                monitor.begin(RunPlan("demo", Path("."), 3, 0, {"seed": 0}, ("a",), "cpu", 1))
                for step in (1, 2, 3):
                    monitor.step(step, {"loss": 1.0 / step})
                monitor.end(RunOutcome("finished", 3))
            from trackio.sqlite_storage import SQLiteStorage
            assert [line["step"] for line in SQLiteStorage.get_logs("paceline", "demo")] == [1, 2, 3]
        """
        succeeds(python(code, TRACKIO_DIR=str(tmp_path)))


def test_numbers_read_well() -> None:
    assert [format_count(value) for value in (0, 842, 999.6, 4132, 999_990, 135e6)] == [
        "0",
        "842",
        "1.0k",
        "4.1k",
        "1.0M",
        "135M",
    ]
    assert [format_seconds(value) for value in (0.31, 9.999, 21, 250, 11_100)] == [
        "0.31 s",
        "10 s",
        "21 s",
        "4 min 10 s",
        "3 h 05 min",
    ]
    assert [format_clock(value) for value in (-1, 7.2, 760, 11_100)] == ["0:00", "0:07", "12:40", "3:05:00"]
    assert [format_change(0.5, last) for last in (0.872, 0.4, 0.5001, 0.4999)] == [
        "+0.372",
        "-0.100",
        "0.000",
        "0.000",
    ]


def test_recorded_lines_are_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record(tmp_path, range(3))
    for path in tmp_path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)
