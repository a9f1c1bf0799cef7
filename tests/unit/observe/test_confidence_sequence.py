"""A difference is called real at most once in twenty pairs of equals, however often one looks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.record.paired import ALPHA, LEAST_DIFFERENCES, confidence_sequence

LOOKS, PAIRS = 1500, 400


def coins(dice: np.random.Generator) -> np.ndarray:
    """Rewards of 0 or 1 of two equals that mostly say the same."""
    return dice.choice([-1.0, 0.0, 1.0], LOOKS, p=[0.1, 0.8, 0.1])


def drawn(dice: np.random.Generator) -> np.ndarray:
    return dice.normal(0.0, 0.3, LOOKS)


def skewed(dice: np.random.Generator) -> np.ndarray:
    return dice.exponential(1.0, LOOKS) - 1.0


@pytest.mark.parametrize("luck", [coins, drawn, skewed])
def test_equals_are_rarely_told_apart_at_any_time(luck):
    told = [confidence_sequence(luck(np.random.default_rng(seed))).decided_after is not None for seed in range(PAIRS)]
    assert np.mean(told) <= ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / PAIRS)


def test_a_test_that_is_only_repeated_would_tell_them_apart_again_and_again():
    """Why this is not a t-test after every step."""
    n = np.arange(1, LOOKS + 1)
    fooled = 0
    for seed in range(PAIRS):
        values = drawn(np.random.default_rng(seed))
        mean = np.cumsum(values) / n
        error = np.sqrt(np.maximum(np.cumsum(values**2) / n - mean**2, 0) / n)
        fooled += bool((np.abs(mean) > 1.96 * error)[LEAST_DIFFERENCES:].any())
    assert fooled > 0.25 * PAIRS


def test_a_true_difference_is_found_and_has_its_sign():
    found = [confidence_sequence(drawn(np.random.default_rng(seed)) + 0.1).decided_after for seed in range(50)]
    assert all(found)
    assert np.median([one or LOOKS for one in found]) < 300


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=200), st.floats(0.1, 10))
def test_the_unit_of_the_reward_does_not_matter_and_who_is_first_only_for_the_sign(values, unit):
    given = np.array(values)
    plain, other = confidence_sequence(given), confidence_sequence(-unit * given)
    np.testing.assert_allclose(other.mean, -unit * plain.mean, atol=1e-12)
    np.testing.assert_allclose(other.radius, unit * plain.radius, atol=1e-6)  # of equals, the root of a rounding error
    assert plain.decided_after == other.decided_after


@pytest.mark.parametrize("values", [[], [1.0] * (LEAST_DIFFERENCES - 1), [0.0] * 500])
def test_too_little_says_nothing(values):
    assert confidence_sequence(np.array(values)).decided_after is None
