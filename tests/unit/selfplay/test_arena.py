"""Laws of the arena: who hears what, who is paid what, who is trained, and what is remembered."""

import asyncio
import json
import random
import threading
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clients import Pool
from paceline.config.env.base import ArenaEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.config.model import ModelConfig
from paceline.data import Ticket
from paceline.engine import Completion
from paceline.model import load_tokenizer
from paceline.orchestrator.episodes import build_rollouts
from paceline.rollout import Renderer, Rollout, SamplingClient, SessionMap, assemble
from paceline.selfplay import (
    Actor,
    Arena,
    ArenaEnvironment,
    ArenaError,
    Artifact,
    ArtifactStore,
    Episode,
    EpisodeRequest,
    MultiTurnEpisode,
    Rubric,
    SingleTurnEpisode,
    arena_environment,
)
from paceline.util.importing import import_object

laws = settings(max_examples=15, deadline=None)
EXAMPLES = Path(__file__).parents[3] / "examples" / "arenas"


def example(name: str):
    return import_object(f"{EXAMPLES / name.split(':')[0]}:{name.split(':')[1]}")


class Speaker:
    """An engine that says what a function of the prompt's text tells it, one character a token."""

    busy_seconds = 0.0

    def __init__(self, tokenizer, say) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.requests = []
        self.outcome = None

    async def generate(self, request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        said = self.say(self.tokenizer.decode(request.prompt_ids))
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[3] * len(ids), finish="stop")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def play(tokenizer):
    """Plays one request of an arena as a run would; answers with the rollouts, and the engine that was asked."""

    def play(arena: Arena, say, request: EpisodeRequest, split: str = "train") -> tuple[list[Rollout], Speaker]:
        engine = Speaker(tokenizer, say)
        ends = [tokenizer.eos_token_id]
        client = SamplingClient(
            Pool([engine]), Renderer(tokenizer, ends), SamplingConfig(max_tokens=99), frozenset(ends)
        )
        environment = ArenaEnvironment(arena)
        table = SessionMap(client, (7,), 0, environment.actors)
        outcome = asyncio.run(environment.play({"split": split, "request": request}, table))
        engine.outcome = outcome
        if outcome is None:
            return [], engine
        rollouts = build_rollouts("arena", Ticket(0, "arena", 0, 0, 0), 0, table, outcome)
        for rollout in rollouts:
            rollout.samples = assemble(rollout)
        return rollouts, engine

    return play


def dice(seed: int, words: str):
    """A player who says any of these characters, or now and then nothing of the kind."""
    rng = random.Random(seed)
    return lambda prompt: rng.choice([*words, *words, "no"])


# --- games

GAMES = [("tic_tac_toe.py:TicTacToe", "abcdefghi"), ("kuhn_poker.py:KuhnPoker", "0123456789")]


@pytest.mark.parametrize(("name", "words"), GAMES)
@laws
@given(seed=st.integers(0, 10_000))
def test_what_one_player_wins_the_other_loses(play, name, words, seed):
    arena = example(name)()
    request = random.Random(seed).choice(arena.matches())
    rollouts, engine = play(arena, dice(seed, words), request)
    assert len(engine.outcome.rewards) == 2
    assert sum(engine.outcome.rewards.values()) == 0
    assert {rollout.reward for rollout in rollouts} <= {-2, -1, 0, 1, 2}


@laws
@given(seed=st.integers(0, 10_000))
def test_each_actors_turns_of_a_game_form_one_sample(play, seed):
    rng, taken = random.Random(seed), []

    def legal(prompt: str) -> str:
        taken.append(rng.choice([square for square in "abcdefghi" if square not in taken]))
        return taken[-1]

    arena = example("tic_tac_toe.py:TicTacToe")()
    rollouts, engine = play(arena, legal, arena.requests("train")[0])
    assert len(engine.requests) >= 5
    assert sum(len(rollout.turns) for rollout in rollouts) == len(engine.requests)
    for rollout in rollouts:
        (sample,) = rollout.samples
        assert len(sample.spans) == len(rollout.turns)
        assert sample.loss_mask.sum() == sum(len(turn.completion_ids) for turn in rollout.turns)
        assert rollout.kind == "training"
        assert rollout.parent == ""


