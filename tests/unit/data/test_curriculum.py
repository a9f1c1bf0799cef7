"""Laws of the curriculum: hard rows come more often, none is out of reach, and a resumed run draws the same."""

import json
import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Cursor, DataError, make_cursor
from paceline.data.sampler import Curriculum, Mixture, MixtureCursor, SumTree

laws = settings(max_examples=40, deadline=None)
REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.49, 0.5, 1.0, 3.0]), max_size=4)
LIVES = st.lists(st.tuples(st.integers(0, 6), REWARDS), max_size=30)
"""Rows and how they went."""


def lived(rows: int, life, seed: int = 0, name: str = "env") -> Curriculum:
    curriculum = Curriculum(rows, seed, name)
    for row, rewards in life:
        curriculum.update(row % rows, rewards)
    return curriculum


@laws
@given(st.integers(1, 7), LIVES)
def test_probabilities_are_the_formula(rows, life):
    accuracy = [0.5] * rows
    for row, rewards in life:
        orders = [accuracy[row % rows]] * math.factorial(len(rewards))
        for at, order in enumerate(permutations(rewards)):
            for reward in order:
                orders[at] = 0.95 * orders[at] + 0.05 * (reward >= 0.5)
        accuracy[row % rows] = sum(orders) / len(orders)
    curriculum = lived(rows, life)
    np.testing.assert_allclose(curriculum.accuracy, accuracy, rtol=1e-5)
    weights = [math.exp(3 * (1 - a)) for a in accuracy]
    expected = [(1 - 1e-3) * w / sum(weights) + 1e-3 / rows for w in weights]
    np.testing.assert_allclose(curriculum.probabilities(), expected, rtol=1e-5)
    assert curriculum.probabilities().sum() == pytest.approx(1)


@laws
@given(st.integers(1, 7), LIVES, LIVES, st.integers(0, 2**63), st.text(max_size=3), st.integers(0, 20))
def test_a_draw_is_a_pure_function_of_seed_index_and_state(rows, before, after, seed, name, draws):
    def go_on(curriculum):
        drawn = []
        for row, rewards in after:
            drawn.append(curriculum.draw())
            curriculum.update(row % rows, rewards)
        return [*drawn, curriculum.draw()]

    unbroken = lived(rows, before, seed, name)
    for _ in range(draws):
        unbroken.draw()
    state = json.loads(json.dumps(unbroken.state()))
    resumed = lived(rows, after, seed, name)  # whatever it did before, it goes on from the checkpoint
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
