"""Laws of a league in a run: who is met can be played again, the past arrives before it is met, and nothing is lost."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.clients.pool import LeaguePool
from paceline.config import CheckpointConfig, EvalConfig, RunConfig
from paceline.config import env as config
from paceline.config.inference import SamplingConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import Ticket
from paceline.engine import Completion, EngineStats, GenerateRequest
from paceline.model import load_tokenizer
from paceline.orchestrator import Checkpoints, Clock, Orchestrator, OrchestratorParts, RunStopped, build_train_envs
from paceline.orchestrator.episodes import MATCH, RolloutRunner, row_for_ticket
from paceline.orchestrator.league_checkpoints import LeagueCheckpoints
from paceline.rollout import Renderer, SamplingClient, SessionMap
from paceline.runtime.league import leagues
from paceline.runtime.local import with_adapter_slots
from paceline.selfplay import (
    Actor,
    Arena,
    ArenaEnvironment,
    ArenaError,
    Artifact,
    Episode,
    EpisodeRequest,
    League,
    Rubric,
)
from paceline.weights.update import Adapter, ServedPolicy, WeightUpdate
from scripted_run import CountingTrainer, Log

TOKENIZER = load_tokenizer(ModelConfig())
ENDS = (TOKENIZER.eos_token_id,)


class Restless:
    """Says `a` or `b` by the noise and who is asked, after an unpredictable number of turns of the event loop."""

    busy_seconds = 0.0

    def __init__(self, seed: int = 0) -> None:
        self.version, self.asked, self._rng = 0, [], random.Random(seed)

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request.model)
        for _ in range(self._rng.randrange(9)):
            await asyncio.sleep(0)
        word = random.Random(f"{request.noise} {request.model}").choice("ab")
        ids = [*TOKENIZER.encode(word, add_special_tokens=False), *ENDS]
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[self.version] * len(ids), finish="stop")

    async def load_weights(self, update: WeightUpdate) -> float:
        self.version = update.version
        return 0.0

    async def policy(self) -> ServedPolicy:
        return ServedPolicy(self.version, "")


class Shelf(LeaguePool):
    """Every past version is the one engine; what was kept under which name is written down."""

    def __init__(self, engine: Restless) -> None:
        super().__init__([engine], lambda: engine)
        self.kept: dict[str, WeightUpdate] = {}

    async def keep(self, name: str, update: WeightUpdate) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.kept[name] = update


def first_word(state, arena):
    won = float(state.steps[0].text == "a") - float(state.steps[1].text == "a")
    return {"x": won, "o": -won}


class Game(Episode):
    """Each says a word."""

    episode_type = "game"
    actors = ("x", "o")
    rubric = Rubric([first_word])

    async def rollout(self, arena, artifact, state):
        for actor in self.actors:
            await self.call_model(state, actor, arena.actor(actor).build_messages("word?"))


class Words(Arena):
    """Draws its games as it goes."""

    def __init__(self) -> None:
        super().__init__(seed=5)
        for name in ("x", "o"):
            self.add_actor(Actor(name))
        self.add_episode(Game())

    def get_batch(self):
        return [EpisodeRequest("game", Artifact(self.rng.randrange(10**6))) for _ in range(3)]


def environment(arena: Arena | None = None, **league) -> ArenaEnvironment:
    wanted = {"every": 1, "size": 3, "games": 4, "mirror": 0.25} | league
    return ArenaEnvironment(arena or Words(), 64, League(config.LeagueConfig(**wanted), "words"))


class Watched(ArenaEnvironment):
    """Remembers what every draw got."""

    def __init__(self, **league) -> None:
        plain = environment(**league)
        super().__init__(plain.arena, 64, plain.league)
        self.got = {}

    async def assign(self, example, draw, dice):
        row = await super().assign(example, draw, dice)
        self.got[draw] = row["request"], row["match"]
        return row


def run_config(**more) -> RunConfig:
    return RunConfig(
        **{
            "batch_size": 8,
            "group_size": 2,
            "staleness": 0,
            "steps": 4,
            "eval": EvalConfig(every=2),
            "checkpoint": CheckpointConfig(every=1, keep=100),
            "env": [config.ArenaEnvConfig(name="words", import_path="x:y")],
        }
        | more
    )


def client(pool) -> SamplingClient:
    return SamplingClient(pool, Renderer(TOKENIZER, ENDS), SamplingConfig(max_tokens=4), frozenset(ENDS))


def conduct(folder: Path, arena: ArenaEnvironment, timing: int = 0, **more) -> Log:
    wanted, log = run_config(**more), Log()
    pool = Shelf(Restless(timing))
    said = client(pool)
    courses = build_train_envs(wanted, {"words": arena})
    parts = OrchestratorParts(
        pool, CountingTrainer(timing), said, said, courses, log, Checkpoints(folder, 100), Clock()
    )
    asyncio.run(asyncio.wait_for(Orchestrator(wanted, parts).run(), 240))
    return log


def numbers(log: Log, after: int = 0) -> list[dict]:
    told = ("step", "reward_trained/", "batch/", "league/")
    return [{k: v for k, v in m.items() if k.startswith(told)} for m in log.metrics if m["step"] > after]


# --- again and again


@settings(max_examples=4)
@given(timings=st.tuples(st.integers(0, 99), st.integers(100, 199)), rule=st.sampled_from(["hardest", "uniform"]))
def test_however_long_games_take_a_synchronous_run_meets_the_same_opponents(tmp_path_factory, timings, rule):
    runs = []
    for timing in timings:
        arena = Watched(rule=rule, every=3)
        log = conduct(tmp_path_factory.mktemp("run"), arena, timing, steps=7)
        runs.append((arena.got, numbers(log), arena.league.payoff))
    assert runs[0] == runs[1]
    assert len({match.opponent for _, match in runs[0][0].values() if match}) == 3, "v0, v3 and v6"


@settings(max_examples=4)
@given(st.integers(0, 99), st.integers(100, 199), st.integers(1, 5))
def test_a_resumed_run_meets_whom_the_unbroken_one_met(tmp_path_factory, timing, other, step):
    folder = tmp_path_factory.mktemp("run")
    unbroken, resumed = Watched(every=3), Watched(every=3)
    whole = conduct(folder, unbroken, timing, steps=6)
    at = str(folder / f"step-00000{step}")
    part = conduct(tmp_path_factory.mktemp("resumed"), resumed, other, steps=6, resume=at)
    assert resumed.got
    assert resumed.got.items() <= unbroken.got.items()
    assert numbers(part) == numbers(whole, after=step)
    assert resumed.league.state() == unbroken.league.state()


def test_a_draw_is_forgotten_once_it_cannot_be_played_again(tmp_path):
    arena = Watched()
    conduct(tmp_path, arena, steps=12)
    assert len(arena.got) > 40
    assert arena.arena.state()["given"] == []


def test_another_seed_meets_others():
    def met(seed: int) -> list:
        arena, found = environment(mirror=0), []
        for version in range(3):
            arena.league.admit(version)
        for number in range(20):
            ticket = Ticket(number, "words", 0, number, 0)
            found.append(asyncio.run(row_for_ticket(arena, {"split": "train"}, ticket, seed))["match"])
        return found

    assert met(1) == met(1) != met(2)


# --- the past


def past_of(arena: ArenaEnvironment, notes: list[str] | None = None) -> tuple[LeagueCheckpoints, Shelf]:
    pool = Shelf(Restless())
    courses = build_train_envs(run_config(), {"words": arena})
    return LeagueCheckpoints(courses, pool, (notes if notes is not None else []).append), pool


def update(version: int, value: float = 0.0) -> WeightUpdate:
    return WeightUpdate(version, {"w": torch.full((2,), value)}, Adapter("", 2.0))


def test_a_newcomer_is_met_when_its_weights_have_arrived_and_not_before():
    arena = environment(mirror=0)
    past, pool = past_of(arena)

    async def meet_all_the_while(version: int) -> None:
        offered = asyncio.ensure_future(past.offer(update(version)))
        while not offered.done():
            for number in range(20):
                match = arena.league.draw(("x", "o"), number, random.Random(number))
                held = {f"v{kept.version}" for kept in pool.kept.values()}
                assert match is None or match.opponent in held
            await asyncio.sleep(0)
        await offered

    for version in range(6):
        asyncio.run(meet_all_the_while(version))
    assert len(pool.kept) == 3


def test_a_file_is_linked_only_if_it_holds_the_same_weights(tmp_path):
    """A directory that a second run has taken over still holds versions of the first, of the same number."""

    def saved(past: LeagueCheckpoints, step: int) -> Path:
        folder = tmp_path / f"step-{step:06d}"
        folder.mkdir()
        past.save(folder)
        return folder / "past-v0.safetensors"

    first, _ = past_of(environment())
    second, _ = past_of(environment())
    asyncio.run(first.offer(update(0, 1.0)))
    asyncio.run(second.offer(update(0, 2.0)))
    one, same, other = saved(first, 1), saved(first, 2), saved(second, 3)
    assert one.samefile(same)
    assert not other.samefile(one)
    assert load_file(other)["w"].tolist() == [2.0, 2.0]
    again, pool = past_of(environment())
    again.members[0].league.load(second.members[0].league.state())
    asyncio.run(again.load(other.parent))
    assert pool.kept["words/past-0"].tensors["w"].tolist() == [2.0, 2.0]
    assert pool.kept["words/past-0"].adapter.scale == 2.0
    assert saved(again, 4).samefile(other), "what was read is what was written"


def test_a_smaller_league_says_who_left_when_it_is_resumed(tmp_path):
    large, small, notes = environment(size=4), environment(size=2), []
    past, _ = past_of(large)
    for version in range(4):
        asyncio.run(past.offer(update(version, version)))
    past.save(tmp_path)
    small.league.load(json.loads(json.dumps(large.league.state())))
    resumed, pool = past_of(small, notes)
    asyncio.run(resumed.load(tmp_path))
    assert {name: kept.version for name, kept in pool.kept.items()} == {"words/past-0": 0, "words/past-1": 3}
    assert notes == ["words: its league is smaller now, and v1, v2 left it"]


def test_under_lora_every_past_version_has_a_slot_beside_those_the_user_wants():
    lora = run_config(model=ModelConfig(lora=LoRAConfig(rank=2)))
    served = lora.model_copy(update={"engine": lora.engine.model_copy(update={"adapters": 3})})
    assert with_adapter_slots(lora, past=4).engine.adapters == 5
    assert with_adapter_slots(served, past=4).engine.adapters == 7
    assert with_adapter_slots(served, past=0).engine.adapters == 3
    assert with_adapter_slots(run_config(), past=4).engine.adapters == 0


# --- ratings


def rated(arena: ArenaEnvironment) -> tuple[dict[str, float], list[str], Restless]:
    """Two versions are there, and the second is rated."""
    notes: list[str] = []
    past, pool = past_of(arena, notes)
    engine = pool._registry.members[0].engine
    for version in range(2):
        asyncio.run(past.offer(update(version)))
    player = RolloutRunner(client(pool), Clock(), 0, MATCH)
    return asyncio.run(past.rate_version(player, 1, 3, lambda text: None)), notes, engine


def test_every_opening_is_played_from_every_seat():
    class Openings(Words):
        def requests(self, split):
            return [EpisodeRequest("game", Artifact(n)) for n in range(3)] if split == "train" else []

    arena = environment(Openings(), games=12)
    arena.arena.add_actor(Actor("bystander"))
    arena.league.admit(0)
    played = [(row["request"].artifact.data, row["match"].learner) for row in arena.rating_games(1)]
    assert sorted(played) == sorted([(n, seat) for n in range(3) for seat in "xo"] * 2)


class Fragile(Game):
    async def rollout(self, arena, artifact, state):
        if artifact.data == 1:
            raise ValueError("the pieces fell over")
        await super().rollout(arena, artifact, state)


def test_games_for_the_ratings_that_fail_are_counted_and_told():
    class Some(Words):
        def matches(self):
            return [EpisodeRequest("game", Artifact(n)) for n in range(2)]

    arena = environment(Some(), games=8)
    arena.arena.episodes["game"] = Fragile()
    metrics, notes, _ = rated(arena)
    assert metrics["league/words/failed"] == 4
    assert arena.league.payoff.games("v1", "v0") == 4
    (note,) = notes
    failed = "words: 4 of 8 games for the ratings failed; the first cause: words: ValueError: the pieces fell over, at "
    assert note.startswith(failed)
    assert note.endswith(', in rollout (failures.episode = "drop")')
    metrics, notes, _ = rated(environment())
    assert metrics["league/words/failed"] == 0
    assert notes == []


@pytest.mark.parametrize("given", ["matches", "get_batch"])
def test_nothing_to_rate_with_is_said_and_the_run_goes_on(given):
    arena = environment(type("Idle", (Words,), {given: lambda self: []})())
    metrics, notes, _ = rated(arena)
    assert metrics == {}
    assert notes == ["words: no version was rated: matches() gave no episode of two actors"]


def test_matches_that_raise_are_a_sentence():
    class Broken(Words):
        def matches(self):
            raise KeyError("opening")

    with pytest.raises(ArenaError, match=r"Broken.matches\(\), .* raised KeyError: 'opening'"):
        rated(environment(Broken()))


def test_an_arena_that_draws_nothing_to_train_on_stops_the_run_with_the_cause(tmp_path):
    class Idle(Words):
        def get_batch(self):
            return []

    with pytest.raises(RunStopped, match=r"Idle has nothing to play: its get_batch\(\) gave no request"):
        conduct(tmp_path, environment(Idle()))


def test_what_a_checkpoint_could_not_keep_is_refused_when_it_is_drawn(tmp_path):
    class Opaque(Words):
        def get_batch(self):
            return [EpisodeRequest("game", Artifact(object()))]

    with pytest.raises(RunStopped, match=r"Opaque.get_batch\(\) gave .*, which a checkpoint cannot keep"):
        conduct(tmp_path, environment(Opaque()))


# --- who plays whom


def play(arena: ArenaEnvironment, row: dict) -> tuple[Restless, SessionMap]:
    pool = Shelf(Restless())
    table = SessionMap(client(pool), (7,), 0, arena.actors)
    assert asyncio.run(arena.play(row, table)) is not None
    return pool._registry.members[0].engine, table


def first_match(arena: ArenaEnvironment, request: EpisodeRequest) -> dict:
    arena.league.admit(0)
    dice = random.Random(1)
    return asyncio.run(arena.assign({"split": "train", "request": request}, 0, dice))


class Trio(Game):
    episode_type = "trio"
    actors = ("x", "o", "umpire")


def test_an_actor_another_model_plays_is_neither_the_learner_nor_the_past():
    arena = environment(mirror=0)
    arena.arena.add_actor(Actor("umpire"))
    arena.arena.add_episode(Trio())
    row = first_match(arena, EpisodeRequest("trio", Artifact(0), models={"umpire": "old-hand"}))
    assert row["match"].learner in ("x", "o")
    engine, table = play(arena, row)
    assert engine.asked == ["", "words/past-0", "old-hand"] or engine.asked == ["words/past-0", "", "old-hand"]
    assert [seat.actor for seat in table.values() if seat.turns and seat.trained] == [row["match"].learner]
    alone = first_match(arena, EpisodeRequest("game", Artifact(0), models={"o": "old-hand"}))
    assert alone.get("match") is None, "no seat is left to be played by the past"


class Outer(Episode):
    """The players only ever speak in games below it."""

    episode_type = "outer"
    actors = ("x", "o")
    rubric = Rubric([])

    async def rollout(self, arena, artifact, state):
        await self.spawn_all(state, [EpisodeRequest("game", Artifact(n)) for n in range(2)])


def test_the_past_plays_its_seat_in_children_too_and_what_the_learner_says_there_trains():
    arena = environment(mirror=0)
    arena.arena.add_episode(Outer())
    row = first_match(arena, EpisodeRequest("outer", Artifact(0)))
    engine, table = play(arena, row)
    assert sorted(engine.asked) == ["", "", "words/past-0", "words/past-0"]
    assert {seat.actor for seat in table.values() if seat.turns and seat.trained} == {row["match"].learner}


def test_only_a_league_is_taken_for_one(tmp_path):
    """An environment may call anything of its own a league."""
    folder = tmp_path / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    arena = environment()
    rated(arena)
    state = {"football": {"league": "premier"}, "words": arena.state()}
    (folder / "state.json").write_text(json.dumps({"environments": state, "leagues": ["words"]}))
    assert list(leagues(tmp_path)) == ["words"]
