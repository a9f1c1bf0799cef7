"""Plays rows by a rollout service: another process, or another machine, that returns whole rollouts as tokens."""

import asyncio
import logging
from collections.abc import Mapping
from time import monotonic
from uuid import uuid4

import httpx

from paceline.config.env import RemoteEnvConfig
from paceline.config.secret import read_key, redact
from paceline.data import Row
from paceline.envs.base import POLICY, DatasetEnvironment, Outcome, RefusedRollout
from paceline.envs.rollout_service import RolloutRequest, check_answer, parse_answer
from paceline.errors import RequestError, Unreachable
from paceline.rollout import Seat
from paceline.util.rate_limited_logger import RateLimitedLogger

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""
limited_log = RateLimitedLogger(logging.getLogger(__name__))


class Remote(DatasetEnvironment[RemoteEnvConfig]):
    """Posts each row to a service, with an address to sample the policy at, and trains on the turns it answers with.

    A post that finds the service gone is repeated under the same id until it answers: a service that was killed plays
    the row again, one that lost only the connection answers with the same rollout. The id belongs to one episode of
    this process, so what a service remembers of an earlier run, and of weights that a resume undid, is never used.
    """

    require = ()
    prompted = False

    def __init__(self, config: RemoteEnvConfig) -> None:
        super().__init__(config)
        self._key = read_key(config.api_key_env, f"environment `{config.name}`")
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._ssl = httpx.create_ssl_context() if config.url.startswith("https") else False

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        seat, who = seats[POLICY], f"the rollout service at {self._config.url}"
        key, base_url = uuid4().hex, await seat.base_url()
        request = RolloutRequest.build(key, example, seat, base_url, self._config.timeout)
        try:
            answer = parse_answer(await self._ask(request, who), f"the answer of {who}")
            if answer.id != key:
                raise RefusedRollout("id", f"{who} answered for episode {answer.id[:80]!r}, not {key!r}")
            if answer.dropped is not None:
                return None
            turns = check_answer(answer, request, seat, f"the answer of {who}")
        except RefusedRollout as refused:
            limited_log.warn((self._config.name, refused.reason), "dropped (%s): %s", refused.reason, refused)
            raise
        seat.turns[:] = turns
        return Outcome.solo(float(answer.reward or 0.0), **answer.metrics)

    async def _ask(self, request: RolloutRequest, who: str) -> bytes:
        """The body of the service's answer, posting again while the service is away."""
        body = request.model_dump_json(fallback=str).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": request.id, **self._headers}
        # Reading has no limit of its own: the episode's `timeout` ends it.
        timeouts = httpx.Timeout(None, connect=CONNECT_SECONDS)
        pause, lost_at = FIRST_PAUSE, None
        async with httpx.AsyncClient(headers=headers, timeout=timeouts, verify=self._ssl) as client:
            while True:
                began = monotonic()
                try:
                    return await self._post(client, body, who)
                except (httpx.TransportError, Unreachable) as error:
                    if lost_at is None or monotonic() - began > LONGEST_PAUSE:
                        lost_at, pause = monotonic(), FIRST_PAUSE  # the service took the post, and has only now gone
                    cause = redact(str(error) or type(error).__name__, self._key)
                    limited_log.warn(
                        (self._config.name, "away"),
                        "%s does not answer: %s; its episodes are posted again for %g s",
                        who,
                        cause,
                        self._config.reconnect_seconds,
                    )
                    if monotonic() - lost_at > self._config.reconnect_seconds:
                        hint = self._config.raise_hint("reconnect_seconds")
                        raise Unreachable(f"{who} does not answer: {cause}; start it, or {hint}") from error
                await asyncio.sleep(pause)  # bounded: by reconnect_seconds, and by the episode's timeout
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _post(self, client: httpx.AsyncClient, body: bytes, who: str) -> bytes:
        """One attempt. Raises `Unreachable` or httpx's own error where another may succeed."""
        most = self._config.max_answer_mb << 20
        parts, size = [], 0
        async with client.stream("POST", self._config.url, content=body) as response:
            async for part in response.aiter_bytes():
                size += len(part)
                if size > most:
                    hint = self._config.raise_hint("max_answer_mb")
                    raise RefusedRollout("too_large", f"{who} answered more than {most >> 20} MiB: {hint}")
                parts.append(part)
        answer = b"".join(parts)
        if response.status_code == 200:
            return answer
        words = redact(" ".join(answer[:2000].decode(errors="replace").split()), self._key)[:300]
        text = f"{who} answered {response.status_code}: {words}"
        if response.status_code in TRANSIENT:
            raise Unreachable(text)
        hint = f"; its key is read from the variable {self._config.api_key_env or 'that `api_key_env` names'}"
        raise RequestError(text + hint * (response.status_code in (401, 403)))
