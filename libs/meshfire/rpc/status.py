"""Errors of `meshfire.errors` as google.rpc.Status and back: both ends of a call raise the same type."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from meshfire import errors

DOMAIN = "meshfire"
_DETAILS_KEY = "grpc-status-details-bin"

#: What a bare gRPC status (no ErrorInfo: the transport's own) means here.
_BY_CODE: dict[grpc.StatusCode, type[errors.MeshfireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.BadInput,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Refused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Exhausted,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
}


def code_of(error: errors.MeshfireError) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    return grpc.StatusCode[error.code]


def to_status(error: errors.MeshfireError) -> status_pb2.Status:
    """Status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=error.message)
    _add(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.field is not None:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=error.message)
        _add(status, bad)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def trailing_metadata(error: errors.MeshfireError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries the whole status of an aborted call."""
    return ((_DETAILS_KEY, to_status(error).SerializeToString()),)


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.MeshfireError:
    """The error that the other side raised; the transport's own trouble becomes Unavailable and its like."""
    status = _status_in(error.trailing_metadata())
    if status is not None:
        return from_status(status)
    kind = _BY_CODE.get(error.code(), errors.InternalError)
    return kind(error.details() or error.code().name)


def from_status(status: status_pb2.Status) -> errors.MeshfireError:
    """Rebuild an error from its status. An unknown reason falls back to the class of its code."""
    reason, metadata, field, retry_after_s = "", {}, None, None
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    kind = errors.all_errors().get(reason) or _class_of(status.code)
    return kind(status.message, field=field, retry_after_s=retry_after_s, metadata=metadata)


def from_reason(reason: str, message: str, metadata: dict[str, str], *, retryable: bool) -> errors.MeshfireError:
    """Rebuild an error from what a message (LeaseFailed, ForwardError) says of it."""
    kind = errors.all_errors().get(reason)
    if kind is None:
        kind = errors.Unavailable if retryable else errors.InternalError
    return kind(message, metadata=metadata)


def _class_of(code: int) -> type[errors.MeshfireError]:
    return _BY_CODE.get(grpc.StatusCode[code_pb2.Code.Name(code)], errors.InternalError)


def _add(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _status_in(metadata: Any) -> status_pb2.Status | None:
    for key, value in metadata or ():
        if key == _DETAILS_KEY:
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                return None
            return status
    return None
