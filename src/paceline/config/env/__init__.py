"""Environments: where examples come from and how an episode is played. Built-in tasks, and those of other packages."""

import re
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from paceline.config.base import FilePath, ImportPath, PathKey, UserCode, check_toml_values
from paceline.config.env.base import (
    ArenaEnvConfig,
    BaseEnvConfig,
    ContaminationConfig,  # noqa: F401
    CurriculumConfig,  # noqa: F401
    CustomEnvConfig,
    DatasetEnvConfig,
    LeagueConfig,  # noqa: F401 - public here, as every section of an environment
    RewardEnvConfig,
    Source,
)
from paceline.util.lazy_import import renamed_getattr

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


class MathVerifyConfig(DatasetEnvConfig):
    """Answers that the `math-verify` package checks in worker processes."""

    check_timeout: float = Field(default=5.0, gt=0)
    """Seconds one check may take. A check that takes longer is killed and pays nothing."""
    workers: int | None = Field(default=None, ge=1)
    """Processes that check; one for each core when left out."""
    memory_mb: int | None = Field(default=None, ge=256)
    """Memory of each such process; no limit when left out."""


class MathConfig(MathVerifyConfig):
    """Mathematics checked by the `math-verify` package. Rows have `messages`, `prompt`, `question` or exact tokens in
    `input_token_ids`; and `answer` or `gt_answer`, a string or a list of strings of which any will do. The last
    `\\boxed{}` of the reply counts, or else all of it."""

    type: Literal["math"] = "math"
    system: str = "Reason step by step, then put your final answer within \\boxed{}."
    """System message put before rows that have none; empty for none."""


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


TAGS_PROMPT = "Think as long as you need, then write your final answer between <answer> and </answer>."


class EqualityConfig(DatasetEnvConfig):
    """Questions with one right text: 1 for it, else 0. Rows have `messages`, `prompt`, `question` or `input_token_ids`,
    and `answer`: a string or a list of strings of which any will do. The last `<answer>...</answer>` of the reply is
    compared, or all of a reply without tags. Case, punctuation and white space never count."""

    type: Literal["equality"] = "equality"
    system: str = TAGS_PROMPT
    """System message put before rows that have none; empty for none."""


class TaggedAnswerConfig(DatasetEnvConfig):
    """Questions with one right text, which must stand between tags. Rows are those of `equality`. The last
    `<answer>...</answer>` of the reply is compared, punctuation included."""

    type: Literal["tagged-answer"] = "tagged-answer"
    system: str = TAGS_PROMPT
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

    def check_keys(self) -> None:
        for least, most in (("min_turns", "max_turns"), ("min_names", "max_names")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"`{least}` is larger than `{most}`")
        if len(set(self.letters)) < len(self.letters) or any(map(str.isspace, self.letters)):
            raise ValueError("`letters` must be different letters, such as abcdefgh")
        if self.items == "letters" and self.max_turns * self.max_names > len(self.letters):
            raise ValueError(f"`max_turns` * `max_names` is more than the {len(self.letters)} `letters` there are")


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

    def check_keys(self) -> None:
        for least, most in (("min_terms", "max_terms"), ("min_operand", "max_operand")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"`{least}` is larger than `{most}`")
        for name, mark in (("question", "{expression}"), ("result", "{result}")):
            if (text := getattr(self, name)) is not None and mark not in text:
                raise ValueError(f"`{name}` must have `{mark}` in it")
        if self.partial_credit + self.call_reward >= 1:
            raise ValueError("a wrong answer must earn less than a right one: partial_credit + call_reward < 1")


class GSM8KConfig(MathVerifyConfig):
    """Grade-school maths over the original files: `question`, and `answer` ending in `#### 18`. A wrong answer may be
    tried again; the last try counts. Answers are read from `\\boxed{}` or after `####`: numbers are compared, and
    expressions (`\\boxed{36/2}`) checked by the `math-verify` package where it is installed. With `sft` and
    `demonstrations = true` the worked solutions are learnt, each ending in `\\boxed{18}`. Rows of `input_token_ids`
    have one try (`max_turns = 1`)."""

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
    calculator_marks: bool = False
    """Whether demonstrations keep the dataset's marks, `48/2 = <<48/2=24>>24`."""


class TokenInConfig(DatasetEnvConfig):
    """One reply to a prompt given as exact tokens. Rows have `input_token_ids` and, unless a scorer is named, `answer`:
    a string or a list of strings of which any will do."""

    type: Literal["token-in"] = "token-in"
    scorer: UserCode | None = None
    """Your function `fn(row, text, **kwargs) -> reward`, sync or async; equality with `answer` when left out."""


