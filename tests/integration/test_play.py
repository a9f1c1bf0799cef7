"""Real games with a person at the table: in this process with a script, and behind a terminal's pipes."""

import asyncio
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastapi import FastAPI
from live_server import served
from rich.console import Console
from safetensors.torch import save_file
from test_rollouts import listening

from child_processes import Launched
from paceline.commands.play import MOST_SILENT_GAMES, Person, PersonSeat, PlayOptions, play, play_games
from paceline.commands.rollouts import EpisodePlayer, RolloutOptions, play_episodes
from paceline.config import RunConfig, load
from paceline.config.env import CustomEnvConfig
from paceline.config.model import ModelConfig
from paceline.envs import Environment, Outcome, build_environment
from paceline.errors import PacelineError
from paceline.model import load_model
from paceline.runtime.episode_runtime import open_episode_runtime

ROOT = Path(__file__).parents[2]


def arena(name: str, kind: str, *overrides: str) -> RunConfig:
    folder = ROOT / "examples" / "arenas"
    return load(folder / f"{name}.toml", ["--env.0.import_path", f"{folder / name}.py:{kind}", *overrides]).config


def kuhn() -> RunConfig:
    return arena("kuhn_poker", "KuhnPoker", "--deterministic", "--seed", "5")


def script(*lines: str):
    """What the person types; then they leave."""
    rest = iter(lines)

    def read(prompt: str) -> str:
        for line in rest:
            return line
        raise EOFError

    return read


def test_a_person_who_says_what_the_policy_would_have_said_plays_its_games():
    """The others sample as they would have sampled, and everybody earns the same: there is one path for both."""
    config = kuhn()
    section, environment = config.env[0], build_environment(config.env[0])
    with open_episode_runtime(config, config.sampling, None, 8) as house:
        player = EpisodePlayer(section, environment, house, seed=config.seed)
        records = asyncio.run(play_episodes(player, RolloutOptions(count=6)))
        said = [record["messages"][at]["content"] for record in records[::2] for at in record["sampled"]]
        person = Person(Console(file=io.StringIO()), script(*said))
        guests = {"first": lambda n: PersonSeat(person, n, "first", config.sampling, house)}
        games = []
        asyncio.run(play_games(replace(player, guests=guests), PlayOptions(), person, games.append))
    assert [record["actor"] for record in records] == ["first", "second"] * 6
    assert person.turns == len(said)
    for first, second, game in zip(records[::2], records[1::2], games, strict=True):
        assert game.outcome.rewards == {"first": first["reward"], "second": second["reward"]}
        ours, theirs = game.sessions["first"], game.sessions["second"]
        assert ours.turns[-1].messages == first["messages"][:-1]
        assert [*theirs.turns[-1].messages, theirs.turns[-1].message] == second["messages"]
        assert (ours.turns[-1].completion_ids, bool(theirs.turns[-1].completion_ids)) == ([], True)


def opponent(asked: list[dict]) -> FastAPI:
    """Calls everything."""
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": "caller"}]}

    @app.post("/v1/chat/completions")
    def chat(body: dict) -> dict:
        asked.append(body)
        message = {"role": "assistant", "content": "1"}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    return app


def test_the_others_may_be_anybody_behind_an_endpoint():
    asked, out = [], io.StringIO()
    with listening(opponent(asked)) as url:
        # Three showdowns for two, then they leave in the middle of the fourth: that one does not count.
        assert play(kuhn(), PlayOptions(endpoint=url, seat="first"), out, script("1", "1", "1")) == 0
    assert (len(asked), {body["model"] for body in asked}) == (3, {"caller"})
    rewards = re.findall(r"game \d  first \(you\) (-?\d)\.000  second (-?\d)\.000", out.getvalue())
    assert len(rewards) == 3
    assert {abs(int(one)) for game in rewards for one in game} == {2}
    ours, theirs = (sum(int(game[side]) for game in rewards) for side in (0, 1))
    assert out.getvalue().splitlines()[-1] == f"score after 3 games  first (you) {ours}.000  second {theirs}.000"


def test_the_others_may_speak_from_a_checkpoint(tmp_path):
    weights = {f"master/{name}": tensor for name, tensor in load_model(ModelConfig(), "cpu").named_parameters()}
    save_file({**weights, "rng": torch.get_rng_state()}, tmp_path / "trainer.safetensors")
    (tmp_path / "trainer.json").write_text('{"version": 7}')
    out = io.StringIO()
    play(kuhn(), PlayOptions(model=str(tmp_path), count=1, reveal=True), out, script("1"))
    assert "version 7" in out.getvalue()


