"""A client whose engine scores by a rule anybody can work out, and rollouts recorded in real tokens."""

import asyncio
import hashlib
from collections.abc import Sequence

from paceline.algorithms import AlgorithmContext
from paceline.clients import Pool
from paceline.clients.frozen import FrozenPool
from paceline.config.inference import SamplingConfig
from paceline.data import Ticket
from paceline.errors import EngineError, RequestError
from paceline.rollout import Group, Message, Renderer, Rollout, SamplingClient, Turn, assemble
from paceline.weights.update import ServedPolicy
from rollouts import continued_prompt


def truth(ids: Sequence[int], temperature: float) -> list[float]:
    """A number for each token that depends on all tokens before it, and on the temperature."""
    found, state = [0.0], hashlib.blake2b(f"{temperature:.4f}".encode())
    for token in ids:
        state.update(token.to_bytes(4))
        found.append(-int.from_bytes(state.digest()[:4]) / 2**30)
    return [0.0, *found[2:]] if ids else []


class Oracle:
    """An engine that only scores. It fails on sequences that hold a token of its `fears`."""

    name = "oracle"

    def __init__(self, fears: Sequence[int] = ()) -> None:
        self.fears = set(fears)
        self.asked: list[tuple[list[int], float]] = []
        self.running = self.most = 0

    async def score(self, sequences, temperature=1.0, model=""):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        for ids in sequences:
            self.asked.append((list(ids), temperature))
            if self.fears & set(ids):
                raise RequestError("I fear this")
        return [truth(ids, temperature) for ids in sequences]

    async def policy(self) -> ServedPolicy:
        return ServedPolicy(0, "")

    async def aclose(self) -> None:
        self.closed = True


class Attached(FrozenPool):
    """A frozen pool around an oracle."""

    scores_any_temperature = True  # ty: ignore


def context(
    renderer: Renderer, engine: Oracle, rows=(), temperature: float = 1.0, teacher: bool = True
) -> AlgorithmContext:
    async def attach(ref):
        if not teacher:
            raise EngineError("the model does not answer")
        return Attached([engine], ref)

    sampling = SamplingConfig(temperature=temperature, max_tokens=8)
    client = SamplingClient(Pool([engine]), renderer, sampling, renderer.end_tokens)
    return AlgorithmContext("maze", rows, client, attach)


def spoken(
    renderer: Renderer,
    *conversation: Message,
    replies: Sequence[str],
    member: int = 0,
    row: int = 0,
    reward: float = 0.0,
    finish: str = "stop",
    temperature: float = 1.0,
) -> Rollout:
    """A rollout in which the policy gives the replies; after each but the last, the next given message is put in.

    The conversation begins with all messages but the last len(replies) - 1.
    """
    split = len(conversation) - len(replies) + 1
    messages, rest = list(conversation[:split]), list(conversation[split:])
    turns: list[Turn] = []
    end = min(renderer.end_tokens)
    for at, text in enumerate(replies):
        last = at == len(replies) - 1
        prompt = continued_prompt(renderer, turns[-1], messages) if turns else renderer.prompt(messages)
        cut = last and finish == "length"
        said = [*renderer.encode(text), *([] if cut else [end])]
        turns.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=said,
                logprobs=[-0.5 - i / 8 for i in range(len(said))],
                versions=[3] * len(said),
                finish="length" if cut else "stop",
                temperature=temperature,
                messages=list(messages),
                text=text,
            )
        )
        messages.append(turns[-1].message)
        if not last:
            messages.append(rest[at])
    rollout = Rollout(ticket=Ticket(4, "maze", 0, 4, row), member=member, turns=turns, reward=reward)
    rollout.samples = assemble(rollout)
    return rollout


def grouped(*rollouts: Rollout) -> Group:
    return Group(ticket=rollouts[0].ticket, rollouts=list(rollouts), size=len(rollouts))
