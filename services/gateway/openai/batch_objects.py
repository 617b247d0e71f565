"""Batches as OpenAI writes them. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshfire.api.router.v1 import job_service_pb2 as pb
from services.gateway.dialect import Json
from services.gateway.openai.strict import Strict

ENDED = frozenset({pb.JOB_STATUS_COMPLETED, pb.JOB_STATUS_FAILED, pb.JOB_STATUS_CANCELLED, pb.JOB_STATUS_EXPIRED})
#: A batch all of whose lines failed is completed all the same: each line says why.
_STATUS = {
    pb.JOB_STATUS_QUEUED: "in_progress",
    pb.JOB_STATUS_RUNNING: "in_progress",
    pb.JOB_STATUS_COMPLETED: "completed",
    pb.JOB_STATUS_FAILED: "completed",
    pb.JOB_STATUS_CANCELLED: "cancelled",
    pb.JOB_STATUS_EXPIRED: "expired",
}
_WINDOWS_S = {"24h": 86_400}

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


class BatchRequest(Strict):
    """POST /v1/batches"""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None

    @property
    def window_s(self) -> int:
        """Seconds of the completion window."""
        return _WINDOWS_S[self.completion_window]


class Label(BaseModel):
    """What a job keeps of the batch that it is."""

    model_config = ConfigDict(frozen=True)

    dialect: Literal["openai.batch"] = "openai.batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None

    def to_bytes(self) -> bytes:
        """For the job."""
        return self.model_dump_json().encode()


def label_of(job: pb.Job) -> Label | None:
    """None for a job that is no batch."""
    try:
        return Label.model_validate(json.loads(job.label))
    except (ValidationError, ValueError):
        return None


def batch(job: pb.Job, label: Label) -> Json:
    """A `batch` object."""
    status = _STATUS.get(job.status, "in_progress")
    ended = job.ended_at_ms // 1000 if job.ended_at_ms else None
    num_missing = job.num_items - job.num_succeeded if job.status in ENDED else 0
    return {
        "id": f"batch_{job.job_id}",
        "object": "batch",
        "endpoint": label.endpoint,
        "model": job.model,
        "errors": None,
        "input_file_id": label.input_file_id,
        "completion_window": label.completion_window,
        "status": status,
        "output_file_id": f"file-out-{job.job_id}" if ended and job.num_succeeded else None,
        "error_file_id": f"file-err-{job.job_id}" if num_missing else None,
        "created_at": job.created_at_ms // 1000,
        "in_progress_at": job.started_at_ms // 1000 if job.started_at_ms else None,
        "expires_at": job.expires_at_ms // 1000,
        "finalizing_at": ended,
        "completed_at": ended if status == "completed" else None,
        "failed_at": None,
        "expired_at": ended if status == "expired" else None,
        "cancelling_at": ended if status == "cancelled" else None,
        "cancelled_at": ended if status == "cancelled" else None,
        "request_counts": {"total": job.num_items, "completed": job.num_succeeded, "failed": job.num_failed},
        "metadata": label.metadata,
    }
