"""A league through a run: the past is met, rated, and still there after a restart."""

import json
from pathlib import Path

import pytest

from paceline.commands import main
from paceline.config import env, load
from paceline.runtime.league import leagues
from paceline.runtime.session import RunResult, train
from paceline.selfplay import ArenaEnvironment, League
from paceline.util.importing import import_object

GAME = Path(__file__).parents[2] / "examples" / "arenas" / "tic_tac_toe.toml"
SMALL = {
    "batch_size": 16,
    "group_size": 4,
    "eval.every": 2,
    "env.0.import_path": f"{GAME.with_suffix('.py')}:TicTacToe",
    "env.0.kwargs.eval_games": 2,
    "env.0.league.every": 2,
    "env.0.league.size": 2,
    "env.0.league.games": 4,
    "env.0.league.mirror": 0.25,
}


def run(folder: Path, environments: dict | None = None, **more) -> RunResult:
    settings = SMALL | {"runs": str(folder), "name": "league"} | {key.replace("__", "."): v for key, v in more.items()}
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    config = load(GAME, arguments).config
    if environments:
        config.env[0].league = None
    result = train(config, environments=environments)
    assert result.error is None, result.error
    return result


def kept(folder: Path) -> dict:
    state = json.loads((folder / "league" / "checkpoints" / "latest" / "state.json").read_text())
    return state["environments"]["tic-tac-toe"]["league"]


@pytest.mark.parametrize("more", [{}, {"model__lora__rank": 4}], ids=["whole", "lora"])
def test_the_past_is_met_rated_and_survives_a_restart(tmp_path, capsys, more):
    first = run(tmp_path, steps=2, **more)
    assert kept(tmp_path)["places"] == [[0, 0], [2, 1]]
    assert leagues(tmp_path / "league")["tic-tac-toe"].games("v2", "v0") == 4
    assert 0 <= first.metrics[-1]["league/tic-tac-toe/score/v0"] <= 1
    assert json.loads(kept(tmp_path)["form"]) == [], "a newcomer has no form yet"

    second = run(tmp_path, steps=4, resume="latest", **more)
    payoff = leagues(tmp_path / "league")["tic-tac-toe"]
    assert kept(tmp_path)["places"] == [[0, 0], [4, 1]], "the league is full: the one in the middle has left"
    assert payoff.games("v2", "v0") == 4, "games before the restart count"
    assert payoff.games("v4", "v0") == 4
    files = {path.name for path in (tmp_path / "league" / "checkpoints" / "latest").iterdir()}
    assert {"past-v0.safetensors", "past-v4.safetensors"} <= files
    assert "past-v2.safetensors" not in files
    (line,) = [line for line in second.summary if line.startswith("league tic-tac-toe: ")]
    assert all(f"{player} " in line for player in ("v0", "v2", "v4"))
    assert (tmp_path / "league" / "league-tic-tac-toe.png").stat().st_size > 5000
    assert main(["league", str(tmp_path / "league")]) == 0
    shown = capsys.readouterr().out
    assert all(player in shown for player in ("v0", "v2", "v4", "league-tic-tac-toe.png"))
    # Seats the past sat in are recorded nowhere: whatever trained was said by the policy.
    tickets = [json.loads(line) for line in (tmp_path / "league" / "rollouts.jsonl").read_text().splitlines()]
    assert any(len({r["actor"] for r in tickets if r["ticket"] == t["ticket"]}) == 1 for t in tickets)


def test_a_resumed_league_goes_on_as_the_unbroken_one_did(tmp_path):
    """On one machine the very same losses: the policy meets whom it would have met, and they are who they were."""
    settings = {"steps": 3, "batch_size": 8, "staleness": 0, "deterministic": "true", "checkpoint__every": 2}
    settings |= {"env__0__league__every": 1, "engine__threads": 1, "trainer__threads": 2}  # each keeps its own
    whole = run(tmp_path / "whole", **settings)
    at = tmp_path / "whole" / "league" / "checkpoints" / "step-000002"
    part = run(tmp_path / "part", resume=at, **settings)

    def told(result: RunResult) -> list[dict]:
        names = ("step", "loss", "grad_norm", "reward_trained/", "league/")
        return [{k: v for k, v in line.items() if k.startswith(names)} for line in result.metrics if line["step"] > 2]

    assert told(part) == told(whole)
    assert kept(tmp_path / "part") == kept(tmp_path / "whole")


def test_a_league_that_an_environment_brings_itself_has_its_past(tmp_path):
    arena = import_object(SMALL["env.0.import_path"])(eval_games=2)
    league = League(env.LeagueConfig(every=1, size=2, games=2, mirror=0.25), "tic-tac-toe")
    own = {"tic-tac-toe": ArenaEnvironment(arena, league=league)}
    result = run(tmp_path, own, steps=2, model__lora__rank=4, engine__adapters=2)
    assert kept(tmp_path)["places"] == [[0, 0], [2, 1]]
    assert result.metrics[-1]["league/tic-tac-toe/failed"] == 0
    assert leagues(tmp_path / "league")["tic-tac-toe"].games("v2", "v0") == 2