def test_the_rules_of_tic_tac_toe():
    standing = example("tic_tac_toe.py:standing")
    games = ["".join(moves) for moves in permutations("abcdefghi", 5)]
    assert sum(standing(game) == "x" for game in games) == 1440  # of 255,168 games so many end there
    assert not any(standing(game) == "o" for game in games)
    assert standing("abcedfhgi") == "draw"


@laws
@given(seed=st.integers(0, 10_000))
def test_a_foul_costs_half_a_point_in_training_and_dice_move_on(play, seed):
    arena, fouls = example("tic_tac_toe.py:TicTacToe")(), []
    request = random.Random(seed).choice(arena.requests("train"))
    rollouts, engine = play(arena, dice(seed, "abcdefghi"), request)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    for turn in turns:
        board = turn.messages[-1]["content"]
        assert sorted(set(board) - set("xo")) == [square for square in "abcdefghi" if square in board]
        fouls.append(turn.text[:1] not in set(board) - set("xo"))
    assert sum(engine.outcome.rewards.values()) == -0.5 * sum(fouls)
    assert len(turns) + len(request.artifact.data["opening"]) <= 9


def test_kuhn_poker_is_worth_minus_one_eighteenth():
    """Both sides at Kuhn's equilibrium, the first player bluffing a third of the time: exact expectation."""
    payoff = example("kuhn_poker.py:payoff")
    third = Fraction(1, 3)
    bets = {  # chance to say 1, by card and what was said
        "1": {"": third, "0": third, "1": Fraction(0), "01": Fraction(0)},
        "2": {"": Fraction(0), "0": Fraction(0), "1": third, "01": 2 * third},
        "3": {"": Fraction(1), "0": Fraction(1), "1": Fraction(1), "01": Fraction(1)},
    }

    def value(cards: str, said: str) -> Fraction:
        ended = payoff(cards, said)
        if ended is not None:
            return Fraction(ended)
        bet = bets[cards[len(said) % 2]][said]
        return bet * value(cards, said + "1") + (1 - bet) * value(cards, said + "0")

    deals = ["".join(deal) for deal in permutations("123", 2)]
    assert sum((value(cards, "") for cards in deals), Fraction(0)) / len(deals) == Fraction(-1, 18)


def test_kuhn_poker_tells_each_player_their_own_card_and_the_others_words(play):
    arena = example("kuhn_poker.py:KuhnPoker")()
    request = EpisodeRequest("hand", Artifact({"cards": "31"}))
    said = iter("415")  # check, bet, call
    rollouts, _ = play(arena, lambda prompt: next(said), request)
    assert {rollout.actor: rollout.reward for rollout in rollouts} == {"first": 2.0, "second": -2.0}
    heard = {r.actor: [m["content"] for m in r.turns[-1].messages if m["role"] == "user"] for r in rollouts}
    assert heard == {"first": ["add: 3+0", "add: 0+1"], "second": ["add: 1+0"]}


# --- who hears what


class Gossip(MultiTurnEpisode):
    """Each actor sees a secret at every turn; everybody hears the words, and the bell after each turn."""

    episode_type = "gossip"
    rubric = Rubric([])

    def __init__(self, turns: int) -> None:
        self.max_turns = turns
        self.responses = 0

    def get_initial_prompt(self, arena, artifact, state):
        return f"you are {state.current_actor}"

    def get_observation(self, state, arena, artifact):
        return f"secret{state.actors.index(state.current_actor)}"

    async def env_response(self, state, arena, artifact):
        self.responses += 1
        return f"bell{state.turn}"


