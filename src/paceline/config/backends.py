"""Whose engine samples from the policy: Paceline's own, a vLLM, or an SGLang."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.base import PathKey, Section

if TYPE_CHECKING:
    from paceline.config.run import RunConfig

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


class Launch(Section):
    """A vLLM that the run starts on this machine, on a loopback port with a key of its own, and ends with itself."""

    python: Annotated[str, PathKey("program")] = ".venv-vllm/bin/python"
    """The interpreter of the environment vLLM is installed in."""
    args: list[str] = Field(default_factory=list)
    """Further arguments of vLLM's server, such as `["--tensor-parallel-size", "2"]`; the last one counts."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of its environment."""
    seconds: float = Field(default=900.0, gt=0)
    """How long it may take to come up."""


class Backend(Section):
    """Which server samples. A run with another than Paceline's own keeps its trainer in this process."""

    backend: Literal["paceline", "vllm", "sglang"] = "paceline"
    """`paceline`: the embedded engine. `vllm`, `sglang`: a server, attached (`base_url`) or, for vLLM, `launch`ed."""
    base_url: str | None = None
    """Where a server that somebody else started is reached. It must see `folder` under the same path."""
    api_key_env: str | None = None
    """Environment variable that holds its key."""
    folder: str | None = None
    """Where weights are written for it; `weights` in the run directory when left out."""
    launch: Launch | None = None
    """How a vLLM of the run's own is started; needed unless `base_url` is given."""

    @field_validator("base_url")
    @classmethod
    def _an_address(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"`{url}` is no address: write where the engine is served, http://HOST:PORT")
        return url

    @model_validator(mode="after")
    def _one_way(self) -> "Backend":
        given = [name for name in ("base_url", "api_key_env", "folder", "launch") if getattr(self, name) is not None]
        if self.backend == "paceline":
            if given:
                raise ValueError(f'{" and ".join(given)} need another engine: set backend = "vllm" or "sglang"')
        elif self.backend == "sglang" and self.launch is not None:
            raise ValueError("only vLLM is launched: start SGLang yourself and give its base_url")
        elif (self.base_url is None) == (self.launch is None):
            both = "" if self.base_url is None else ", not both"
            launch = " or a section [engine.launch], which may be empty" if self.backend == "vllm" else ""
            raise ValueError(f'backend = "{self.backend}" needs base_url, where it is served,{launch}{both}')
        return self


def problems(config: "RunConfig") -> Iterator[str]:
    """What a run asks of another maker's engine that it cannot do."""
    engine = config.engine
    if engine.backend == "paceline":
        return
    name = NAMES[engine.backend]
    if config.placement != "local":
        yield f'placement = "{config.placement}" starts engines of Paceline: with {name} set placement = "local"'
    if config.deterministic:
        yield f"deterministic = true needs the embedded engine: {name} repeats a run as far as its own seeds go"
    if config.model.fp32_head:
        yield f"model.fp32_head is not known to {name}: leave it out"
    samplings = {"sampling": config.sampling, "eval.sampling": config.eval.sampling}
    for at, sampling in samplings.items():
        if sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0):
            yield (
                f"{at}: {name} reports log probabilities of what top_p and top_k have left, not of the policy itself: "
                "leave both out, or use the embedded engine"
            )
    for env in config.env:
        if getattr(env, "league", None) is not None:
            yield f"environment `{env.name}`: a league needs the embedded engine, which serves past versions too"