class RemoteEnvConfig(DatasetEnvConfig):
    """Rows played by a rollout service: an HTTP server that is posted a row and an address to sample the policy at, and
    answers with the turns' token ids and log probabilities, and the reward. Rows hold whatever the service wants."""

    type: Literal["remote"] = "remote"
    url: str
    """Where rows are posted, such as `http://rollouts:8900/rollout`."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key, sent as a bearer token; none is sent when left out."""
    reconnect_seconds: float = Field(default=60.0, ge=0)
    """Seconds a service may be away, to be started again, before its episodes count as failed."""
    max_answer_mb: int = Field(default=64, ge=1)
    """Larger answers are refused, in MiB."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`{url}` is no address of a service: write http://HOST:PORT/PATH")
        return url


class ModuleEnvConfig(DatasetEnvConfig):
    """A Python module with `reward_fn(messages, answer)` and, for several turns, `interact(messages)`. Rows have
    `messages`, `prompt` or `question`, and `answer`: a string, a list of strings, or what else the function takes."""

    type: Literal["module"] = "module"
    module: Annotated[str, PathKey("module")]
    """A file, `path/to/env.py`, or the name of an installed module, `package.env`."""
    max_turns: int = Field(default=1, ge=1)
    """Most replies of the policy in an episode. `interact` is never called after the last."""
    call_timeout: float = Field(default=60.0, gt=0)
    """Seconds one call of `interact` or `reward_fn` may take before its episode counts as failed."""


class ReasoningGymConfig(BaseEnvConfig):
    """Tasks of the `reasoning-gym` package: questions made from a seed, each scored by its task's own rule."""

    type: Literal["reasoning-gym"] = "reasoning-gym"
    task: str | None = None
    """One task by name, such as `gcd` or `chain_sum`."""
    tasks: dict[str, float] | list[str] = Field(default_factory=dict)
    """Instead of `task`, several: names with weights (`{gcd = 1.0, chain_sum = 2.0}`), or a list of equal shares."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task (`{min_terms = 2}`); with `tasks`, settings by name (`{chain_sum = {min_terms = 2}}`)."""
    size: int = Field(default=1000, ge=1, le=1_000_000)
    """Training rows."""
    eval_size: int = Field(default=100, ge=0, le=1_000_000)
    """Held-out rows; 0 for no evaluation."""
    seed: int = Field(default=0, ge=0, lt=1 << 30)
    """Questions come from here. Held-out ones are drawn from seeds no training row uses."""
    answer: Literal["tags", "text"] = "tags"
    """The text that counts as the answer: between the last `<answer>` and `</answer>`, or the whole reply."""
    system_prompt: str | None = None
    """First message of every row. Left out: with `tags` it asks for them, with `text` there is none."""
    score_timeout: float = Field(default=30.0, gt=0)
    """Seconds a task may take to score one answer before the episode counts as failed."""

    _check_toml = field_validator("args")(partial(check_toml_values, key="args"))

    def check_keys(self) -> None:
        if (self.task is None) == (not self.tasks):
            raise ValueError("name one reasoning-gym task with `task`, or several with `tasks`")
        if unnamed := self.args.keys() - self.weights.keys() if self.tasks else None:
            raise ValueError(f"args for {sorted(unnamed)}, which `tasks` does not name")
        for name, weight in self.weights.items():
            if weight <= 0:
                raise ValueError(f"the weight of task `{name}` is {weight:g}: it must be above 0")
            if not isinstance(self.args_of(name), dict):
                raise ValueError(
                    f"args of task `{name}` must be a table: with `tasks`, write args = {{{name} = {{...}}}}"
                )

    @property
    def weights(self) -> dict[str, float]:
        if self.task is not None:
            return {self.task: 1.0}
        return dict(self.tasks) if isinstance(self.tasks, dict) else dict.fromkeys(self.tasks, 1.0)

    def args_of(self, task: str) -> dict[str, Any]:
        return self.args if self.task is not None else self.args.get(task, {})


class TextArenaConfig(BaseEnvConfig):
    """A game of the `textarena` package, by the policy alone, against itself, or against an opponent."""

    type: Literal["textarena"] = "textarena"
    game: str
    """Its id there, such as `TicTacToe-v0`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the game."""
    players: int | None = Field(default=None, ge=1)
    """How many play; the fewest the game allows when left out."""
    opponent: ImportPath = "self"
    """The player in the other seats: `self` (the policy, and every seat is trained), `random` (any legal move, where
    the game lists its moves), or the import path of `choose(observation, random) -> action`."""
    max_turns: int = Field(default=100, ge=1)
    """Moves of all players together after which an unfinished game ends, with reward 0 for everyone."""
    size: int = Field(default=1000, ge=1, le=1_000_000)
    """Training rows: each is the seed of a game. Against an opponent the policy's seat changes from row to row."""
    eval_size: int = Field(default=100, ge=0, le=1_000_000)
    """Held-out rows; 0 for no evaluation."""
    seed: int = Field(default=0, ge=0, lt=1 << 30)
    """First seed of the training rows."""
    system_prompt: str = ""
    """First message in front of the game's own words; none when empty."""

    _check_toml = field_validator("args")(partial(check_toml_values, key="args"))