@laws
@given(st.integers(1, 9), st.integers(1, 3))
def test_private_observations_reach_no_other_seat_and_words_reach_all(play, turns, count):
    arena, episode = Arena(), Gossip(turns)
    names = ["ann", "bob", "cy"][:count]
    for name in names:
        arena.add_actor(Actor(name, system_prompt=f"be {name}"))
    arena.add_episode(episode)
    spoken = iter(range(turns))
    rollouts, engine = play(arena, lambda prompt: f"word{next(spoken)}", EpisodeRequest("gossip", Artifact(0)))
    assert episode.responses == turns  # also to the last word
    for rollout in rollouts:
        me = names.index(rollout.actor)
        whole = engine.tokenizer.decode(rollout.turns[-1].prompt_ids)
        last = max(turn for turn in range(turns) if turn % count == me)
        for turn in range(turns):
            assert whole.count(f"word{turn}") == (turn < last)
            assert whole.count(f"bell{turn + 1}") == (turn < last)
        assert {f"secret{at}" for at in range(count) if f"secret{at}" in whole} == {f"secret{me}"}
        assert whole.startswith(f"<|system|>be {rollout.actor}<|end|><|user|>you are {rollout.actor}")
        assert whole.count("you are") == 1
        roles = [message["role"] for message in rollout.turns[-1].messages]
        assert roles == ["system", *["user", "assistant"] * (len(rollout.turns) - 1), "user"]
        assert len(rollout.samples) == 1


def test_a_word_can_be_kept_from_a_listener(play):
    class Whisper(Gossip):
        def describe(self, event, listener):
            return None if event.speaker == "ann" else super().describe(event, listener)

    arena = Arena()
    arena.add_actor(Actor("ann"))
    arena.add_actor(Actor("bob"))
    arena.add_episode(Whisper(2))
    _, engine = play(arena, lambda prompt: "psst", EpisodeRequest("gossip", Artifact(0)))
    assert "psst" not in engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def test_an_actors_limit_is_its_own(play):
    arena = Arena()
    arena.add_actor(Actor("ann", max_tokens=5))
    arena.add_actor(Actor("bob"))
    arena.add_episode(Gossip(2))
    _, engine = play(arena, lambda prompt: "hi", EpisodeRequest("gossip", Artifact(0)))
    assert [request.max_tokens for request in engine.requests] == [5, 99]


# --- children, judges, continuations


def marks(state, arena):
    return {"child": float(state.last_text == "good")}


class Task(SingleTurnEpisode):
    episode_type = "task"
    actors = ("child",)
    rubric = Rubric([marks])

    def get_initial_prompt(self, arena, artifact, state):
        return f"task {artifact.data}"


class Boss(Episode):
    """Speaks, then hands out tasks, then speaks again and hands out one more."""

    episode_type = "boss"
    actors = ("parent",)

    def __init__(self, trainable: bool = True) -> None:
        self.trainable = trainable

    @property
    def rubric(self):
        async def judged(state, arena):
            reply = await arena.call_model(state, [{"role": "user", "content": "how was it"}])
            return {"parent": float(reply.text == "fine") + sum(child.rewards["child"] for child in state.children)}

        return Rubric([judged])

    async def rollout(self, arena, artifact, state):
        await self.call_model(state, "parent", arena.actor("parent").build_messages("one"))
        await self.spawn_all(state, [EpisodeRequest("task", Artifact(n), {}, self.trainable) for n in range(3)])
        await self.call_model(state, "parent", arena.actor("parent").build_messages("two"))
        await self.spawn(state, EpisodeRequest("task", Artifact(3)))


def company(**boss) -> Arena:
    arena = Arena()
    arena.add_actor(Actor("child"))
    arena.add_actor(Actor("parent"))
    arena.add_episode(Boss(**boss))
    arena.add_episode(Task())
    return arena


