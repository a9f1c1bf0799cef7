"""What recording costs.

turns: a recorded turn, to the orchestrator: rendering, matching, tokenising, recording and assembling, over an engine
that answers at once.

  budget    CPU milliseconds a turn of conversations of 1, 10 and 30 turns; the bar is 1 ms a turn at 10 turns
  anew      the same conversations by a client that renders and tokenises the whole of it each turn, as most do; no bar

  talk      user and assistant take turns            tools   each reply is a tool call, each answer its result
  thoughts  the template drops what was thought, so every prompt is rendered anew (Qwen 3 only)

Time is CPU time of this process, so other load on the machine does not count. Conversations share their system prompt
and nothing else: what one asks was not tokenised for another.

The quickstart model's tokenizer ships with the package; Qwen 3's comes from `shared/tokenizers.tar.xz`, if it is here.

steps: the record of every rollout, to a run of the quickstart: CPU time of the thread that writes it and what handing
over takes on the event loop, against a hundredth of the time in which steps and evaluations were done. That is the time
on the wall or the CPU time of the whole run, whichever is less, so that a busy machine does not make us look good. On
a GPU `trainer.py` measures the same beside its whole steps.

reading: a run directory of `scripts/make_big_run.py`, opened by a fresh process. Give one with --big, or let it be
made, which takes minutes. Time is CPU time here too; a disk is only waited for where files are not in memory.
"""

import asyncio
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

import paceline
from bars import Row, alternate, arguments, finish
from paceline.clients import Pool
from paceline.config import RunConfig
from paceline.config.inference import SamplingConfig
from paceline.data import Ticket
from paceline.engine import Completion, GenerateRequest
from paceline.observe.record import open_run
from paceline.rollout import Renderer, Rollout, SamplingClient, Seat, assemble
from paceline.runtime import session
from timed_recorder import TimedRecorder

ARCHIVE = Path(__file__).parents[2] / "shared" / "tokenizers.tar.xz"
QUICKSTART = Path(paceline.__file__).parent / "quickstart"
BUDGET_MS = 1.0
TURNS = (1, 10, 30)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PARTS = ("turns", "steps", "reading")
SHARE = 0.01
FIRST_PAGE_SECONDS, FILTER_SECONDS, MOST_MEMORY = 0.3, 2.0, 1000.0
READING = """
import json, resource, sys, time
from paceline.observe.record import Query, open_run

def seconds(work):
    begun = time.process_time()
    found = work()
    return time.process_time() - begun, found

def page():
    run = open_run(sys.argv[1])
    return run, run.rollouts.count, run.rollouts.find()

first, (run, count, _) = seconds(page)
find = run.rollouts.find
filters = {
    "five columns": Query(env="search", reward=(0.8, None), length=(40, None), error=False, state="trained"),
    "sorted by reward": Query(sort="-reward", domain="training"),
    "a rare text": Query(text="Castle forest needle bridge"),
    "a common text": Query(text="the"),
    "a text in one environment": Query(text="planet", env="code", step=(100, None)),
}
took = {name: seconds(lambda query=query: find(query)) for name, query in filters.items()}
body, _ = seconds(lambda: run.rollouts.get(count // 2))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
print(json.dumps({"count": count, "first": first, "body": body, "memory": memory,
                  "filters": {name: (spent, found.total) for name, (spent, found) in took.items()}}))
"""


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(LETTERS, k=rng.randint(2, 7))) for _ in range(count))


class Instant:
    """An engine that answers at once with whatever is next."""

    busy_seconds = 0.0

    def __init__(self, replies: list[list[int]]) -> None:
        self._replies = replies
        self._at = 0

    async def generate(self, request: GenerateRequest, listener: Callable | None = None) -> Completion:
        ids = self._replies[self._at % len(self._replies)]
        self._at += 1
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish="stop")


