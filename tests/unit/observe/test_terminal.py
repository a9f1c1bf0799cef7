"""`paceline top`: vital signs in a terminal, on run directories that the real recorder wrote."""

import asyncio
import io
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from textual.pilot import Pilot

from paceline.commands import main
from paceline.observe.analysis.text import (
    escape_control_chars,
    format_number,
    format_timestamp,
    format_whole_seconds,
    safe_line,
)
from paceline.observe.analysis.vitals import reward_trends, vitals
from paceline.observe.monitor import RunDirectory, RunPlan
from paceline.observe.record import folder, open_run
from paceline.observe.terminal import snapshot
from paceline.observe.terminal.app import TopApp
from paceline.observe.terminal.drawing import RESCAN_SECONDS, RunPoller, _chart, bar
from paceline.observe.web.runs import Runs
from recorded_runs import Told, torn
from token_run import tokened

HOSTILE = "\x1b[31mred\x1b[0m [red]markup[/red] [/] \u202eturned \x9b2J\x07 end"
SHOWN = "\\x1b[31mred\\x1b[0m [red]markup[/red] [/] \\u202eturned \\x9b2J\\x07 end"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder, now = tmp_path_factory.mktemp("runs"), time.time()
    Told(folder, "finished", began=now - 4000).step(40).end()
    torn(Told(folder, "crashed", began=now - 3000).step(23).let_go().path / "metrics.jsonl")
    Told(folder, "failed", began=now - 2000).step(5).note(HOSTILE).end("failed", f"bad reward {HOSTILE}")
    Told(folder, "empty", began=now - 1000).let_go()
    (folder / "empty" / "metrics.jsonl").unlink()
    living = Told(folder, "living", began=now - 30).step(15).note("all is well")
    yield folder
    living.let_go()


def _screen(app: TopApp) -> str:
    """What stands on the terminal, row by row."""
    return "\n".join("".join(segment.text for segment in row) for row in app.screen._compositor.render_strips())


def _words(screen: str) -> str:
    """The screen as one line, wherever its lines were broken."""
    return " ".join(screen.split())


async def _settled(app: TopApp, pilot: Pilot) -> str:
    """The screen once the last look is over and drawn. The pilot itself takes a process that gets no core for one that
    has nothing to do."""
    while not (app._worker and app._worker.is_finished and app._snapshot is app._worker.result):
        await pilot.pause()
    screens: list[str] = []
    while len(screens) < 3 or len(set(screens[-3:])) > 1:
        await pilot.pause()
        screens.append(_screen(app))
    return screens[-1]


async def _looked(app: TopApp, pilot: Pilot) -> str:
    """The screen after a look that began now: one that is under way may have read before."""
    while app._worker and not app._worker.is_finished:
        await pilot.pause()
    app.poll()
    return await _settled(app, pilot)


def _watched(path: Path, *keys: str, size: tuple[int, int] = (80, 24)) -> tuple[TopApp, list[str]]:
    """The real app on a terminal of this size: its screen at first, and after each key."""

    async def live() -> tuple[TopApp, list[str]]:
        app, screens = TopApp(Runs(path)), []
        async with app.run_test(size=size) as pilot:
            for key in ("", *keys):
                if key:
                    await pilot.press(key)
                screens.append(await _settled(app, pilot))
        return app, screens

    return asyncio.run(live())


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("living", ["living  running", "step 15 of 40", "left", "all is well"]),
        ("finished", ["finished  finished", "step 40 of 40", "held-out exact", "from 0.2"]),
        (
            "crashed",
            [
                "crashed  crashed",
                "step 23 of 40",
                "killed, out of memory",
                "to begin anew beside it (no checkpoint was saved)",
            ],
        ),
        ("failed", ["failed  failed", "failed: bad reward", "step 5 of 40"]),
        ("empty", ["empty  crashed", "no step is finished yet"]),
    ],
)
def test_a_run_in_any_state_shows_what_matters_on_the_smallest_terminal(runs, name, wanted):
    _, [screen] = _watched(runs / name)
    assert [words for words in wanted if words not in screen] == []
    if name != "empty":
        first = screen.splitlines()[:21]
        for sign in ("reward", "loss", "grad norm", "staleness", "tokens a second", "who waits", "trainer", "dropped"):
            assert any(sign in row for row in first), sign
    assert all(len(row) <= 80 for row in screen.splitlines())


