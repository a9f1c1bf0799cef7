"""Built-in tasks that need nothing but the policy: questions from files, lists to sort, a calculator."""

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Hook
from paceline.config.env.base import EnvBase
from paceline.config.env.dataset import DatasetEnv


class Equality(DatasetEnv):
    """Questions with one right text. Rows have `messages`, `prompt` or `question`, and `answer`: a string or a list of
    strings of which any will do. The last `<answer>...</answer>` of the reply is compared."""

    type: Literal["equality"] = "equality"
    system: str = "Think as long as you need, then write your final answer between <answer> and </answer>."
    """System message put before rows that have none; empty for none."""
    ignore_case: bool = False
    """Whether `Paris` and `paris` are the same. White space never counts."""
    format_reward: float = Field(default=0.1, ge=0, lt=1)
    """What a wrong answer between tags earns; without tags it earns nothing."""


class AlphabetSort(EnvBase):
    """Names come in over several turns; each turn wants the whole list so far in order, with the new names marked."""

    type: Literal["alphabet-sort"] = "alphabet-sort"
    items: Literal["names", "words", "letters"] = "names"
    """What is sorted: first and last names, asked for in sentences; short made-up words (`sort: tobi mar`); or letters
    (`sort: cab`), the only ones the quickstart model can learn in minutes."""
    min_turns: int = Field(default=1, ge=1, le=10)
    """Turns of an episode, at least."""
    max_turns: int = Field(default=3, ge=1, le=10)
    """Turns of an episode, at most."""
    min_names: int = Field(default=1, ge=1, le=50)
    """Names that come in each turn, at least."""
    max_names: int = Field(default=5, ge=1, le=50)
    """Names that come in each turn, at most."""
    power: float = Field(default=4.0, gt=0)
    """A turn pays its similarity to the right list, to this power: 1 rewards every step in the right direction, a high
    power hardly anything but the whole list."""
    letters: str = "abcdefghijklmnoprstuvwxz"
    """Letters to draw from for `items = "letters"`; fewer are easier."""
    mark: str | None = None
    """What stands behind a new name; ` (new)` for names, `*` for words and nothing for letters when left out."""
    train_examples: int = Field(default=2048, ge=1, le=50_000)
    """Rows generated for training."""
    eval_examples: int = Field(default=128, ge=1, le=50_000)
    """Held-out rows generated for evaluation."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for least, most in (("min_turns", "max_turns"), ("min_names", "max_names")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"`{least}` is larger than `{most}`")
        if len(set(self.letters)) < len(self.letters) or any(map(str.isspace, self.letters)):
            raise ValueError("`letters` must be different letters, such as abcdefgh")
        if self.items == "letters" and self.max_turns * self.max_names > len(self.letters):
            raise ValueError(f"`max_turns` * `max_names` is more than the {len(self.letters)} `letters` there are")
        return self


class Calculator(EnvBase):
    """The value of an arithmetic expression, with a calculator to call. A correct final answer pays 1."""

    type: Literal["calculator"] = "calculator"
    style: Literal["tools", "text"] = "tools"
    """`tools` offers a tool in OpenAI's form, in the model's own template; `text` answers lines of the reply that begin
    with `call`, for models too small for that."""
    max_turns: int = Field(default=3, ge=1, le=50)
    """Replies of the policy, at most. The calculator is not run after the last."""
    question: str | None = None
    """What is asked, with `{expression}` in it; a sentence that explains the style when left out."""
    call: str = Field(default="calc:", min_length=1)
    """In text style, what a line with a call begins with. The expression follows, or none for the one in question."""
    result: str = "{result}"
    """In text style, the message that answers a call."""
    call_reward: float = Field(default=0.0, ge=0, lt=1)
    """What a wrong answer earns if the calculator has shown the right one; 0 leaves tool use to its own merit."""
    partial_credit: float = Field(default=0.0, ge=0, lt=1)
    """What a wrong answer earns on top, at most, for digits of the right one where they belong."""
    operators: list[Literal["+", "-", "*"]] = Field(default=["+", "-", "*"], min_length=1)
    """Operators in the questions; the calculator itself knows more."""
    min_terms: int = Field(default=2, ge=2, le=8)
    """Numbers in a question, at least."""
    max_terms: int = Field(default=3, ge=2, le=8)
    """Numbers in a question, at most."""
    min_operand: int = Field(default=0, ge=0, le=1_000_000)
    """Smallest number in a question."""
    max_operand: int = Field(default=999, ge=1, le=1_000_000)
    """Largest number in a question."""
    train_examples: int = Field(default=2048, ge=1, le=50_000)
    """Rows generated for training."""
    eval_examples: int = Field(default=128, ge=1, le=50_000)
    """Held-out rows generated for evaluation."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for least, most in (("min_terms", "max_terms"), ("min_operand", "max_operand")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"`{least}` is larger than `{most}`")
        for name, mark in (("question", "{expression}"), ("result", "{result}")):
            if (text := getattr(self, name)) is not None and mark not in text:
                raise ValueError(f"`{name}` must have `{mark}` in it")
        if self.partial_credit + self.call_reward >= 1:
            raise ValueError("a wrong answer must earn less than a right one: partial_credit + call_reward < 1")
        return self


class GSM8K(DatasetEnv):
    """Grade-school maths over the original files: `question`, and `answer` ending in `#### 18`. A wrong answer may be
    tried again; the last try counts. Answers are read from `\\boxed{}` or after `####`, and compared as numbers."""

    type: Literal["gsm8k"] = "gsm8k"
    max_turns: int = Field(default=2, ge=1, le=20)
    """Tries, at most."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Each further try multiplies the reward by this."""
    system: str = "Solve the problem step by step. End with the answer, a number, as \\boxed{number}."
    """System message; empty for none."""
    retry_prompt: str = (
        "That is not the right answer. Go through your steps again, find the mistake, "
        "and end with the corrected answer as \\boxed{number}."
    )
    """What a wrong answer is told."""


class TokenIn(DatasetEnv):
    """One reply to a prompt given as exact tokens. Rows have `input_token_ids` and, unless a scorer is named, `answer`:
    a string or a list of strings of which any will do."""

    type: Literal["token-in"] = "token-in"
    scorer: Hook | None = None
    """Your function `fn(row, text, **kwargs) -> reward`, sync or async; equality with `answer` when left out."""
