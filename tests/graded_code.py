"""Solutions that the code environment grades."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from paceline.config.env import CodeConfig
from paceline.envs import Outcome
from paceline.envs import sandbox as sandbox_package
from paceline.envs.code import Code

TOYS = Path(sandbox_package.__file__).parents[1] / "toys"


def coder(**settings) -> Code:
    return Code(CodeConfig(**{"name": "code", "dataset": str(TOYS / "code.jsonl"), "workers": 2, **settings}))


def graded(*solutions: str, tests: Sequence[str], entry_point: str | None = "f", **settings) -> list[Outcome]:
    """The outcomes of several solutions, each as a reply with a block."""
    environment = coder(**settings)

    async def run():
        replies = (f"Here:\n```python\n{solution}\n```" for solution in solutions)
        return await asyncio.gather(*(environment.grade(reply, tests, entry_point) for reply in replies))

    return asyncio.run(run())
