"""What every endpoint shares, in one place."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Request

from paceline.inference.base import Engine
from paceline.inference.server.mailbox import Post
from paceline.inference.server.metrics import Meter
from paceline.inference.server.models import Models
from paceline.inference.server.scribe import Scribe
from paceline.inference.server.spool import Spool

if TYPE_CHECKING:
    from paceline.inference.broadcast import Receiver


@dataclass(slots=True)
class Service:
    """One engine and what the server knows around it. Lives as long as the server's event loop."""

    engine: Engine
    scribe: Scribe
    models: Models
    post: Post
    meter: Meter
    allowed: tuple[Path, ...] = ()
    """Folders weights may be loaded from, resolved."""
    peers: frozenset[str] = frozenset()
    """Addresses that groups may meet at."""
    spool: Spool = field(default_factory=Spool)
    """Where weights that come as a body lie until they are applied."""
    receiver: "Receiver | None" = None
    """Our part of a group that broadcasts weights."""
    joining: bool = False
    """Whether we are about to join one."""
    started: int = field(default_factory=lambda: int(time.time()))

    async def check_alive(self) -> None:
        """Raise if the engine cannot answer any more."""
        await self.engine.stats()


def service_of(request: Request) -> Service:
    return request.app.state.service
