"""What a recorded turn costs the orchestrator: rendering, matching, tokenising, recording and assembling, over an
engine that answers at once.

  budget    CPU milliseconds a turn of conversations of 1, 10 and 30 turns; the bar is 1 ms a turn at 10 turns
  anew      the same conversations by a client that renders and tokenises the whole of it each turn, as most do; no bar

  talk      user and assistant take turns            tools   each reply is a tool call, each answer its result
  thoughts  the template drops what was thought, so every prompt is rendered anew (Qwen 3 only)

Time is CPU time of this process, whoever else uses the machine. Conversations share their system prompt and nothing
else: what one asks was not tokenised for another.

The quickstart model's tokenizer ships with the package; Qwen 3's comes from `shared/tokenizers.tar.xz`, if it is here.
"""

import asyncio
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

import paceline
from bars import Row, alternate, arguments, finish
from paceline.config.inference import Sampling
from paceline.data import Ticket
from paceline.inference import Completion, GenerateRequest, Pool
from paceline.rollout import Renderer, Rollout, Seat, Voice, assemble

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
        voice = Voice(Pool([Instant(self.replies)]), Renderer(self.tokenizer, [self.end]), Sampling(), frozenset())

        async def play() -> None:
            for number in range(conversations):
                seat, messages = Seat(voice, (0, 0, number, 0), number), self.messages(number)
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
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, load in loads(Path(folder)).items():
            for turns in TURNS:
                rows += compare(name, load, turns, options.rounds)
    return finish("recording", rows, options.json)


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
