"""Makes the small corpus of the retrieval environment: an invented country in 200 documents, and questions about it.

The country has ten regions. Each has 2 rivers, 6 towns, 8 people and 4 buildings, and nothing in a region speaks of
another one. Two regions are asked about in evaluation only, so a policy that learned the training documents by heart
gains nothing there. A question needs one document, or two: the first says which the second one is.

  python scripts/make_corpus.py                   writes corpus.jsonl and questions.jsonl into the package
  python scripts/make_corpus.py --into FOLDER
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src" / "paceline" / "envs" / "search"
SEED = 20
REGIONS, EVAL_REGIONS = 10, 2
RIVERS, TOWNS, PEOPLE, BUILDINGS = 2, 6, 8, 4

ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "t", "th", "v", "z")
VOWELS = ("a", "e", "i", "o", "u", "ae", "ia", "ei")
CODAS = ("l", "m", "n", "r", "s", "th", "lt", "nd", "rn", "sk")
TOWN_ENDINGS = ("wick", "stead", "holm", "garth", "combe", "minster")
KINDS = ("Bridge", "Tower", "Mill", "Hall", "Gate", "Well")
DAYS = ("Ashday", "Reedday", "Millday", "Tollday", "Lampday", "Saltday")
LOOKS = ("blue", "painted", "smoked", "woven", "striped", "bitter", "carved", "golden", "pickled", "folded")
GOODS = ("glass", "eels", "lanterns", "carpets", "cheese", "flutes", "plums", "paper", "candles", "saddles", "kites")
TRADES = (
    "clockmaker",
    "ferryman",
    "weaver",
    "mapmaker",
    "beekeeper",
    "bell founder",
    "potter",
    "stonecutter",
    "dyer",
    "bookbinder",
    "saltboiler",
    "gardener",
    "locksmith",
    "baker",
    "lens grinder",
    "tanner",
)
CUSTOMS = (
    "No house there is taller than the oldest tree.",
    "Children ring a copper bell when the first snow falls.",
    "Its walls were pulled down and built anew three times.",
    "Travellers are given bread at the gate and asked for a story.",
    "Every roof carries a weathervane in the shape of a fish.",
    "It has two squares and a staircase that leads nowhere.",
)
HABITS = (
    "kept a diary in green ink",
    "never learned to swim",
    "owned eleven umbrellas",
    "wrote letters to the moon",
    "slept only in the afternoon",
    "collected broken keys",
)
TALES = (
    "Swallows nest under its stones.",
    "It is said to hum when the wind comes from the east.",
    "A lamp has burned there ever since.",
    "Half of it was paid for with honey.",
)


@dataclass
class Names:
    """Made-up words, each given out once."""

    rng: random.Random
    taken: set[str] = field(default_factory=set)

    def word(self, syllables: int, ending: str = "") -> str:
        while True:
            parts = [self.rng.choice(ONSETS) + self.rng.choice(VOWELS) for _ in range(syllables)]
            word = ("".join(parts) + (ending or self.rng.choice(CODAS))).capitalize()
            if word not in self.taken:
                self.taken.add(word)
                return word


@dataclass
class River:
    id: str
    name: str
    hills: str
    mouth: str
    leagues: int

    def text(self, region: str) -> str:
        return (
            f"The {self.name} is a river in the region of {region}. It rises in the {self.hills} Hills and flows into "
            f"{self.mouth}. From source to mouth it is {self.leagues} leagues long."
        )


@dataclass
class Town:
    id: str
    name: str
    founded: int
    river: River
    goods: str
    day: str
    custom: str

    def text(self, region: str) -> str:
        return (
            f"{self.name} is a town in the region of {region}. It was founded in the year {self.founded} and lies on "
            f"the river {self.river.name}. The town is known for its {self.goods}. The market is held on {self.day}. "
            f"{self.custom}"
        )


@dataclass
class Person:
    id: str
    name: str
    born: int
    town: Town
    trade: str
    habit: str
    companion: "Person | None" = None

    def text(self, region: str) -> str:
        assert self.companion is not None
        family = self.name.split()[1]
        return (
            f"{self.name} was born in the year {self.born} in {self.town.name} and worked as a {self.trade}. For many "
            f"years {family} travelled through {region} with {self.companion.name}. {family} {self.habit}."
        )


@dataclass
class Building:
    id: str
    name: str
    town: Town
    builder: Person
    built: int
    ells: int
    tale: str

    def text(self, region: str) -> str:
        return (
            f"{self.name} stands in {self.town.name}, in the region of {region}. It was built by {self.builder.name} "
            f"in the year {self.built} and is {self.ells} ells high. {self.tale}"
        )


@dataclass
class Region:
    name: str
    rivers: list[River]
    towns: list[Town]
    people: list[Person]
    buildings: list[Building]

    def documents(self) -> Iterator[dict]:
        for thing in (*self.rivers, *self.towns, *self.people, *self.buildings):
            yield {"id": thing.id, "title": thing.name, "text": thing.text(self.name)}

    def questions(self) -> Iterator[tuple[str, str, list[str]]]:
        """Question, answer, and the documents that tell it, in the order in which they are needed."""
        for r in self.rivers:
            yield f"How many leagues long is the river {r.name}?", str(r.leagues), [r.id]
            yield f"Into which water does the river {r.name} flow?", r.mouth, [r.id]
        for t in self.towns:
            yield f"In which year was the town of {t.name} founded?", str(t.founded), [t.id]
            yield f"What is the town of {t.name} known for?", t.goods, [t.id]
            yield f"On which day is the market of {t.name} held?", t.day, [t.id]
            length = str(t.river.leagues)
            yield f"How many leagues long is the river on which the town of {t.name} lies?", length, [t.id, t.river.id]
        for p in self.people:
            assert p.companion is not None
            yield f"What was the trade of {p.name}?", p.trade, [p.id]
            yield f"In which year was {p.name} born?", str(p.born), [p.id]
            yield f"In which year was the birthplace of {p.name} founded?", str(p.town.founded), [p.id, p.town.id]
            yield f"On which river does the birthplace of {p.name} lie?", p.town.river.name, [p.id, p.town.id]
            yield f"What is the birthplace of {p.name} known for?", p.town.goods, [p.id, p.town.id]
            with_whom = [p.id, p.companion.id]
            yield f"What was the trade of the person with whom {p.name} travelled?", p.companion.trade, with_whom
        for b in self.buildings:
            yield f"How many ells high is {b.name}?", str(b.ells), [b.id]
            yield f"Who built {b.name}?", b.builder.name, [b.id]
            yield f"In which town was the builder of {b.name} born?", b.builder.town.name, [b.id, b.builder.id]


def make_region(number: int, names: Names, goods: Iterator[str], rng: random.Random) -> Region:
    at = f"r{number}"
    rivers = [
        River(
            id=f"{at}-river-{i}",
            name=names.word(2),
            hills=names.word(2),
            mouth=f"Lake {names.word(1)}" if i else f"the Sea of {names.word(2)}",
            leagues=rng.randrange(20, 400),
        )
        for i in range(RIVERS)
    ]
    towns = [
        Town(
            id=f"{at}-town-{i}",
            name=names.word(1, rng.choice(TOWN_ENDINGS)),
            founded=rng.randrange(100, 600),
            river=rng.choice(rivers),
            goods=next(goods),
            day=rng.choice(DAYS),
            custom=rng.choice(CUSTOMS),
        )
        for i in range(TOWNS)
    ]
    people = [
        Person(
            id=f"{at}-person-{i}",
            name=f"{names.word(1)} {names.word(2)}",
            born=rng.randrange(620, 900),
            town=rng.choice(towns),
            trade=trade,
            habit=rng.choice(HABITS),
        )
        for i, trade in enumerate(rng.sample(TRADES, PEOPLE))
    ]
    for person in people:
        person.companion = rng.choice([other for other in people if other is not person])
    return Region(names.word(2, "ia"), rivers, towns, people, make_buildings(at, towns, people, names, rng))


def make_buildings(
    at: str, towns: list[Town], people: list[Person], names: Names, rng: random.Random
) -> list[Building]:
    buildings = []
    for i in range(BUILDINGS):
        builder = rng.choice(people)
        # Elsewhere than the builder was born, or the first document alone would tell the birthplace.
        town = rng.choice([town for town in towns if town is not builder.town])
        name = f"{names.word(2)} {rng.choice(KINDS)}"
        built, ells = builder.born + rng.randrange(25, 60), rng.randrange(5, 90)
        buildings.append(Building(f"{at}-building-{i}", name, town, builder, built, ells, rng.choice(TALES)))
    return buildings


def make(seed: int = SEED) -> tuple[list[dict], list[dict]]:
    """The documents, and the questions with their split."""
    rng = random.Random(seed)
    names = Names(rng)
    goods = iter(rng.sample([f"{look} {good}" for look in LOOKS for good in GOODS], REGIONS * TOWNS))
    regions = [make_region(number, names, goods, rng) for number in range(REGIONS)]
    documents = [document for region in regions for document in region.documents()]
    questions = [
        {
            "split": "train" if number < REGIONS - EVAL_REGIONS else "eval",
            "question": question,
            "answer": answer,
            "documents": ids,
        }
        for number, region in enumerate(regions)
        for question, answer, ids in region.questions()
    ]
    rng.shuffle(documents)
    return documents, questions


def write(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER")
    folder: Path = parser.parse_args().into
    documents, questions = make()
    write(documents, folder / "corpus.jsonl")
    write(questions, folder / "questions.jsonl")
    print(f"{len(documents)} documents and {len(questions)} questions in {folder}")


if __name__ == "__main__":
    main()
