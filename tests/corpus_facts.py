"""Facts of the small corpus: what a question asks for and where a document says it."""

import re
from collections.abc import Callable

LENGTH, MOUTH = r"it is (\d+) leagues long", r"flows into (.+?)\."
FOUNDED, GOODS = r"founded in the year (\d+)", r"known for its (.+?)\."
DAY, ON_RIVER = r"held on (\w+)\.", r"lies on the river (\w+)\."
TRADE, BORN = r"worked as a (.+?)\.", r"born in the year (\d+)"
BIRTHPLACE, COMPANION = r"born in the year \d+ in (\w+)", r"travelled through \w+ with (\w+ \w+)\."
HEIGHT, BUILDER = r"is (\d+) ells high", r"built by (\w+ \w+)"

FORMS = {
    r"How many leagues long is the river (\w+)\?": [LENGTH],
    r"Into which water does the river (\w+) flow\?": [MOUTH],
    r"In which year was the town of (\w+) founded\?": [FOUNDED],
    r"What is the town of (\w+) known for\?": [GOODS],
    r"On which day is the market of (\w+) held\?": [DAY],
    r"How many leagues long is the river on which the town of (\w+) lies\?": [ON_RIVER, LENGTH],
    r"What was the trade of (\w+ \w+)\?": [TRADE],
    r"In which year was (\w+ \w+) born\?": [BORN],
    r"In which year was the birthplace of (\w+ \w+) founded\?": [BIRTHPLACE, FOUNDED],
    r"On which river does the birthplace of (\w+ \w+) lie\?": [BIRTHPLACE, ON_RIVER],
    r"What is the birthplace of (\w+ \w+) known for\?": [BIRTHPLACE, GOODS],
    r"What was the trade of the person with whom (\w+ \w+) travelled\?": [COMPANION, TRADE],
    r"How many ells high is (\w+ \w+)\?": [HEIGHT],
    r"Who built (\w+ \w+)\?": [BUILDER],
    r"In which town was the builder of (\w+ \w+) born\?": [BUILDER, BIRTHPLACE],
}


def plan(question: str) -> tuple[str, list[str]]:
    """What to look up first, and what to read in one document after another."""
    ((found, chain),) = [(m, chain) for form, chain in FORMS.items() if (m := re.fullmatch(form, question))]
    return found[1], list(chain)


def look_up(question: str, read: Callable[[str], str]) -> str:
    """The answer, given a way to read the document about something."""
    name, chain = plan(question)
    for place in chain:
        (name,) = re.findall(place, read(name))
    return name