def test_a_wide_terminal_shows_two_things_beside_one_another(runs):
    _, [screen] = _watched(runs / "living", size=(160, 40))
    row = next(row for row in screen.splitlines() if row.lstrip().startswith("reward"))
    assert "staleness" in row


@pytest.mark.parametrize("size", [(100, 60), (160, 60), (240, 70)])
def test_charts_take_the_room_of_a_large_terminal(runs, size):
    _, [screen] = _watched(runs / "finished", size=size)
    rows = screen.splitlines()
    charted = [row for row in rows if sum(row.count(block) for block in "▁▂▃▄▅▆▇█") > 20]
    assert len(charted) > size[1] // 3
    assert sum(not row.strip() for row in rows) < size[1] // 5, "little is left empty"
    assert "finished at step 40" in screen, "and nothing is pushed out"
    for title in ("reward  1.003", "held-out exact  0.825"):
        assert any(title in row for row in rows), title


def test_a_chart_holds_its_lowest_and_highest_value():
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(_chart("entropy", [0.0, 1.0, 0.5, 0.5], 55, 6))
    title, *rows = console.export_text().splitlines()
    assert title.split() == ["entropy", "0.500"]
    assert len(rows) == 5
    assert rows[0].split()[0] == "1"
    assert rows[-1].split()[0] == "0"
    assert [row.count("█") for row in rows] == sorted(row.count("█") for row in rows)
    assert rows[0].count("█") == 10, "a quarter of the width reaches the top"


def test_keys_go_from_run_to_run_and_round_again(runs):
    names = list(Runs(runs).paths())
    app, screens = _watched(runs, "j", "down", "k", "up", "up")
    places = [names.index(next(name for name in names if f" {name}  " in screen)) for screen in screens]
    assert places == [0, 1, 2, 1, 0, len(names) - 1]
    assert app.run_name == names[-1]
    assert f"run 2 of {len(names)}" in screens[1]


def test_t_changes_the_theme_and_a_question_mark_explains(runs):
    app, screens = _watched(runs / "finished", "t", "question_mark", "x")
    assert app.theme == "textual-light"
    assert "mismatch   how far trainer and sampler are apart" in screens[2]
    assert screens[3] == screens[1], "any key closes the help"


def test_q_leaves(runs):
    async def live() -> TopApp:
        app = TopApp(Runs(runs))
        async with app.run_test() as pilot:
            await pilot.press("q")
            while app.is_running:  # noqa: ASYNC110 - its own loop ends it
                await asyncio.sleep(0.01)
        return app

    assert asyncio.run(live()).return_code == 0


def test_a_run_that_goes_on_is_seen_at_the_next_look(tmp_path):
    told = Told(tmp_path, "run", began=time.time() - 60).step(3)

    async def live() -> list[str]:
        app, screens = TopApp(Runs(tmp_path)), []
        async with app.run_test() as pilot:
            for more in (0, 4, None):
                told.step(more) if more is not None else told.let_go()
                screens.append(await _looked(app, pilot))
        return screens

    first, second, third = asyncio.run(live())
    assert "step 3 of 40" in first
    assert "step 7 of 40" in second
    assert "run  running" in second
    assert "run  crashed" in third, "a process that is gone writes nothing, and is missed all the same"


def test_a_run_whose_folder_goes_is_named(tmp_path):
    # The longest path before a line break: the words after it are on two lines.
    folder = tmp_path / ("x" * ((68 - len(f"{tmp_path}/")) % 78 + 1))
    told = Told(folder, "run").step(2).end()

    async def live() -> str:
        app = TopApp(Runs(folder))
        async with app.run_test() as pilot:
            await _settled(app, pilot)
            told.path.rename(tmp_path.parent / "elsewhere")
            return await _looked(app, pilot)

    assert "run is gone" in _words(asyncio.run(live()))


