"""A limit that was too low is told with the key of the run file that raises it; content that is no text by its kind."""

import asyncio

import pytest

from paceline.config import RunConfig
from paceline.config.env import RetrievalConfig
from paceline.envs import EnvError
from paceline.envs.retrieval import Retrieval as RetrievalEnvironment
from paceline.rollout.render import Renderer, RenderError

TWO = {"env": [{"type": "reverse-text"}, {"type": "arithmetic", "timeout": 7.0}]}


def test_a_limit_is_named_as_the_command_line_takes_it():
    """Also after the run file went through JSON, as it does on its way to another process."""
    config = RunConfig.model_validate(TWO)
    again = type(config).model_validate_json(config.model_dump_json())
    for env in (config.env[1], again.env[1], again.env[1].model_copy(update={"weight": 2.0})):
        assert env.raise_hint("timeout") == "raise env.1.timeout (now 7) if it needs longer"


def test_a_search_service_that_is_slow_names_the_key():
    async def search() -> None:
        hold = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await hold.wait()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        config = RetrievalConfig(url=f"http://127.0.0.1:{port}", search_timeout=0.05)
        searcher = RetrievalEnvironment(config)._searcher
        try:
            with pytest.raises(EnvError, match=r"did not answer within 0\.05 s: raise `search_timeout` in \[\[env\]\]"):
                await searcher.search("x")
        finally:
            hold.set()
            await searcher.aclose()
            server.close()

    asyncio.run(search())


@pytest.mark.parametrize("kind", ["image_url", "image", "input_image"])
def test_a_template_is_not_shown_images(load, kind):
    """It would write the rest of the message, and the model would answer as if that were all."""
    renderer = Renderer(load("quickstart"), [])
    told = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": kind, kind: "x"}]}]
    with pytest.raises(RenderError, match="images are not supported"):
        renderer.prompt(told)
    assert renderer.text([{"role": "user", "content": told[0]["content"][:1]}]) == renderer.text(
        [{"role": "user", "content": "ab"}]
    )
