"""Laws of the league: ratings tell what the games tell, matchmaking repeats itself, and the past still speaks."""

import asyncio
import json
import random
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import tiny_model
from paceline.clients.pool import LeaguePool
from paceline.config import env as config
from paceline.config.inference import EngineConfig
from paceline.engine import EmbeddedEngine, GenerateRequest
from paceline.observe.analysis.payoff import ELO_SCALE, Payoff, draw_league, rate
from paceline.selfplay import Artifact, EpisodeRequest, EpisodeResult, League, Match
from paceline.selfplay.league import draw_opponent
from paceline.weights.update import Adapter, WeightUpdate

GAMES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.sampled_from([0.0, 0.5, 1.0])).filter(
        lambda game: game[0] != game[1]
    ),
    min_size=1,
    max_size=30,
)


def played(games) -> Payoff:
    payoff = Payoff()
    for game in games:
        payoff.add(*game)
    return payoff


def points(payoff: Payoff) -> dict[str, float]:
    return {rating.player: rating.points for rating in payoff.ratings()}


@settings(deadline=None)
@given(GAMES, st.randoms(use_true_random=False))
def test_ratings_do_not_depend_on_the_order_of_games_or_on_who_tells_them(games, rng):
    told = [(b, a, 1 - s) if rng.random() < 0.5 else (a, b, s) for a, b, s in rng.sample(games, len(games))]
    before, after = points(played(games)), points(played(told))
    assert before.keys() == after.keys()
    assert all(abs(before[player] - after[player]) < 1e-3 for player in before)


@settings(deadline=None)
@given(GAMES)
def test_ratings_are_finite_centred_and_inside_their_interval(games):
    ratings = played(games).ratings()
    assert abs(sum(rating.points for rating in ratings)) < 1e-6
    for rating in ratings:
        assert np.isfinite([rating.points, rating.low, rating.high]).all()
        assert rating.low < rating.points < rating.high


@settings(deadline=None)
@given(GAMES)
def test_what_one_takes_the_other_loses(games):
    payoff = played(games)
    for a in payoff.players:
        for b in payoff.players:
            if a != b and payoff.games(a, b):
                assert payoff.score(a, b) + payoff.score(b, a) == pytest.approx(1)
                assert payoff.games(a, b) == payoff.games(b, a)


def test_a_state_brings_everything_back():
    payoff = played([("a", "b", 1.0), ("b", "c", 0.5), ("c", "a", 0.0)])
    other = Payoff()
    other.load(payoff.state())
    assert other == payoff
    assert other.table().row_count == 3


def test_true_strengths_are_found_again():
    """Ten thousand simulated games: the ratings' differences are the truth's, and intervals shrink with games."""
    true = np.array([0.0, 60.0, 150.0, 400.0])
    chance = 1 / (1 + np.exp((true[None, :] - true[:, None]) / ELO_SCALE))
    rng = np.random.default_rng(3)

    def simulated(games: int) -> np.ndarray:
        scores = np.zeros((4, 4))
        for i in range(4):
            for j in range(i):
                scores[i, j] = rng.binomial(games, chance[i, j])
                scores[j, i] = games - scores[i, j]
        return scores

    few, many = (rate("wxyz", simulated(games)) for games in (20, 2000))
    found = np.array([rating.points for rating in many])
    np.testing.assert_allclose(found - found[0], true, atol=25)
    assert all(a.high - a.low < b.high - b.low for a, b in zip(many, few, strict=True))
    outside = sum(not r.low <= t - true.mean() <= r.high for r, t in zip(many, true, strict=True))
    assert outside <= 1


def test_a_point_beyond_a_game_is_refused():
    with pytest.raises(ValueError, match="0 to 1 point, not 2"):
        Payoff().add("a", "b", 2)


def test_matchmaking_is_a_pure_function_and_prefers_those_it_loses_to():
    payoff = played([("me", "strong", 0.0)] * 8 + [("me", "weak", 1.0)] * 8)
    past = ["weak", "strong"]

    def drawn(rule: str, mirror: float) -> list[str]:
        c = config.LeagueConfig(rule=rule, mirror=mirror)
        return [draw_opponent(c, random.Random(n), "me", past, payoff) for n in range(400)]

    hardest = drawn("hardest", 0.25)
    assert hardest == drawn("hardest", 0.25)
    assert 60 < hardest.count("me") < 140
    assert hardest.count("strong") > 20 * hardest.count("weak")
    assert set(drawn("latest", 0)) == {"strong"}
    assert 150 < drawn("uniform", 0).count("weak") < 250
    assert draw_opponent(config.LeagueConfig(rule="hardest", mirror=0), random.Random(0), "me", [], payoff) == "me"


def test_intervals_tell_players_apart_and_not_from_nowhere():
    """What all players have in common cannot be known, so it must not blur how they differ."""
    payoff = played([("new", "old", 1.0)] * 40 + [("new", "old", 0.0)] * 8)
    new, old = payoff.ratings()
    assert (new.player, old.player) == ("new", "old")
    assert new.low > old.high
    wider = played([("new", "old", 1.0)] * 5 + [("new", "old", 0.0)]).ratings()[0]
    assert wider.high - wider.low > 2 * (new.high - new.low)