SPLIT_NAMES: dict[str, Literal["train", "eval"]] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("eval", "evaluation", "test", "validation", "dev"), "eval"),
}
"""Names of a `verifiers` environment's splits."""
_SPLIT_URI = re.compile(rf"verifiers:({'|'.join(SPLIT_NAMES)})(?:\?limit=(-1|[1-9][0-9]*))?")


class VerifiersConfig(BaseEnvConfig):
    """An environment of the `verifiers` package, unchanged: its rows, tools, turns, rewards and judges. Both of its
    interfaces are spoken: `load_environment()` (below 0.4) and tasksets (0.4)."""

    type: Literal["verifiers"] = "verifiers"
    id: Annotated[str, PathKey("module")] | None = None
    """Its id there, an installed package; or a file, `path/to/file.py` relative to the run file, whose name is in lower
    case. The variable VERIFIERS_ENV_ID when left out."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment. Where VERIFIERS_ENV_ID names it, they come on top of VERIFIERS_ENV_ARGS."""
    dataset: str | None = None
    """Training rows by split, `verifiers:train?limit=32`; `limit=-1` or none takes all. In place of `size`."""
    eval_dataset: str | None = None
    """Held-out rows likewise, `verifiers:eval?limit=32`; the training rows where the environment has no others."""
    eval_args: dict[str, Any] | None = None
    """Settings that differ for the held-out rows (`{split = "test"}`). No evaluation when this and `eval_dataset` are
    left out, unless the environment has an `eval_dataset` of its own."""
    size: int | None = Field(default=None, ge=1)
    """Use only the first n rows; needed where a taskset never ends."""
    eval_size: int | None = Field(default=100, ge=1)
    """Use only the first n held-out rows."""
    max_turns: int | None = Field(default=None, ge=1)
    """Most replies of the policy in an episode; the environment's own limit when left out."""
    env: str = ""
    """How agents interact, by its id there (`best-of-n`); the taskset's own way when left out."""
    agents: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings by agent of a taskset, in that package's words (`{agent = {max_turns = 4}}`). Where no harness is
    chosen, agents talk and call tools from this process; where no runtime is chosen, it is this machine."""

    _check_toml = field_validator("args", "eval_args", "agents")(partial(check_toml_values, key="these settings"))

    def check_keys(self) -> None:
        for key in ("dataset", "eval_dataset"):
            uri = getattr(self, key)
            if uri is not None and not _SPLIT_URI.fullmatch(uri):
                raise ValueError(
                    f"{key} = {uri!r}: the rows are the environment's own: write verifiers:SPLIT?limit=N, with one of "
                    f"{', '.join(SPLIT_NAMES)}, and N from 1, or -1 for all"
                )
        if self.dataset is not None and self.size is not None:
            raise ValueError("`dataset` and `size` both limit the training rows: leave `size` out")

    def rows_of(self, split: Literal["train", "eval"]) -> tuple[str, int | None]:
        """The name of the split that a run trains on or evaluates, and how many of its rows."""
        uri = self.dataset if split == "train" else self.eval_dataset
        if uri is None:
            return split, self.size if split == "train" else self.eval_size
        found = _SPLIT_URI.fullmatch(uri)
        assert found is not None
        limit = int(found[2] or -1)
        return found[1], None if limit < 0 else limit


EnvConfig = Annotated[
    ReverseTextConfig
    | ArithmeticConfig
    | AlphabetSortConfig
    | CalculatorConfig
    | EqualityConfig
    | TaggedAnswerConfig
    | MathConfig
    | GSM8KConfig
    | CodeConfig
    | RetrievalConfig
    | TokenInConfig
    | RemoteEnvConfig
    | ModuleEnvConfig
    | ReasoningGymConfig
    | TextArenaConfig
    | VerifiersConfig
    | ArenaEnvConfig
    | RewardEnvConfig
    | CustomEnvConfig,
    Field(discriminator="type"),
]

__getattr__ = renamed_getattr(
    __name__, {name.removesuffix("Config"): name for name in list(globals()) if name.endswith("Config")}
)
