"""An environment with tools: the answer takes two look-ups, one after the other.

The policy is offered both tools in OpenAI's form, calls them in as many replies as it needs, reads each result, and
answers with a city. Put your own functions in the place of the two.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import paceline
from paceline.data import Row
from paceline.envs import Split
from paceline.envs.words import words

CITIES = ("amman", "bern", "cairo", "dakar", "lima", "oslo", "quito", "rome")
NAMES = [*words("train", count=200, seed=0), *words("eval", count=50, seed=0)]
TURNS = 4
"""Most replies of an episode: two calls, an answer, and one more for a mistake."""


def find_customer(name: str) -> str:
    """Finds the number of a customer by name."""
    return str(NAMES.index(name))


def city_of(customer: str) -> str:
    """Tells in which city the customer with this number lives."""
    return CITIES[int(customer) % len(CITIES)]


def described(function: Any, **parameters: str) -> dict[str, Any]:
    """A function as the chat template shows it to the model."""
    properties = {name: {"type": "string", "description": text} for name, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    about = {"name": function.__name__, "description": function.__doc__, "parameters": schema}
    return {"type": "function", "function": about}


FUNCTIONS = {"find_customer": find_customer, "city_of": city_of}
TOOLS = [described(find_customer, name="such as ada"), described(city_of, customer="such as 17")]


def run(call: dict[str, Any]) -> dict[str, Any]:
    """The message that answers a call. The policy wrote the call: a wrong one is answered with the error, from which it
    can learn."""
    try:
        result = FUNCTIONS[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
    except (LookupError, TypeError, ValueError) as error:
        result = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


class Customers(paceline.Environment):
    """Where does a customer live?"""

    def examples(self, split: Split) -> Sequence[Row]:
        """The rows of a split; the held-out ones ask about other customers."""
        asked = NAMES[:200] if split == "train" else NAMES[200:]
        return [{"name": name, "city": city_of(find_customer(name))} for name in asked]

    async def play(self, example: Row, seats: Mapping[str, paceline.Seat]) -> paceline.Outcome:
        messages: list[Any] = [{"role": "user", "content": f"which city does {example['name']} live in?"}]
        calls = 0
        for _ in range(TURNS):
            reply = await seats["policy"].chat(messages, tools=TOOLS)
            if not reply.tool_calls:
                break
            calls += len(reply.tool_calls)
            messages += [reply.message, *map(run, reply.tool_calls)]
        right = reply.text.strip().lower() == example["city"]
        # Letters in common earn a little: tries that all earn the same teach nothing.
        alike = difflib.SequenceMatcher(None, reply.text, example["city"]).ratio()
        return paceline.Outcome.solo(1.0 if right else 0.2 * alike, right=right, calls=calls)
