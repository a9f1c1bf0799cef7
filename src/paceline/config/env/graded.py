"""Environments whose answers are checked by other programs: mathematics by math-verify, code by its tests."""

from typing import Literal

from pydantic import Field

from paceline.config.env.dataset import DatasetEnv


class Math(DatasetEnv):
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


class Code(DatasetEnv):
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
