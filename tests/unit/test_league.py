"""Laws of the league: ratings tell what the games tell, and matchmaking repeats itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.arena.matchmaking import Matchmaker
from paceline.arena.payoff import Payoff
from paceline.arena.ratings import SCALE, rate

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
    chance = 1 / (1 + np.exp((true[None, :] - true[:, None]) / SCALE))
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
    maker, past = Matchmaker("hardest", mirror=0.25, seed=7), ["weak", "strong"]
    drawn = [maker.draw(n, "me", past, payoff) for n in range(400)]
    assert drawn == [Matchmaker("hardest", mirror=0.25, seed=7).draw(n, "me", past, payoff) for n in range(400)]
    assert 60 < drawn.count("me") < 140
    assert drawn.count("strong") > 20 * drawn.count("weak")
    assert {Matchmaker("latest", mirror=0).draw(n, "me", past, payoff) for n in range(20)} == {"strong"}
    even = [Matchmaker("uniform", mirror=0).draw(n, "me", past, payoff) for n in range(400)]
    assert 150 < even.count("weak") < 250
    assert Matchmaker("hardest", mirror=0).draw(0, "me", [], payoff) == "me"
