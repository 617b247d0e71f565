"""py-consul's asyncio client over an aiohttp session of our own.

Owns only that session. The client's own one (1.8.0) passes arguments that aiohttp has deprecated, and its pool would
make the hundred-and-first watch wait for a connection: every blocking query holds one.
"""

from __future__ import annotations

import aiohttp
import consul.aio
import consul.base


class _Transport(consul.aio.HTTPClient):  # type: ignore[misc]  # py-consul is untyped
    def __init__(self, host: str, port: int) -> None:
        consul.base.HTTPClient.__init__(self, host, port, "http", verify=False)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class AgentApi(consul.aio.Consul):  # type: ignore[misc]  # py-consul is untyped
    """One agent's HTTP API. Needs a running event loop; `await close()` ends its connections.

    An ACL token comes from Consul's own variable, `CONSUL_HTTP_TOKEN`."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, scheme="http", verify=False)

    def http_connect(self, host: str, port: int, *_: object) -> _Transport:
        return _Transport(host, port)
