"""Made-up words and additions for the built-in tasks, in three splits that can never overlap.

The split of an item is a hash of the item itself, not a slice of some list. So the text the quickstart model was
pretrained on, the prompts RL trains on and the prompts it is evaluated on stay disjoint whatever counts and seeds are
asked for, now or in a later release.
"""

import hashlib
import random
from functools import cache
from typing import Literal

Split = Literal["pretrain", "train", "eval"]

MIN_LETTERS, MAX_LETTERS = 3, 8
MAX_OPERAND = 99

# Well below what the smallest split holds, so that drawing until enough distinct words are found always ends.
MAX_WORDS = 50_000

_ONSETS = (*"bcdfghjklmnprstvwz", "br", "dr", "fl", "gr", "kl", "pl", "sk", "st", "tr")
_VOWELS = "aeiou"
_CODAS = ("", "", "", *"lmnprstkdx")
_SYLLABLES = (1, 2, 2, 3, 3, 4)


def split_of(word: str) -> Split:
    """The split a word, or an addition written "17+25", belongs to: 70% pretrain, 20% train, 10% eval."""
    bucket = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest()) % 10
    if bucket < 7:
        return "pretrain"
    return "train" if bucket < 9 else "eval"


def words(split: Split, count: int, seed: int) -> list[str]:
    """`count` distinct pronounceable lowercase words of 3 to 8 letters; the same arguments give the same list."""
    if count > MAX_WORDS:
        raise ValueError(f"words() gives at most {MAX_WORDS} distinct words, but {count} were asked for")
    return list(_words(split, count, seed))


def additions(split: Split, count: int, seed: int) -> list[tuple[int, int]]:
    """`count` distinct pairs of operands from 0 to 99; the same arguments give the same list."""
    pairs = _pairs(split)
    if count > len(pairs):
        raise ValueError(f"the {split} split holds {len(pairs)} additions, but {count} were asked for")
    return random.Random(seed).sample(pairs, count)


@cache
def _words(split: Split, count: int, seed: int) -> tuple[str, ...]:
    """The same, made once: a run asks for its rows several times while it starts."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        word = _word(rng)
        if split_of(word) == split:
            found[word] = None
    return tuple(found)


@cache
def _pairs(split: Split) -> tuple[tuple[int, int], ...]:
    operands = range(MAX_OPERAND + 1)
    return tuple((a, b) for a in operands for b in operands if split_of(f"{a}+{b}") == split)


def _word(rng: random.Random) -> str:
    """One word whose copy, reversal and sorting all differ, so that a reply shows which of the three was done."""
    while True:
        syllables = (
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice(_SYLLABLES))
        )
        word = "".join(syllables)
        answers = {word, word[::-1], "".join(sorted(word))}
        if MIN_LETTERS <= len(word) <= MAX_LETTERS and len(answers) == 3:
            return word
