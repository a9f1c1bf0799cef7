"""A seat in an episode: a client that speaks for the policy and records every token."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.inference import Sampling
from paceline.inference import Completion, GenerateRequest, Pool, noise_key
from paceline.rollout.render import Renderer
from paceline.rollout.types import Message, Turn


@dataclass(frozen=True, slots=True)
class Voice:
    """How a seat speaks: through which pool, in which template, sampled how. Shared by all seats of a run."""

    pool: Pool
    renderer: Renderer
    sampling: Sampling
    end_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said."""

    text: str
    truncated: bool
    """It hit the token limit before it was done."""

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.text}


class Seat:
    """Takes messages or token ids, calls the pool, and records the exact tokens, logprobs and versions."""

    def __init__(self, voice: Voice, noise: Sequence[int], order: int) -> None:
        self.turns: list[Turn] = []
        self._voice = voice
        self._noise = tuple(noise)
        self._order = order
        self._calls = 0

    async def chat(self, messages: Sequence[Message]) -> Reply:
        """The policy's next message in this conversation."""
        renderer = self._voice.renderer
        messages = [dict(message) for message in messages]
        prompt = renderer.extend(self.turns[-1], messages) if self.turns else renderer.prompt(messages)
        return await self._speak(prompt, messages)

    async def complete(self, token_ids: Sequence[int]) -> Reply:
        """The policy's continuation of exact tokens."""
        return await self._speak(list(token_ids), None)

    async def _speak(self, prompt: list[int], messages: list[Message] | None) -> Reply:
        sampling = self._voice.sampling
        noise = noise_key(*self._noise, self._calls)
        self._calls += 1
        completion = await self._voice.pool.generate(
            GenerateRequest(
                prompt_ids=tuple(prompt),
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=self._voice.end_tokens,
                noise=noise,
                order=self._order,
            )
        )
        return self._record(prompt, messages, completion)

    def _record(self, prompt: list[int], messages: list[Message] | None, completion: Completion) -> Reply:
        text = self._voice.renderer.reply(completion.token_ids)
        self.turns.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish=completion.finish,
                temperature=self._voice.sampling.temperature,
                log_z=completion.log_z,
                recomputed=completion.recomputed,
                messages=messages,
                text=text,
            )
        )
        return Reply(text, truncated=completion.finish == "length")
