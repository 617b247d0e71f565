"""Jobs through a whole mesh: the same words as online, billed once, whoever runs them and whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as generate_pb
from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.api.router.v1 import job_service_pb2_grpc as rpc
from meshfire.client import Sampling
from meshfire.cluster.topology import parse
from meshfire.errors import BadInput, NotFound
from meshfire.rpc.status import from_rpc_error
from meshfire.store.database import Database
from meshfire.store.ledger import GroupBy, Ledger
from tests import oracles
from tests.mesh.asking import ask
from tests.mesh.harness import InProcessMesh, mesh_of

ACCOUNT = "a" * 32
ENDED = {pb.JOB_STATUS_COMPLETED, pb.JOB_STATUS_FAILED, pb.JOB_STATUS_CANCELLED, pb.JOB_STATUS_EXPIRED}


@dataclass
class JobMesh:
    mesh: InProcessMesh
    store_url: str

    async def call(self, method: str, request: Any, router: str = "router-0", account: str = ACCOUNT) -> Any:
        """One unary call, or all messages of a stream."""
        async with grpc.aio.insecure_channel(self.mesh.address(router)) as channel:
            answer = getattr(rpc.JobServiceStub(channel), method)(
                request, metadata=(("x-meshfire-account", account), ("x-meshfire-key", "k" * 32)), timeout=40
            )
            try:
                if isinstance(answer, grpc.aio.UnaryStreamCall):
                    return [message async for message in answer]
                return await answer
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None

    async def submit(self, items: list[pb.JobItem], **more: Any) -> pb.Job:
        return (await self.call("SubmitJob", pb.SubmitJobRequest(model="m", items=items, **more))).job

    async def ended(self, job_id: str) -> pb.Job:
        async with asyncio.timeout(40):
            while True:
                job = (await self.call("GetJob", pb.GetJobRequest(job_id=job_id))).job
                if job.status in ENDED:
                    return job
                await asyncio.sleep(0.1)

    async def results(self, job_id: str) -> list[pb.JobItemResult]:
        parts = await self.call("ListJobItems", pb.ListJobItemsRequest(job_id=job_id))
        return [item for part in parts for item in part.items]

    async def billed(self) -> tuple[int, int]:
        """Requests and output tokens of the account."""
        database = await Database.open(self.store_url)
        try:
            sums = await Ledger(database).sums([GroupBy.ACCOUNT], account_id=ACCOUNT)
        finally:
            await database.close()
        return (sums[0].num_requests, sums[0].tokens.output) if sums else (0, 0)


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[JobMesh]:
    model = oracles.make_deepseek_checkpoint(tmp_path / "model")
    store_url = f"sqlite:///{tmp_path / 'store.db'}"
    topology = parse(
        {
            "mesh": "jobs",
            "http_port": 0,
            "routers": 2,
            "store_url": store_url,
            "models": [{"model": str(model), "name": "m", "expert_shards": 0}],
        }
    )
    async with mesh_of(topology) as mesh:
        yield JobMesh(mesh, store_url)


def request(prompt: list[int], max_tokens: int, **more: Any) -> generate_pb.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **more)
    return generate_pb.GenerateRequest(model="m", token_ids=generate_pb.TokenIds(ids=prompt), sampling=sampling)


def item(number: int, max_tokens: int = 6) -> pb.JobItem:
    call = pb.JobCall(request=request([20 + number, 30, 40], max_tokens))
    return pb.JobItem(reference=f"r{number}", body=f"body {number}".encode(), calls=[call])


def token_ids(output: pb.JobOutput) -> list[int]:
    return [token for message in output.messages for token in message.delta.token_ids]


async def test_a_jobs_words_are_those_of_an_online_request(jobs: JobMesh) -> None:
    refused = pb.JobItem(reference="bad", body=b"{", refusal=pb.JobError(reason="BAD_INPUT", message="no JSON"))
    failing = pb.JobItem(reference="long", calls=[pb.JobCall(request=request([5] * 5000, 1))])
    job = await jobs.submit([item(0), item(1), refused, failing], label=b"mine")
    assert (job.status, job.num_items, job.num_failed) == (pb.JOB_STATUS_QUEUED, 4, 1)
    done = await jobs.ended(job.job_id)
    assert (done.status, done.num_succeeded, done.num_failed, done.label) == (pb.JOB_STATUS_COMPLETED, 2, 2, b"mine")
    results = await jobs.results(job.job_id)
    assert [one.reference for one in results] == ["r0", "r1", "bad", "long"]
    for number in (0, 1):
        online = await ask(jobs.mesh, [20 + number, 30, 40], Sampling(max_tokens=6, temperature=0, ignore_eos=True))
        (output,) = results[number].outcome.outputs
        assert token_ids(output) == online.token_ids
        assert output.messages[-1].finished.usage.num_output_tokens == 6
        assert results[number].body == f"body {number}".encode()
    assert results[2].outcome.error.message == "no JSON"
    assert results[3].outcome.error.reason == "PROMPT_TOO_LONG"
    assert await jobs.billed() == (2, 12)


async def test_choices_share_their_prompts_price(jobs: JobMesh) -> None:
    calls = [pb.JobCall(request=request([7] * 40, 3, seed=seed), prompt_index=0) for seed in (1, 2, 3)]
    job = await jobs.submit([pb.JobItem(reference="n", calls=calls)])
    await jobs.ended(job.job_id)
    (result,) = await jobs.results(job.job_id)
    assert len(result.outcome.outputs) == 3
    assert list(result.prompt_indices) == [0, 0, 0]
    assert await jobs.billed() == (3, 9)


async def test_online_requests_go_before_a_crowd_of_jobs(jobs: JobMesh) -> None:
    job = await jobs.submit([item(number, max_tokens=40) for number in range(40)])
    await asyncio.sleep(0.5)
    answer = await ask(jobs.mesh, [9, 9, 9], Sampling(max_tokens=4, temperature=0, ignore_eos=True))
    running = (await jobs.call("GetJob", pb.GetJobRequest(job_id=job.job_id))).job
    assert len(answer.token_ids) == 4
    assert running.num_succeeded < 40, "the online request did not wait for all of them"
    done = await jobs.ended(job.job_id)
    assert done.num_succeeded == 40
    assert await jobs.billed() == (40, 40 * 40)


async def test_a_cancelled_job_stops_what_runs_and_commits_nothing_more(jobs: JobMesh) -> None:
    job = await jobs.submit([item(number, max_tokens=400) for number in range(30)])
    await asyncio.sleep(0.3)
    cancelled = (await jobs.call("CancelJob", pb.CancelJobRequest(job_id=job.job_id), router="router-1")).job
    assert cancelled.status == pb.JOB_STATUS_CANCELLED
    succeeded = [one for one in await jobs.results(job.job_id) if one.status == pb.JOB_ITEM_STATUS_SUCCEEDED]
    await asyncio.sleep(1.0)
    again = [one for one in await jobs.results(job.job_id) if one.status == pb.JOB_ITEM_STATUS_SUCCEEDED]
    assert again == succeeded
    assert (await jobs.billed())[0] == len(succeeded)


async def test_events_tell_of_a_job_through_every_router(jobs: JobMesh) -> None:
    watched: list[pb.JobEvent] = []

    async def watch() -> None:
        async with grpc.aio.insecure_channel(jobs.mesh.address("router-1")) as channel:
            stream = rpc.JobServiceStub(channel).WatchJobs(
                pb.WatchJobsRequest(), metadata=(("x-meshfire-account", ACCOUNT),), timeout=40
            )
            async for message in stream:
                watched.extend(message.events)
                if len(watched) >= 2:
                    return

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.5)
    job = await jobs.submit([item(0)])
    async with asyncio.timeout(40):
        await watching
    assert [(event.job_id, event.kind) for event in watched] == [
        (job.job_id, pb.JOB_EVENT_KIND_QUEUED),
        (job.job_id, pb.JOB_EVENT_KIND_SUCCEEDED),
    ]


async def test_an_account_sees_only_its_own_jobs(jobs: JobMesh) -> None:
    first, second = await jobs.submit([item(0)]), await jobs.submit([item(1)])
    listed = await jobs.call("ListJobs", pb.ListJobsRequest(limit=1))
    assert ([job.job_id for job in listed.jobs], listed.has_more) == ([second.job_id], True)
    rest = await jobs.call("ListJobs", pb.ListJobsRequest(after=second.job_id))
    assert ([job.job_id for job in rest.jobs], rest.has_more) == ([first.job_id], False)
    for method, message in (
        ("GetJob", pb.GetJobRequest(job_id=first.job_id)),
        ("CancelJob", pb.CancelJobRequest(job_id=first.job_id)),
        ("ListJobItems", pb.ListJobItemsRequest(job_id=first.job_id)),
    ):
        with pytest.raises(NotFound):
            await jobs.call(method, message, account="b" * 32)


async def test_wrong_jobs_name_the_field(jobs: JobMesh) -> None:
    other = pb.JobItem(calls=[pb.JobCall(request=generate_pb.GenerateRequest(model="other"))])
    cases: list[tuple[pb.SubmitJobRequest, str]] = [
        (pb.SubmitJobRequest(items=[item(0)]), "model"),
        (pb.SubmitJobRequest(model="m"), "items"),
        (pb.SubmitJobRequest(model="m", items=[pb.JobItem()]), "items[0].calls"),
        (pb.SubmitJobRequest(model="m", items=[item(0), other]), "items[1].calls[0].request.model"),
        (pb.SubmitJobRequest(model="m", items=[item(0)], completion_window_s=-1), "completion_window_s"),
        (pb.SubmitJobRequest(model="m", items=[pb.JobItem(body=b"x" * (10 << 20), calls=item(0).calls)]), "items"),
    ]
    for wrong, field in cases:
        with pytest.raises(BadInput) as caught:
            await jobs.call("SubmitJob", wrong)
        assert caught.value.field == field
