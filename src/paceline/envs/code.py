"""Programs graded by hidden tests, in a sandbox."""

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config.env import CodeConfig as Config
from paceline.data import BadRow, Row
from paceline.envs.answers import conversation
from paceline.envs.base import POLICY, DatasetEnvironment, EnvError, Outcome
from paceline.envs.workers import WorkerFailed, Workers, failure_metrics
from paceline.rollout import Seat

GRADER = f"{Path(__file__).with_name('sandbox') / 'grader.py'}:grade"
GRADER_GRACE_SECONDS = 15.0
"""Seconds beyond its own deadline the grader may take, to start cells and to end them."""
_PYTHON_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_PLAIN_BLOCK = re.compile(r"```[ \t]*\r?\n(.*?)```", re.DOTALL)


class Code(DatasetEnvironment[Config]):
    """The solution runs in a sandbox and its tests outside, where it cannot see them (`paceline.envs.sandbox`).

    A test is Python text that raises if the solution is wrong. It calls the solution by name, with plain data; it may
    compare only plain data, functions to call again, and objects of a class with a capitalised name. With an
    `entry_point` that is the only name it finds, and a function `check(candidate)` is called with it.

    Metrics: `solved` (every test passed), `passed` (share of them), `sandbox` (1: the kernel's namespaces; 0: only the
    guard inside the interpreter), `check_failed` and under it the share of each kind of failure.
    """

    require = ("messages", "tests")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._workers = Workers(config.workers, kind="sandbox")

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].chat(example["messages"])
        return await self.grade(reply.text, example["tests"], example.get("entry_point"))

    async def grade(self, text: str, tests: Sequence[str], entry_point: str | None = None) -> Outcome:
        """The outcome of a reply."""
        c = self._config
        limits = {"seconds": c.time_limit, **c.model_dump(include={"memory_mb", "file_mb", "processes"})}
        args = [extract_code(text), list(tests), entry_point, c.reward == "all", c.sandbox, limits]
        try:
            graded = await self._workers.call(GRADER, args, c.time_limit + GRADER_GRACE_SECONDS)
        except WorkerFailed as failed:
            return Outcome.solo(0.0, solved=0.0, passed=0.0, **failure_metrics(failed))
        if "no_jail" in graded:
            why = f"this machine allows no namespaces ({graded['no_jail']})"
            raise EnvError(f'environment `{c.name}`: {why}: set sandbox = "auto", or run where they are allowed')
        passed = graded["passed"] / len(tests)
        solved = float(graded["passed"] == len(tests))
        reward = solved if c.reward == "all" else passed
        sandbox = float(graded["jailed"])
        return Outcome.solo(reward, solved=solved, passed=passed, sandbox=sandbox, **failure_metrics(None))

    def _row(self, row: Row) -> Row:
        tests = row.get("tests")
        tests = [tests] if isinstance(tests, str) else tests
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise BadRow(f"`tests` must be Python text or a list of it, not {tests!r}")
        entry_point = row.get("entry_point")
        if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
            raise BadRow(f"`entry_point` must be the name of a function, not {entry_point!r}")
        for test in tests:
            try:
                ast.parse(test)
            except (SyntaxError, ValueError) as error:
                raise BadRow(f"a test is not valid Python: {error}") from error
        return row | {"messages": conversation(row, self._config.system), "tests": tests}


def extract_code(text: str) -> str:
    r"""The program in a reply: its last block marked as Python, else its last block without a mark, else all of it.

    >>> extract_code("First ```python\nx = 1\n``` and better:\n```python\nx = 2\n```")
    'x = 2\n'
    """
    return (_PYTHON_BLOCK.findall(text) or _PLAIN_BLOCK.findall(text) or [text])[-1]
