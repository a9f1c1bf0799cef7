"""The reader of rollouts in `paceline top`, on records that the real recorder wrote."""

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot

from conversations import Talking, asked, rollout, turn
from paceline.observe.terminal.app import TopApp
from paceline.observe.terminal.reader import ReaderScreen
from paceline.observe.web.runs import Runs
from recorded_runs import Told

HOSTILE = "\x1b[31mred [bold]\u202eback"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Told(tmp_path_factory.mktemp("runs"), "talk").step(5).end().path
    talk = Talking(path)
    for n in range(3):
        played = rollout(
            1, n, [turn(asked(f"word {n}"), f"reply {n}", 1)], n / 2, metrics={"right": n / 2}, target="yes"
        )
        talk.played(1, "trained", played)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": '{"a": 1}'}}]}
    answered = [*asked("use the tool"), call, {"role": "tool", "content": HOSTILE}]
    turns = [turn(asked("use the tool"), "", 1, call), turn(answered, "so it is", 1)]
    talk.played(2, "dropped:stale", rollout(2, 0, turns, 0.25, seconds=1.5))
    talk.played(3, "trained", rollout(3, 0, [], None, error="the sandbox is gone"))
    talk.close()
    return path


def test_figures_that_are_none_are_text(tmp_path):
    told = Told(tmp_path, "run").step(2)
    said = [{"role": "user", "content": "hello"}]
    told.recorder.rollouts(
        2, [{"env": "e", "ticket": 1, "reward": "x", "metrics": {"right": HOSTILE}, "messages": said}]
    )
    screen = _screens(told.end().path)[0]
    assert "right \\x1b[31mred" in screen
    assert "hello" in screen


def _screens(run: Path, *keys: str, size: tuple[int, int] = (100, 40)) -> list[str]:
    """What stands on the terminal once the reader is open, and after each key."""

    async def settled(app: TopApp, pilot: Pilot) -> str:
        screen = app.screen
        while isinstance(screen, ReaderScreen) and not (screen._worker and screen._worker.is_finished):
            await pilot.pause()
        shown: list[str] = []
        while len(shown) < 3 or len(set(shown[-3:])) > 1:
            await pilot.pause()
            rows = app.screen._compositor.render_strips()
            shown.append("\n".join("".join(part.text for part in row) for row in rows))
        return shown[-1]

    async def live() -> list[str]:
        app, screens = TopApp(Runs(run)), []
        async with app.run_test(size=size) as pilot:
            for key in ("r", *keys):
                await pilot.press(key)
                screens.append(await settled(app, pilot))
        return screens

    return asyncio.run(live())


def test_keys_lead_from_the_newest_conversation_to_the_oldest_and_back_to_the_run(run):
    newest, second, third, again, left = _screens(run, "j", "j", "k", "escape")
    assert "rollout 4" in newest
    assert "error     the sandbox is gone" in newest
    assert "1 of 5: all, newest first" in newest
    for words in ("step 2", "reward 0.250", "dropped: stale", "2 of 5", "→ look(", '"a": 1', "so it is", "1.5"):
        assert words in second, words
    for words in ("expected  yes", "metrics   right 1", "word 2", "reply 2", "assistant  turn 1"):
        assert words in third, words
    assert again == second
    assert "step 5 of 40" in left


def test_filters_and_sorts_are_a_key_each(run):
    trained, best, worst, dropped = _screens(run, "f", "s", "s", "f")[1:]
    assert "of 3: trained, newest first" in trained
    assert ("1 of 3: trained, best first" in best, "reply 2" in best) == (True, True)
    assert ("1 of 3: trained, worst first" in worst, "reply 0" in worst) == (True, True)
    assert "1 of 1: dropped, worst first" in dropped


def test_hostile_words_are_spelled_out_and_a_narrow_terminal_holds_it_all(run):
    screen = _screens(run, "j", size=(60, 40))[-1]
    assert "\\x1b[31mred [bold]\\u202eback" in screen
    assert not {"\x1b", "\u202e"} & set(screen)
    assert all(len(row) <= 60 for row in screen.splitlines())


def test_a_run_without_rollouts_says_so(tmp_path):
    Told(tmp_path, "bare").step(2).end()
    assert "no rollout" in _screens(tmp_path / "bare")[0]
