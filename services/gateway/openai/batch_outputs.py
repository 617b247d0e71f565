"""Output and error files of batches: rendered from a job's results whenever they are read, stored nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.errors import NotFound
from services.gateway.access.visitor import Visitor
from services.gateway.dialect import Dialect, Json
from services.gateway.jobs.client import JobClient
from services.gateway.openai.batch_lines import output_file
from services.gateway.openai.batch_objects import ENDED, Label, label_of

OUTPUT_PREFIX, ERROR_PREFIX = "file-out-", "file-err-"


@dataclass(frozen=True)
class MadeFile:
    """A rendered file."""

    facts: Json
    content: bytes


class BatchOutputs:
    """`dialects` by the endpoint that a batch names."""

    def __init__(self, jobs: JobClient, dialects: Mapping[str, Dialect]) -> None:
        self._jobs = jobs
        self._dialects = dialects

    async def file(self, visitor: Visitor, file_id: str) -> MadeFile | None:
        """None if the id is not of this kind. Raises NotFound for a batch that is not there or has not ended."""
        for prefix, errors in ((OUTPUT_PREFIX, False), (ERROR_PREFIX, True)):
            if file_id.startswith(prefix):
                return await self._render(visitor, file_id, file_id.removeprefix(prefix), errors=errors)
        return None

    async def _render(self, visitor: Visitor, file_id: str, job_id: str, *, errors: bool) -> MadeFile:
        job = await self._jobs.job(visitor, job_id)
        label = label_of(job)
        if label is None or job.status not in ENDED:
            raise NotFound(f"there is no file {file_id!r}", field="file_id")
        content = await self._content(visitor, job, label, errors=errors)
        facts: Json = {
            "id": file_id,
            "object": "file",
            "bytes": len(content),
            "created_at": job.ended_at_ms // 1000,
            "filename": f"{file_id}.jsonl",
            "purpose": "batch_output",
            "status": "processed",
        }
        return MadeFile(facts, content)

    async def _content(self, visitor: Visitor, job: pb.Job, label: Label, *, errors: bool) -> bytes:
        results = await self._jobs.results(visitor, job.job_id)
        return output_file(job, results, self._dialects[label.endpoint], errors=errors)
