"""Laws of the curriculum: hard rows come more often, none is out of reach, and a resumed run draws the same."""

import json
import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.env import CurriculumConfig
from paceline.data import Cursor, DataError, make_cursor
from paceline.data.sampler import Curriculum, Mixture, MixtureCursor, SumTree

laws = settings(max_examples=40, deadline=None)
REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.49, 0.5, 1.0, 3.0]), max_size=4)
LIVES = st.lists(st.tuples(st.integers(0, 6), REWARDS), max_size=30)
"""Rows and how they went."""


SETTINGS = st.builds(
    CurriculumConfig,
    rate=st.floats(0.01, 1),
    sharpness=st.floats(0, 20),
    floor=st.floats(1e-6, 1),
    start=st.floats(0, 1),
    pass_at=st.sampled_from([-0.5, 0.5, 2.0]),
)


def lived(rows: int, life, seed: int = 0, name: str = "env", settings: CurriculumConfig | None = None) -> Curriculum:
    curriculum = Curriculum(rows, seed, name, settings)
    for row, rewards in life:
        curriculum.update(row % rows, rewards)
    return curriculum


@laws
@given(st.integers(1, 7), LIVES, SETTINGS)
def test_probabilities_are_the_formula(rows, life, c):
    accuracy, seen = [c.start] * rows, set()
    for row, rewards in life:
        orders = [accuracy[row % rows]] * math.factorial(len(rewards))
        for at, order in enumerate(permutations(rewards)):
            for reward in order:
                orders[at] = (1 - c.rate) * orders[at] + c.rate * (reward >= c.pass_at)
        accuracy[row % rows] = sum(orders) / len(orders)
        seen |= {row % rows} if rewards else set()
    curriculum = lived(rows, life, settings=c)
    np.testing.assert_allclose(curriculum.accuracy, accuracy, rtol=1e-5, atol=1e-7)
    weights = [math.exp(c.sharpness * (1 - a)) for a in accuracy]
    expected = [(1 - c.floor) * w / sum(weights) + c.floor / rows for w in weights]
    np.testing.assert_allclose(curriculum.probabilities(), expected, rtol=1e-4)
    assert curriculum.probabilities().sum() == pytest.approx(1)
    assert curriculum.probabilities().min() >= c.floor / rows * (1 - 1e-12)
    metrics = curriculum.metrics()
    assert metrics["accuracy"] == pytest.approx(sum(accuracy) / rows, rel=1e-5, abs=1e-7)
    assert metrics["seen"] == len(seen) / rows
    assert metrics["effective_rows"] == pytest.approx(1 / sum(p * p for p in expected), rel=1e-4)
    assert metrics["effective_rows"] + 1e-9 >= 1
    assert metrics["effective_rows"] <= rows + 1e-6


def test_the_defaults_are_those_of_the_formula_as_it_is_told():
    c = CurriculumConfig()
    assert (c.rate, c.sharpness, c.floor, c.start, c.pass_at) == (0.05, 3.0, 1e-3, 0.5, 0.5)
    plain, given_ = lived(3, [(0, [1.0])]), lived(3, [(0, [1.0])], settings=c)
    assert plain.state() == given_.state()


def test_mastered_and_hopeless_rows_are_counted_once_they_were_seen():
    c = CurriculumConfig(start=1.0, mastered_at=0.9, hopeless_at=0.1)
    curriculum = lived(10, [(0, [1.0] * 8), *[(1, [0.0] * 100)], (2, [0.0] * 4)], settings=c)
    metrics = curriculum.metrics()
    assert (metrics["seen"], metrics["mastered"], metrics["hopeless"]) == (0.3, 0.1, 0.1)