def workers(prompt: str) -> str:
    return {"<|user|>task 1<|end|><|assistant|>": "good", "<|user|>how was it<|end|><|assistant|>": "fine"}.get(
        prompt, "so so"
    )


def test_children_carry_their_parent_and_kind_and_judges_are_never_trained(play):
    rollouts, engine = play(company(), workers, EpisodeRequest("boss", Artifact(0)))
    children = [rollout for rollout in rollouts if rollout.actor == "child"]
    (root,) = [rollout for rollout in rollouts if rollout.actor == "parent"]
    assert (root.kind, root.parent, root.reward) == ("boss", "", 2.0)
    assert [(child.kind, child.parent) for child in children] == [("task", "parent")] * 4
    assert [child.reward for child in children] == [0.0, 1.0, 0.0, 0.0]
    assert {version for child in children for turn in child.turns for version in turn.versions} == {3}
    asked = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
    assert sum("how was it" in prompt for prompt in asked) == 1
    trained = [engine.tokenizer.decode(turn.prompt_ids) for rollout in rollouts for turn in rollout.turns]
    assert len(trained) == len(asked) - 1
    assert not any("how was it" in prompt for prompt in trained)
    assert len({request.noise for request in engine.requests}) == len(engine.requests)


def test_what_is_not_trainable_is_played_with_everything_below_it_and_not_trained(play):
    rollouts, engine = play(company(trainable=False), workers, EpisodeRequest("boss", Artifact(0)))
    assert [rollout.actor for rollout in rollouts].count("child") == 1
    assert len(engine.requests) == 7
    request = EpisodeRequest("boss", Artifact(0), is_trainable=False)
    assert play(company(), workers, request)[0] == []


def test_an_actor_played_by_another_model_does_not_train(play):
    arena = example("tic_tac_toe.py:TicTacToe")()
    request = EpisodeRequest("match", Artifact({"opening": ""}), models={"o": "version-7"})
    moves = iter("adbec")
    rollouts, engine = play(arena, lambda prompt: next(moves), request)
    assert [(rollout.actor, rollout.reward) for rollout in rollouts] == [("x", 1.0)]
    assert [request.model for request in engine.requests] == ["", "version-7"] * 2 + [""]


def test_children_are_played_by_the_player_of_their_parent_actor(play):
    request = EpisodeRequest("boss", Artifact(0), models={"child": "version-7"})
    rollouts, engine = play(company(), workers, request)
    asked = [(engine.tokenizer.decode(request.prompt_ids), request.model) for request in engine.requests]
    assert {model for prompt, model in asked if "task" in prompt} == {"version-7"}
    assert {model for prompt, model in asked if "task" not in prompt} == {""}
    assert {rollout.actor for rollout in rollouts} == {"parent"}


def test_a_failing_child_ends_its_siblings_and_names_its_own_cause(play):
    ended = []

    class Fragile(Task):
        async def rollout(self, arena, artifact, state):
            if artifact.data == 1:
                raise ValueError("the ladder broke")
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(artifact.data)

    arena = company()
    arena.episodes["task"] = Fragile()
    with pytest.raises(ValueError, match="the ladder broke"):
        play(arena, workers, EpisodeRequest("boss", Artifact(0)))
    assert ended == [0, 2]


def test_a_continuation_goes_on_in_the_same_seat_and_rewards_add_up(play):
    class Chapter(Task):
        episode_type = "chapter"

        async def rollout(self, arena, artifact, state):
            await super().rollout(arena, artifact, state)
            if artifact.data < 3:
                state.then = EpisodeRequest("chapter", Artifact(artifact.data + 1))

    arena = company()
    arena.add_episode(Chapter())
    ((rollout,), engine) = play(arena, lambda prompt: "good", EpisodeRequest("chapter", Artifact(0)))
    assert (rollout.reward, rollout.kind, len(rollout.turns)) == (4.0, "chapter", 4)
    assert len(rollout.samples) == 4  # each begins a conversation of its own, and all share one reward
    assert len(engine.requests) == 4