def test_hostile_words_are_shown_as_text_and_move_nothing(runs, capsys):
    _, [screen] = _watched(runs / "failed", size=(200, 40))
    assert SHOWN in screen
    assert main(["top", str(runs / "failed")]) == 0
    printed = capsys.readouterr().out
    assert SHOWN in printed
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(printed)


def test_an_environment_with_a_hostile_name_is_shown_as_text(tmp_path):
    told = Told(tmp_path, "run").step(2)
    told.recorder.step(3, {"reward/[red]\x1b[2J/mean": 0.5, "loss/[bold]": 1.0, "loss/rl": 0.5, "dropped/[b]\x07": 2.0})
    text = snapshot(open_run(told.let_go().path))
    assert "[red]\\x1b[2J" in text
    assert "[bold] 1" in text
    assert "2 [b]\\x07" in text


def test_into_a_pipe_one_plain_picture_goes_and_torch_is_not_needed(runs):
    code = (
        "import sys; from paceline.commands import main; assert main(sys.argv[1:]) == 0\n"
        "import paceline.observe.terminal.app, paceline.observe.report\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "top", str(runs / "living")],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "living  running" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith("\nset()\n")


@pytest.mark.parametrize("make", [False, True])
def test_where_there_is_no_run_a_sentence_says_so(tmp_path, capsys, make):
    place = tmp_path / "nowhere"
    if make:
        place.mkdir()
    assert main(["top", str(place)]) == 2
    assert "there is no run" in capsys.readouterr().err


def test_the_record_is_looked_through_now_and_then_and_files_are_read_on(tmp_path, monkeypatch):
    told = Told(tmp_path, "run").step(5)
    now = [told.now]
    run = open_run(told.path)
    asked: list[list[int]] = []
    monkeypatch.setattr(folder, "columns_of", _counted(folder.columns_of, asked))
    looker = RunPoller(run, clock=lambda: now[0])
    assert looker.poll().problems == []
    (told.path / "tickets.jsonl").write_text("nonsense\n")
    now[0] += RESCAN_SECONDS / 2
    assert looker.poll().problems == [], "too soon to look again"
    told.step(2)
    now[0] += RESCAN_SECONDS
    assert any("tickets.jsonl" in problem for problem in looker.poll().problems)
    assert asked == [[0, 1, 2, 3, 4, 5], [6, 7]], "only the lines that came since"
    told.let_go()


def _counted(real, asked: list[list[int]]):
    def columns_of(lines):
        asked.append([line["step"] for line in lines])
        return real(lines)

    return columns_of


def test_signs_of_a_living_run_tell_pace_and_what_is_left(tmp_path):
    told = Told(tmp_path, "run", steps=100).step(30)
    seen = vitals(open_run(told.path), now=told.now + 0.5)
    assert seen.pace == pytest.approx(0.9 + 0.4 / 10, abs=0.05)
    assert seen.seconds_left == pytest.approx(70 * seen.pace - 0.5)
    assert seen.losses["loss"] == pytest.approx(sum(v for k, v in seen.losses.items() if k != "loss"))
    assert seen.dropped_counts["stale"] == 4
    told.end()
    done = vitals(open_run(told.path))
    assert done.seconds_left is None
    assert done.next_action[1].endswith("--resume latest --steps 60")


def test_a_look_without_a_new_step_tells_the_same_as_a_first_look(tmp_path):
    told = Told(tmp_path, "run").step(12)
    run = open_run(told.path)
    before = vitals(run, told.now + 1)
    told.note("still here")
    again = vitals(run, told.now + 5, before)
    assert again.rewards is before.rewards, "curves are not looked through again"
    assert replace(again, columns={}) == replace(vitals(open_run(told.path), told.now + 5), columns={})
    told.step()
    assert vitals(run, told.now, again).status.step == 13
    assert vitals(run, told.now, again).rewards != before.rewards
    told.let_go()


def test_a_run_that_died_goes_on_from_its_newest_whole_checkpoint(tmp_path):
    told = Told(tmp_path, "run").step(9).let_go()
    for step in (4, 8):
        (told.path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (told.path / "checkpoints" / "step-000004" / "state.json").write_text("{}")
    what, command = vitals(open_run(told.path)).next_action
    assert what == "to go on from step-000004", "8 lost its state"
    assert command.endswith("config.toml --resume step-000004"), "`latest` would name the damage of 8"


def test_evaluations_of_an_arena_count_although_they_are_written_by_actor():
    """`eval/<arena>/<actor>/reward` is all that an arena with several actors writes of its evaluation."""
    columns = {
        "step": [0.0, 1.0, 2.0],
        "eval/tic-tac-toe/x/reward": [0.25, None, 0.75],
        "eval/tic-tac-toe/o/reward": [0.0, None, 0.5],
        "reward/tic-tac-toe/mean": [None, 0.5, 0.75],
        "reward/tic-tac-toe/x/mean": [None, 0.0, 0.0],
        "reward/of/words/mean": [None, 0.25, 0.25],
    }
    rewards, held_out, kind = reward_trends(columns)
    assert kind == "reward"
    assert {env: trend.values for env, trend in held_out.items()} == {
        "": [0.125, 0.625],
        "tic-tac-toe/x": [0.25, 0.75],
        "tic-tac-toe/o": [0.0, 0.5],
    }
    assert {env: trend.values for env, trend in rewards.items() if env} == {
        "tic-tac-toe": [0.5, 0.75],
        "of/words": [0.25, 0.25],
    }


def test_a_pause_between_two_lives_is_no_step(tmp_path):
    told = Told(tmp_path, "run").step(5)
    told.now += 86_400
    told.recorder.begin(_plan(told))
    told.step(5)
    assert vitals(open_run(told.path)).pace < 2
    told.let_go()


def _plan(told: Told) -> RunPlan:
    return RunPlan("run", told.path, 40, told.done, {}, told.envs, "cpu", 1)


def test_lanes_are_shares_of_the_last_minute_by_record_or_by_metrics(tmp_path):
    plain = vitals(open_run(Told(tmp_path, "plain").step(20).let_go().path))
    shares = {lane.lane: lane.share for lane in plain.load.lanes}
    assert set(shares) == {"engine", "trainer", "publish", "evaluation"}
    assert shares["trainer"] == pytest.approx(0.52 / 0.94, abs=0.08), "0.5 s of training and 0.02 of scoring in 0.94 s"
    kept = vitals(open_run(tokened(tmp_path).let_go().path))
    assert {lane.lane for lane in kept.load.lanes} == {"trainer", "publish"}
    assert all(0 < lane.share <= 1 for lane in kept.load.lanes)


def test_words_of_others_are_spelled_out_and_cut():
    assert escape_control_chars("a\tb\n", keep="\n\t") == "a\tb\n"
    assert escape_control_chars("\x00\ud800é日👩‍🔬") == "\\x00\\ud800é日👩‍🔬"
    assert safe_line("a\n\n b\x1b" + "x" * 999, 10) == "a b\\x1bxx…"
    assert (format_number(None), format_number(0.0004), format_number(float("nan")), format_number(12345.6)) == (
        "–",
        "0.0004",
        "nan",
        "12,346",
    )
    assert (
        format_whole_seconds(-3),
        format_whole_seconds(4.4),
        format_whole_seconds(75),
        format_whole_seconds(float("inf")),
    ) == ("0 s", "4 s", "75 s", "an unknown time")
    assert format_timestamp(1e300) == "1e+300"
    assert (bar(0, 4), bar(0.01, 4), bar(1.5, 4)) == ("░░░░", "█░░░", "████")


def test_a_directory_alone_is_enough(tmp_path):
    """A run that was claimed and never began: another machine's lock file, nothing else."""
    RunDirectory.claim(tmp_path / "bare").release()
    assert "no step is finished yet" in snapshot(open_run(tmp_path / "bare"))


def test_times_that_are_none_are_shown_or_named(tmp_path):
    told = Told(tmp_path, "run").step(4)
    with (told.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": Infinity, "loss": NaN}\n')
    with (told.path / "events.jsonl").open("a") as file:
        file.write('{"event": "begin", "time": Infinity, "total_steps": 9}\n{"event": [], "time": "x"}\n')
    text = snapshot(open_run(told.let_go().path))
    assert "step 5 of 9" in text
