"""Built-in tasks: generated text, questions from files, checked answers, retrieval, a calculator."""

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import FilePath, Hook
from paceline.config.env.base import BaseEnvConfig, DatasetEnvConfig, Source

SEARCH_KEY_VARIABLE = "PACELINE_SEARCH_API_KEY"
"""Not the model server's key: a search service must not learn that one."""


class RetrievalConfig(BaseEnvConfig):
    """Look up, then answer. The model writes `<search>query</search>` and reads what was found in the next message;
    `<answer>...</answer>` ends the episode."""

    type: Literal["retrieval"] = "retrieval"
    url: str | None = None
    """A search service (`paceline search-server`); an index in this process is searched when left out."""
    api_key_variable: str = SEARCH_KEY_VARIABLE
    """Environment variable that holds the service's API key, if it wants one. The key itself has no place in a run
    file, which is kept with the run."""
    corpus: FilePath | None = None
    """Documents to search in this process: a .jsonl file of `id`, `text` and perhaps `title`. The small corpus of the
    package when left out."""
    dataset: Source | None = None
    """Training questions, by file or URI: rows of `question` (or `messages`) and `answer`, a string or a list of
    accepted ones. Several mix as a list, or by weight as a table. Those about the package's corpus when left out."""
    eval_dataset: Source | None = None
    """Held-out questions; with a `dataset` of your own and without this there is no evaluation."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Renames fields of the rows, `{gt_answer = "answer"}`; `a.b` reaches into an object."""
    max_turns: int = Field(default=4, ge=1)
    """Replies the model has in all. A search in the last one is not run."""
    top_k: int | None = Field(default=None, ge=1, le=100)
    """Documents shown for a query; 5, or what the service says, when left out."""
    score: Literal["exact", "f1"] = "exact"
    """Scoring: the right answer but for case, punctuation and articles, or the share of words in common with it."""
    results_role: Literal["user", "tool"] = "user"
    """Whose message brings the results."""
    max_result_chars: int = Field(default=600, ge=1)
    """Longer documents are shown up to here."""
    search_timeout: float = Field(default=30.0, gt=0)
    """Seconds a search service may take for one query."""


class MathConfig(DatasetEnvConfig):
    """Mathematics checked by the `math-verify` package. Rows have `messages`, `prompt` or `question`, and `answer`: a
    string or a list of strings of which any will do. The last `\\boxed{}` of the reply counts, or else all of it."""

    type: Literal["math"] = "math"
    system: str = "Reason step by step, then put your final answer within \\boxed{}."
    """System message put before rows that have none; empty for none."""
    check_timeout: float = Field(default=5.0, gt=0)
    """Seconds one check may take. A check that takes longer is killed and pays nothing."""
    workers: int | None = Field(default=None, ge=1)
    """Processes that check; one for each core when left out."""
    memory_mb: int | None = Field(default=None, ge=256)
    """Memory of each such process; no limit when left out."""


class CodeConfig(DatasetEnvConfig):
    """Programs judged by hidden tests. Rows have `messages` or `prompt`, `tests`: Python text or a list of it, and
    perhaps `entry_point`, the function under test. The last ```python block of the reply is run, or all of it."""

    type: Literal["code"] = "code"
    system: str = "Write the Python code that was asked for in one ```python block. Use the standard library only."
    """System message put before rows that have none; empty for none."""
    reward: Literal["all", "fraction"] = "all"
    """`all` pays 1 when every test passes and else nothing; `fraction` pays the share of tests that pass."""
    sandbox: Literal["auto", "kernel", "guard"] = "auto"
    """`kernel` needs Linux with namespaces, and fails without; `guard` watches inside the interpreter, which stops
    cheating but not a determined intruder; `auto` takes the first where it can."""
    time_limit: float = Field(default=10.0, gt=0)
    """Seconds a solution may take for all of its tests together, both of the clock and of the processor."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory a solution may use."""
    file_mb: int = Field(default=16, ge=1)
    """Size of the files a solution may write."""
    processes: int = Field(default=16, ge=1)
    """Processes and threads a solution may have."""
    workers: int | None = Field(default=None, ge=1)
    """Solutions judged at once; one for each core when left out."""