# --- rubrics


def test_rewards_are_weighted_sums_of_sync_and_async_functions(play):
    def half(state, arena):
        return {"ann": 0.5}

    async def whole(state, arena):
        await asyncio.sleep(0)
        return {"ann": True, "bob": 2}

    class Judged(Gossip):
        rubric = Rubric([half, whole], weights=[2, -1])

    arena = Arena()
    arena.add_actor(Actor("ann"))
    arena.add_actor(Actor("bob"))
    arena.add_episode(Judged(2))
    rollouts, _ = play(arena, lambda prompt: "hi", EpisodeRequest("gossip", Artifact(0)))
    assert {rollout.actor: rollout.reward for rollout in rollouts} == {"ann": 0.0, "bob": -2.0}
    expected = {"half/ann": 0.5, "whole/ann": 1.0, "whole/bob": 2.0, "game_turns": 2.0}
    assert all(rollout.metrics == expected for rollout in rollouts)


def stranger(state, arena):
    return {"zoe": 1.0}


def lonely(state, arena):
    return 1.0


def wordy(state, arena):
    return {"ann": "much"}


@pytest.mark.parametrize(
    ("func", "sentence"),
    [
        (stranger, "rubric function `stranger` of episode `gossip` scores `zoe`, but .* are `ann`, `bob`"),
        (lonely, "rubric function `lonely` of episode `gossip` returned 1.0: return a dict of actor and number"),
        (wordy, "rubric function `wordy` of episode `gossip` returned 'much': return a number"),
    ],
)
def test_a_rubric_that_does_not_fit_is_a_sentence(play, func, sentence):
    class Judged(Gossip):
        rubric = Rubric([func])

    arena = Arena()
    arena.add_actor(Actor("ann"))
    arena.add_actor(Actor("bob"))
    arena.add_episode(Judged(2))
    with pytest.raises(Exception, match=sentence):
        play(arena, lambda prompt: "hi", EpisodeRequest("gossip", Artifact(0)))


def test_a_rubric_keeps_away_from_the_threads_of_the_event_loop(play):
    def where(state, arena):
        return {"ann": float(threading.current_thread().name.startswith("asyncio"))}

    class Judged(Gossip):
        rubric = Rubric([where])

    arena = Arena()
    arena.add_actor(Actor("ann"))
    arena.add_actor(Actor("bob"))
    arena.add_episode(Judged(2))
    rollouts, _ = play(arena, lambda prompt: "hi", EpisodeRequest("gossip", Artifact(0)))
    assert {rollout.reward for rollout in rollouts} == {0.0}


def test_weights_that_do_not_fit_are_a_sentence():
    with pytest.raises(ArenaError, match="a rubric has 1 functions but 2 weights: give one weight for each"):
        Rubric([lonely], weights=[1, 2])
    with pytest.raises(ArenaError, match="every weight must be a finite number"):
        Rubric([lonely], weights=[float("nan")])


# --- stores and draws


@laws
@given(st.integers(1, 8), st.lists(st.integers(), max_size=30), st.integers(0, 40), st.integers(0, 99))
def test_a_store_holds_the_newest_and_samples_each_at_most_once(size, numbers, k, seed):
    store = ArtifactStore(size)
    for number in numbers:
        store.add(Artifact(number))
    assert [artifact.data for artifact in store] == numbers[-size:] if numbers else store.count() == 0
    assert store.count() == len(store) == min(size, len(numbers))
    drawn = store.sample(k, random.Random(seed))
    assert len(drawn) == min(k, store.count())
    assert sorted(a.data for a in drawn) == sorted(a.data for a in drawn if a in list(store))
    back = ArtifactStore(size)
    back.load(json.loads(json.dumps(store.state())))
    assert list(back) == list(store)
    assert back.sample(k, random.Random(seed)) == drawn


