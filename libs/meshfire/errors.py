"""Every error that Meshfire raises on purpose, as one tree.

    MeshfireError
    ├── BadInput                 INVALID_ARGUMENT     the caller must change the request; `field` names what
    │   ├── InvalidPrompt
    │   ├── PromptTooLong
    │   ├── InvalidPlacement
    │   ├── InvalidTensor
    │   └── NonFiniteValue
    ├── NotFound                 NOT_FOUND
    │   ├── UnknownModel
    │   ├── UnknownExpert
    │   └── KvExpired
    ├── Refused                  FAILED_PRECONDITION  right in form, wrong now; repeating it unchanged is useless
    │   ├── StaleEpoch
    │   ├── IllegalTransition
    │   ├── ModelMismatch
    │   └── KvNotGranted
    ├── TestHooksOff             PERMISSION_DENIED
    ├── Exhausted                RESOURCE_EXHAUSTED   try again later; `retry_after_s` says when
    │   ├── QueueFull
    │   ├── OutOfCapacity
    │   └── NoFreeBlocks
    ├── Unavailable              UNAVAILABLE          another replica, or the same later, may do it
    │   ├── ShardUnavailable
    │   ├── WorkerLost
    │   ├── NoWorker
    │   ├── RankLost
    │   ├── StoreUnavailable
    │   └── Draining
    ├── DataLoss                 DATA_LOSS            bytes that do not match their checksum
    │   └── KvCorrupt
    ├── DeadlineExceeded         DEADLINE_EXCEEDED
    ├── Cancelled                CANCELLED
    ├── CheckpointError          FAILED_PRECONDITION  a model directory that cannot be served
    └── InternalError            INTERNAL             a defect; details stay in the log

`code` is the gRPC status name, `reason` what callers branch on (google.rpc.ErrorInfo), `retryable` whether the same
request may succeed elsewhere or later. `meshfire.rpc.status` maps both ways: both ends of a call raise the same type.
"""

from __future__ import annotations

import re
from typing import ClassVar

_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class MeshfireError(Exception):
    """Base of the tree. `message` says what was seen and what was expected; `metadata` is for machines."""

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "MESHFIRE_ERROR"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.reason = _WORD.sub("_", cls.__name__).upper()

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})


class BadInput(MeshfireError):
    """The request is wrong in itself."""

    code = "INVALID_ARGUMENT"


class InvalidPrompt(BadInput):
    """Nothing that could be rendered or encoded."""


class PromptTooLong(BadInput):
    """Prompt and wanted output do not fit the context window."""


class InvalidPlacement(BadInput):
    """A placement document that cannot be read, or shards that cannot hold one."""


class InvalidTensor(BadInput):
    """A tensor whose bytes, shape or dtype do not agree with each other or with the layer."""


class NonFiniteValue(BadInput):
    """A tensor with NaN, infinity, or values beyond what a fixed-point sum can hold."""


class NotFound(MeshfireError):
    """The thing named does not exist here."""

    code = "NOT_FOUND"


class UnknownModel(NotFound):
    """No such model is served."""


class UnknownExpert(NotFound):
    """This shard does not hold the expert; the caller's placement is not this shard's."""

    retryable = True


class KvExpired(NotFound):
    """The KV lease is gone: released, expired, or its owner restarted."""

    retryable = True


class Refused(MeshfireError):
    """Well-formed, but not in this state."""

    code = "FAILED_PRECONDITION"


class StaleEpoch(Refused):
    """The message belongs to an older epoch."""


class IllegalTransition(Refused):
    """The lease's state machine has no such step."""


class ModelMismatch(Refused):
    """Revision, geometry or dtype of the two sides differ."""


class KvNotGranted(Refused):
    """The reader holds no grant."""

    retryable = True


class TestHooksOff(MeshfireError):
    """A test hook was used on a mesh that runs without them."""

    __test__ = False  # not a pytest class
    code = "PERMISSION_DENIED"


class Exhausted(MeshfireError):
    """No room now."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True


class QueueFull(Exhausted):
    """The queue's bound is reached."""


class OutOfCapacity(Exhausted):
    """The request would have to wait for longer than it can."""


class NoFreeBlocks(Exhausted):
    """The KV cache has no block that is free or can be evicted."""


class Unavailable(MeshfireError):
    """The other side is not there, or not there yet."""

    code = "UNAVAILABLE"
    retryable = True


class ShardUnavailable(Unavailable):
    """No live replica of an expert."""


class WorkerLost(Unavailable):
    """A worker's stream ended while it held a lease."""


class NoWorker(Unavailable):
    """No worker serves the model."""


class RankLost(Unavailable):
    """A rank of a tensor-parallel worker is gone or silent: the worker must start anew."""


class StoreUnavailable(Unavailable):
    """The database cannot be reached, or cannot write: no server, no disk, no lock."""


class Draining(Unavailable):
    """The service stops and takes no new work."""


class DataLoss(MeshfireError):
    """Bytes that do not match their checksum, or that are missing."""

    code = "DATA_LOSS"
    retryable = True


class KvCorrupt(DataLoss):
    """A KV block or manifest that does not verify."""


class DeadlineExceeded(MeshfireError):
    """The request's deadline passed."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(MeshfireError):
    """The caller went away."""

    code = "CANCELLED"


class CheckpointError(MeshfireError):
    """A model directory that is incomplete, corrupt or of an unknown architecture."""

    code = "FAILED_PRECONDITION"


class InternalError(MeshfireError):
    """A defect. The message on the wire holds no detail."""

    code = "INTERNAL"


def all_errors() -> dict[str, type[MeshfireError]]:
    """Every class of the tree by its `reason`."""
    found: dict[str, type[MeshfireError]] = {}
    waiting: list[type[MeshfireError]] = [MeshfireError]
    while waiting:
        cls = waiting.pop()
        found[cls.reason] = cls
        waiting.extend(cls.__subclasses__())
    return found
