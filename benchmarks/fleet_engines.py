"""The engines of `fleet.py`, in a module of their own so that Ray's workers can import them."""

import msgspec

from paceline.clients.rpc import Answer, FromEngine, Load, decode_to_engine, handle_message
from paceline.weights.update import WeightUpdate
from simulator.cost import Lengths
from simulator.engine import SimulatedEngine

LONGEST = 8192
LENGTHS = Lengths(median=700.0, spread=0.9, longest=LONGEST)


class SimulatedEngines:
    """Several simulated engines in one process, which sample in real time."""

    def __init__(self, engines: int, slots: int, seconds: float) -> None:
        pace = seconds / LENGTHS.mean
        self._engines = [SimulatedEngine(slots, lambda running: pace, LENGTHS) for _ in range(engines)]
        self._encode = msgspec.msgpack.Encoder().encode

    async def answer(self, number: int, question: bytes) -> bytes:
        (message,) = decode_to_engine(question).messages
        return self._framed(number, await handle_message(self._engines[number], message))

    async def load(self, number: int, head: bytes, weights: object) -> bytes:
        (message,) = decode_to_engine(head).messages
        assert isinstance(message, Load)
        seconds = await self._engines[number].load_weights(WeightUpdate(message.version, {}))
        return self._framed(number, Answer(message.id, seconds=seconds))

    def _framed(self, number: int, answer) -> bytes:
        return self._encode(FromEngine([answer], self._engines[number].busy_seconds))