class Drawing(Arena):
    """Draws from a store that its own draws fill."""

    def __init__(self) -> None:
        super().__init__(seed=3)
        self.add_actor(Actor("child"))
        self.add_episode(Task())
        self.add_store("seen", ArtifactStore(4))

    def get_batch(self):
        self.stores["seen"].add(Artifact(self.rng.randrange(1000)))
        return [EpisodeRequest("task", a) for a in self.stores["seen"].sample(3, self.rng) for _ in range(2)]


@laws
@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9))
def test_a_resumed_arena_draws_what_an_unbroken_one_would(before, after, oldest):
    """From the oldest draw that was not yet over at the checkpoint: those are played again."""
    unbroken, resumed = Drawing(), Drawing()
    drawn = [unbroken.draw(number) for number in range(before)]
    unbroken.forget(oldest)
    resumed.load(json.loads(json.dumps(unbroken.state())))
    drawn += [unbroken.draw(number) for number in range(before, before + after)]
    again = range(min(oldest, before), before + after)
    assert [resumed.draw(number) for number in again] == drawn[again.start :]


def test_a_group_draws_its_request_once_and_tries_of_one_thing_are_drawn_once():
    class Pairs(Drawing):
        def get_batch(self):
            return [EpisodeRequest("task", Artifact(n)) for n in "aabb"]

    environment = ArenaEnvironment(Pairs(), train_examples=5)
    rows = environment.examples("train")
    assert environment.examples("eval") == []
    dice = random.Random(0)
    drawn = [asyncio.run(environment.assign(dict(row), n, dice))["request"].artifact.data for n, row in enumerate(rows)]
    assert drawn == [*"ababa"]


def test_artifacts_of_equal_data_are_the_same():
    assert Artifact({"a": 1, "b": [2]}).id == Artifact({"b": [2], "a": 1}).id != Artifact({"a": 2, "b": [2]}).id
    assert Artifact(1, id="mine").id == "mine"


def test_evaluation_leaves_no_trace(play):
    class Noting(Task):
        async def rollout(self, arena, artifact, state):
            await super().rollout(arena, artifact, state)
            arena.store("seen").add(Artifact(arena.rng.random()))

    arena = Drawing()
    arena.episodes["task"] = Noting()
    before = json.dumps(arena.state())
    rollouts, _ = play(arena, workers, EpisodeRequest("task", Artifact(1), is_trainable=False), split="eval")
    assert [rollout.reward for rollout in rollouts] == [1.0]
    assert json.dumps(arena.state()) == before
    play(arena, workers, EpisodeRequest("task", Artifact(1)))
    assert json.dumps(arena.state()) != before


# --- what cannot be played


def test_an_unregistered_name_is_reported_with_the_registered_ones(play):
    arena = company()
    known = "registered are `boss`, `task`; add it with add_episode"
    with pytest.raises(ArenaError, match=f"episode type `bos` is not registered in this arena: {known}"):
        play(arena, workers, EpisodeRequest("bos", Artifact(0)))
    arena.episodes["boss"].rollout = lambda a, b, state: arena.call_model(state, [], "child")
    with pytest.raises(ArenaError, match=r"actor `child` has no seat in episode `boss`.*which are `parent`"):
        play(arena, workers, EpisodeRequest("boss", Artifact(0)))
    del arena.actors["child"]
    with pytest.raises(ArenaError, match=r"actor `child` is not registered .*: registered are `parent`; add it with"):
        play(arena, workers, EpisodeRequest("task", Artifact(0)))
    with pytest.raises(ArenaError, match="store `x` is not registered in this arena: registered are none"):
        arena.store("x")
    with pytest.raises(ArenaError, match="actor `parent` is registered already"):
        arena.add_actor(Actor("parent"))


