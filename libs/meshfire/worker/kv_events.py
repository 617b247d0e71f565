"""Changes of a prefix cache as messages of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.kv.journal import CacheChanges

#: hashes of one message: 16 bytes each and 2 of framing, far below what gRPC takes
MAX_HASHES = 16_384


def everything(shared: Sequence[bytes]) -> list[pb.WorkRequest]:
    """For a router that knows nothing yet: at least one message, the first of which resets."""
    parts = list(_cut(shared)) or [[]]
    return [pb.WorkRequest(kv_events=pb.KvEvents(reset=index == 0, stored=part)) for index, part in enumerate(parts)]


def changes(since: CacheChanges) -> list[pb.WorkRequest]:
    """For routers that know all before. Nothing is said of nothing."""
    removed = [pb.WorkRequest(kv_events=pb.KvEvents(removed=part)) for part in _cut(since.removed)]
    return removed + [pb.WorkRequest(kv_events=pb.KvEvents(stored=part)) for part in _cut(since.stored)]


def _cut(hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [hashes[start : start + MAX_HASHES] for start in range(0, len(hashes), MAX_HASHES)]
