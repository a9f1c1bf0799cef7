"""Keep a list sorted while it grows, turn by turn."""

import random
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from paceline.config.env import AlphabetSortConfig as Config
from paceline.data import Row
from paceline.envs.answers import extract_tag
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split
from paceline.envs.words import split_of, words
from paceline.rollout import Message, Seat

WORD_POOL_SIZE = 4000
MAX_SHORT_LETTERS = 4
"""Letters of a word for a small model, at most."""
MAX_DRAWS = 1000
"""Draws for one row before there seem to be no lists of this split."""


class AlphabetSort(Environment):
    """Each turn brings new names and wants the whole list so far in order, the new names marked.

    A turn pays the similarity of the list to the right one, to the power `power`; the episode pays the mean of its
    turns. A reply that was cut off ends the episode, and what was still to come pays nothing.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._items = ITEMS[config.items](config)
        self._mark = self._items.mark if config.mark is None else config.mark

    def examples(self, split: Split) -> Sequence[Row]:
        count = self._config.train_examples if split == "train" else self._config.eval_examples
        rng = random.Random(f"alphabet-sort {split}")
        rows = [self._draw(rng, split) for _ in range(count)]
        return [{"messages": [self._ask(turns[:1], by)], "turns": turns, "by": by} for turns, by in rows]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        turns, by = example["turns"], example["by"]
        messages, alike = [], []
        for count in range(1, len(turns) + 1):
            messages.append(self._ask(turns[:count], by))
            reply = await seats[POLICY].chat(messages)
            messages.append(reply.message)
            alike.append(self.similarity(turns[:count], by, reply.text))
            if reply.truncated:
                break
        reward = sum(likeness**self._config.power for likeness in alike) / len(turns)
        exact = alike == [1.0] * len(turns)
        return Outcome.solo(reward, exact=float(exact), similarity=sum(alike) / len(turns))

    def similarity(self, turns: Sequence[Sequence[str]], by: str, said: str) -> float:
        """How much of the right list is there in the right order: 1 for all of it and nothing else."""
        given, right = (self._items.read(text) for text in (said, self.answer(turns, by)))
        return SequenceMatcher(None, given, right, autojunk=False).ratio()

    def answer(self, turns: Sequence[Sequence[str]], by: str) -> str:
        """The right reply to the last of these turns."""
        new = turns[-1] if len(turns) > 1 else []
        part = 0 if by == "first" else -1
        ordered = sorted((name for turn in turns for name in turn), key=lambda name: name.split()[part])
        return self._items.write([f"{name}{self._mark}" if name in new else name for name in ordered])

    def _draw(self, rng: random.Random, split: Split) -> tuple[list[list[str]], str]:
        """A list of the split. Its split is a hash of the list itself, as for all made-up items (`words.py`)."""
        config = self._config
        for _ in range(MAX_DRAWS):
            turns = rng.randint(config.min_turns, config.max_turns)
            sizes = [rng.randint(config.min_names, config.max_names) for _ in range(turns)]
            names = self._items.draw(rng, sum(sizes))
            if split_of(" ".join(names)) == split:
                rest = iter(names)
                return [[next(rest) for _ in range(size)] for size in sizes], rng.choice(self._items.orders)
        raise EnvError(f"environment `{config.name}`: there are too few lists of this kind, raise `max_names`")

    def _ask(self, turns: Sequence[Sequence[str]], by: str) -> Message:
        ask = self._items.first if len(turns) == 1 else self._items.more
        names = self._items.join(turns[-1])
        return {"role": "user", "content": ask.format(names=names, by=by, mark=self._mark.strip())}


class WordList:
    """Short made-up words, and as little else as possible."""

    mark = "*"
    orders: Sequence[str] = ("first",)
    first = "sort: {names}"
    more = "more: {names}"
    separator = " "

    def __init__(self, config: Config) -> None:
        self._words = [word for word in words("train", WORD_POOL_SIZE, seed=0) if len(word) <= MAX_SHORT_LETTERS]

    def draw(self, rng: random.Random, count: int) -> list[str]:
        return rng.sample(self._words, count)

    def join(self, names: Sequence[str]) -> str:
        return self.separator.join(names)

    def write(self, names: Sequence[str]) -> str:
        return self.join(names)

    def read(self, text: str) -> list[str]:
        return text.split()


class NameList(WordList):
    """First and last names, for a model that can read."""

    mark = " (new)"
    orders = ("first", "last")
    first = (
        "Put these names in alphabetical order by {by} name. "
        "Write the list between <sorted> and </sorted>, one name on each line.\n\n{names}"
    )
    more = (
        "More names have come in. Give the whole list so far in the same order and form, "
        "and write `{mark}` after each name that is new in this message.\n\n{names}"
    )
    separator = "\n"

    def __init__(self, config: Config) -> None:
        self._words = [word.capitalize() for word in words("train", WORD_POOL_SIZE, seed=0)]

    def draw(self, rng: random.Random, count: int) -> list[str]:
        """No two share a first or a last name, so there is one right order."""
        parts = rng.sample(self._words, 2 * count)
        return [f"{first} {last}" for first, last in zip(parts[:count], parts[count:], strict=True)]

    def write(self, names: Sequence[str]) -> str:
        return f"<sorted>\n{self.join(names)}\n</sorted>"

    def read(self, text: str) -> list[str]:
        lines = map(str.strip, (extract_tag(text, "sorted") or "").splitlines())
        return [line for line in lines if line]


class LetterList(WordList):
    """Single letters, for a model of letters: `sort: cab` wants `abc`."""

    mark = ""
    separator = ""

    def __init__(self, config: Config) -> None:
        self._words = list(config.letters)

    def read(self, text: str) -> list[str]:
        return [letter for letter in text if not letter.isspace()]


ITEMS: Mapping[str, type[WordList]] = {"names": NameList, "words": WordList, "letters": LetterList}