def test_an_arena_with_nothing_to_play_is_refused_at_the_start():
    with pytest.raises(ArenaError, match="Arena has no actors or no episodes"):
        ArenaEnvironment(Arena())
    with pytest.raises(ArenaError, match=r"Arena has nothing to play: fill in requests\(\) or get_batch\(\)"):
        ArenaEnvironment(company()).examples("train")
    with pytest.raises(ArenaError, match="a store of 0 artifacts can hold nothing"):
        ArtifactStore(0)


def test_a_run_file_names_an_arena_by_import_path():
    path = f"{EXAMPLES / 'tic_tac_toe.py'}:TicTacToe"
    environment = arena_environment(ArenaEnvConfig(import_path=path, kwargs={"count": 10, "eval_games": 6}))
    assert environment.actors == ("x", "o")
    assert len(environment.examples("train")) == 10
    assert [row["request"].artifact.data["player"] for row in environment.examples("eval")] == [*"xoxoxo"]
    with pytest.raises(ArenaError, match=r"tic_tac_toe.py:SQUARES: gave 'abcdefghi', not a paceline.selfplay.Arena"):
        arena_environment(ArenaEnvConfig(import_path=path.replace("TicTacToe", "SQUARES")))


@pytest.mark.parametrize("name", ["proposer_solver.py:ProposerSolver", "negotiation.py:Negotiation"])
def test_the_examples_can_be_played(play, name):
    arena = example(name)()
    request = (arena.requests("train") or arena.get_batch())[0]
    rollouts, _ = play(arena, lambda prompt: "3", request)
    assert rollouts
    assert all(rollout.samples for rollout in rollouts)


SHOWN = EpisodeRequest("propose", Artifact({"operands": [17, 9]}))


def test_a_proposer_earns_most_from_questions_that_half_can_solve(play):
    for right in range(5):
        arena = example("proposer_solver.py:ProposerSolver")(solvers=4)
        said = iter(["25"] + ["42"] * right + ["41"] * (4 - right))
        before = list(arena.store("questions"))
        rollouts, engine = play(arena, lambda prompt, said=said: next(said), SHOWN)
        asked = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
        assert asked == [f"<|user|>{q}<|end|><|assistant|>" for q in ("ask: 17+9", *["add: 17+25"] * 4)]
        (proposer,) = [rollout for rollout in rollouts if rollout.actor == "proposer"]
        assert proposer.reward == pytest.approx(4 * (right / 4) * (1 - right / 4))
        assert sorted(r.reward for r in rollouts if r.parent == "proposer") == [0.0] * (4 - right) + [1.0] * right
        assert (list(arena.store("questions")) != before) == (0 < right < 4)
    for nonsense in ("", "100", "-1", "2+2", "add"):
        arena = example("proposer_solver.py:ProposerSolver")(solvers=4)
        rollouts, _ = play(arena, lambda prompt, said=nonsense: said, SHOWN)
        assert [(rollout.actor, rollout.reward) for rollout in rollouts] == [("proposer", 0.0)]


@pytest.mark.parametrize(
    ("said", "gains"),
    [
        ("955", {"seller": 3 / 9, "buyer": 2 / 9}),
        ("99", {"seller": 7 / 9, "buyer": -2 / 9}),
        ("912345", {"seller": 0.0, "buyer": 0.0}),
        ("9x", {"seller": 0.0, "buyer": -1.0}),
    ],
)
def test_negotiators_share_what_the_price_leaves_them(play, said, gains):
    arena = example("negotiation.py:Negotiation")()
    words = iter(said)
    rollouts, _ = play(arena, lambda p: next(words), EpisodeRequest("bargain", Artifact({"seller": 2, "buyer": 7})))
    assert {rollout.actor: rollout.reward for rollout in rollouts} == pytest.approx(gains)
    for rollout in rollouts:
        heard = "".join(m["content"] for m in rollout.turns[-1].messages if m["role"] == "user")
        assert ("7" in heard) == (rollout.actor == "buyer")
