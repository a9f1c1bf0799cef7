"""Asks for the value of an arithmetic expression, with a calculator as a tool."""

import ast
import json
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from paceline.config.env import CalculatorConfig as Config
from paceline.data import Row
from paceline.envs.answers import extract_boxed, last_number
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split
from paceline.envs.reverse_text import position_accuracy
from paceline.envs.words import split_of
from paceline.rollout import Message, Reply, Seat

Number = int | float

MAX_CHARACTERS = 200
MAX_DEPTH = 30
MAX_BITS = 256
"""Of an integer, and so of the work in one step."""
MAX_DRAWS = 1000
_ALLOWED_TEXT = re.compile(r"[0-9+\-*/%(). ]*")


class BadExpression(ValueError):
    """Something the calculator will not work out, in words for the policy."""


# --- the calculator


def calculate(expression: str) -> Number:
    """The value of an expression of numbers and `+ - * / // % **`, as Python has it.

    Nothing is ever evaluated but these, and every number on the way is bounded, so the work is too.

    >>> calculate("(2 + 3) * -4")
    -20
    """
    if len(expression) > MAX_CHARACTERS:
        raise BadExpression(f"longer than {MAX_CHARACTERS} characters")
    if not _ALLOWED_TEXT.fullmatch(expression.strip()):
        raise BadExpression("only numbers, + - * / // % ** and brackets are known")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body, MAX_DEPTH)
    except (ZeroDivisionError, OverflowError, SyntaxError, RecursionError, MemoryError) as error:
        reasons = {ZeroDivisionError: "division by zero", OverflowError: "too large"}
        raise BadExpression(reasons.get(type(error), "not a whole expression")) from None


def format_number(value: Number) -> str:
    """A number as people write it: 84/2 is 42, not 42.0."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.12g}"
    return str(int(value))


def _value(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise BadExpression("nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as value):
            return _check_bounds(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _value(operand, depth - 1)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _check_bounds(_OPERATORS[type(op)](_value(left, depth - 1), _value(right, depth - 1)))
    raise BadExpression("only numbers, + - * / // % ** and brackets are known")


def _check_bounds(value: Number) -> Number:
    if (isinstance(value, int) and value.bit_length() > MAX_BITS) or not math.isfinite(value):
        raise BadExpression("too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    """A power whose size is known before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise BadExpression("too large")
    value = base**exponent
    if isinstance(value, complex):
        raise BadExpression("a fractional power of a negative number")
    return value


_OPERATORS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


# --- the task


class Calculator(Environment):
    """Asks for the value of an expression. Calls of the calculator are answered until the last turn, in which the
    reply must be the answer: no call is run whose result the policy would not see."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._style = ToolStyle(config) if config.style == "tools" else TextStyle(config)

    def examples(self, split: Split) -> Sequence[Row]:
        count = self._config.train_examples if split == "train" else self._config.eval_examples
        rng = random.Random(f"calculator {split}")
        rows = [self._draw(rng, split) for _ in range(count)]
        return [
            {"messages": [self._style.ask(text)], "expression": text, "answer": format_number(calculate(text))}
            for text in rows
        ]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        messages = list(example["messages"])
        calls, errors, shown = 0, 0, False
        for turns_left in reversed(range(self._config.max_turns)):
            reply = await seats[POLICY].chat(messages, tools=self._style.tools)
            messages.append(reply.message)
            asked = self._style.calls(reply, example["expression"])
            if not asked or reply.truncated or not turns_left:
                break
            results = [run_calculator(expression) for expression, _ in asked]
            calls += len(results)
            errors += sum(not is_number for _, is_number in results)
            texts = [text for text, _ in results]
            shown = shown or example["answer"] in texts
            messages.extend(self._style.answer(asked, texts))
        said = "" if asked else reply.content.strip()
        inside = extract_boxed(said)
        correct = last_number(said if inside is None else inside) == Fraction(example["answer"])
        # A wrong answer earns nothing, unless the run file says otherwise. Calls count by what they showed (paid for
        # any call, a policy learns to have 5 worked out), digits only if they could be copied (else it guesses).
        copied = self._config.partial_credit * position_accuracy(said, example["answer"])
        reward = 1.0 if correct else shown * (self._config.call_reward + copied)
        return Outcome.solo(reward, correct=float(correct), calls=float(calls), tool_errors=float(errors))

    def _draw(self, rng: random.Random, split: Split) -> str:
        config = self._config
        for _ in range(MAX_DRAWS):
            terms = rng.randint(config.min_terms, config.max_terms)
            text = str(rng.randint(config.min_operand, config.max_operand))
            for _ in range(terms - 1):
                text += f"{rng.choice(config.operators)}{rng.randint(config.min_operand, config.max_operand)}"
            if split_of(text) == split:
                return text
        raise EnvError(f"environment `{config.name}`: there are too few questions of this kind, raise `max_operand`")


# --- calls

Call = tuple[str | None, str]
"""The expression the policy wants worked out, None if it did not say which; and the call's id."""


def run_calculator(expression: str | None) -> tuple[str, bool]:
    """The calculator's answer, and whether it is a number. An error is an answer too: the policy can learn from it."""
    try:
        if expression is None:
            raise BadExpression("call it with an `expression`, as text")
        return format_number(calculate(expression)), True
    except BadExpression as error:
        return f"error: {error}", False


class ToolStyle:
    """Offers the calculator as a tool in OpenAI's form, for models whose template knows tools."""

    question = "What is {expression}? Work it out with the calculator, then answer with the number."
    name = "calculator"
    tools: Sequence[dict[str, Any]] | None = (
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Works out an arithmetic expression of numbers, brackets and + - * / // % **.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "such as (12 + 34) * 5"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def __init__(self, config: Config) -> None:
        self._config = config

    def ask(self, expression: str) -> Message:
        text = self.question if self._config.question is None else self._config.question
        return {"role": "user", "content": text.replace("{expression}", expression)}

    def calls(self, reply: Reply, asked: str) -> list[Call]:
        return [(_expression(call["function"]["arguments"]), call.get("id", "")) for call in reply.tool_calls]

    def answer(self, calls: Sequence[Call], texts: Sequence[str]) -> list[Message]:
        return [
            {"role": "tool", "tool_call_id": ident, "name": self.name, "content": text}
            for (_, ident), text in zip(calls, texts, strict=True)
        ]


class TextStyle(ToolStyle):
    """A line that begins with the `call` mark is a call, and a message of the user is its result: for models that are
    too small for JSON. A call without a number is about the question itself: even a model that cannot yet copy an
    expression can make it, and so find out what a calculator is good for."""

    tools = None
    question = (
        "What is {expression}? You have a calculator: a line such as `calc: 2*3` is answered with its result. "
        "When you know the answer, reply with the number alone."
    )

    def calls(self, reply: Reply, asked: str) -> list[Call]:
        lines = map(str.strip, reply.text.splitlines())
        rests = [line.removeprefix(self._config.call).strip() for line in lines if line.startswith(self._config.call)]
        return [(rest if any(map(str.isdigit, rest)) else asked, "") for rest in rests]

    def answer(self, calls: Sequence[Call], texts: Sequence[str]) -> list[Message]:
        return [{"role": "user", "content": self._config.result.replace("{result}", "\n".join(texts))}]


def _expression(arguments: str) -> str | None:
    try:
        value = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        return None
    expression = value.get("expression") if isinstance(value, dict) else None
    return expression if isinstance(expression, str) else None
