"""The door of the gateway: a request comes in as a visitor, and is admitted to a model, or it is refused.

Owns the port and the open door of development. `keyed` has the real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from starlette.datastructures import Headers

from services.gateway.access.visitor import Visitor


class Door(Protocol):
    """Asked twice: before the body is read, and when the model is known."""

    async def enter(self, headers: Headers, account_id: str | None = None) -> Visitor:
        """Who this is; `account_id` is the one that the path names. Raises HttpError 401 or 403."""

    def admitted(self, visitor: Visitor, model: str) -> AbstractAsyncContextManager[None]:
        """Held while the request runs. Raises HttpError 429."""


class OpenDoor:
    """No keys: everybody is welcome, nobody is billed. For development, on loopback."""

    async def enter(self, headers: Headers, account_id: str | None = None) -> Visitor:
        """A visitor without a name."""
        return Visitor()

    @asynccontextmanager
    async def admitted(self, visitor: Visitor, model: str) -> AsyncIterator[None]:
        """Always."""
        yield