class ReverseTextConfig(BaseEnvConfig):
    """Reverse a made-up word. Exact match pays 1; partial credit for letters in place."""

    type: Literal["reverse-text"] = "reverse-text"
    train_examples: int = Field(default=2048, ge=1, le=50_000)
    """Rows generated for training."""
    eval_examples: int = Field(default=128, ge=1, le=50_000)
    """Held-out rows generated for evaluation."""
    partial_credit: float = Field(default=0.5, ge=0, le=1)
    """The most a reply with every letter but not every place right can earn; 0 pays exact matches only."""


class ArithmeticConfig(BaseEnvConfig):
    """Add two numbers below one hundred. Exact match pays 1."""

    type: Literal["arithmetic"] = "arithmetic"
    train_examples: int = Field(default=1024, ge=1, le=1900)
    """Rows generated for training; there are not many more sums below one hundred."""
    eval_examples: int = Field(default=128, ge=1, le=900)
    """Held-out rows generated for evaluation."""


class EqualityConfig(DatasetEnvConfig):
    """Questions with one right text. Rows have `messages`, `prompt` or `question`, and `answer`: a string or a list of
    strings of which any will do. The last `<answer>...</answer>` of the reply is compared."""

    type: Literal["equality"] = "equality"
    system: str = "Think as long as you need, then write your final answer between <answer> and </answer>."
    """System message put before rows that have none; empty for none."""
    ignore_case: bool = False
    """Whether `Paris` and `paris` are the same. White space never counts."""
    format_reward: float = Field(default=0.1, ge=0, lt=1)
    """Reward of a wrong answer between tags; without tags it earns nothing."""


class AlphabetSortConfig(BaseEnvConfig):
    """Names come in over several turns; each turn wants the whole list so far in order, with the new names marked."""

    type: Literal["alphabet-sort"] = "alphabet-sort"
    items: Literal["names", "words", "letters"] = "names"
    """Items to sort: first and last names, asked for in sentences; short made-up words (`sort: tobi mar`); or letters
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
    """Text behind a new name; ` (new)` for names, `*` for words and nothing for letters when left out."""
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


class CalculatorConfig(BaseEnvConfig):
    """The value of an arithmetic expression, with a calculator to call. A correct final answer pays 1."""

    type: Literal["calculator"] = "calculator"
    style: Literal["tools", "text"] = "tools"
    """`tools` offers a tool in OpenAI's form, in the model's own template; `text` answers lines of the reply that begin
    with `call`, for models too small for that."""
    max_turns: int = Field(default=3, ge=1, le=50)
    """Replies of the policy, at most. The calculator is not run after the last."""
    question: str | None = None
    """The question, with `{expression}` in it; a sentence that explains the style when left out."""
    call: str = Field(default="calc:", min_length=1)
    """In text style, what a line with a call begins with. The expression follows, or none for the one in question."""
    result: str = "{result}"
    """In text style, the message that answers a call."""
    call_reward: float = Field(default=0.0, ge=0, lt=1)
    """Reward of a wrong answer if the calculator has shown the right one; 0 leaves tool use to its own merit."""
    partial_credit: float = Field(default=0.0, ge=0, lt=1)
    """Further reward of a wrong answer, at most, for digits of the right one where they belong."""
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


class GSM8KConfig(DatasetEnvConfig):
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
    """The message that answers a wrong answer."""


class TokenInConfig(DatasetEnvConfig):
    """One reply to a prompt given as exact tokens. Rows have `input_token_ids` and, unless a scorer is named, `answer`:
    a string or a list of strings of which any will do."""

    type: Literal["token-in"] = "token-in"
    scorer: Hook | None = None
    """Your function `fn(row, text, **kwargs) -> reward`, sync or async; equality with `answer` when left out."""
