"""Connects the orchestrator to an engine and a trainer in other processes."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from paceline.cluster.local import Placed, renderer_of, share_cores
from paceline.cluster.processes.launch_spec import LaunchSpec
from paceline.cluster.processes.link import RETURN_SECONDS, WORD_SECONDS, RemoteTrainer
from paceline.cluster.torch_kit import engine_for, pick_device
from paceline.config import RunConfig
from paceline.config.inference import SamplingConfig
from paceline.inference import EmbeddedEngine, EngineError, HttpEngine, Pool
from paceline.inference.pool import LeaguePool
from paceline.model import load_model, load_tokenizer
from paceline.orchestrator import lay_out
from paceline.orchestrator.league_checkpoints import members
from paceline.rollout import RecordingServer, SamplingClient

LOOK_SECONDS = 0.25
log = logging.getLogger("paceline.server")


@asynccontextmanager
async def connected(config: RunConfig, brief: LaunchSpec, phase: Callable[[str], None]) -> AsyncGenerator[Placed]:
    """Wait for server and trainer, and let go of them at the end."""
    phase("preparing environments")
    courses = lay_out(config)
    tokenizer = load_tokenizer(config.model)
    phase(f"waiting for a server and a trainer of {config.model.name}")
    trainer = RemoteTrainer(Path(brief.trainer))
    engine = HttpEngine(brief.url, api_key=brief.key, folder=brief.weights, path=config.weights.path)
    recorder = RecordingServer(config.recording.host, config.recording.port, config.recording.advertise)
    past = sum(member.league.size for member in members(courses))
    try:
        hello = await trainer.meet()
        await _up(engine)
        config = share_cores(config, hello.parameters)

        def twin() -> EmbeddedEngine:
            """An engine of this process, for a past version that is a whole model."""
            model = load_model(config.model, pick_device(config.device))
            return engine_for(model.requires_grad_(False), config)

        with_past = LeaguePool([engine], twin) if past else None
        pool = with_past or Pool([engine])
        renderer = renderer_of(tokenizer, hello.ends, config.model)

        def voice(sampling: SamplingConfig) -> SamplingClient:
            stops = frozenset((*hello.ends, *sampling.stop_token_ids))
            return SamplingClient(pool, renderer, sampling, stops, recorder)

        try:
            yield Placed(pool, trainer, tokenizer, courses, voice, hello.device, hello.parameters, with_past)
        finally:
            pool.close()
    finally:
        await engine.aclose()
        trainer.close()


async def _up(engine: HttpEngine) -> None:
    began, told = time.monotonic(), 0.0
    while True:
        try:
            return await asyncio.to_thread(engine.start)
        except EngineError as error:
            waited = time.monotonic() - began
            if waited > RETURN_SECONDS:
                raise
            if waited - told > WORD_SECONDS:
                told = waited
                log.warning("waiting for the server for %.0f s: %s", waited, error)
        await asyncio.sleep(LOOK_SECONDS)  # bounded: by RETURN_SECONDS
