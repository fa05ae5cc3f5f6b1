"""What a pool's routers say now of the work on its machines, asked of each directly: for moves between two plans.

All of them or none: work that one of them does not tell would make a busy machine look free.
"""

import asyncio
import logging
from collections.abc import Mapping

import httpx

from poolwright.core import live_work
from poolwright.core.reading import LiveReading, MachineWork
from poolwright_protocol import names

log = logging.getLogger(__name__)


class RouterWork:
    """`LiveSource` of one pool."""

    def __init__(self, timeout_seconds: float = 1.0) -> None:
        self._client = httpx.AsyncClient(
            timeout=timeout_seconds,
            limits=httpx.Limits(max_keepalive_connections=0),  # an idle connection would outlive an IP's owner
            trust_env=False,
        )
        self._problem = ""

    async def read(self, router_urls: Mapping[str, str], now: float) -> LiveReading | None:
        try:
            said = await asyncio.gather(*(self._ask(uid, url) for uid, url in sorted(router_urls.items())))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.info("The work of routers is not known between two plans error=%s", error or type(error).__name__)
            return None
        self._problem = ""
        return LiveReading(now, live_work.added(said)) if said else None

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, uid: str, url: str) -> Mapping[str, MachineWork]:
        answer = await self._client.get(f"{url}{names.ROUTER_WORK_PATH}")
        answer.raise_for_status()
        if answer.headers.get(names.HEADER_ROUTER_UID) != uid:
            raise ValueError(f"{url} is another router's now")
        return live_work.from_json(answer.content)