class Duel(Environment):
    """The seat that is asked says a word; row 1 asks only `b`, row 2 fails."""

    actors = ("a", "b")

    def examples(self, split):
        return [{"n": n} for n in range(3)]

    async def play(self, example, seats):
        await seats["b"].chat([{"role": "user", "content": "reverse: planet"}])
        for name in ("a", seats.open("a", parent="b")) if example["n"] == 0 else ():
            await seats[name].chat([{"role": "user", "content": f"for {name}"}])
        if example["n"] == 2:
            raise KeyError("lamp")
        return Outcome({name: 1.0 if name == "b" else 0.5 for name, seat in seats.items() if seat.turns})


def duel(options: PlayOptions, *lines: str) -> tuple[int, str]:
    config = RunConfig(env=[CustomEnvConfig(name="duel", import_path=f"{__name__}:Duel")])
    out = io.StringIO()
    return play(config, options, out, script(*lines)), out.getvalue()


def test_a_person_sits_wherever_their_actor_does_and_the_score_is_their_actors():
    code, text = duel(PlayOptions(row=0, count=2, reveal=True), *"kept")
    assert (code, "for a\n" in text, "for a#2\n" in text) == (0, True, True)
    assert text.splitlines()[-1] == "score after 2 games  a (you) 2.000  b 2.000"
    assert text.count("duel · row 0") == text.count("assistant, sampled") == 2, "what `b` said, and nothing of `a`"


def test_games_that_fail_are_told_and_games_without_the_person_come_to_an_end():
    code, text = duel(PlayOptions(row=2, count=1))
    assert (code, "KeyError: 'lamp'" in text, text.splitlines()[-1]) == (1, True, "score after 0 games  1 failed")
    with pytest.raises(
        PacelineError, match=f"{MOST_SILENT_GAMES} games went by without a turn of `a`: take another seat"
    ):
        duel(PlayOptions(row=1))


def test_the_command_plays_at_a_pipe_and_ctrl_c_ends_it_politely(tmp_path):
    """Tic-tac-toe against the tiny model, whatever the game says: a person who always answers with a square."""
    run = tmp_path / "run.toml"
    folder = ROOT / "examples" / "arenas"
    run.write_text(
        f'include = ["{folder / "tic_tac_toe.toml"}"]\n'
        f'[[env]]\ntype = "arena"\nname = "game"\nimport_path = "{folder / "tic_tac_toe.py"}:TicTacToe"\n'
    )
    command = [sys.executable, "-m", "paceline", "play", str(run), "--seat", "o", "--seed", "1"]
    process = Launched(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        text = ""
        squares = iter("159372468" * 20)
        while True:
            read = process.stdout.read1()
            assert read, (text, process.communicate()[1].decode())
            text += read.decode()
            if text.endswith("\no> "):
                if "game 2" in text:
                    break
                process.stdin.write(f"{next(squares)}\n".encode())
                process.stdin.flush()
        process.send_signal(signal.SIGINT)
        process.wait(240)  # although its input stays open
        rest, errors = (part.decode() for part in process.communicate())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert text.startswith("game, you are o; x: paceline:quickstart\n")
    games = re.findall(r"^game \d+  x (-?\d+\.\d{3})  o \(you\) (-?\d+\.\d{3})", text, re.MULTILINE)
    assert len(games) >= 2
    x, o = (sum(float(game[side]) for game in games) for side in (0, 1))
    assert rest.splitlines()[-1] == f"score after {len(games)} games  x {x:.3f}  o (you) {o:.3f}"


def test_the_loop_without_a_run_file_trains_what_a_server_serves(tmp_path):
    """As its first lines say: a server with a key, and the example beside it."""
    script = ROOT / "examples" / "arenas" / "loop.py"
    with served("--engine.adapters", "1", "--engine.max-context", "128", key="mine") as server:
        command = [sys.executable, str(script), f"{server.url}/v1", "2"]
        there = os.environ | {"PACELINE_API_KEY": "mine"}
        loop = Launched(command, cwd=tmp_path, env=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said, _ = loop.communicate(timeout=280)
        assert loop.returncode == 0, said
        assert server.get("/policy").json()["version"] >= 2
