"""Which names the server answers to: the served model's own, and those of its adapters."""

from paceline.inference.base import Engine, Limits, UnknownModel

BASE = "base"
"""What an engine calls the plain base, beside a policy that is an adapter."""


class Models:
    """Knows the engine's limits without asking it for every request; looks again when a name is unknown."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self._engine = engine
        self.name = name
        self.limits = limits

    async def refresh(self) -> None:
        self.limits = await self._engine.limits()

    async def resolve(self, asked: str | None) -> str:
        """The engine's name for what a request calls its model."""
        if not asked or asked == self.name:
            return ""
        if asked == BASE:
            return asked
        if asked not in self.limits.adapters:
            await self.refresh()
        if asked not in self.limits.adapters:
            served = ", ".join(f"`{name}`" for name in self.names())
            raise UnknownModel(f"there is no model `{asked}` here: the server has {served}")
        return asked

    def names(self) -> list[str]:
        return [self.name, *(name for name in self.limits.adapters if name)]
