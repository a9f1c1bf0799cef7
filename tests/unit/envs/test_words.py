"""The built-in words and additions: splits that cannot leak into each other, and draws that can be repeated."""

import random
import re
from collections import Counter

import pytest

from paceline.envs.words import additions, split_of, words

SPLITS = ("pretrain", "train", "eval")


def test_no_word_is_in_two_splits_whatever_the_seeds() -> None:
    drawn = {split: {word for seed in range(3) for word in words(split, 2000, seed)} for split in SPLITS}
    assert not drawn["pretrain"] & drawn["train"]
    assert not drawn["pretrain"] & drawn["eval"]
    assert not drawn["train"] & drawn["eval"]


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_drawn_belongs_to_the_split_asked_for(split) -> None:
    assert {split_of(word) for word in words(split, 1000, seed=4)} == {split}
    assert {split_of(f"{a}+{b}") for a, b in additions(split, 500, seed=4)} == {split}


def test_splits_never_change() -> None:
    """A published model was pretrained on one of these splits: moving an item would leak it into evaluation."""
    assert [split_of(text) for text in ("planet", "wonvar", "fud")] == ["pretrain", "train", "eval"]
    assert [split_of(text) for text in ("17+25", "88+13", "87+20")] == ["pretrain", "train", "eval"]


@pytest.mark.parametrize("draw", [words, additions])
def test_draws_depend_on_the_seed_and_on_nothing_else(draw) -> None:
    random.seed(1)
    first = draw("train", 300, seed=7)
    state = random.getstate()
    assert draw("train", 300, seed=7) == first
    assert random.getstate() == state
    assert draw("train", 300, seed=8) != first


@pytest.mark.parametrize("draw", [words, additions])
def test_a_longer_draw_has_no_repeats_and_the_count_asked_for(draw) -> None:
    assert len(set(draw("eval", 900, seed=0))) == 900


def test_words_are_pronounceable_and_tell_the_three_skills_apart() -> None:
    for word in words("train", 3000, seed=2):
        assert re.fullmatch(r"[a-z]{3,8}", word)
        assert re.search(r"[aeiou]", word)
        assert not re.search(r"[^aeiou]{4}", word)
        assert len({word, word[::-1], "".join(sorted(word))}) == 3


def test_additions_cover_all_operands_and_stay_below_a_hundred() -> None:
    pairs = [pair for split in SPLITS for pair in additions(split, 900, seed=3)]
    assert {operand for pair in pairs for operand in pair} == set(range(100))


def test_shares_are_about_seventy_twenty_ten() -> None:
    counts = Counter(split_of(f"{a}+{b}") for a in range(100) for b in range(100))
    assert counts["pretrain"] == pytest.approx(7000, abs=200)
    assert counts["train"] == pytest.approx(2000, abs=200)
    assert counts["eval"] == pytest.approx(1000, abs=200)


def test_asking_for_too_many_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="holds 984 additions, but 1000 were asked for"):
        additions("eval", 1000, seed=0)
    with pytest.raises(ValueError, match="at most 50000 distinct words"):
        words("eval", 50_001, seed=0)