class Load:
    """Conversations of one kind in one tokenizer's template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
        rng = random.Random(0)
        self.tokenizer, self.kind = tokenizer, kind
        self.end = tokenizer.eos_token_id
        self.tools = TOOLS if kind == "tools" else None
        self.system = {"role": "system", "content": words(rng, 40)}
        self.asked = [words(rng, 30) for _ in range(997)]
        self.texts = [self.reply(rng) for _ in range(499)]
        self.replies = [[*self.encode(text), self.end] for text in self.texts]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def reply(self, rng: random.Random) -> str:
        if self.kind == "tools":
            return f'<tool_call>{{"name": "look_up", "arguments": {{"word": "{words(rng, 1)}"}}}}</tool_call>'
        thought = f"<think>\n{words(rng, 30)}\n</think>\n\n" if self.kind == "thoughts" else ""
        return thought + words(rng, 30)

    def messages(self, number: int) -> list[dict]:
        return [self.system, self.user(number, 0)]

    def user(self, number: int, turn: int) -> dict:
        return {"role": "user", "content": self.asked[(number * (max(TURNS) + 1) + turn) % len(self.asked)]}

    def answer(self, number: int, turn: int) -> dict:
        return self.user(number, turn + 1) | ({"role": "tool"} if self.kind == "tools" else {})

    def recorded(self, turns: int, conversations: int) -> float:
        """CPU milliseconds a turn through a seat, samples included."""
        client = SamplingClient(
            Pool([Instant(self.replies)]), Renderer(self.tokenizer, [self.end]), SamplingConfig(), frozenset()
        )

        async def play() -> None:
            for number in range(conversations):
                seat, messages = Seat(client, (0, 0, number, 0), number), self.messages(number)
                for turn in range(turns):
                    reply = await seat.chat(messages, self.tools)
                    messages += [reply.message, self.answer(number, turn)]
                ticket = Ticket(number, "bench", 0, number, number)
                assemble(Rollout(ticket=ticket, member=0, turns=seat.turns))

        start = time.process_time()
        asyncio.run(play())
        return 1000 * (time.process_time() - start) / (turns * conversations)

    def anew(self, turns: int, conversations: int) -> float:
        """CPU milliseconds a turn of rendering and tokenising the whole conversation each time; nothing is recorded."""
        start = time.process_time()
        for number in range(conversations):
            messages = self.messages(number)
            for turn in range(turns):
                text = self.tokenizer.apply_chat_template(
                    messages, tools=self.tools, tokenize=False, add_generation_prompt=True
                )
                self.encode(text)
                said = self.tokenizer.decode(self.replies[turn % len(self.replies)][:-1])
                messages += [{"role": "assistant", "content": said}, self.answer(number, turn)]
        return 1000 * (time.process_time() - start) / (turns * conversations)


def loads(folder: Path) -> dict[str, Load]:
    quickstart = AutoTokenizer.from_pretrained(QUICKSTART, local_files_only=True)
    found = {f"quickstart, {kind}": Load(quickstart, kind) for kind in ("talk", "tools")}
    if ARCHIVE.exists():
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        qwen = AutoTokenizer.from_pretrained(folder / "tokenizers" / "qwen3", local_files_only=True)
        found |= {f"qwen3, {kind}": Load(qwen, kind) for kind in ("talk", "tools", "thoughts")}
    return found


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs, in turn")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    parser.add_argument("--steps", type=int, default=20, help="steps of the quickstart")
    parser.add_argument("--big", type=Path, help="the run directory to read")
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="of the run directory that is made")
    options = parser.parse_args()
    parts, rows = options.part or PARTS, []
    with tempfile.TemporaryDirectory() as folder:
        if "turns" in parts:
            for name, load in loads(Path(folder)).items():
                for turns in TURNS:
                    rows += compare(name, load, turns, options.rounds)
        if "steps" in parts:
            rows += steps(Path(folder), options.steps)
        if "reading" in parts:
            rows += reading(options.big or made(Path(folder) / "big", options.rollouts))
    return finish("recording", rows, options.json)


def steps(folder: Path, count: int) -> list[Row]:
    """The record's milliseconds a step, beside a hundredth of the step's."""
    session.RolloutRecorder = TimedRecorder
    result = session.train(RunConfig(runs=str(folder), name="quickstart", steps=count))
    recorder = TimedRecorder.made.pop()
    wall = sum(line.get("time/step", 0.0) + line.get("time/eval", 0.0) for line in result.metrics)
    spent = min(wall, recorder.run_cpu)
    ours, budget = 1000 * recorder.cost / count, 1000 * SHARE * spent / count
    kept = open_run(result.directory).rollouts.count
    size = sum(path.stat().st_size for path in (result.directory / "record").iterdir())
    what = f"quickstart, {kept} rollouts in {count} steps"
    return [
        Row(what, "ms/step", ours, budget, "1% of a step", budget / ours, 1.0),
        Row(f"{what}, on disk", "bytes", size / kept, size / kept, "a rollout", 1.0, 0.0),
    ]


def reading(run: Path) -> list[Row]:
    """How long a reader waits, and how much memory it takes."""
    command = [sys.executable, "-c", READING, str(run)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    told = json.loads(said)
    first, memory, many = told["first"], told["memory"], f"{told['count']:,} rollouts"
    rows = [
        Row(f"{many}: count and first page", "s", first, FIRST_PAGE_SECONDS, "bar", FIRST_PAGE_SECONDS / first, 1.0)
    ]
    for name, (seconds, found) in told["filters"].items():
        what = f"{many}: {name}, {found:,} found"
        rows.append(Row(what, "s", seconds, FILTER_SECONDS, "bar", FILTER_SECONDS / seconds, 1.0))
    rows.append(
        Row(f"{many}: one body", "s", told["body"], FIRST_PAGE_SECONDS, "bar", FIRST_PAGE_SECONDS / told["body"], 1.0)
    )
    rows.append(Row(f"{many}: peak memory", "MB", memory, MOST_MEMORY, "bar", MOST_MEMORY / memory, 1.0))
    return rows


def made(folder: Path, rollouts: int) -> Path:
    script = Path(__file__).parents[1] / "scripts" / "make_big_run.py"
    subprocess.run([sys.executable, str(script), str(folder), "--rollouts", str(rollouts)], check=True, timeout=3600)
    return folder


def compare(name: str, load: Load, turns: int, rounds: int) -> list[Row]:
    many = max(3, 120 // turns)
    load.recorded(turns, 1)
    ours, peer = alternate(rounds, lambda: load.recorded(turns, many), lambda: load.anew(turns, many))
    what = f"{name}, {turns} turns"
    return [
        Row(what, "ms/turn", ours, BUDGET_MS, "budget", BUDGET_MS / ours, bar(turns)),
        Row(what, "ms/turn", ours, peer, "anew, unrecorded", peer / ours, 0.0),
    ]


def bar(turns: int) -> float:
    """The promise is for conversations of ten turns, of whatever kind."""
    return 1.0 if turns == 10 else 0.0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