def test_other_settings_on_resume_are_told_and_hold_from_then_on():
    before = lived(9, [(0, [1.0] * 8), (1, [0.0] * 8)])
    state = json.loads(json.dumps(before.state()))
    same = Curriculum(9, 0, "env")
    assert same.load(state) == ""
    assert same.state() == before.state()
    other = Curriculum(9, 0, "env", CurriculumConfig(sharpness=6.0, start=0.25, floor=0.1))
    assert (
        other.load(state) == "the curriculum's sharpness from 3 to 6, floor from 0.001 to 0.1, start from 0.5 to 0.25"
    )
    assert list(other.accuracy[:2]) == list(before.accuracy[:2])
    assert list(other.accuracy[2:]) == [0.25] * 7
    weights = np.exp(6.0 * (1 - other.accuracy.astype(float)))
    np.testing.assert_allclose(other.probabilities(), 0.9 * weights / weights.sum() + 0.1 / 9)
    old = {name: value for name, value in state.items() if name not in ("settings", "seen")}  # of an earlier version
    assert same.load(old) == ""
    assert same.seen.tolist() == before.seen.tolist()


@laws
@given(st.integers(1, 7), LIVES, LIVES, st.integers(0, 2**63), st.text(max_size=3), st.integers(0, 20), SETTINGS)
def test_a_draw_is_a_pure_function_of_seed_index_and_state(rows, before, after, seed, name, draws, c):
    def go_on(curriculum):
        drawn = []
        for row, rewards in after:
            drawn.append(curriculum.draw())
            curriculum.update(row % rows, rewards)
        return [*drawn, curriculum.draw()]

    unbroken = lived(rows, before, seed, name, c)
    for _ in range(draws):
        unbroken.draw()
    state = json.loads(json.dumps(unbroken.state()))
    resumed = lived(rows, after, seed, name, c)  # whatever it did before, it goes on from the checkpoint
    resumed.load(state)
    assert resumed.state() == state
    drawn = go_on(unbroken)
    assert go_on(resumed) == drawn
    assert resumed.state() == unbroken.state()
    assert [(epoch, index) for epoch, index, _ in drawn] == [(i // rows, i) for i in range(draws, unbroken.draws)]
    assert all(0 <= row < rows for _, _, row in drawn)


def test_rows_are_drawn_as_often_as_their_probabilities_say():
    rng = np.random.default_rng(1)
    rows, draws = 50, 20_000
    curriculum = lived(rows, [(row, rng.random(8) < row / rows) for row in range(rows) for _ in range(40)], seed=7)
    expected = draws * curriculum.probabilities()
    counts = Counter(curriculum.draw()[2] for _ in range(draws))
    squares = sum((counts[row] - expected[row]) ** 2 / expected[row] for row in range(rows))
    # Chi-squared with 49 degrees of freedom: mean 49, standard deviation 9.9.
    assert 49 - 4 * 9.9 < squares < 49 + 4 * 9.9
    assert max(expected) / min(expected) > 10  # so that equal shares would fail


def test_other_seeds_names_and_indices_draw_other_rows():
    drawn = {
        (seed, name): [curriculum.draw()[2] for _ in range(20)]
        for seed in (0, 1)
        for name in ("a", "b")
        for curriculum in [Curriculum(1000, seed, name)]
    }
    assert len({tuple(rows) for rows in drawn.values()}) == 4
    assert all(len(set(rows)) > 15 for rows in drawn.values())


@laws
@given(st.integers(2, 400), st.integers(1, 300))
def test_a_row_always_right_becomes_rare_and_never_impossible(rows, groups):
    curriculum = lived(rows, [(0, [1.0] * 8)] * groups)
    right, *others = curriculum.probabilities()
    assert right < min(others)
    assert right >= 1e-3 / rows
    forgotten = curriculum.probabilities()[0]
    curriculum.update(0, [0.0] * 8)
    assert curriculum.probabilities()[0] > forgotten


def test_a_row_always_right_is_still_drawn():
    curriculum = lived(40, [(0, [1.0] * 8)] * 100)
    counts = Counter(curriculum.draw()[2] for _ in range(4000))
    assert 0 < counts[0] < min(count for row, count in counts.items() if row)


@laws
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any), st.data())
def test_a_tree_finds_what_a_running_sum_finds(leaves, data):
    tree = SumTree(np.zeros(len(leaves)))
    for leaf in data.draw(st.permutations(range(len(leaves)))):
        tree[leaf] = float(leaves[leaf])
    total = sum(leaves)
    covered = [leaf for leaf, weight in enumerate(leaves) for _ in range(weight)]
    # Halves of a unit, so that rounding cannot move a place across an edge.
    assert [tree.find((unit + 0.5) / total) for unit in range(total)] == covered
    assert leaves[tree.find(np.nextafter(1.0, 0.0))] > 0