# --- who is in it


@settings(deadline=None)
@given(
    size=st.integers(2, 5),
    every=st.integers(1, 4),
    steps=st.integers(0, 40),
    busy=st.dictionaries(st.integers(0, 40), st.integers(1, 9)),
)
def test_a_league_keeps_the_first_version_never_more_than_its_size_and_no_player_leaves_in_play(
    size, every, steps, busy
):
    """`busy` says for how many versions some of them are in a game, from when they come."""
    league, addresses, games = League(config.LeagueConfig(size=size, every=every), "chess"), {}, {}
    with ExitStack() as stack:
        for version in range(steps + 1):
            for playing in [v for v, (until, _) in games.items() if until == version]:
                games.pop(playing)[1].close()
            before = set(league.versions)
            address = league.admit(version)
            left = before - set(league.versions)
            assert not left & games.keys()
            addresses = {v: a for v, a in addresses.items() if v not in left}
            if address is not None:
                assert address not in addresses.values(), "two versions under one name"
                addresses[version] = address
                if version in busy:
                    game = stack.enter_context(ExitStack())
                    game.enter_context(league.pin(f"v{version}"))
                    games[version] = version + busy[version], game
            assert league.versions == sorted(addresses)
            assert len(league.versions) <= size
            assert league.versions[0] == 0
            if not games:
                assert version // every == league.versions[-1] // every, "no version that is due is passed over"
    assert {league.address(name) for name in league.version_names} == set(addresses.values())
    assert league.address(f"v{steps + 1}") is None


def draws(league: League, numbers=range(60)) -> list[Match | None]:
    return [league.draw(("x", "o"), number, random.Random(number)) for number in numbers]


def test_a_leaving_version_is_met_no_more_and_goes_when_its_games_are_over():
    league = League(config.LeagueConfig(size=2, every=4, mirror=0), "chess")
    league.admit(0)
    league.admit(4)
    with league.pin("v4"):
        assert {match.opponent for match in draws(league)} == {"v0", "v4"}
        assert league.admit(8) is None
        assert {match.opponent for match in draws(league)} == {"v0"}
        assert league.address("v4"), "its games go on"
    assert league.admit(9) == "chess/past-1"
    assert league.versions == [0, 9]
    assert {match.opponent for match in draws(league)} == {"v0", "v9"}
    assert league.admit(11) is None
    assert league.admit(12) is not None


def test_a_new_version_is_not_met_before_it_has_arrived():
    league = League(config.LeagueConfig(size=3, every=1, mirror=0), "chess")
    league.admit(0)
    league.admit(1)
    with league.loading(1):
        assert {match.opponent for match in draws(league)} == {"v0"}
    assert {match.opponent for match in draws(league)} == {"v0", "v1"}


def test_a_full_league_is_spread_over_the_run():
    league = League(config.LeagueConfig(size=4, every=1), "chess")
    for version in range(13):
        league.admit(version)
    assert league.versions[0] == 0
    assert league.versions[-1] == 12
    assert max(np.diff(league.versions)) <= 6


@settings(deadline=None)
@given(larger=st.integers(2, 6), smaller=st.integers(2, 6), steps=st.integers(0, 20))
def test_a_league_that_was_larger_once_keeps_its_first_and_its_newest_and_goes_on(larger, smaller, steps):
    before, after = (League(config.LeagueConfig(size=size, every=1), "chess") for size in (larger, smaller))
    for version in range(steps + 1):
        before.admit(version)
    after.load(json.loads(json.dumps(before.state())))
    left = after.shrink()
    assert sorted([*left, *after.version_names]) == sorted(before.version_names)
    assert len(after.versions) == min(smaller, len(before.versions))
    assert {after.versions[0], after.versions[-1]} == {0, steps}
    for version in range(steps + 1, steps + 9):
        assert after.admit(version) is not None
        assert len(after.versions) <= smaller
        assert len({after.address(name) for name in after.version_names}) == len(after.versions)


# --- games


def game(learner: float, opponent: float) -> EpisodeResult:
    request = EpisodeRequest("game", Artifact(0))
    return EpisodeResult(request, {}, {"x": learner, "o": opponent}, {}, [], {})


def league_of_three(**more) -> League:
    league = League(config.LeagueConfig(**({"size": 3, "every": 1, "mirror": 0.25} | more)), "chess")
    for version in range(3):
        league.admit(version)
    return league


REPORTS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["v0", "v1", "v2"]), st.sampled_from([-1.0, 0.0, 1.0])), max_size=20
)


@settings(deadline=None)
@given(REPORTS, st.randoms(use_true_random=False))
def test_who_is_met_does_not_depend_on_whose_game_was_over_first(reports, rng):
    leagues = league_of_three(every=3), league_of_three(every=3)
    before = draws(leagues[0])
    for league, told in zip(leagues, (reports, rng.sample(reports, len(reports))), strict=True):
        for number, opponent, reward in told:
            league.report(Match("x", opponent, 1000 + number), game(reward, 0.0))
            league.report(Match("x", opponent, number), game(reward, 0.0), rated=True)
        assert draws(league) == before, "results count from the next version on"
        assert league.record_ratings(2) == len(reports)
        league.admit(4)
    assert leagues[0].state() == leagues[1].state()
    assert draws(leagues[0]) == draws(leagues[1])


