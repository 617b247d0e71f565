"""Webhook deliveries to a receiver that checks signatures by itself, and that is sometimes not there."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from meshfire.errors import BadInput
from meshfire.store.database import Database
from meshfire.store.job_outbox import JobOutbox
from meshfire.store.job_values import NewItem, NewJob
from meshfire.store.jobs import Jobs
from services.router.jobs import webhook
from services.router.jobs.webhook import Webhook

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef").decode()
ACCOUNT = "a" * 32


@dataclass
class Receiver:
    """Takes every third delivery."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        event_id, timestamp = request.headers["webhook-id"], request.headers["webhook-timestamp"]
        expected = hmac.new(b"0123456789abcdef", f"{event_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
        assert request.headers["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"
        status = self.answers.pop(0) if self.answers else 204
        self.ids.append(event_id)
        if status == 204:
            self.bodies.append(json.loads(body))
        return web.Response(status=status)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    app = web.Application()
    app.router.add_post("/hook", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    made.url = f"http://{host}:{port}/hook"
    yield made
    await runner.cleanup()


async def test_events_are_signed_and_sent_until_they_are_taken(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "_POLL_S", 0.02)
    monkeypatch.setattr(webhook, "_FIRST_PAUSE_S", 0.02)
    receiver.answers = [500, 302, 204]
    database = await Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    jobs, outbox = Jobs(database, retention_s=60), JobOutbox(database)
    new = NewJob(ACCOUNT, "k", "@cf/x/y", b"", (NewItem("r", b"", refused=b"no"),), 4e9)
    job = await jobs.submit(new)
    running = asyncio.create_task(Webhook(outbox, receiver.url, SECRET).run())
    async with asyncio.timeout(20):
        while len(receiver.bodies) < 2:
            await asyncio.sleep(0.02)
    running.cancel()
    queued, failed = sorted(receiver.bodies, key=lambda body: str(body["type"]), reverse=True)
    assert queued["type"] == "cf.workersAi.model.batch.queued"
    assert queued["source"] == {"type": "workersAi.model", "modelName": "@cf/x/y"}
    assert queued["payload"] == {"requestId": job.job_id}
    assert failed["payload"] == {
        "requestId": job.job_id,
        "message": "every item failed",
        "internalCode": 5001,
        "httpCode": 500,
    }
    assert len(receiver.ids) == 4
    assert len(set(receiver.ids)) == 2, "a second try is the same event"
    assert await outbox.due(1.0) == []
    await database.close()


async def test_a_receiver_that_is_not_there_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_POLL_S", 0.02)
    monkeypatch.setattr(webhook, "_FIRST_PAUSE_S", 0.02)
    database = await Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    await Jobs(database, retention_s=60).submit(NewJob(ACCOUNT, "k", "m", b"", (NewItem("r", b""),), 4e9))
    outbox = JobOutbox(database)
    running = asyncio.create_task(Webhook(outbox, "http://127.0.0.1:1/hook", SECRET).run())
    async with asyncio.timeout(20):
        while (await outbox.after(0, ACCOUNT))[0].num_attempts < 3:
            await asyncio.sleep(0.02)
    assert not running.done()
    running.cancel()
    await database.close()


@pytest.mark.parametrize("secret", ["", "plain", "whsec_", "whsec_!!!!", "whsec_c2hvcnQ="])
def test_a_weak_secret_is_refused(secret: str) -> None:
    with pytest.raises(BadInput) as caught:
        Webhook(None, "http://host/hook", secret)  # type: ignore[arg-type]
    assert caught.value.field == "webhook_secret"