def test_rounding_never_finds_what_is_not_there():
    leaves = np.array([3.2712136193526606, 5.839558731345578, 17.16162535221479])  # halves that do not add up
    assert SumTree(leaves).find(np.nextafter(1.0, 0.0)) == 2


def test_the_state_is_small():
    rows = 20_000
    curriculum = Curriculum(rows, 0, "env")
    assert len(json.dumps(curriculum.state())) < 1000
    rng = np.random.default_rng(0)
    for row in rng.permutation(rows):
        curriculum.update(int(row), rng.random(4))
    assert len(json.dumps(curriculum.state())) < 2 * rows


def test_a_state_that_does_not_fit_is_one_sentence():
    state = Curriculum(3, 0, "env").state()
    for broken, sentence in (
        (3, "made without a curriculum"),
        ({**state, "seen": "!"}, "cannot be read"),
        ({**state, "seen": Curriculum(20, 0, "env").state()["seen"]}, "marks 24 rows as seen, not 3"),
        ({**state, "rows": 4}, "knows 4 rows, the dataset has 3"),
        ({**state, "accuracy": "!"}, "cannot be read"),
        ({**state, "accuracy": "AAAA"}, "cannot be read"),
        ({**state, "accuracy": Curriculum(2, 0, "env").state()["accuracy"]}, "holds 2 accuracies for 3 rows"),
    ):
        with pytest.raises(DataError, match=sentence):
            Curriculum(3, 0, "env").load(broken)


def test_the_order_is_chosen_once():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    mixture = Mixture({"x": rows, "y": rows}, {"x": 1, "y": 1})
    assert isinstance(make_cursor(rows, 0, "env"), Cursor)
    assert isinstance(make_cursor(rows, 0, "env", curriculum=True), Curriculum)
    assert isinstance(make_cursor(mixture, 0, "env"), MixtureCursor)
    for order in (make_cursor(rows, 0, "env"), make_cursor(mixture, 0, "env")):
        before = order.state()
        order.update(1, [1.0])
        assert order.state() == before
    for listening in (make_cursor(rows, 0, "env", curriculum=True), make_cursor(mixture, 0, "env", curriculum=True)):
        before = listening.state()
        listening.update(1, [1.0])
        assert listening.state() != before


def test_a_mixtures_parts_have_metrics_of_their_own():
    mixture = Mixture(
        {"data/x.jsonl": [{"prompt": "a"}], "y.csv": [{"prompt": "b"}] * 3}, {"data/x.jsonl": 1, "y.csv": 1}
    )
    cursor = make_cursor(mixture, 0, "env", CurriculumConfig(rate=1.0))
    cursor.update(0, [1.0])
    cursor.update(2, [0.0])
    metrics = cursor.metrics()
    assert {name: metrics[name] for name in ("x/accuracy", "x/seen", "y/accuracy", "y/seen")} == pytest.approx(
        {"x/accuracy": 1.0, "x/seen": 1.0, "y/accuracy": 1 / 3, "y/seen": 1 / 3}
    )
    assert make_cursor(mixture, 0, "env").metrics() == {}


def test_a_checkpoint_of_another_kind_of_order_is_one_sentence():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    mixture = Mixture({"x": rows, "y": rows}, {"x": 1, "y": 1})
    plain, mixed = make_cursor(rows, 0, "env"), make_cursor(mixture, 0, "env")
    for cursor, state, sentence in (
        (plain, Curriculum(2, 0, "env").state(), "was made with a curriculum"),
        (plain, mixed.state(), "mixes several datasets"),
        (mixed, plain.state(), "mixes 1 datasets, the run file 2"),
    ):
        with pytest.raises(DataError, match=sentence):
            cursor.load(state)
