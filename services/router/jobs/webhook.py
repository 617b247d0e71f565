"""Events of jobs to a webhook: signed, at least once, tried again for a day.

The signature is that of the Standard Webhooks specification: HMAC-SHA256 over `id.timestamp.body`. The body is Workers
AI's batch event. An event may come twice: its id is the same then.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from datetime import UTC, datetime

import aiohttp

from meshfire.errors import BadInput, StoreUnavailable
from meshfire.store.job_outbox import JobOutbox
from meshfire.store.job_values import EventKind, JobEvent

_log = logging.getLogger(__name__)

_TIMEOUT_S = 15.0
#: nobody else delivers an event meanwhile
_LEASE_S = 60.0
_POLL_S = 1.0
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 3600.0
_GIVE_UP_S = 86_400.0
_SECRET_PREFIX = "whsec_"


class Webhook:
    """One URL for all accounts; `secret` is `whsec_` and base64, as the specification writes it. Raises BadInput."""

    def __init__(self, outbox: JobOutbox, url: str, secret: str) -> None:
        self._outbox = outbox
        self._url = url
        self._key = _key(secret)

    async def run(self) -> None:
        """Deliver until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    events = await self._outbox.due(_LEASE_S)
                    for event in events:
                        await self._deliver(session, event)
                except StoreUnavailable as error:
                    _log.warning("webhook deliveries wait for the store: %s", error)
                    events = []
                if not events:
                    await asyncio.sleep(_POLL_S)

    async def _deliver(self, session: aiohttp.ClientSession, event: JobEvent) -> None:
        retry_after_s: float | None = None
        if not await self._post(session, event):
            if time.time() - event.created_at < _GIVE_UP_S:
                retry_after_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(event.num_attempts - 1, 16))
            else:
                _log.error("event %d of job %s was never taken by the webhook", event.event_id, event.job_id)
        await self._outbox.settle(event.event_id, retry_after_s)

    async def _post(self, session: aiohttp.ClientSession, event: JobEvent) -> bool:
        body = json.dumps(body_of(event), separators=(",", ":")).encode()
        headers = {"content-type": "application/json", **signed(self._key, f"evt_{event.event_id}", time.time(), body)}
        try:
            async with session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
                if 200 <= answer.status < 300:
                    return True
                _log.warning("webhook answered %d to event %d", answer.status, event.event_id)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.warning("webhook cannot be reached: %s", error)
        return False


def signed(key: bytes, event_id: str, now_s: float, body: bytes) -> dict[str, str]:
    """The headers by which a receiver checks who sent this, and when."""
    timestamp = str(int(now_s))
    digest = hmac.new(key, b".".join((event_id.encode(), timestamp.encode(), body)), hashlib.sha256).digest()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def body_of(event: JobEvent) -> dict[str, object]:
    """As Workers AI's queue subscriptions write it."""
    payload: dict[str, object] = {"requestId": event.job_id}
    if event.kind is EventKind.FAILED:
        payload |= {"message": event.message, "internalCode": 5001, "httpCode": 500}
    at = datetime.fromtimestamp(event.created_at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        "type": f"cf.workersAi.model.batch.{event.kind.value}",
        "source": {"type": "workersAi.model", "modelName": event.model},
        "payload": payload,
        "metadata": {"accountId": event.account_id, "eventSchemaVersion": 1, "eventTimestamp": at},
    }


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(_SECRET_PREFIX) or len(key) < 16:
        raise BadInput("the webhook's secret must be whsec_ and base64 of at least 16 bytes", field="webhook_secret")
    return key
