"""Jobs of the store ⇄ messages."""

from __future__ import annotations

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.errors import MeshfireError
from meshfire.store.job_values import EventKind, Item, ItemStatus, Job, JobEvent, JobStatus, NewItem

_JOB_STATUS = {status: pb.JobStatus.Value(f"JOB_STATUS_{status.name}") for status in JobStatus}
_ITEM_STATUS = {status: pb.JobItemStatus.Value(f"JOB_ITEM_STATUS_{status.name}") for status in ItemStatus}
_EVENT_KIND = {kind: pb.JobEventKind.Value(f"JOB_EVENT_KIND_{kind.name}") for kind in EventKind}


def job_to(job: Job) -> pb.Job:
    """A job."""
    return pb.Job(
        job_id=job.job_id,
        model=job.model,
        label=job.label,
        status=_JOB_STATUS[job.status],
        num_items=job.num_items,
        num_succeeded=job.num_succeeded,
        num_failed=job.num_failed,
        created_at_ms=_ms(job.created_at),
        started_at_ms=_ms(job.started_at),
        ended_at_ms=_ms(job.ended_at),
        expires_at_ms=_ms(job.expires_at),
    )


def new_item(item: pb.JobItem) -> NewItem:
    """An item as it is kept: a refused one needs no calls any more."""
    if not item.HasField("refusal"):
        return NewItem(item.reference, item.SerializeToString())
    kept = pb.JobItem(reference=item.reference, body=item.body)
    return NewItem(item.reference, kept.SerializeToString(), pb.JobOutcome(error=item.refusal).SerializeToString())


def item_to(item: Item) -> pb.JobItemResult:
    """An item and what became of it."""
    asked = pb.JobItem.FromString(item.request)
    return pb.JobItemResult(
        position=item.position,
        reference=item.reference,
        body=asked.body,
        status=_ITEM_STATUS[item.status],
        outcome=None if item.result is None else pb.JobOutcome.FromString(item.result),
        prompt_indices=[call.prompt_index for call in asked.calls],
    )


def event_to(event: JobEvent) -> pb.JobEvent:
    """An event."""
    return pb.JobEvent(
        event_id=event.event_id,
        job_id=event.job_id,
        model=event.model,
        kind=_EVENT_KIND[event.kind],
        message=event.message,
        created_at_ms=_ms(event.created_at),
    )


def error_to(error: MeshfireError) -> pb.JobError:
    """Why an item failed."""
    return pb.JobError(reason=error.reason, message=error.message, field=error.field or "")


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1000)