def test_results_of_training_decide_who_is_met_next():
    league = league_of_three(every=3, mirror=0)
    league.admit(3)
    for opponent, reward in (("v0", 1.0), ("v3", -1.0)):
        for number in range(9):
            league.report(Match("x", opponent, number), game(reward, 0.0))
    league.admit(4)
    met = [match.opponent for match in draws(league)]
    assert met.count("v3") > 10 * met.count("v0")


def test_a_draw_that_is_played_again_meets_whom_it_met_and_counts_once():
    unbroken, resumed = league_of_three(every=9), league_of_three(every=9)
    first = draws(unbroken)
    for match in filter(None, first[:30]):
        unbroken.report(match, game(1.0, 0.0))
    resumed.load(json.loads(json.dumps(unbroken.state())))
    resumed.admit(2)  # a resumed run publishes the version it begins with
    assert resumed.state() == unbroken.state()
    again = draws(resumed, range(20, 60))  # the ten before were dropped, and are not played again
    assert again == first[20:]
    for match in filter(None, again[:10]):
        resumed.report(match, game(1.0, 0.0))
    for league in (unbroken, resumed):
        league.admit(3)
    assert resumed.state() == unbroken.state()


def test_the_policy_learns_in_every_seat_of_every_opening():
    """Openings that take turns must not give the policy one seat in the one and the other in the other."""
    league = league_of_three(mirror=0.25)
    drawn = draws(league, range(400))
    assert 0.6 < sum(match is not None for match in drawn) / len(drawn) < 0.9
    for period in (2, 3, 4):
        for opening in range(period):
            seats = [match.learner for match in drawn[opening::period] if match is not None]
            assert 0.3 < seats.count("x") / len(seats) < 0.7


def test_games_of_training_are_not_for_the_ratings_and_a_state_brings_all_back():
    league, other = league_of_three(), league_of_three()
    league.report(Match("x", "v1"), game(1.0, -1.0))
    league.report(Match("o", "v1"), game(0.5, 0.5), rated=True)
    assert league.record_ratings(2) == 1
    other.load(json.loads(json.dumps(league.state())))
    assert other.state() == league.state()
    assert other.payoff.score("v2", "v1") == 0.5
    assert other.payoff.games("v2", "v1") == 1


def test_a_league_that_goes_back_forgets_what_was_under_way():
    league = League(config.LeagueConfig(size=2, every=4, mirror=0), "chess")
    league.admit(0)
    league.admit(4)
    then = json.loads(json.dumps(league.state()))
    with league.pin("v4"):
        assert league.admit(8) is None, "v4 is to leave"
    league.report(Match("x", "v0"), game(1.0, -1.0), rated=True)
    league.load(then)
    assert {match.opponent for match in draws(league)} == {"v0", "v4"}
    assert league.record_ratings(4) == 0


# --- the past speaks


def whole(version: int, seed: int) -> WeightUpdate:
    return WeightUpdate(version, dict(tiny_model(seed).named_parameters()))


def adapter(version: int, seed: int) -> WeightUpdate:
    generator = torch.Generator().manual_seed(seed)
    layer = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"{layer}.lora_A.weight": torch.randn(2, 32, generator=generator),
        f"{layer}.lora_B.weight": torch.randn(32, 2, generator=generator),
    }
    return WeightUpdate(version, tensors, Adapter("", 2.0))


@pytest.mark.parametrize("update", [whole, adapter])
def test_a_past_version_says_what_it_said_when_it_was_the_policy(update):
    settings = EngineConfig(adapters=3 if update is adapter else 0, adapter_rank=2)
    ask = GenerateRequest(prompt_ids=(5, 6, 7, 8), max_tokens=24, noise=3)

    def make() -> EmbeddedEngine:
        return EmbeddedEngine(tiny_model(9), settings)

    async def talk(pool):
        said = {}
        for version in range(3):
            await pool.load_weights(update(version, version))
            await pool.keep(f"chess/past-{version % 2}", update(version, version))
            said[version] = (await pool.generate(ask)).token_ids
        for place, version in ((0, 2), (1, 1)):  # version 0 has lost its place to version 2
            answer = await pool.generate(GenerateRequest(**{**_fields(ask), "model": f"chess/past-{place}"}))
            assert answer.token_ids == said[version]
            assert set(answer.versions) == {version}
        assert len({tuple(ids) for ids in said.values()}) == 3

    engine = make()
    engine.start()
    pool = LeaguePool([engine], make)
    try:
        asyncio.run(talk(pool))
    finally:
        pool.close()
        engine.close()


def _fields(request: GenerateRequest) -> dict:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def test_a_league_can_be_looked_at(tmp_path):
    payoff = played([("v40", "v0", 1.0), ("v40", "v20", 0.5), ("v20", "v0", 1.0)])
    draw_league(payoff, tmp_path / "league.png", "chess")
    assert (tmp_path / "league.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["league.png"]
